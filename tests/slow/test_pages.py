"""The code blocks of all pages with marks end as these say (see tests/pages.py); the pages on errors have an index."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from oneflow_cookbook.pool import Pool, pool_cache
from tests.cases import ROOT
from tests.jobs import LAUNCH, Run, free_port, wait_until
from tests.markdown import slug
from tests.pages import BLOCK, FIX, MARK, Page, messages, missing, offline, plain, run_job

INDEX = ROOT / "docs" / "diagnosing.md"
PAGES = [
    Page(path)
    for path in sorted(INDEX.parent.glob("*.md"))
    if re.search(f"^<!-- {MARK.pattern} -->$", path.read_text(), re.M)
]
ERRORS = [page for page in PAGES if page.name.startswith(("errors-", "silently-"))]
BLOCKS = [block for page in PAGES for block in page.blocks]
TOOLS = "It hangs"  # a chapter of commands, not of messages with fixes
AT_ONCE = 5  # jobs; most of them wait
NAMESPACES = []  # of the blocks that a rank has run: OneFlow may hang or die when a graph is freed


def run_on_ranks(code, folder):
    """Called on the ranks of a pool: run a block; returns whether it raised, and what it printed."""
    os.chdir(folder)
    text, raised = io.StringIO(), False
    NAMESPACES.append({"__name__": "__main__"})
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            exec(compile(code, "block.py", "exec"), NAMESPACES[-1])
        except Exception:
            raised = True
            traceback.print_exc()
    return raised, text.getvalue()


PORT_JOB = """
import sys
import oneflow as flow

own = flow.full((1,), float(sys.argv[1]))
print(own.to_global(flow.placement.all("cpu"), flow.sbp.split(0)).numpy().tolist(), flush=True)
"""


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def jobs_on_one_port(folder):
    """Start rank 0 of each of two jobs with rank 1 of the other, all on one port; returns what they print.

    One pair after the other: if all four started at once, the kernel would choose which of them meet.
    """
    (folder / "job.py").write_text(PORT_JOB)
    port, printed = free_port(), []
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    for first, second in ("12", "21"):
        rank_0 = Run(sys.executable, "job.py", first, cwd=folder, RANK="0", **where)
        wait_until(lambda: listens(port), "rank 0")
        rank_1 = Run(sys.executable, "job.py", second, cwd=folder, RANK="1", **where)
        printed.append([run.wait().out.strip() for run in (rank_0, rank_1)])
    return printed


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """All blocks that need a job of their own, five at a time, those first that wait longest."""
    items = [item for item in request.session.items if item.module is request.module]
    blocks = [item.callspec.params.get("block") for item in items if hasattr(item, "callspec")]
    blocks = [block for block in blocks if block and block.own_job]
    started = {}
    with ThreadPoolExecutor(AT_ONCE) as executor:
        if any("one_port" in item.name for item in items):
            started["port"] = executor.submit(jobs_on_one_port, tmp_path_factory.mktemp("port"))
        for block in sorted(blocks, key=lambda block: (not block.options, block.end != "waits")):
            folder = tmp_path_factory.mktemp(f"block{BLOCKS.index(block)}-")
            started[block] = executor.submit(run_job, block, folder)
        yield started
        for future in started.values():
            future.cancel()


@pytest.fixture(scope="module")
def own_pools():
    """As `pools`, but for this module alone: blocks change the seed, and leave ranks with an exception."""
    with pool_cache(partial(Pool, repeat=True, variables={"CUDA_VISIBLE_DEVICES": ""})) as pools:
        yield pools


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.own_job], ids=str)
def test_block_in_a_job_of_its_own(block, jobs):
    text, wrong = jobs[block].result()
    if offline(block, text):
        pytest.skip("pip cannot reach a package index")
    assert not wrong, text
    assert not block.compares or "AssertionError" in text, text


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.own_job], ids=str)
def test_block_on_ranks_of_a_pool(block, own_pools, tmp_path):
    for raised, text in own_pools(block.ranks).call(f"{__file__}:run_on_ranks", code=block.code, folder=str(tmp_path)):
        assert raised == (block.end == "raises"), text
        assert not block.compares or "AssertionError" in text, text
        assert not missing(block, plain(text, tmp_path)), text
        assert not (raised and block.fixes and any(message in text for message in messages(block.entry))), text


MESSAGES = {  # of the index, for which it has no entry: what raises it on 2 ranks, where `one_row` is in B
    "Expected one of cpu, cuda device type at start of device string: cpu:0": 'flow.placement("cpu:0", [0, 1])',
    'Can\'t construct placement with "cuda" type because there is no device!': 'flow.placement.all("cuda")',
    "random source op only support broadcast or split": "flow.randn(4, placement=ranks, sbp=flow.sbp.partial_sum)",
    "cannot be splitted by parallel_num: 2 at axis 0": "InAGraph()(one_row)",
    "A lazy tensor can not be applied to argwhere.": "Picked(flow.argwhere)(one_row)",
    "Advanced indexing by boolean(mask) tensor only valid in eager mode.": "Picked(lambda x: x[x > 0])(one_row)",
    "SyncBatchNorm expected input tensor to be on GPU": "flow.nn.SyncBatchNorm(2)(flow.ones(4, 2))",
}
BEFORE = """
import oneflow as flow

