"""PyTorch's weights in a split model: its logits and losses are PyTorch's, and a wrong file gives a clear error."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from harness.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import MAIN, Checks

ON_RANK = str(ROOT / "tests" / "on_rank_your_model.py")
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


@pytest.mark.parametrize(
    "dtype, n, ranks",
    [
        *((dtype, 2, None) for dtype in ("float32", "float16", "bfloat16")),
        *(pytest.param("float32", n, None, marks=pytest.mark.slow) for n in (3, 4)),
        ("float32", 4, [2, 3]),
    ],
)
def test_weights_of_pytorch_give_its_logits_and_losses(pools, dtype, n, ranks):
    """Also on ranks that do not begin at 0."""
    check_loaded(pools(n), file_of(dtype), dtype, ranks)


def test_dict_of_numpy_arrays(pools):
    check_loaded(pools(2), read(file_of("float32")), "float32")


def check_loaded(pool, weights, dtype, ranks=None):
    for rank, result in enumerate(pool.call(f"{ON_RANK}:loaded", path=WEIGHTS, weights=weights, ranks=ranks)):
        for what, allowed in (("logits", 1e-6), ("losses", 2e-6)):
            off = np.abs(result[what] - KNOWN[dtype][what]).max()
            Checks.that(off <= allowed, f"{dtype}: rank {rank}: {what} are off PyTorch's by", off)
        if not ranks or rank in ranks:
            Checks.equal(result["read"], result["held"], f"{dtype}: rank {rank} reads its own numbers, which")


def test_saved_file_is_the_trained_model(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    [trained, _] = pools(2).call(f"{ON_RANK}:saved", path=WEIGHTS, weights=file_of("float32"), target=str(target))
    in_file = read(target)
    assert list(in_file) == list(trained)
    assert all((in_file[name] == array).all() for name, array in trained.items())
    assert list(tmp_path.iterdir()) == [target]


def test_full_disk_leaves_the_earlier_file(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"earlier")
    arguments = {"path": WEIGHTS, "weights": file_of("float32"), "target": str(target)}
    pools(2).call(f"{ON_RANK}:saved", **arguments, fails=True)
    assert target.read_bytes() == b"earlier"


def arrays_without(name):
    return {key: array for key, array in read(file_of("float32")).items() if key != name}


FILES = {  # what is wrong with a file -> (a change of its content, the error)
    "empty": (lambda content: b"", "not a safetensors file, or cut off: 0 bytes"),
    "cut off in the header": (lambda content: content[:100], "not a safetensors file, or cut off: 100 bytes"),
    "cut off in the numbers": (lambda content: content[:-1], "cut off: .* ends at byte 6260, the file at 6259"),
    "a zip, as torch.save writes": (lambda content: b"PK\3\4" + content, "not a safetensors file"),
    "no JSON": (lambda content: content[:8] + b"x" + content[9:], "its header is not JSON"),
    "float64": (lambda content: content.replace(b'"F32"', b'"F64"'), "is F64; this recipe reads F32, F16, BF16"),
}
ARRAYS = {  # what is wrong with the arrays -> (the arrays, the error)
    "missing": (lambda: arrays_without("head.bias"), "head.bias is missing"),
    "unexpected": (lambda: {**arrays_without(""), "tail": np.ones(1)}, "tail is not in the model"),
    "misshapen": (
        lambda: {**arrays_without(""), "head.weight": np.ones((8, 5))},
        r"head.weight is \(8, 5\), the model has \(5, 8\)",
    ),
}


def check_refused(pool, weights, pattern):
    for message, unchanged in pool.call(f"{ON_RANK}:refused", path=WEIGHTS, weights=weights):
        assert message and "\n" not in message and re.search(pattern, message), message
        assert unchanged


@pytest.mark.parametrize("what", FILES)
def test_damaged_file_is_refused(pools, tmp_path, what):
    change, pattern = FILES[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(change(Path(file_of("float32")).read_bytes()))
    check_refused(pools(2), str(path), pattern)


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_of_another_model_are_refused(pools, what):
    arrays, pattern = ARRAYS[what]
    check_refused(pools(2), arrays(), pattern)


def test_main_refuses_a_damaged_file_in_a_line(pools, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    for code, _, err in pools(2).call(MAIN, path=WEIGHTS, arguments=["--weights", str(path)]):
        assert code == 2
        assert err.splitlines()[-1].endswith("cut off: 0 bytes, a header of 0")
