"""What the docstrings of the recipes on state say beyond values and layouts."""

import os
import shutil

import pytest

from harness.pool import Pool, PoolError
from harness.recipe import path_of
from tests import reference
from tests.cases import CASES, ROOT
from tests.ladder import OBSERVE, Checks, close

ON_RANK = str(ROOT / "tests" / "on_rank.py")
HERE = str(ROOT / "tests" / "on_rank_state.py")
CHECKPOINT = str(path_of("checkpoint"))
RESULTS = ("new w0", "new w1", "new w0 momentum", "new w1 momentum", "w0 grad", "w1 grad", "losses")
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def trained_on(pool, folder, **arguments):
    """What checkpoint.py has on rank 0 after a run with this folder: name -> value."""
    seen = pool.call(OBSERVE, path=CHECKPOINT, folder=str(folder), **arguments)
    return {name: tensor["value"] for name, tensor in seen[0]["tensors"].items()}


def same_bits(one, other, *what):
    for name in RESULTS:
        Checks.that((one[name] == other[name]).all(), *what, name, "is not the same bit by bit")


@MODES
@pytest.mark.parametrize("worlds", [(2, 4, 2, 1), (3, 2), (1, 3)], ids=str)
def test_training_goes_on_on_another_number_of_ranks(pools, tmp_path, graph, worlds):
    saved = None
    for k, n in enumerate(worlds):
        weights = ("rows", "columns", "whole")[k % 3]
        found = trained_on(pools(n), tmp_path, graph=graph, steps=1, weights=weights)
        assert os.listdir(tmp_path) == [str(k + 1)]
        for name in ("w0", "w1", "w0 momentum", "w1 momentum") if saved else ():
            Checks.that((found[f"loaded {name}"] == saved[f"new {name}"]).all(), "loaded", name, "is what was saved")
        wanted = reference.trained("momentum", steps=k + 1)
        for w in ("w0", "w1"):
            close(found[f"new {w}"], wanted[f"new {w}"], 1, worlds, k, w)
            close(found[f"new {w} momentum"], wanted[f"{w} momentum_buf"], 1, worlds, k, w, "momentum")
        close(found["losses"], wanted["losses"][k:], 1, worlds, k, "losses")
        saved = found


@MODES
@pytest.mark.parametrize(
    "n, weights", [(1, "rows"), (2, "rows"), (2, "columns"), (2, "whole"), (3, "columns"), (4, "rows")]
)
def test_stopped_training_is_the_other_bit_by_bit(pools, tmp_path, n, weights, graph):
    given = {"graph": graph, "weights": weights}
    at_once = trained_on(pools(n), tmp_path / "at once", steps=4, **given)
    for _ in range(2):
        stopped = trained_on(pools(n), tmp_path / "stopped", steps=2, **given)
    same_bits(stopped, {**at_once, "losses": at_once["losses"][2:]}, n, weights)
    if n == 2:  # of two numbers the sum has no order
        same_bits(trained_on(pools(n), "", steps=2, **given), at_once, weights, "after whole")


@pytest.mark.parametrize("n, ranks", [(2, [1]), (3, [1, 2]), (4, [0, 3])])
def test_checkpoint_loads_onto_other_ranks(pools, tmp_path, n, ranks):
    saved = trained_on(pools(n), tmp_path)
    shapes = {name: saved[f"new {name}"].shape for name in ("w0", "w1")}
    loaded = pools(n).call(f"{HERE}:load_onto", path=CHECKPOINT, folder=str(tmp_path / "2"), ranks=ranks, **shapes)
    for rank in range(n):
        for name, tensor in loaded[rank].items():
            wanted = saved[f"new {name}"]
            Checks.equal((tensor["sbp"], tensor["ranks"]), ("S(0)", ranks), rank, name)
            Checks.that((tensor["value"] == wanted).all(), rank, name)
            if rank in ranks:
                block = wanted[reference.split(wanted.shape, 0, ranks.index(rank), len(ranks))]
                Checks.that((tensor["shard"] == block).all(), rank, name)
            else:
                Checks.that(tensor["shard"] is None, rank, name)


