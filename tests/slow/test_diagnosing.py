"""The pages on errors: each code block still ends with the message that the page names, and each fix works.

Every code block of these pages is run, as the comment in front of it says:

    <!-- 2 ranks: raises -->  an exception on every rank  <!-- 2 ranks: fails -->  in a job of its own, which ends badly
    <!-- 2 ranks: wrong -->   runs through, wrong values  <!-- 2 ranks: waits -->  in a job of its own, which never ends
    <!-- 2 ranks: works -->   runs through                <!-- file NAME -->       a script that shell blocks start
    <!-- shell: fails -->     by bash; wrong, waits, works likewise; then, behind commas, what else is asked for

A block must print each line of the ```text block behind it and, up to the fix, the message in the heading. A ```text
block in front of the first block of an entry belongs to that block.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from oneflow_cookbook.pool import Pool, pool_cache
from tests.cases import ROOT
from tests.jobs import LAUNCH, NO_LIBIBVERBS, Run, free_port, wait_until
from tests.markdown import slug

INDEX = ROOT / "docs" / "diagnosing.md"
NAMES = ("errors-start", "errors-hangs", "errors-tensors", "errors-launcher", "silently-wrong")
PAGES = {f"{name}.md": INDEX.with_name(f"{name}.md").read_text() for name in NAMES}
TEXT = "\n".join(PAGES.values())
BLOCK = re.compile(r"(?:<!-- (?P<mark>.+?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"(shell|\d ranks?): (raises|wrong|works|fails|waits)((?:, [\w ]+)*)")
PORT = "29500"  # on the page; each job gets a free one
TOOLS = "It hangs"  # a chapter of commands, not of messages with fixes
FIX = "**Fix**: "
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
AT_ONCE = 5  # jobs; most of them wait
TRIES = (1, 4, 12)  # all sleeps and time limits of a block are multiplied by these in turn, if the machine is too busy
NAMESPACES = []  # of the blocks that a rank has run: OneFlow may hang or die when a graph is freed
# No network, or an environment made by uv.
NO_INDEX = ("No matching distribution found", "No module named pip", "Read timed out")


@dataclass
class Block:
    """A code block: how it is run, how it must end, and what it must print."""

    entry: str  # the heading above
    chapter: str
    number: int  # of the block on the page
    how: str  # "shell" or "2 ranks"
    end: str  # "raises", "wrong", "works", "fails" or "waits"
    options: tuple
    code: str
    fixes: bool  # whether it stands behind FIX
    shown: list = field(default_factory=list)

    @property
    def ranks(self):
        return int(self.how.split()[0])

    @property
    def own_job(self):
        return self.how == "shell" or self.end in ("fails", "waits")

    def __str__(self):
        words = re.sub(r"\W+", " ", self.entry).split()[:6]
        return f"{self.number} {'-'.join(words)}-{self.end}"


def read_pages():
    """The headings, the blocks that run, the files by name, and the blocks without a mark."""
    entries, blocks, files, unread, chapter = [], [], {}, [], ""
    parts = re.split(r"^(###?) (.+)\n", TEXT, flags=re.MULTILINE)
    for level, title, body in zip(parts[1::3], parts[2::3], parts[3::3]):
        first = []  # what the first block of the entry must print
        if level == "##":
            chapter = title
        else:
            entries.append(title)
        for match in BLOCK.finditer(body):
            mark, language, code = match.group("mark", "language", "code")
            how = re.fullmatch(MARK, mark or "")
            if language == "text" and not mark:
                inside = blocks and entries and blocks[-1].entry == entries[-1]
                (blocks[-1].shown if inside else first).extend(code.splitlines())
            elif mark and mark.startswith("file "):
                files[mark[5:]] = code
            elif how:
                options, fixes = tuple(how[3].split(", ")[1:]), FIX in body[: match.start()]
                blocks.append(Block(entries[-1], chapter, len(blocks) + 1, how[1], how[2], options, code, fixes, first))
                first = []
            else:
                unread.append(match.group())
        unread += first
    return entries, blocks, files, unread


ENTRIES, BLOCKS, FILES, UNREAD = read_pages()


def messages(entry):
    """The messages that a heading begins with, cut where the page writes " ... "."""
    [first] = re.findall(r"^(?:`[^`]+`(?:, (?=`))?)*", entry)
    return [piece for message in re.findall("`([^`]+)`", first) for piece in message.split(" ... ")]


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


def plain(text, folder, port=PORT):
    """What a job printed, without colours, this machine's paths and this job's port."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    for path in (sysconfig.get_path("purelib"), f"{folder}/", f"{folder.resolve()}/"):
        text = text.replace(path, "")
    return re.sub(rf"\b{port}\b", PORT, text)


def run_job(block, folder):
    """Run a block in a job of its own; returns what it printed, and how that differs from what the page says."""
    for longer in TRIES:
        code, text, seconds = attempt(block, folder, longer)
        wrong = complaints(block, code, text, seconds)
        if not wrong or offline(block, text):
            break
    return text, wrong


