"""The benchmarks' front door, and the setting of launch.sh that they measure. Times are not tested."""

import pytest

from benchmarks import bench, peers
from harness.ranks import blas_kernels, cores_of, environment
from tests.cases import CASES

AVX512 = "avx512f avx512cd avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    "flags, kernels",
    [("sse2", None), ("avx avx2", None), ("avx2 fma", "Haswell"), (f"avx2 fma {AVX512}", "SkylakeX"), (None, None)],
)
def test_kernels_go_by_the_flags_of_the_cpu(tmp_path, flags, kernels):
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t: spectre_v1\n")
    assert blas_kernels(tmp_path / "cpuinfo") == kernels


def test_kernels_that_the_user_has_set_stay():
    assert environment(0, 2, 1, base={"OPENBLAS_CORETYPE": "Zen"})["OPENBLAS_CORETYPE"] == "Zen"


@pytest.mark.parametrize(
    "cores, n, wanted",
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1], 4, [[0], [1], [0], [1]]),
        ([2, 3, 5, 7, 8], 2, [[2, 3], [5, 7]]),
        ([4], 1, [[4]]),
    ],
)
def test_each_rank_has_its_cores(cores, n, wanted):
    assert [cores_of(rank, n, cores) for rank in range(n)] == wanted


def test_without_the_peers_it_says_how_to_get_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit) as end:
        bench.main([])
    assert end.value.code == 2
    assert "pip install -r benchmarks/requirements-peers.txt" in capsys.readouterr().err


def test_strategies_are_recipes():
    assert all(script in CASES for _, script, _, _, _ in bench.STRATEGIES.values())