@MODES
@pytest.mark.parametrize("moment", ["half a file", "not named"])
def test_crash_while_saving_leaves_the_old_checkpoint_whole(pools, tmp_path, moment, graph):
    given = {"graph": graph, "weights": "whole"}
    trained_on(pools(2), tmp_path, **given)
    with pytest.raises(PoolError, match="died .exit code 9"):
        pools(2).call(f"{HERE}:die_while_saving", path=CHECKPOINT, moment=moment, folder=str(tmp_path), **given)
    assert sorted(os.listdir(tmp_path)) == ["2", "unfinished"]
    went_on = trained_on(pools(2), tmp_path, **given)
    assert os.listdir(tmp_path) == ["4"]
    same_bits(went_on, {**(whole := trained_on(pools(2), "", **given)), "losses": whole["losses"][2:]})


def cut(file, tmp_path):
    """Half of one of the files of a checkpoint: its pickle, or what a tensor has."""
    [checkpoint] = tmp_path.iterdir()
    path = min(checkpoint.rglob(file))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(file, tmp_path):
    [checkpoint] = tmp_path.iterdir()
    min(checkpoint.rglob(file)).unlink()


def refusals(pool, folder, *arguments):
    """What each rank says of this folder, without the recipe's name; all must say the same, and stop with code 2."""
    answers = pool.call(f"{ON_RANK}:main_of", path=CHECKPOINT, arguments=["--folder", str(folder), *arguments])
    begin = f"checkpoint.py: --folder {folder}: "
    for code, out, err in answers:
        assert (code, out) == (2, "")
        assert err.startswith(begin) and err.count("\n") == 1
    [text] = {err for _, _, err in answers}
    return text[len(begin) : -1]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "spoil, file", [(cut, "pickled_data"), (cut, "out"), (cut, "meta"), (remove, "out"), (remove, "pickled_data")]
)
def test_checkpoint_that_is_cut_short_is_refused(pools, tmp_path, n, spoil, file):
    trained_on(pools(n), tmp_path)
    spoil(file, tmp_path)
    text = refusals(pools(n), tmp_path)
    assert text.startswith("checkpoint 2 is not whole (") and text.endswith(f"): remove {tmp_path}/2")
    shutil.rmtree(tmp_path / "2")
    assert "loaded w0" not in trained_on(pools(n), tmp_path)  # what the message says to do helps


OTHER = "checkpoint 3 is of another model, {}: name another folder"
W = {"w0": (4, 8), "w1": (8, 4)}


def listed(dtype="float32", **shapes):
    """The tensors in the words of the refusal."""
    return ", ".join(f"{w}{kind} {shape} oneflow.{dtype}" for w, shape in shapes.items() for kind in ("", " momentum"))


@pytest.mark.parametrize(
    "there, text",
    [
        ({"w0": (4, 6), "w1": (6, 4)}, OTHER.format(listed(w0=(4, 6), w1=(6, 4)))),
        ({"dtype": "float64", **W}, OTHER.format(listed("float64", **W))),
        (
            {"v0": (4, 8), "v1": (8, 4)},
            OTHER.format(
                "v0 (4, 8) {0}, v1 (8, 4) {0}, w0 momentum (4, 8) {0}, w1 momentum (8, 4) {0}".format("oneflow.float32")
            ),
        ),
        (
            {"drop": ["optimizer"], **W},
            "checkpoint 3 is of another optimizer, or eager and not --graph: name another folder",
        ),
    ],
    ids=["shapes", "dtype", "names", "optimizer"],
)
def test_checkpoint_of_another_model_is_refused(pools, tmp_path, there, text):
    pools(2).call(f"{HERE}:put", path=CHECKPOINT, folder=str(tmp_path), **there)
    assert refusals(pools(2), tmp_path) == text


def test_checkpoint_of_the_model_is_not_refused(pools, tmp_path):
    trained_on(pools(3), tmp_path, batch=6)  # of another batch and number of ranks
    answers = pools(2).call(f"{ON_RANK}:main_of", path=CHECKPOINT, arguments=["--folder", str(tmp_path)])
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 2
    assert os.listdir(tmp_path) == ["4"]


