"""What a recipe refuses by itself, on every rank at once, also under a launcher that is not ours."""

import pytest

from harness.recipe import path_of, world_sizes
from tests.cases import CASES, ROOT

ON_RANK = str(ROOT / "tests" / "on_rank.py")
SUPPORTED, HOPPER = (8, 0), (9, 0)
NO_GPU = "each rank needs a GPU of compute capability 6.0 to 8.9, got {}: type --device cpu"

# (recipe, ranks, arguments, compute capabilities of the GPUs) -> what the one line says behind the recipe's name.
REFUSED = [
    ("data_parallel", 1, "", (), "cannot run on 1 ranks: type -n 2, or --nproc_per_node 2"),
    ("single_device", 2, "", (), "cannot run on 2 ranks: type -n 1, or --nproc_per_node 1"),
    ("hybrid_parallel", 1, "", (), "cannot run on 1 ranks: type -n 4, or --nproc_per_node 4"),
    ("hybrid_parallel", 3, "", (), "cannot run on 3 ranks: type -n 4, or --nproc_per_node 4"),
    ("data_parallel", 2, "--batch 1", (), "--batch 1 does not fit on 2 ranks: type --batch 2"),
    ("data_parallel", 2, "--in-features 0", (), "--in-features 0 does not fit on 2 ranks: type --in-features 1"),
    ("data_parallel", 2, "--seed -1", (), "--seed -1 does not fit on 2 ranks: type --seed 0"),
    ("data_parallel", 2, "--batch x", (), "error: argument --batch: invalid int value: 'x'"),
    ("data_parallel", 2, "--graf", (), "error: unrecognized arguments: --graf"),
    (
        "data_parallel",
        2,
        "--device tpu",
        (),
        "error: argument --device: invalid choice: 'tpu' (choose from 'cpu', 'cuda')",
    ),
    ("model_parallel", 3, "--out-features 2", (), "--out-features 2 does not fit on 3 ranks: type --out-features 3"),
    ("row_parallel", 4, "--in-features 3", (), "--in-features 3 does not fit on 4 ranks: type --in-features 4"),
    ("pipeline_parallel", 2, "--batch 0", (), "--batch 0 does not fit on 2 ranks: type --batch 1"),
    ("hybrid_parallel", 4, "--batch 1", (), "--batch 1 does not fit on 4 ranks: type --batch 2"),
    ("data_loading", 2, "--samples 1", (), "--samples 1 does not fit on 2 ranks: type --samples 2"),
    ("metrics", 3, "--batch 2", (), "--batch 2 does not fit on 3 ranks: type --batch 3"),
    ("batch_norm", 2, "--batch 3", (), "--batch 3 does not fit on 2 ranks: type --batch 4"),
    ("random_numbers", 3, "--features 2", (), "--features 2 does not fit on 3 ranks: type --features 3"),
    ("data_parallel", 2, "--device cuda", (SUPPORTED,), NO_GPU.format(1)),
    ("data_parallel", 2, "--device cuda", (HOPPER, HOPPER), NO_GPU.format(0)),
    ("data_parallel", 2, "--device cuda", (SUPPORTED, (12, 0)), NO_GPU.format(1)),
    ("data_parallel", 2, "--device cuda", ((5, 2), (5, 2)), NO_GPU.format(0)),
    ("spawn", 1, "--device cuda", (SUPPORTED,), NO_GPU.format(1)),  # for two ranks of its own
    ("spawn", 1, "--ranks 5", (), "--batch 4 does not fit on 5 ranks: type --batch 5"),
    ("spawn", 1, "--ranks 0", (), "--ranks 0 does not fit on 1 ranks: type --ranks 1"),
]
REFUSED += [
    (name, 4, "--device cuda", (), NO_GPU.format(0)) for name in CASES if 4 in world_sizes(path_of(name))
]


@pytest.mark.parametrize("name, n, arguments, gpus, text", REFUSED)
def test_recipe_refuses_in_one_line_on_every_rank(pools, name, n, arguments, gpus, text):
    path = str(path_of(name))
    for code, out, err in pools(n).call(f"{ON_RANK}:main_of", path=path, arguments=arguments.split(), gpus=gpus):
        assert (code, out) == (2, "")
        assert err.startswith(f"{name}.py: ") and err.endswith(f"{text}\n") and err.count("\n") == 1


@pytest.mark.parametrize("n, arguments", [(2, "--batch 2"), (3, "--batch 3"), (4, "--batch 4")])
def test_smallest_size_that_is_not_refused_runs(pools, n, arguments):
    path = str(path_of("data_parallel"))
    for code, _, err in pools(n).call(f"{ON_RANK}:main_of", path=path, arguments=arguments.split()):
        assert (code, err) == (0, "")


def test_seed_repeats_a_run_and_another_seed_does_not(pools):
    path = str(path_of("data_parallel"))
    one, again, other = (
        pools(2).call(f"{ON_RANK}:main_of", path=path, arguments=["--seed", seed]) for seed in ("5", "5", "7")
    )
    assert one == again != other and one[0][1].splitlines()[-1] != other[0][1].splitlines()[-1]


@pytest.mark.parametrize(
    "gpus, device",
    [((), "cpu"), ((SUPPORTED,), "cpu"), ((SUPPORTED, (8, 9)), "cuda"), ((HOPPER, HOPPER), "cpu")],
)
def test_gpus_are_taken_only_where_each_rank_has_one_that_works(pools, gpus, device):
    path = str(path_of("data_parallel"))
    assert pools(2).call(f"{ON_RANK}:device_of", path=path, gpus=gpus) == [device] * 2