class InAGraph(flow.nn.Graph):
    def build(self, x):
        return x.to_global(sbp=flow.sbp.split(0))

class Picked(flow.nn.Graph):
    def __init__(self, pick):
        super().__init__()
        self.build = pick

ranks = flow.placement.all("cpu")
one_row = flow.ones(1, 4, placement=ranks, sbp=flow.sbp.broadcast)
"""


@pytest.mark.parametrize("message", MESSAGES)
def test_message_of_the_index_without_an_entry(own_pools, tmp_path, message):
    assert f"`{message}`" in INDEX.read_text()
    for raised, text in own_pools(2).call(
        f"{__file__}:run_on_ranks", code=BEFORE + MESSAGES[message], folder=str(tmp_path)
    ):
        assert raised and message in text, text


def test_two_jobs_on_one_port_get_each_others_ranks(jobs):
    assert jobs["port"].result() == [["[1.0, 2.0]"] * 2, ["[2.0, 1.0]"] * 2]  # not [1.0, 1.0] and [2.0, 2.0]


WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"


def test_pattern_of_the_page_signals_the_launcher_alone(tmp_path):
    """Each rank then prints its line once, as the launcher passes the signal on."""
    [pattern] = {pattern for page in ERRORS for pattern in re.findall("`pkill -USR1 -f '([^']+)'`", page.text)}
    script = tmp_path / f"{tmp_path.parent.name}-{os.getpid()}.py"  # no other job has this name
    script.write_text(WAITS)
    job = Run(LAUNCH, "-n", 2, script).until("ready", times=2)
    processes = subprocess.check_output(["pgrep", "-f", pattern.replace("mine.py", script.name)], text=True)
    assert processes.split() == [str(job.process.pid)]
    job.process.send_signal(signal.SIGUSR1)
    job.until(script.name, times=2, stream="stderr")
    job.kill()
    assert all(job.wait().err.count(f"[{rank}] Stack (most recent call first)") == 1 for rank in (0, 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_the_page_is_run(page):
    assert not page.unread
    assert page.text.count("\n```") == 2 * len(BLOCK.findall(page.text))


def test_every_file_is_used():
    commands = "".join(block.code for block in BLOCKS) + "".join(Page.files.values())
    for name in Page.files:
        assert re.search(rf"\b{name}\b|(from|import) {name[:-3]}\b", commands), name


@pytest.mark.parametrize("page, entry", [(page, entry) for page in ERRORS for entry in page.entries])
def test_entry_shows_its_message_and_then_the_fix(page, entry):
    blocks = [block for block in page.blocks if block.entry == entry]
    assert blocks
    body = page.text.split(f"### {entry}\n")[1].split("\n##")[0]
    assert blocks[0].chapter.startswith(TOOLS) or FIX in body
    shows = [block for block in blocks if not block.fixes]
    shown = "\n".join(line for block in shows for line in block.shown)
    for message in messages(entry):
        assert not [block for block in shows if message in block.code], "the block prints the message itself"
        assert len(shows) == 1 or message in shown


def test_index_links_to_every_entry_by_its_name():
    """An entry is there under its symptoms, or in a list of the page itself."""
    entries = {}
    for page in ERRORS:
        entries.update({(f"{page.name}.md", slug(title)): title for title in page.entries})
    links = re.findall(r"^- \[(.+)]\(([\w-]+\.md)#([\w-]+)\)", INDEX.read_text(), flags=re.MULTILINE)
    links = [(name, (page, anchor)) for name, page, anchor in links if page in {page for page, _ in entries}]
    with_lists = {f"{page.name}.md": page.text for page in ERRORS if page.name in ("errors-hangs", "silently-wrong")}
    links_in = partial(re.findall, r"\]\(([\w-]+\.md)?#([\w-]+)\)")
    listed = [(name or page, anchor) for page, text in with_lists.items() for name, anchor in links_in(text)]
    assert set(entries) <= {target for _, target in links} | set(listed)
    assert [name for name, target in links if name not in entries[target]] == []
