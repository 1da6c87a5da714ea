"""PyTorch's weights in a split model: the logits and losses are PyTorch's, and what is wrong with a file is told."""

import json
from pathlib import Path

import numpy as np
import pytest

from harness.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_your_model.py")
MAIN_OF = str(ROOT / "harness" / "measure" / "main.py") + ":main_of"
DATA = ROOT / "tests" / "data"
WEIGHTS = str(path_of("pytorch_weights"))
KNOWN = json.loads((DATA / "pytorch.json").read_text())  # by benchmarks/pytorch_reference.py
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def file_of(dtype):
    return str(DATA / f"pytorch_{dtype}.safetensors")


def read(path):
    """{name: (dtype, array)} of a .safetensors file, read here and not by the recipe."""
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == len(data)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def check_loaded(pool, weights, dtype, ranks=None):
    for rank, seen in enumerate(pool.call(f"{ON_RANK}:loaded", path=WEIGHTS, weights=weights, ranks=ranks)):
        for what, allowed in (("logits", 1e-6), ("losses", 2e-6)):
            off = np.abs(seen[what] - KNOWN[dtype][what]).max()
            Checks.that(off <= allowed, f"{dtype}: rank {rank}: {what} are off PyTorch's by", off)
        if not ranks or rank in ranks:
            Checks.equal(seen["read"], seen["held"], f"{dtype}: rank {rank} reads its own numbers, which")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_file_of_pytorch_gives_its_logits_and_losses(pools, dtype):
    check_loaded(pools(2), file_of(dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 4])
def test_file_of_pytorch_on_more_ranks(pools, n):
    check_loaded(pools(n), file_of("float32"), "float32")


def test_ranks_that_do_not_begin_at_0(pools):
    check_loaded(pools(4), file_of("float32"), "float32", ranks=[2, 3])


def test_dict_of_numpy_arrays(pools):
    check_loaded(pools(2), read(file_of("float32")), "float32")


def test_saved_file_is_the_trained_model(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    [trained, _] = pools(2).call(f"{ON_RANK}:saved", path=WEIGHTS, weights=file_of("float32"), target=str(target))
    found = read(target)
    assert list(found) == list(trained)
    assert all((found[name] == array).all() for name, array in trained.items())
    assert list(tmp_path.iterdir()) == [target]


def test_file_is_on_disk_before_it_gets_its_name_and_named_before_ranks_go_on(pools, tmp_path):
    """And rank 0 alone writes it."""
    target = tmp_path / "model.safetensors"
    writer, other = pools(2).call(f"{ON_RANK}:order_of_saving", path=WEIGHTS, target=str(target))
    size = target.stat().st_size
    assert writer == [(f"{target}.unfinished", size), ("named", size), (str(tmp_path), 1), ("met", size)]
    assert other == [("met", 0)]


def test_full_disk_leaves_the_earlier_file(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"earlier")
    arguments = {"path": WEIGHTS, "weights": file_of("float32"), "target": str(target)}
    pools(2).call(f"{ON_RANK}:saved", **arguments, fails=True)
    assert target.read_bytes() == b"earlier"


def without(name):
    return {key: array for key, array in read(file_of("float32")).items() if key != name}


FILES = {  # what is wrong with a file -> (its content, the words of the error)
    "empty": (lambda content: b"", "not a safetensors file, or cut off: 0 bytes"),
    "cut off in the header": (lambda content: content[:100], "not a safetensors file, or cut off: 100 bytes"),
    "cut off in the numbers": (lambda content: content[:-1], "cut off: .* ends at byte 6260, the file at 6259"),
    "a zip, as torch.save writes": (lambda content: b"PK\3\4" + content, "not a safetensors file"),
    "no JSON": (lambda content: content[:8] + b"x" + content[9:], "its header is not JSON"),
    "float64": (lambda content: content.replace(b'"F32"', b'"F64"'), "is F64; this recipe reads F32, F16, BF16"),
}
ARRAYS = {  # what is wrong with the arrays -> (they, the error)
    "missing": (lambda: without("head.bias"), "head.bias is missing"),
    "unexpected": (lambda: {**without(""), "tail": np.ones(1)}, "tail is not in the model"),
    "misshapen": (
        lambda: {**without(""), "head.weight": np.ones((8, 5))},
        r"head.weight is \(8, 5\), the model has \(5, 8\)",
    ),
}


def check_refused(pool, weights, words):
    for message, untouched in pool.call(f"{ON_RANK}:refused", path=WEIGHTS, weights=weights):
        assert message and "\n" not in message
        assert untouched
        with pytest.raises(ValueError, match=words):
            raise ValueError(message)


@pytest.mark.parametrize("what", FILES)
def test_damaged_file_is_refused(pools, tmp_path, what):
    change, words = FILES[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(Path(file_of("float32")).read_bytes()))
    check_refused(pools(2), str(path), words)


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_of_another_model_are_refused(pools, what):
    make, words = ARRAYS[what]
    check_refused(pools(2), make(), words)


def test_main_refuses_a_damaged_file_in_a_line(pools, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    for code, _, err in pools(2).call(MAIN_OF, path=WEIGHTS, arguments=["--weights", str(path)]):
        assert code == 2
        assert err.splitlines()[-1].endswith("cut off: 0 bytes, a header of 0")
