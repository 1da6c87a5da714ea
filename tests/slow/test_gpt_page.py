"""The GPT on all ten meshes of up to 4 ranks, eager and, on most, in a graph; docs/gpt.md, whose runs these are.

Also its checkpoints, and what happens without each of its cures.
"""

import json
import shutil
from functools import partial

import numpy as np
import pytest

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT, reference_gpt
from tests.cases.gpt_meshes import (
    FOUND,
    ROWS,
    SIZES,
    TRAINED,
    axis_of,
    by_row,
    context_formulas,
    expert_formulas,
    known,
    mesh_of,
    prove_run,
    row_run,
    sent_in_a_step,
)
from tests.cases.ladder import Checks
from tests.jobs import changed

GPT = str(path_of("gpt"))
HERE = str(ROOT / "tests" / "on_rank_gpt.py")
SMALL = {"batch_size": 16, "seq_len": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 4}
FEW = {"steps": 3, "sums": 0}
# With all options at once, in eager mode: each axis alone, and two. On 1 and on 4 ranks along an axis the plain run of
# the page is enough. A graph takes up to 20 seconds to compile, so there only two axes.
WITH_ALL = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
ALL_OPTIONS = {"sequence_parallel": True, "shard_weights": True, "micro_batches": 4, "clip_grad": 0.5}
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
RESUMED = [  # (mesh, whether in a graph) that saves, and that loads: each mode does both; stages save and load
    (((2, 1, 1), False), ((1, 2, 2), False)),
    (((1, 1, 2), True), ((2, 2, 1), False)),
    (((2, 1, 1), False), ((1, 2, 2), True)),
]
STORED = by_row(json.loads(FOUND.read_text()))
SHORTER = [  # runs of the page; a graph on four ranks takes ten seconds to compile, so only plain runs along one axis
    (row, graph)
    for row in ROWS
    for graph in (False, True)
    if not graph or np.prod(row[0]) <= 2 or row[1] == "plain" and max(row[0]) == 4
]
# Large enough that OneFlow's own messages are few bytes.
WIDE = {"batch_size": 8, "seq_len": 32, "num_layers": 2, "hidden_size": 64, "num_heads": 4}
LOSS = "_C.sparse_softmax_cross_entropy(logits, targets.flatten())"
MASK = "self.mask(seq_len, x.dtype)"
VOCAB_SIZE, LARGER = "math.ceil(len(CHARACTERS) / config.num_heads) * config.num_heads", "96"
TRAPS = [  # the cure, what one would write without it, how many times as much two ranks send then
    (', grad_sbp=self.layout["residual"])', ")", 1.4),
    (LOSS, "nn.functional.cross_entropy(logits, targets.flatten())", 1.03),
    (LOSS, "_C.sparse_softmax_cross_entropy(logits.reshape(*targets.shape, -1), targets)", 1.03),
    ("scores + self.mask(seq_len, x.dtype)", f"flow.where({MASK} == 0, scores, {MASK})", 1.1),
]
CONTROL = 30_000  # bytes of OneFlow's own messages in a step, at most


def background_calls(item):
    """The runs that a test needs: see pools.py."""
    if item.originalname == "test_model_learns_to_add":
        return {("learns",): (0, learned)}
    if item.originalname != "test_row_of_the_page_trains_as_numpy":
        return {}
    (mesh, layout), graph = item.callspec.params["row"], item.callspec.params["graph"]
    run = partial(row_run, mesh=mesh, layout=layout, graph=graph, **FEW)
    return {("gpt", (mesh, layout), graph): (int(np.prod(mesh)), run)}


@pytest.mark.parametrize(
    "mesh, graph",
    [(mesh, graph) for mesh in WITH_ALL for graph in (False, True) if not graph or np.prod(mesh) == 4],
    ids=str,
)
def test_mesh_trains_as_numpy_with_all_options(pools, mesh, graph):
    """Without them it trains below, as a row of the page.

    Two ranks also train with micro-batches alone: in a pipeline, and in tensor parallelism, where there is a trap.
    """
    sizes = {**SMALL, "num_layers": mesh[2] + 1}  # a pipeline has stages of unequal size
    runs = [{**ALL_OPTIONS, "steps": 2, "sums": 9, "micro_batches": 2 if graph else 4}]
    if mesh in ((1, 2, 1), (1, 1, 2)):
        runs.append({**FEW, "micro_batches": 4})
    for options in runs:
        prove_run(pools(int(np.prod(mesh))), GPT, mesh, {**options, "graph": graph}, sizes, options)


@MODES
@pytest.mark.parametrize(
    "option, formulas",
    [({"experts": 4}, partial(expert_formulas, experts=4)), ({"context_parallel": True}, context_formulas)],
    ids=["experts", "context parallel"],
)
def test_bytes_are_those_of_the_formula(pools, graph, option, formulas):
    mesh = (2, 2, 1)
    sizes = {**SIZES, "num_layers": 2}
    arguments = {**mesh_of(mesh), **sizes, **option, "steps": 3, "graph": graph}
    seen = pools(4).call(TRAINED, path=GPT, **arguments)
    sent = dict.fromkeys(("data", "tensor", "others"), 0)
    for ranks, count in sent_in_a_step(seen).items():
        sent[axis_of(mesh, *ranks)] += count
    for axis, count in sent.items():
        wanted = formulas(mesh, num_layers=2).get(axis, 0)
        Checks.that(abs(count - wanted) <= 0.02 * wanted + 2 * CONTROL, axis, "sends", count, "not", wanted)


