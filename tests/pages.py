"""Run the code blocks of pages, each as the comment in front of it says:

    <!-- 2 ranks: raises -->  an exception on every rank  <!-- 2 ranks: fails -->  in a job of its own, which ends badly
    <!-- 2 ranks: wrong -->   runs through, wrong values  <!-- 2 ranks: waits -->  in a job of its own, which never ends
    <!-- 2 ranks: works -->   runs through                <!-- file NAME -->       a script that shell blocks start
    <!-- shell: fails -->     by bash; wrong, waits, works likewise; then, behind commas, what else is asked for:
                              exactly (it prints nothing else), silent, 10 s, at once, network
    <!-- again: works -->     before a ```text block: the block before, once more, after what the page names last,
                              in backquotes, is deleted from the files
    <!-- elsewhere -->        another test runs it
    <!-- preamble -->         the lines that every Python block of the page begins with
    <!-- 2 ranks: raises then works -->   before a ```diff block: without the lines with + it raises, without those
                              with - it works (or raises, if the user wants to see the exception); a ```text block
                              behind it is what it prints without those with +

tests/reproductions/ has further blocks of a page's entries: what makes an error happen, where readers need it not.

A block must print each line of the ```text block behind it and, up to the fix, the message in the heading. A ```text
block in front of the first block of an entry belongs to that block. What follows >>> in it is typed.
"""

import os
import re
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.cases import ROOT
from tests.jobs import LAUNCH, NO_LIBIBVERBS, Run, free_port

