"""docs/shell.md: what is typed shows exactly what the page says, and the cells of its notebook run."""

import os
import re
import site
import subprocess
import sys
import tempfile

import pytest

from tests.cases import ROOT
from tests.environments import programs
from tests.jobs import CLEAN, LONG, MARK, marked, piped, wait_until
from tests.markdown import blocks_of

TEXT = (ROOT / "docs" / "shell.md").read_text()
PROMPT = re.compile(r"^(?:>>> |\.\.\.(?: |$))", flags=re.MULTILINE)
CELLS = blocks_of(TEXT.partition("\n## In a notebook\n")[2], "python")
TOO_OLD = sys.version_info < (3, 10)
NOTEBOOK = """
import sys
import nbclient, nbformat
cells = [nbformat.v4.new_code_cell(source) for source in sys.argv[1:]]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("data", {}).get("text/plain", ""))
"""


def sessions():
    """[arguments of launch.sh, what the page shows of that session] of each session of the page."""
    pairs = []
    for kind, block in re.findall(r"```(bash|text)\n(.*?)```", TEXT, flags=re.DOTALL):
        if kind == "bash":
            pairs.append([block.split()[2:], ""])
        else:
            pairs[-1][1] += block
    return pairs


def background_calls(item):
    """The programs of this page mostly wait: see pools.py."""
    if item.originalname == "test_session_shows_what_the_page_says":
        arguments, shown = (item.callspec.params[name] for name in ("arguments", "shown"))
        return {("session", *arguments): (0, lambda _: session(arguments, shown))}
    if item.originalname == "test_cells_of_the_notebook_run" and not TOO_OLD:
        return {("notebook",): (0, lambda _: notebook())}
    return {}


def session(arguments, shown):
    """What the shell prints when somebody types what the page shows."""
    typed = [line[4:] for line in shown.splitlines() if PROMPT.match(line)]
    return piped("\n".join(typed) + "\n", "shell", "--echo", *arguments)


@pytest.mark.parametrize(
    "arguments, shown", sessions(), ids=lambda value: " ".join(value) if value != str(value) else ""
)
def test_session_shows_what_the_page_says(measured, arguments, shown):
    done = measured("session", *arguments)
    assert done.stdout == shown
    assert (done.returncode, done.stderr) == (0, "")


def test_page_has_both_kinds_of_session():
    [first, second] = sessions()
    assert first[1].count(">>> ") > 20 and second[0] == ["train_tensor_parallel"]


def notebook():
    """What the cells print, in an environment that has ipyparallel, and OneFlow from ours."""
    python, mark = programs("notebook") / "python", f"notebook-{os.getpid()}"
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    (packages / "oneflow.pth").write_text(site.getsitepackages()[0])
    with tempfile.TemporaryDirectory() as folder:
        environment = {**CLEAN, "HOME": folder, MARK: mark}
        environment["PATH"] = f"{python.parent}:{environment['PATH']}"
        done = subprocess.run(
            [str(python), "-c", NOTEBOOK, *CELLS, "client.cluster.stop_cluster_sync()"],
            env=environment,
            timeout=2 * LONG,
            capture_output=True,
            text=True,
        )
        wait_until(lambda: not marked(f"{MARK}={mark}"), "the end of all processes", 60)
        return done


@pytest.mark.installs("a notebook's packages")
@pytest.mark.skipif(TOO_OLD, reason="these versions of ipyparallel and ipykernel need Python 3.10")
def test_cells_of_the_notebook_run(measured):
    done = measured("notebook")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[stdout:{rank}] {rank} oneflow.Size([2, 6]) 24.0" in done.stdout, done.stdout
