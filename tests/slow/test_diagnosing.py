"""docs/diagnosing.md: each message still appears where the page says, and each cure works.

Every code block of the page is run, as the comment in front of it says:

    <!-- 2 ranks: raises -->  an exception on every rank  <!-- 2 ranks: fails -->  in a job of its own, which ends badly
    <!-- 2 ranks: wrong -->   runs through, wrong values  <!-- 2 ranks: waits -->  in a job of its own, which never ends
    <!-- 2 ranks: works -->   runs through                <!-- file NAME -->       a script that shell blocks start
    <!-- shell: fails -->     by bash; waits, works likewise; then, behind commas, what else is asked for

What a block prints must hold each line of the ```text block behind it and, up to the cure, the message in the heading.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import sysconfig
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.pool import Pool
from tests.cases import ROOT
from tests.jobs import LAUNCH, NO_LIBIBVERBS, Run, free_port
from tests.markdown import slug

PAGE = ROOT / "docs" / "diagnosing.md"
BLOCK = re.compile(r"(?:<!-- (?P<mark>.+?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "29500"  # on the page; each job gets a free one
TOOLS = "## It hangs"  # a chapter of commands, not of messages with cures
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
AT_ONCE = 5  # jobs; most of them wait
KEPT = []  # what blocks have made on a rank: OneFlow may hang or die when a graph is freed
NO_INDEX = (
    "No matching distribution found",
    "No module named pip",
    "Read timed out",
)  # no network, or an environment made by uv


@dataclass
class Block:
    """A block that is run: how, what must come of it, and what it must print."""

    entry: str  # the heading above
    number: int  # of the block on the page
    how: str  # "shell" or "2 ranks"
    end: str  # "raises", "wrong", "works", "fails" or "waits"
    options: tuple
    code: str
    cures: bool  # whether it stands behind "Cure:"
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


@dataclass
class Page:
    """The page, read once: headings below each chapter, blocks that run, files by name."""

    chapters: dict
    blocks: list
    files: dict
    unread: list  # what has no comment, or no block that it belongs to


def read_page(text):
    page = Page({}, [], {}, [])
    chapter = entry = ""
    cures = False
    place = 0
    for found in [*BLOCK.finditer(text), None]:
        for line in text[place : found.start() if found else None].splitlines():
            if line.startswith("## "):
                chapter, entry = line, ""
                page.chapters[chapter] = []
            elif line.startswith("### "):
                entry, cures = line[4:], False
                page.chapters[chapter].append(entry)
            cures = cures or line.startswith("Cure: ")
        if found is None:
            return page
        place = found.end()
        mark, language, code = found.group("mark", "language", "code")
        if language == "text" and not mark and page.blocks and page.blocks[-1].entry == entry:
            page.blocks[-1].shown += code.splitlines()
        elif mark and mark.startswith("file ") and language == "python":
            page.files[mark[5:]] = code
        elif mark and re.fullmatch(r"(shell|\d ranks?): (raises|wrong|works|fails|waits)(, .+)?", mark):
            how, end = mark.split(": ")
            end, *options = end.split(", ")
            page.blocks.append(Block(entry, len(page.blocks) + 1, how, end, tuple(options), code, cures))
        else:
            page.unread.append(found.group())


TEXT = PAGE.read_text()
PAGE_READ = read_page(TEXT)
BLOCKS, FILES = PAGE_READ.blocks, PAGE_READ.files
ENTRIES = [entry for entries in PAGE_READ.chapters.values() for entry in entries]


def messages(entry):
    """The messages that a heading begins with, in pieces where the page leaves something out."""
    [first] = re.findall(r"^(?:`[^`]+`(?:, (?=`))?)*", entry)
    return [piece for message in re.findall("`([^`]+)`", first) for piece in message.split(" ... ")]


def write_files(folder):
    """Into an empty folder, as if the page's scripts had been saved there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, code in FILES.items():
        (folder / name).write_text(code)


def run_on_ranks(code, folder):
    """Called on the ranks of a pool: run a block; returns whether it raised, and what it printed."""
    os.chdir(folder)
    text, raised = io.StringIO(), False
    KEPT.append({"__name__": "__main__"})
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            exec(compile(code, "block.py", "exec"), KEPT[-1])
        except Exception:
            raised = True
            traceback.print_exc()
    return raised, text.getvalue()