def test_both_splits_of_a_sequence_send_more_than_twice_as_much_in_eager_mode(pools):
    """Which is why recipes/README.md says to use a graph for them."""

    def sent(**more):
        arguments = {"data": 2, "tensor": 2, "steps": 3, "context_parallel": True, **WIDE, **more}
        return sum(sent_in_a_step(pools(4).call(TRAINED, path=GPT, **arguments)).values())

    times = sent(sequence_parallel=True) / sent()
    Checks.that(times > 2, "with --sequence-parallel too it sends", times, "x as much")


def learned(_):
    """The lines that one rank writes after training with the sizes of main."""
    with Pool(1, timeout=1800) as pool:
        return pool.call(f"{HERE}:answers", path=GPT, sums=100, graph=True, steps=250)[0]


def test_model_learns_to_add(measured):
    """98 of 100 answers were right; after the 400 steps of main 100 were, on 1 rank and on 2."""
    lines = measured("learns")
    right = (lines == reference_gpt.lines_of(reference_gpt.SUMS[:100])).all(1).sum()
    Checks.that(right >= 90, right, "of 100 answers are right")


def run_id(run):
    mesh, graph = run
    return "x".join(map(str, mesh)) + ("-graph" if graph else "")


@pytest.mark.parametrize("saved, loaded", RESUMED, ids=run_id)
def test_training_resumes_on_another_mesh_and_in_the_other_mode(pools, tmp_path, saved, loaded):
    def losses(run, **more):
        mesh, graph = run
        checkpoints = {"checkpoint_dir": str(tmp_path), "save_every": 4, "steps": 8}
        arguments = {"path": GPT, "graph": graph, **checkpoints, **mesh_of(mesh), **more, **SMALL}
        return np.array(pools(int(np.prod(mesh))).call(f"{HERE}:losses", **arguments)[0])

    unbroken = losses(saved)
    shutil.rmtree(tmp_path / "8")
    resumed = losses(loaded, shard_weights=True)
    Checks.equal(len(resumed), 4, "steps done after the checkpoint")
    off = np.abs(resumed - unbroken[4:]).max()
    Checks.that(off <= 1e-5, "losses differ from those of the unbroken run by", off)
    off = np.abs(unbroken - known(steps=8, **SMALL)["losses"]).max()
    Checks.that(off <= 1e-4, "losses of the unbroken run are off by", off)


@pytest.fixture(scope="module")
def sends_by_formula(pools, tmp_path_factory):
    """The bytes that two tensor-parallel ranks send in an eager step, which are about those of Megatron's formula."""
    sent = bytes_of_a_step(pools(2), tmp_path_factory.mktemp("gpt"))
    all_reduces = 4 * WIDE["num_layers"] + 2
    activation = 4 * WIDE["batch_size"] * WIDE["seq_len"] * WIDE["hidden_size"]
    formula = all_reduces * 2 * activation  # of both ranks; the loss, its input's maxima and ids are added
    Checks.that(formula <= sent <= 1.1 * formula, sent / formula, "x Megatron's formula")
    return sent


def bytes_of_a_step(pool, folder, *changes):
    """With a larger vocabulary: with so few characters, a gather of the logits costs little."""
    path = str(changed(GPT, folder, (VOCAB_SIZE, LARGER), *changes))
    return sum(sent_in_a_step(pool.call(TRAINED, path=path, steps=3, tensor=2, **WIDE)).values())


@pytest.mark.parametrize("cure, other, times", TRAPS)
def test_recipe_without_its_cure_sends_more(pools, tmp_path, sends_by_formula, cure, other, times):
    sent = bytes_of_a_step(pools(2), tmp_path, (cure, other))
    Checks.that(sent >= times * sends_by_formula, sent / sends_by_formula, "x as much as with its cure")


@pytest.mark.parametrize("row, graph", SHORTER, ids=str)
def test_row_of_the_page_trains_as_numpy(measured, row, graph):
    """In three of its steps. row_run also compares layout, first gradients and losses with numpy."""
    run, stored = measured("gpt", row, graph), STORED[row][graph]
    errors = np.array(run["loss_errors"])
    apart = np.abs(errors - stored["loss_errors"][: len(errors)]).max()
    Checks.that(apart <= 1e-5, row, "losses and those of docs/gpt.json are apart by", apart)
    Checks.equal(run["held"], stored["held"], row, "bytes that a rank holds; ./launch.sh meshes makes the page again")
    for axis, before in stored["sent"].items():
        near = abs(run["sent"][axis] - before) <= 0.02 * before + CONTROL
        Checks.that(near, row, axis, "sent", run["sent"][axis], "and in docs/gpt.json", before)
