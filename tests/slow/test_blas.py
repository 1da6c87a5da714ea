"""Ranks compute with the OpenBLAS that set-up has put beside OneFlow, unless it is switched off: see start/blas.py."""

import sys
from pathlib import Path

import pytest

from oneflow_cookbook.start import rank
from oneflow_cookbook.start.blas import REPLACED, exported
from tests.jobs import ended, launch, official

LIBRARY = Path(sys.prefix, "lib", "libopenblas.so")

# The second product is made with a sgemm whose first instruction is `ret`, so that it writes nothing. The ranks write
# their line at once: under OneFlow's launcher they share one pipe, and print writes what it prints piece by piece.
SCRIPT = """
import ctypes
import sys
import numpy as np
import oneflow as flow

def right():
    x, w = np.random.rand(6, 5).astype("float32"), np.random.rand(5, 4).astype("float32")
    return np.allclose(flow.matmul(flow.tensor(x), flow.tensor(w)).numpy(), x @ w)

answers = [right()]
mapped = [line.split()[-1] for line in open("/proc/self/maps") if line.endswith("/libopenblas.so\\n")]
if mapped:
    library = ctypes.CDLL(mapped[0])
    answers.append(library.cookbook_scipy_openblas_get_num_threads())
    address = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address & -4096), ctypes.c_size_t(4096), 7)
    ctypes.memset(address, 0xC3, 1)
    answers.append(right())
sys.stdout.write(" ".join(map(str, answers)) + "\\n")
"""


def early_jobs(tmp_path_factory):
    """OneFlow's own launcher may sleep for 10 s at the start."""
    script = tmp_path_factory.mktemp("blas") / "products.py"
    script.write_text(SCRIPT)
    return {"preloaded": official(2, script, LD_PRELOAD=str(LIBRARY), OMP_NUM_THREADS="1", GLOG_minloglevel="3")}


@pytest.mark.parametrize("blas, line", [(None, "True 1 False"), ("builtin", "True")])
def test_matmul_calls_it_on_every_rank_unless_switched_off(script, blas, line):
    job = launch("-n", 2, script(SCRIPT, head=""), COOKBOOK_BLAS=blas, OMP_NUM_THREADS="1")
    assert (job.code, sorted(job.out.splitlines()), job.err) == (0, [f"[0] {line}", f"[1] {line}"], "")


def test_under_oneflow_s_launcher_it_is_preloaded(early):
    [job] = ended([early["preloaded"]])
    assert (job.code, job.out) == (0, "True 1 False\n" * 2), job.err


@pytest.mark.parametrize("number, lines", [("0", 1), ("1", 0)])
def test_library_that_cannot_be_loaded_is_reported_once(tmp_path, monkeypatch, capsys, number, lines):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("RANK", number)
    monkeypatch.delenv("COOKBOOK_BLAS", raising=False)
    rank.load_blas()
    assert capsys.readouterr().err.count("OneFlow computes with its own, older OpenBLAS: ") == lines


def test_names_differ_from_those_of_other_openblas_libraries():
    names = set(exported(LIBRARY))
    assert {name for name in names if not name.startswith("cookbook_")} == {f"cblas_{name}" for name in REPLACED}