def plain(text, folder, port=PORT):
    """What a job printed, without colours and without this machine's paths and this job's port."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    for path in (sysconfig.get_path("purelib"), f"{folder}/", f"{folder.resolve()}/"):
        text = text.replace(path, "")
    return re.sub(rf"\b{port}\b", PORT, text)


def run_job(block, folder):
    """Run a block in a job of its own, and once more with four times the time where a busy machine had too little."""
    port = str(free_port())
    ended = attempt(block, folder, port, 1)
    if complaints(block, ended) and not offline(block, ended):
        ended = attempt(block, folder, port, 4)
    return ended


def attempt(block, folder, port, longer):
    """Run a block, with all that it sleeps and its time limit so many times longer; see Ended."""

    def patient(text):
        return re.sub(r"(\bsleep|--timeout) (\d+)", lambda found: f"{found[1]} {int(found[2]) * longer}", text)

    write_files(folder)
    output = folder / "output"
    if block.how == "shell":
        code = re.sub(rf"\b{PORT}\b", port, patient(block.code))
        code = re.sub(r"\./launch\.sh\b", LAUNCH, code).replace("recipes/", f"{ROOT}/recipes/")
        command = ["bash", "-c", code]
    else:
        (folder / "block.py").write_text(block.code)
        command = [LAUNCH, "-n", block.ranks, "--timeout", longer * (5 if block.end == "waits" else 40), "block.py"]
    job = Run("bash", "-c", 'exec "$@" > output 2>&1', "bash", *command, cwd=folder, PATH=PATH, CUDA_VISIBLE_DEVICES="")
    deadline = job.begin + (300 if "network" in block.options else 20 * longer + 10)
    while job.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        if block.how == "shell" and block.end == "waits" and output.exists():
            printed = plain(output.read_text(errors="replace"), folder, port)
            if not missing(block, printed):  # and it must go on waiting
                deadline = min(deadline, time.monotonic() + 2)
    ended = Ended(job.process.poll(), "", time.monotonic() - job.begin)
    job.kill()
    job.process.communicate()
    assert job.all_gone()
    ended.text = plain(output.read_text(errors="replace"), folder, port)
    ended.text = re.sub(r"(?<=time limit of )\d+", lambda found: str(int(found[0]) // longer), ended.text)
    return ended


@dataclass
class Ended:
    """How a job ended: its exit code, or None if it waited and was ended; what it printed; after how many seconds."""

    code: int
    text: str
    seconds: float


def complaints(block, ended):
    """In what a job was not as the page says."""
    code, text, options = ended.code, ended.text, block.options
    found = [f"does not print {line!r}" for line in missing(block, text)]
    if block.end == "waits":
        right = code == (None if block.how == "shell" else 124)
    elif block.end == "fails":
        right = code not in (None, 0) and (code != 124 or "time limit" in block.entry)
    else:
        right = code == 0 and "Check failed" not in text and "Traceback" not in text
    if not right:
        found.append(f"{block.end}, but its exit code is {code}")
    if "10 s" in options and ended.seconds < 10 or "at once" in options and "LoadServer" in text:
        found.append(f"took {ended.seconds} s")
    if "silent" in options and text.replace(f"{NO_LIBIBVERBS}\n", ""):
        found.append("is not silent")
    return found


def offline(block, ended):
    """Whether the block could not run because it wants a package from the network."""
    return "network" in block.options and any(words in ended.text for words in NO_INDEX)


def missing(block, text):
    """What the page says that this block prints, and it does not."""
    wanted = [line.strip() for line in block.shown]
    shows = [one for one in BLOCKS if one.entry == block.entry and not one.cures]
    if len(shows) == 1 and block in shows:  # else the page says below each which of the messages it prints
        wanted += messages(block.entry)
    return [line for line in wanted if line not in text]


PORT_JOB = """
import sys
import oneflow as flow