@MODES
def test_checkpoint_of_the_other_mode_is_refused(pools, tmp_path, graph):
    trained_on(pools(2), tmp_path, graph=graph)
    text = refusals(pools(2), tmp_path, *([] if graph else ["--graph"]))
    assert text == "checkpoint 2 is of another optimizer, or eager and not --graph: name another folder"


def test_folder_that_is_a_file_is_refused(pools, tmp_path):
    (tmp_path / "file").touch()
    assert refusals(pools(2), tmp_path / "file") == "File exists: name another folder"


def test_ranks_wait_for_ever_if_the_first_alone_finds_the_checkpoint_broken(pools, tmp_path):
    trained_on(pools(2), tmp_path)
    cut("out", tmp_path)
    with Pool(2) as pool:
        pool.call(f"{ON_RANK}:rank_of")
        pool.timeout = 6
        with pytest.raises(PoolError, match="rank 1 of 2 gave no answer in 6 s"):
            pool.call(f"{HERE}:load_unchecked", folder=str(tmp_path / "2"))


@pytest.mark.parametrize("weights", ["whole", "rows", "columns"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_to_save_and_load(pools, tmp_path, n, weights):
    size = {"rows": 480, "columns": 1200}
    tensor, extra = 4 * 480 * 1200, (n - 1) / n**2 * (weights == "columns")
    found = pools(n).call(f"{HERE}:bytes_to_save_and_load", path=CHECKPOINT, folder=str(tmp_path), sbp=weights, **size)
    gathered = (n - 1) / n * (weights != "whole") + extra
    sums = [("all ranks load", sum(loaded for _, loaded in found), n - 1 + n * extra)]
    sums += [
        (f"rank {rank} saves", saved, gathered + (rank == 0)) for rank, (saved, _) in enumerate(found)
    ]  # and writes
    for what, bytes_found, wanted in sums:
        near = abs(bytes_found - wanted * tensor) <= 0.02 * wanted * tensor + 20_000
        Checks.that(near, what, bytes_found / tensor, "x the tensor, must be", wanted)


@pytest.mark.parametrize("n", [2, 3])
def test_gradient_of_what_was_gathered_comes_back_whole_unless_told(pools, n):
    """What the trap in loss_placement.py says."""
    ranks = list(range(n))
    for grad_sbp, sbp, rows in ((False, "B", 6), (True, "S(0)", 6 // n)):
        found = pools(n).call(f"{HERE}:gradient_of_gathered", rows=6, grad_sbp=grad_sbp)
        assert found == [(sbp, ranks, rows)] * n


@pytest.mark.parametrize("n, loss", [(2, "other"), (3, "none")])
def test_loss_on_a_rank_that_is_not_there_is_refused(pools, n, loss):
    path = str(path_of("loss_placement"))
    text = f"--loss {loss}: takes each or first, or other on 3 ranks or more: type --loss first"
    for code, out, err in pools(n).call(f"{ON_RANK}:main_of", path=path, arguments=["--loss", loss]):
        assert (code, out, err) == (2, "", f"loss_placement.py: {text}\n")


BY_HAND = str(path_of("replicate_scatter_gather"))


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_go_back_from_placement_to_placement(pools, n):
    """Of the replicated table and w, of out, and of the gathered out."""
    ranks = list(range(n))
    wanted = [("P", ranks), ("P", ranks), ("S(0)", ranks), ("B", [0])]
    assert pools(n).call(f"{HERE}:gradients_between", path=BY_HAND) == [wanted] * n


@MODES
@pytest.mark.parametrize("n", [2, 3, 4])
def test_by_hand_is_by_sbp(pools, n, graph):
    by_hand, by_sbp = (
        pools(n).call(OBSERVE, path=BY_HAND, graph=graph, way=way)[0]["tensors"] for way in ("steps", "sbp")
    )
    case = CASES["replicate_scatter_gather"](n)
    for name in ("table grad", "w grad", "new table", "new w", "losses"):
        off = abs(by_hand[name]["value"] - by_sbp[name]["value"])
        Checks.that((off <= 2 * case.values[name].bound).all(), name, "differ by", off.max())