BLOCK = re.compile(r"(?:<!-- (?P<mark>.+?) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"(shell|again|\d ranks?): (raises|wrong|works|fails|waits)( then (?:works|raises))?((?:, [\w ]+)*)")
PROMPT = re.compile(r"^(?:>>> |\.\.\.(?: |$))(.*\n)", re.MULTILINE)
PORT = "29500"  # on the page; each job gets a free one
FIX = "**Fix**:"
REPRODUCTIONS = ROOT / "tests" / "reproductions"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
TRIES = (1, 4, 12)  # all sleeps and time limits of a block are multiplied by these in turn, if the machine is too busy
# No network, or an environment made by uv.
NO_INDEX = ("No matching distribution found", "No module named pip", "Read timed out")


@dataclass(eq=False)
class Block:
    """A code block: how it is run, how it must end, and what it must print."""

    page: "Page"
    entry: str  # the heading above
    chapter: str
    how: str  # "shell" or "2 ranks"
    end: str  # "raises", "wrong", "works", "fails" or "waits"
    options: tuple
    code: str
    fixes: bool  # whether it stands behind FIX
    deleted: str = ""  # what is deleted from the files before it runs
    shown: list = field(default_factory=list)

    @property
    def ranks(self):
        return int(self.how.split()[0])

    @property
    def compares(self):
        """Whether it must end in a failed assert, and not in a different exception."""
        fails = self.end in ("raises", "fails")
        return fails and self.page.name.startswith("silently-") and "assert " in self.code

    @property
    def own_job(self):
        return self.how == "shell" or self.end in ("fails", "waits")

    def __str__(self):
        words = re.sub(r"\W+", " ", self.entry or self.chapter).split()[:6]
        return f"{self.page.name} {self.page.blocks.index(self) + 1} {'-'.join(words)}-{self.end}"


class Page:
    """The entries of a page, its blocks that run, those of its reproductions, and those without a mark."""

    files = {}  # of all pages, by name: a block may start a script of another page

    def __init__(self, path):
        self.name, self.text = path.stem, path.read_text()
        self.blocks, self.unread = [], []
        self.preamble = ""  # of each Python block
        self.shown = {}  # entry -> what its first block must print, if that is a reproduction
        chapters = {}  # of the entries
        for chapter, entry, body in sections_of(self.text):
            chapters.setdefault(entry, chapter)
            self._read(chapter, entry, body)
        self.entries = [entry for entry in chapters if entry]
        reproductions = REPRODUCTIONS / path.name
        for _, entry, body in sections_of(reproductions.read_text()) if reproductions.exists() else []:
            assert entry in chapters, f"{reproductions}: the page has no entry {entry}"
            self._read(chapters[entry], entry, body)
        self.unread += [line for lines in self.shown.values() for line in lines]

    def _read(self, chapter, entry, body):
        lines = self.shown.pop(entry, [])  # what the first block of the entry must print
        above = self.blocks[-1] if self.blocks and self.blocks[-1].entry == entry else None  # the block above
        for match in BLOCK.finditer(body):
            mark, language, code = match.group("mark", "language", "code")
            how = re.fullmatch(MARK, mark or "")
            options = tuple(how[4].split(", ")[1:]) if how else ()
            if language == "text" and not mark:
                (above.shown if above else lines).extend(code.splitlines())
            elif how and how[1] == "again":
                deleted = re.findall("`([^`\n]+)`", body[: match.start()])[-1]
                again = {"end": how[2], "options": options, "deleted": deleted, "shown": code.splitlines()}
                self.blocks.append(replace(self.blocks[-1], **again))
                above = self.blocks[-1]
            elif mark == "preamble":
                self.preamble = code + "\n"
            elif mark and mark.startswith("file "):
                assert self.files.setdefault(mark[5:], code) == code, mark
            elif how:
                behind = FIX in body[: match.start()]
                ends = [(how[2], False), (how[3].split()[1], True)] if how[3] else [(how[2], behind)]
                for (end, fixes), program in zip(ends, before_and_after(code) if how[3] else [code]):
                    program = program if how[1] == "shell" else self.preamble + program
                    self.blocks.append(Block(self, entry, chapter, how[1], end, options, program, fixes, shown=lines))
                    lines = []
                above = self.blocks[-len(ends)]
            elif mark != "elsewhere":
                self.unread.append(match.group())
        if lines:
            self.shown[entry] = lines


def sections_of(text):
    """(chapter, entry, body) of each part of a page between its headings."""
    chapter, entry, parts = "", "", re.split(r"^(###?) (.+)\n", text, flags=re.MULTILINE)
    for level, title, body in zip(["##", *parts[1::3]], ["", *parts[2::3]], parts[::3]):
        if level == "##":
            chapter = title
        else:
            entry = title
        yield chapter, entry, body


def before_and_after(diff):
    """The two programs of a diff: without the lines that it adds, and without those that it removes."""
    lines = diff.splitlines()
    assert all(line[:1] in " +-" for line in lines), diff
    return ["".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-"]


def messages(entry):
    """The messages that a heading begins with, cut where the page writes " ... "."""
    [first] = re.findall(r"^(?:`[^`]+`(?:, (?=`))?)*", entry)
    return [piece for message in re.findall("`([^`]+)`", first) for piece in message.split(" ... ")]


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
    for name, code in block.page.files.items():
        (folder / name).write_text(code.replace(block.deleted, "") if block.deleted else code)
    (folder / "typed").write_text("".join(PROMPT.findall("\n".join([*block.shown, ""]))))
    output, port = folder / "output", str(free_port())
    if block.how == "shell":
        code = re.sub(rf"\b{PORT}\b", port, block.code)
        code = re.sub(r"(\bsleep|--timeout|--silent) (\d+)", lambda match: f"{match[1]} {int(match[2]) * longer}", code)
        code = code.replace("launch.sh shell", "launch.sh shell --echo")
        code = re.sub(r"\./launch\.sh\b", LAUNCH, code).replace("recipes/", f"{ROOT}/recipes/")
        command = ["bash", "-c", code]
    else:
        (folder / "block.py").write_text(block.code)
        command = [LAUNCH, "-n", block.ranks, "--timeout", longer * (5 if block.end == "waits" else 40), "block.py"]
    command = ["bash", "-c", 'exec "$@" < typed > output 2>&1', "bash", *command]
    job = Run(*command, cwd=folder, PATH=PATH, CUDA_VISIBLE_DEVICES="")
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
    elif "exactly" in block.options:
        right = text.splitlines() == block.shown and (code == 0) == (block.end == "works")
    elif block.end == "fails":
        right = code not in (None, 0) and (code != 124 or "time limit" in block.entry)
    else:
        right = code == 0 and "Check failed" not in text and "Traceback" not in text
    if not right:
        differences.append(f"{', '.join([block.end, *block.options])}, but its exit code is {code}")
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
    shows = [other for other in block.page.blocks if other.entry == block.entry and not other.fixes]
    if len(shows) == 1 and block in shows:  # if there are several, each has a text block with its own messages
        wanted += messages(block.entry)
    return [line for line in wanted if line not in text]