own = flow.full((1,), float(sys.argv[1]))
print(own.to_global(flow.placement.all("cpu"), flow.sbp.split(0)).numpy().tolist(), flush=True)
"""


def jobs_on_one_port(folder):
    """Start rank 0 of each of two jobs of two ranks with rank 1 of the other, all on one port; what each got, by job.

    Where all four start at once, who meets whom is the kernel's choice, and chance: one pair after the other is not.
    """
    (folder / "job.py").write_text(PORT_JOB)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    got = {"1": {}, "2": {}}
    for first, second in ("12", "21"):
        pair = []
        for rank, job in enumerate((first, second)):
            pair.append(Run(sys.executable, "job.py", job, cwd=folder, RANK=str(rank), **where))
            time.sleep(1)  # rank 0 listens by then
        for rank, (job, run) in enumerate(zip((first, second), pair)):
            run.wait(timeout=60)
            got[job][rank] = (run.code, run.out.strip())
    return got


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """All blocks that need a job of their own, begun at once, those first that wait longest."""
    items = [item for item in request.session.items if item.module is request.module]
    chosen = [item.callspec.params.get("block") for item in items if hasattr(item, "callspec")]
    chosen = [block for block in chosen if block and block.own_job]
    started = {}
    with ThreadPoolExecutor(AT_ONCE) as executor:
        if any("one_port" in item.name for item in items):
            started["port"] = executor.submit(jobs_on_one_port, tmp_path_factory.mktemp("port"))
        for block in sorted(chosen, key=lambda block: ("10 s" not in block.options, block.end != "waits")):
            folder = tmp_path_factory.mktemp(f"block{block.number}")
            started[block.number] = executor.submit(run_job, block, folder)
        yield started
        for future in started.values():
            future.cancel()


@pytest.fixture(scope="module")
def own_pools():
    """As `pools`, but only of this module: blocks change the seed, and leave ranks with an exception."""
    started = {}
    yield lambda n: started.setdefault(n, Pool(n, repeat=True, variables={"CUDA_VISIBLE_DEVICES": ""}))
    for pool in started.values():
        pool.close()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.own_job], ids=str)
def test_block_in_a_job_of_its_own(block, jobs):
    ended = jobs[block.number].result()
    if offline(block, ended):
        pytest.skip("pip cannot reach a package index")
    assert not complaints(block, ended), ended.text


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.own_job], ids=str)
def test_block_on_ranks_of_a_pool(block, own_pools, tmp_path):
    for raised, text in own_pools(block.ranks).call(f"{__file__}:run_on_ranks", code=block.code, folder=str(tmp_path)):
        assert raised == (block.end == "raises"), text
        assert not missing(block, plain(text, tmp_path)), text


def test_two_jobs_on_one_port_exchange_ranks(jobs):
    as_one, as_other = (0, "[1.0, 2.0]"), (0, "[2.0, 1.0]")  # [1.0, 1.0] and [2.0, 2.0], had each met its own
    assert jobs["port"].result() == {"1": {0: as_one, 1: as_other}, "2": {0: as_other, 1: as_one}}


def test_what_only_tests_read_stands_in_the_text_too():
    """Comments are not seen on the page: names of files, and numbers of ranks other than 2 where they matter."""
    for name in FILES:
        assert re.search(rf"`{name}`[^\n]*:\n+<!-- file {name} -->", TEXT), name
    for found in re.finditer("<!-- ([3-9]) ranks: ", TEXT):
        assert f"n {found[1]} ranks" in " ".join(TEXT[: found.start()].split()[-20:])


def test_every_block_of_the_page_is_run():
    assert not PAGE_READ.unread
    assert TEXT.count("\n```") == 2 * len(BLOCK.findall(TEXT))
    commands = "".join(block.code for block in BLOCKS) + "".join(FILES.values())
    for name in FILES:
        assert re.search(rf"\b{name}\b|import {name[:-3]}\b", commands), name


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_shows_the_message_and_the_cure(entry):
    blocks = [block for block in BLOCKS if block.entry == entry]
    assert blocks
    if entry not in PAGE_READ.chapters[next(name for name in PAGE_READ.chapters if name.startswith(TOOLS))]:
        assert not blocks[0].cures and blocks[-1].cures
    shows = [block for block in blocks if not block.cures]
    assert not [piece for piece in messages(entry) if any(piece in block.code for block in shows)], "it prints its own"
    shown = "\n".join(line for block in shows for line in block.shown)
    assert len(shows) == 1 or not [piece for piece in messages(entry) if piece not in shown]
    assert entry.startswith(("Silence", "A rank that is stopped", "Without")) or messages(entry)


def test_index_has_every_entry_in_order():
    index = re.findall(r"^\| \[(.+)]\(#(.+)\) \| .+ \|$", TEXT, flags=re.MULTILINE)
    assert [link for _, link in index] == [slug(entry) for entry in ENTRIES]
    assert len(set(index)) == len(index)
    for name, entry in zip((name for name, _ in index), ENTRIES):
        assert name in entry


def test_links_lead_somewhere():
    for target in re.findall(r"]\(([^)#]+)\)", TEXT):
        assert (PAGE.parent / target).exists(), target
