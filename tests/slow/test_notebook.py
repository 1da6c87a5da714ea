"""docs/shell.md: the cells of its notebook run. Its sessions run in test_pages.py."""

import os
import site
import subprocess
import sys
import tempfile

import pytest

from tests.cases import ROOT
from tests.environments import programs
from tests.jobs import CLEAN, LONG, MARK, marked, wait_until
from tests.markdown import blocks

CELLS = blocks(ROOT / "docs" / "shell.md", "python")
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


def background_calls(item):
    """The notebook mostly waits: see pools.py."""
    return {} if TOO_OLD else {("notebook",): (0, lambda _: notebook())}


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
