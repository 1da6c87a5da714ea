"""docs/rosetta: the twins in PyTorch and JAX train as numpy and the recipes do, and docs/rosetta.md is true.

They need an environment of their own, .venv-peers: see environments.py.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES, ROOT, reference_module
from tests.cases.ladder import MAIN, shard_of
from tests.cases.measuring import training_sizes
from tests.cases.reference import Value, split
from tests.environments import peers
from tests.jobs import CLEAN, LAUNCH, Run, free_port
from tests.markdown import MATMULS, tables
from tests.peer_programs import LIMIT, Forked

ROSETTA, PAGE = ROOT / "docs" / "rosetta", ROOT / "docs" / "rosetta.md"
RANKS = {"train_data_tensor": 4}  # of a twin's main; the others have 2
pytestmark = pytest.mark.installs("PyTorch and JAX")
STRATEGIES = ("train_data_parallel", "train_tensor_parallel", "train_data_tensor", "train_pipeline", "fully_sharded")
ON = [(name, n) for name in STRATEGIES for n in (2, 4) if n == 4 or name not in RANKS]
WEIGHTS = 2 * 384 * 768 * 4  # bytes of w0 and w1 at the sizes of the SBP atlas
VARIABLES = {**CLEAN, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
IMPORTED = {  # by the programs
    "pytorch": [
        *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
        *("torch.distributed.checkpoint", "torch.distributed.tensor.debug", "torch.nn.parallel", "torch._dynamo"),
    ],
    "jax": ["jax", "jax.numpy"],
}


def early_jobs(tmp_path_factory):
    """PyTorch and JAX take a minute to install in CI, and another one to import."""

    def start():
        folder = peers()
        python = {} if folder is None else dict.fromkeys(IMPORTED, folder / "python")
        return folder, {name: Forked(python[name], IMPORTED[name], ROOT, **VARIABLES) for name in python}

    return {"peers": ThreadPoolExecutor(1).submit(start)}


@pytest.fixture(scope="session")
def programs(early):
    """The folder of programs of .venv-peers."""
    folder, _ = early["peers"].result()
    if folder is None:
        pytest.skip("PyTorch and JAX need Python 3.11 or newer, which this machine has not")
    return folder


@pytest.fixture(scope="session")
def pytorch(programs, early):
    """A function that runs a program of PyTorch on n ranks, as torchrun does."""
    with early["peers"].result()[1]["pytorch"] as process:
        yield process.run


@pytest.fixture(scope="session")
def jax(programs, early):
    """A function that runs a program of JAX, in one process; the first argument is 1."""
    with early["peers"].result()[1]["jax"] as process:
        yield process.run


@pytest.fixture(scope="session")
def torch_results(pytorch, tmp_path_factory):
    """{n: results of rosetta_torch.py by rank}."""
    results = {}
    for n in (2, 4):
        folder = tmp_path_factory.mktemp(f"torch{n}")
        names = [name for name, ranks in ON if ranks == n] + ["tensor_parallel_module"] * (n == 2)
        pytorch(n, ROOT / "tests" / "rosetta_torch.py", folder, *names)
        results[n] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]
    return results


@pytest.fixture(scope="session")
def jax_results(jax, tmp_path_factory):
    """Results of rosetta_jax.py."""
    file = tmp_path_factory.mktemp("jax") / "results.json"
    jax(1, ROOT / "tests" / "rosetta_jax.py", file)
    return json.loads(file.read_text())


def case_of(name, n):
    """The recipe's case, with the number of micro-batches of the twins' runs."""
    return CASES[name](n, **({"micro_batches": 4} if name == "train_pipeline" else {}))


def close(actual, expected):
    np.testing.assert_allclose(np.array(actual), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name, n", ON)
def test_pytorch_trains_as_numpy_does_and_each_rank_holds_its_shard(torch_results, name, n):
    case = case_of(name, n)
    for rank, results in enumerate(torch_results[n]):
        result = results[name]
        close(result["losses"], case.values["losses"].exact)
        assert set(result["rows"]) == rows_of(case, name, n, rank)
        held_weights = {key for key in ("w0", "w1", "w2", "w3") if held(case, f"new {key}", rank) is not None}
        for tensors, expected in (("weights", "new {}"), ("gradients", "{} grad")):
            shards = result[tensors]
            if name == "train_pipeline":
                shards = {f"w{rank}": shards["w"]}
            shards = {re.search(r"w\d", key)[0]: shard for key, shard in shards.items()}
            assert set(shards) == held_weights
            for key, shard in shards.items():
                close(shard, held(case, expected.format(key), rank))


def rows_of(case, name, n, rank):
    """The rows of the outputs of which a rank computes the loss."""
    if name == "train_pipeline":
        return {2} if rank == n - 1 else set()  # of 8, in 4 micro-batches
    return {len(held(case, "x", rank))}


def held(case, name, rank):
    """What a rank must hold of a tensor of the case; None if nothing."""
    if name not in case.values:
        return None
    sbp, ranks = case.layout[name]
    shard = shard_of(case.values[name], sbp, ranks, rank, {})
    return None if shard is None else shard.exact


@pytest.mark.parametrize("name, n", ON)
def test_jax_trains_as_numpy_does_and_each_device_holds_its_shard(jax_results, name, n):
    case, result = case_of(name, n), jax_results[f"{name} on {n}"]
    close(result["losses"], case.values["losses"].exact)
    if name != "train_pipeline":  # whose weights are checked below, and whose batch is whole
        rows = 384 * len(held(case, "x", 0)) // 8
        assert [[384, 384], [rows, 384]] in result["operands"]  # x and y
        assert ([[384, 384], [384, 384]] in result["operands"]) == (rows == 384)
    average = "{} exp_avg" if "w0 exp_avg" in case.values else "{} momentum_buf"
    for tensors, expected in (("weights", "new {}"), ("averages", average)):
        for rank in range(n):
            if name == "train_pipeline":  # the stage is filled up with zeros
                stage, own = np.array(result[tensors]["w"][rank])[0], held(case, expected.format(f"w{rank}"), rank)
                filled = np.zeros_like(stage)
                filled[tuple(map(slice, own.shape))] = own
                close(stage, filled)
            else:
                assert set(result[tensors]) == {"w0", "w1"}
                for key, shards in result[tensors].items():
                    close(shards[rank], held(case, expected.format(key), rank))


def test_the_module_trains_as_numpy_does(torch_results):
    """From the weights that PyTorch draws."""
    for results in torch_results[2]:
        result = results["tensor_parallel_module"]
        arrays = {name: np.array(w, np.float32) for name, w in result["initial"].items()}
        values, _ = reference_module.trained(arrays, "adam", False, 0, 20, 8, 1.0)
        apart = np.abs(np.array(result["losses"]) / values["losses"].exact - 1)
        assert apart[:10].max() <= 1e-5 and apart.max() <= 3e-5  # Adam carries rounding from step to step
        values, _ = reference_module.trained(arrays, "adam", False, 0, 1, 8, 1.0)
        for name in arrays:  # Adam's losses would hide a factor
            close(result["gradients"][name], values[f"{name} grad"].exact)
        activations = 256 * 4 * 512 * 4  # bytes: batch, seq_len, hidden_size; 2 blocks, forward and backward
        assert abs(result["sent"] - 4 * activations) <= 0.01 * 4 * activations


OPERATION = re.compile(r"= (.+?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\((.*)")
SENT = {  # collective -> the bytes that each of n devices sends on average, times those of the result
    "all-reduce": lambda n, pairs: 2 * (n - 1) / n,
    "all-gather": lambda n, pairs: (n - 1) / n,
    "reduce-scatter": lambda n, pairs: n - 1,
    "all-to-all": lambda n, pairs: (n - 1) / n,
    "collective-permute": lambda n, pairs: pairs,
}


def devices_of_a_group(text):
    """The devices between which a collective runs, in each of the three ways in which XLA writes it."""
    listed = re.search(r"replica_groups={{([\d,]+)}", text)
    if listed:
        return listed[1].count(",") + 1
    iota = re.search(r"replica_groups=\[\d+,(\d+)]", text)
    if iota:
        return int(iota[1])
    mesh, names = re.search(r"replica_groups=mesh\[(.*?)] {(.*?)}", text).groups()
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return int(np.prod([int(sizes[name]) for name in re.findall(r"'(\w+)'", names)]))


def collectives(hlo):
    """[(name, bytes of the result, devices of a group, pairs, times)] of a compiled step, but for single numbers."""
    found, times, body = [], dict(re.findall(r'body=%?([\w.-]+).*?known_trip_count":{"n":"(\d+)"', hlo)), ""
    for line in hlo.splitlines():
        if line.endswith("{") and "->" in line:
            body = line.split()[0].lstrip("%")
        match = OPERATION.search(line)
        if not match:
            continue
        shapes, name, rest = match.groups()
        sizes = [
            np.prod([int(d) for d in dims.split(",") if d], dtype=int) for dims in re.findall(r"f32\[([\d,]*)]", shapes)
        ]
        pairs = re.search(r"source_target_pairs={(.*?)}}", rest)
        n = devices_of_a_group(rest) if name != "collective-permute" else 0
        size = 4 * sum(size for size in sizes if size > 1)  # but for the loss
        if size:
            found.append((name, size, n, pairs[1].count("{") if pairs else 0, int(times.get(body, 1))))
    return found


def sent_by_jax(hlo, n):
    """The bytes that a device sends on average."""
    total = 0
    for name, size, group, pairs, times in collectives(hlo):
        total += SENT[name](group, pairs / n) * size * times
    return total


def rows_of_bytes():
    """{strategy: {framework: [bytes on 2 ranks, on 4]}} of the page."""
    rows = {}
    for strategy, *_, oneflow, pytorch, jax in (row for row in tables(PAGE) if len(row) == 6):
        name = re.search(r"(\w+)\.py", strategy)
        if name and name[1] in STRATEGIES:
            cells = {"oneflow": oneflow, "pytorch": pytorch, "jax": jax}
            rows[name[1]] = {
                key: [float(x) * 1e6 if x != "–" else None for x in cell.split(" · ")] for key, cell in cells.items()
            }
    return rows


def agree(measured, name, framework, n):
    stated = rows_of_bytes()[name][framework][n // 2 - 1]
    assert abs(stated - measured) <= 0.01 * measured + 10_000, (name, framework, n, stated, measured)


@pytest.mark.parametrize("name, n", ON)
def test_page_has_the_bytes_that_pytorch_sends(torch_results, name, n):
    agree(np.mean([results[name]["sent"] for results in torch_results[n]]), name, "pytorch", n)


@pytest.mark.parametrize("name, n", ON)
def test_page_has_the_bytes_of_the_collectives_that_jax_compiles(jax_results, name, n):
    agree(sent_by_jax(jax_results[f"{name} on {n}"]["hlo"], n), name, "jax", n)


@pytest.mark.parametrize("name, n", ON)
def test_page_has_the_bytes_of_the_formula_of_the_recipe(name, n):
    """test_training.py measures that it sends them."""
    case = CASES[name](n, **training_sizes(name, steps=1))
    agree(4 * np.mean([case.sends[rank] for rank in range(n)]), name, "oneflow", n)


def test_jax_all_reduces_all_gradients_and_the_loss_at_once(jax_results):
    [only] = collectives(jax_results["train_data_parallel on 2"]["hlo"])
    assert only == ("all-reduce", WEIGHTS, 2, 0, 1)


def lines_of(out):
    """What the ranks print, sorted by rank."""
    return sorted(re.findall(r"\[\d] (?:(?!\[\d] ).)+", out))  # ranks write at once, so that two lines may be one


def lines_of_recipe(pools, name):
    outcomes = pools(RANKS.get(name, 2)).call(MAIN, path=str(path_of(name)), arguments=[])
    lines = sorted(f"[{rank}] {line}" for rank, (_, out, _) in enumerate(outcomes) for line in out.splitlines())
    assert lines
    return lines


def by_command(programs, framework, path):
    """What a program prints that the command in its first lines starts."""
    command = {
        "oneflow": [LAUNCH, "-n", 2, path],
        "pytorch": [programs / "torchrun", "--nproc_per_node", 2, path],
        "jax": [programs / "python", path],
    }[framework]
    job = Run(*command, **VARIABLES, PET_MASTER_PORT=str(free_port())).wait(LIMIT)
    assert job.code == 0, job.err
    return job.out


@pytest.mark.parametrize("name", STRATEGIES)
def test_recipe_and_twins_print_the_same(pools, programs, pytorch, jax, name):
    lines = lines_of_recipe(pools, name)
    of_pytorch, of_jax = (ROSETTA / framework / f"{name}.py" for framework in IMPORTED)
    if name == "train_data_parallel":  # as a user starts it
        outs = by_command(programs, "pytorch", of_pytorch), by_command(programs, "jax", of_jax)
    else:
        outs = pytorch(RANKS.get(name, 2), of_pytorch), jax(1, of_jax)
    pytorch_lines, jax_lines = map(lines_of, outs)
    if name == "train_pipeline":
        stages = [line for line in jax_lines if "filled up" in line]
        assert len(stages) == 2
        jax_lines = sorted({*jax_lines} - {*stages} | {line for line in lines if "nothing of other stages" in line})
    assert pytorch_lines == lines
    assert jax_lines == lines


def test_module_prints_what_the_recipe_prints(pools, pytorch):
    lines = lines_of_recipe(pools, "tensor_parallel_module")
    out = lines_of(pytorch(2, ROSETTA / "pytorch" / "tensor_parallel_module.py"))
    assert [line for line in lines if "loss" not in line] == [line for line in out if "loss" not in line]
    assert len(out) == len(lines)


def test_matmuls_print_the_blocks_of_the_readme(pytorch, jax):
    """The same shards in the same order; JAX fills w up with a column of zeros."""

    def shards(text):
        return sorted((line[:3], json.loads(line[line.index("[[") :])) for line in text)

    expected = shards(MATMULS.splitlines())
    assert shards(lines_of(pytorch(2, ROSETTA / "pytorch" / "matmul_layouts.py"))) == expected
    x, w = Value([[1, 2], [3, 1]]), Value([[2, 0, 1, 0], [1, 3, 2, 0]])
    out = (x @ w).exact
    filled = []
    for rank in (0, 1):
        partial = x.exact[:, [rank]] @ w.exact[[rank]]
        whole = [out[split((2, 4), dim, rank, 2)] for dim in (0, 1)]
        filled += [(f"[{rank}]", array.tolist()) for array in (*whole, partial, out)]
    assert shards(lines_of(jax(1, ROSETTA / "jax" / "matmul_layouts.py"))) == sorted(filled)


SHAPES = {  # plan of rosetta_plans.py -> rank 0's shards of the weights of the embedding, blocks.0.up and blocks.0.down
    "": ([12, 16], [64, 16], [16, 64]),
    "tensor": ([12, 16], [32, 16], [16, 32]),
    "data x tensor": ([12, 16], [32, 16], [16, 32]),
    "data x tensor, sharded": ([6, 16], [16, 16], [8, 32]),
    "vocabulary": ([6, 16], [32, 16], [16, 32]),
    "sequence": ([6, 16], [32, 16], [16, 32]),
    "fully sharded": ([6, 16], [32, 16], [8, 64]),
}


def test_plans_of_your_own_model_train_as_a_single_device_does(pytorch, tmp_path):
    pytorch(4, ROOT / "tests" / "rosetta_plans.py", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    shapes = {plan: tuple(result["shapes"].values()) for plan, result in results.items() if "shapes" in result}
    assert shapes == SHAPES
    for plan, result in results.items():
        alone = results["twin alone" if plan.startswith("twin") else ""]
        close(result["losses"], alone["losses"])
        assert set(result["gradients"]) == set(alone["gradients"])
        for name, gradient in result["gradients"].items():
            close(gradient, alone["gradients"][name])


@pytest.mark.parametrize("framework", ["oneflow", "pytorch", "jax"])
def test_differences_print_what_is_next_to_them(programs, framework):
    path = ROSETTA / "differences" / f"differences_{framework}.py"
    assert by_command(programs, framework, path) == path.with_suffix(".txt").read_text()