def attempt(block, folder, longer):
    """Run a block with its sleeps and time limits multiplied by `longer`; returns its exit code, output and seconds.

    The exit code is None if the job waited and was ended.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, code in FILES.items():
        (folder / name).write_text(code)
    output, port = folder / "output", str(free_port())
    if block.how == "shell":
        code = re.sub(rf"\b{PORT}\b", port, block.code)
        code = re.sub(r"(\bsleep|--timeout|--silent) (\d+)", lambda match: f"{match[1]} {int(match[2]) * longer}", code)
        code = re.sub(r"\./launch\.sh\b", LAUNCH, code).replace("recipes/", f"{ROOT}/recipes/")
        command = ["bash", "-c", code]
    else:
        (folder / "block.py").write_text(block.code)
        command = [LAUNCH, "-n", block.ranks, "--timeout", longer * (5 if block.end == "waits" else 40), "block.py"]
    job = Run("bash", "-c", 'exec "$@" > output 2>&1', "bash", *command, cwd=folder, PATH=PATH, CUDA_VISIBLE_DEVICES="")
    begin = time.monotonic()
    deadline = begin + (300 if "network" in block.options else 60 * longer)
    while job.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        if block.how == "shell" and block.end == "waits" and output.exists():
            printed = plain(output.read_text(errors="replace"), folder, port)
            if not missing(block, printed):  # and it must go on waiting
                deadline = min(deadline, time.monotonic() + 2)
    code, seconds = job.process.poll(), time.monotonic() - begin
    job.kill()
    job.process.communicate()
    assert job.all_gone()
    text = plain(output.read_text(errors="replace"), folder, port)
    text = re.sub(r"(?<=time limit of )\d+|(?<=has printed for )\d+", lambda match: str(int(match[0]) // longer), text)
    return code, text, seconds


def complaints(block, code, text, seconds):
    """How a job differs from what the page says."""
    differences = [f"does not print {line!r}" for line in missing(block, text)]
    if block.end == "waits":
        right = code == (None if block.how == "shell" else 124)
    elif block.end == "fails":
        right = code not in (None, 0) and (code != 124 or "time limit" in block.entry)
    else:
        right = code == 0 and "Check failed" not in text and "Traceback" not in text
    if not right:
        differences.append(f"{block.end}, but its exit code is {code}")
    if "10 s" in block.options and seconds < 10 or "at once" in block.options and "LoadServer" in text:
        differences.append(f"took {seconds} s")
    if "silent" in block.options and text.replace(f"{NO_LIBIBVERBS}\n", ""):
        differences.append("is not silent")
    return differences


def offline(block, text):
    """Whether the block could not run because it needs a package from the network."""
    return "network" in block.options and any(words in text for words in NO_INDEX)


def missing(block, text):
    """What the page says that this block prints, and it does not."""
    wanted = [line.strip() for line in block.shown]
    shows = [other for other in BLOCKS if other.entry == block.entry and not other.fixes]
    if len(shows) == 1 and block in shows:  # if there are several, each has a text block with its own messages
        wanted += messages(block.entry)
    return [line for line in wanted if line not in text]


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
            folder = tmp_path_factory.mktemp(f"block{block.number}")
            started[block.number] = executor.submit(run_job, block, folder)
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
    text, wrong = jobs[block.number].result()
    if offline(block, text):
        pytest.skip("pip cannot reach a package index")
    assert not wrong, text


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.own_job], ids=str)
def test_block_on_ranks_of_a_pool(block, own_pools, tmp_path):
    for raised, text in own_pools(block.ranks).call(f"{__file__}:run_on_ranks", code=block.code, folder=str(tmp_path)):
        assert raised == (block.end == "raises"), text
        assert not missing(block, plain(text, tmp_path)), text


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
    [pattern] = set(re.findall("`pkill -USR1 -f '([^']+)'`", TEXT))
    script = tmp_path / f"{tmp_path.parent.name}-{os.getpid()}.py"  # no other job has this name
    script.write_text(WAITS)
    job = Run(LAUNCH, "-n", 2, script).until("ready", times=2)
    processes = subprocess.check_output(["pgrep", "-f", pattern.replace("mine.py", script.name)], text=True)
    assert processes.split() == [str(job.process.pid)]
    job.process.send_signal(signal.SIGUSR1)
    job.until(script.name, times=2, stream="stderr")
    job.kill()
    assert all(job.wait().err.count(f"[{rank}] Stack (most recent call first)") == 1 for rank in (0, 1))


def test_every_block_of_the_page_is_run():
    assert not UNREAD
    assert TEXT.count("\n```") == 2 * len(BLOCK.findall(TEXT))
    commands = "".join(block.code for block in BLOCKS) + "".join(FILES.values())
    for name in FILES:
        assert re.search(rf"\b{name}\b|import {name[:-3]}\b", commands), name


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_shows_its_message_and_then_the_fix(entry):
    blocks = [block for block in BLOCKS if block.entry == entry]
    assert blocks
    assert blocks[0].chapter.startswith(TOOLS) or not blocks[0].fixes and blocks[-1].fixes
    shows = [block for block in blocks if not block.fixes]
    shown = "\n".join(line for block in shows for line in block.shown)
    for message in messages(entry):
        assert not [block for block in shows if message in block.code], "the block prints the message itself"
        assert len(shows) == 1 or message in shown


def test_index_links_to_every_entry_by_its_name():
    """An entry is there under its symptoms; those of silently-wrong.md also in the table of that page."""
    entries = {}
    for page, text in PAGES.items():
        for title in re.findall(r"^### (.+)$", text, flags=re.MULTILINE):
            entries[page, slug(title)] = title
    links = re.findall(r"^- \[(.+)]\(([\w-]+\.md)#([\w-]+)\)", INDEX.read_text(), flags=re.MULTILINE)
    links = [(name, (page, anchor)) for name, page, anchor in links if page in PAGES]
    table = [("silently-wrong.md", anchor) for anchor in re.findall(r"\]\(#([\w-]+)\)", PAGES["silently-wrong.md"])]
    assert set(entries) <= {target for _, target in links} | set(table)
    assert [name for name, target in links if name not in entries[target]] == []
