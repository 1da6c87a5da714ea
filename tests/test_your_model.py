"""PyTorch's weights in a model of any layout: values, slices, saved files, and errors for what does not fit."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import MAIN, Checks
from tests.safetensors import DTYPES, header_of, read, write

ON_RANK = str(ROOT / "tests" / "on_rank_your_model.py")
DATA = ROOT / "tests" / "data"
ON_RANK_TRAITS = str(ROOT / "tests" / "on_rank_traits.py")
ON_RANK_MAIN = str(ROOT / "tests" / "on_rank_main.py")
ON_RANK_WEIGHTS = str(ROOT / "tests" / "on_rank_weights.py")
WEIGHTS = str(path_of("pytorch_weights"))
MODULES = ("tensor_parallel_module", "fully_sharded_module", "pipeline_module", "pytorch_weights")
PATHS = {name: str(path_of(name)) for name in MODULES}
KNOWN = json.loads((DATA / "pytorch.json").read_text())  # by benchmarks/pytorch_reference.py


def file_of(dtype):
    return str(DATA / f"pytorch_{dtype}.safetensors")


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


@pytest.mark.parametrize("name", ["fully_sharded_module", "pipeline_module"])
def test_model_that_is_global_already_gets_the_layout_too(pools, name):
    """One that was data parallel before, or sharded on other ranks."""
    for rank, held in enumerate(pools(2).call(f"{ON_RANK}:held_of_a_global_model", path=PATHS[name])):
        for layout in ("B", "S(0) on rank 0"):
            Checks.equal(held[layout], held["local"], name, f"rank {rank}", layout, "elements of each tensor")


def test_what_is_global_already_in_this_layout_is_not_moved(pools):
    """Blocks that were sharded as they were made, and a buffer that the user has split."""
    for sent, elements in pools(2).call(f"{ON_RANK}:sharded_again", path=PATHS["fully_sharded_module"]):
        Checks.equal(elements, 4, "elements of the buffer on this rank")
        Checks.that(sent < 500, "a rank sends", sent, "bytes to shard what is sharded")


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
    "empty": (lambda content: b"", "not a safetensors file, or cut off"),
    "cut off in the header": (lambda content: content[:100], "not a safetensors file, or cut off"),
    "cut off in the numbers": (lambda content: content[:-1], "cut off or damaged at head.weight"),
    "a zip, as torch.save writes": (lambda content: b"PK\3\4" + content, "not a safetensors file"),
    "no JSON": (lambda content: content[:8] + b"x" + content[9:], "not a safetensors file"),
    "a list": (lambda content: b"\2" + bytes(7) + b"[]", "not a safetensors file"),
    "no offsets": (lambda content: content.replace(b"data_offsets", b"data-offsets"), "not a safetensors file"),
    "int16": (
        lambda content: content.replace(b'"F32"', b'"I16"'),
        "is I16; this recipe reads F64, F32, F16, BF16, I64, I32, I8, U8, BOOL$",
    ),
    "float64": (
        lambda content: content.replace(b'"F32"', b'"F64"'),
        "cut off or damaged at blocks.0.down.bias",
    ),
}
ARRAYS = {  # what is wrong with the arrays -> (the arrays, the error)
    "missing": (lambda: arrays_without("head.bias"), "head.bias is missing"),
    "unexpected": (lambda: {**arrays_without(""), "tail": np.ones(1)}, "tail is not in the model"),
    "misshapen": (
        lambda: {**arrays_without(""), "head.weight": np.ones((8, 5))},
        r"head.weight is \(8, 5\), the model has \(5, 8\)",
    ),
    "of DistributedDataParallel": (
        lambda: {f"module.{name}": array for name, array in read(file_of("float32")).items()},
        r"^module.(.*) is \1 in the model: PyTorch's DistributedDataParallel adds module.; take it away, as in "
        r'load\(model, {name.replace\("module.", ""\): array for name, array in open_safetensors\(path\).items\(\)}\)$',
    ),
    "of a compiled block": (
        lambda: {name.replace("blocks.0.", "blocks.0._orig_mod."): array for name, array in arrays_without("").items()},
        r"^blocks.0._orig_mod.(.*) is blocks.0.\1 in the model: PyTorch's torch.compile adds _orig_mod.; take it away",
    ),
    "of a larger model": (
        lambda: {f"encoder.text.{name}": array for name, array in read(file_of("float32")).items()},
        r"^encoder.text.(.*) is \1 in the model: all names begin with encoder.text.; take it away",
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


def test_link_that_points_nowhere_is_refused_as_what_it_is(pools, tmp_path):
    """Also where it is the folder that is one."""
    (tmp_path / "model.safetensors").symlink_to("../blobs/1a2b")
    (tmp_path / "latest").symlink_to("step-9")
    for name, target in (("model.safetensors", "../blobs/1a2b"), ("latest", "step-9")):
        path = tmp_path / name / ("model.safetensors" if name == "latest" else "")
        error = f"{tmp_path / name} is a link to {target}, which is not there: where it is, copy the folder with cp -rL"
        check_refused(pools(2), str(path), f"^{error}$")


def test_main_refuses_a_damaged_file_in_a_line(pools, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    for code, _, err in pools(2).call(MAIN, path=WEIGHTS, arguments=["--weights", str(path)]):
        assert code == 2
        assert err.splitlines()[-1].endswith("not a safetensors file, or cut off")


LAYOUTS = [
    *("local", "data", "tensor", "data x tensor", "fully sharded", "pipeline"),
    *("two ranks of four", "rows and columns"),
]
TIED = ("blocks.1.first.weight", "blocks.1.second.weight")


@pytest.fixture(scope="module")
def arrays(pools):
    """{name: array} for every parameter and persistent buffer of the model in on_rank_weights.py."""
    rng, arrays = np.random.default_rng(0), {}
    for name, (dtype, shape) in pools(4).call(f"{ON_RANK_WEIGHTS}:shapes")[0].items():
        arrays[name] = np.asarray(rng.normal(size=shape) if dtype == "float32" else rng.integers(2, size=shape), dtype)
    arrays["head.weight"] = arrays["head.weight"].astype(np.float64)  # becomes the model's float32
    return {**arrays, TIED[1]: arrays[TIED[0]]}


@pytest.mark.parametrize("k, layout", enumerate(LAYOUTS), ids=LAYOUTS)
def test_pytorch_weights_are_sliced_for_each_rank_and_a_saved_file_has_them_all(pools, tmp_path, arrays, k, layout):
    """The file has one name of the tied weight, as safetensors.torch.save_model writes it; the saved one has both."""
    dropped = TIED[k % 2]
    source, target = tmp_path / "pytorch.safetensors", tmp_path / "saved.safetensors"
    write(source, {name: array for name, array in arrays.items() if name != dropped})
    call = {"weights": str(source), "layout": layout, "target": str(target), "paths": PATHS}
    for rank, (held, before, after) in enumerate(pools(4).call(f"{ON_RANK_WEIGHTS}:filled", **call)):
        Checks.equal(list(held), list(arrays), f"rank {rank}: the names")
        for name, (placed, own) in held.items():
            whole = arrays[name].astype(own.dtype)
            block = placed.block(whole.shape, rank)
            if block is None and whole.ndim:  # a tensor without dimensions always has an element
                Checks.equal(own.size, 0, f"rank {rank}: the size of {name}, which is elsewhere,")
            elif block is not None:
                slices = tuple(slice(*edges) for edges in block)
                Checks.that(np.array_equal(own, whole[slices]), f"rank {rank}: {name}, {placed}, is not its slice")
        Checks.equal(after, before, f"rank {rank}: what must stay")
    saved = read(target)
    assert sorted(saved) == sorted(arrays)
    for name, array in arrays.items():
        assert saved[name].dtype == ("float32" if array.dtype == "float64" else array.dtype), name
        assert np.array_equal(saved[name], array.astype(saved[name].dtype)), name


def test_saved_file_is_in_the_format_of_safetensors(pools, tmp_path, arrays):
    """It has PyTorch's metadata, and a tensor begins at a multiple of its item size, whatever is in front of it."""
    target = tmp_path / "model.safetensors"
    call = {"weights": arrays, "layout": "local", "target": str(target), "paths": PATHS}
    pools(2).call(f"{ON_RANK_WEIGHTS}:filled", **call)
    length, header = header_of(target)
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for entry in header.values():
        assert sorted(entry) == ["data_offsets", "dtype", "shape"]
        assert entry["data_offsets"][0] % np.dtype(DTYPES[entry["dtype"]]).itemsize == 0, entry


OF_A_KIND = {  # what is wrong with the arrays -> (layout, what is changed in them, the error)
    "tied weights that differ": (
        "data",
        lambda arrays: {TIED[1]: arrays[TIED[1]] + 1},
        f"{TIED[0]} and {TIED[1]} are one weight in the model, and differ here",
    ),
    "an integer for a float": (
        "local",
        lambda arrays: {"head.bias": arrays["head.bias"].astype(int)},
        "head.bias is int64, the model has float32",
    ),
    "a float for an integer": (
        "local",
        lambda arrays: {"blocks.0.norm.num_batches_tracked": np.array(1.0)},
        "blocks.0.norm.num_batches_tracked is float64, the model has int64",
    ),
    "an integer for a boolean": (
        "fully sharded",
        lambda arrays: {"blocks.0.mask": arrays["blocks.0.mask"].astype(np.uint8)},
        "blocks.0.mask is uint8, the model has bool",
    ),
    "a tensor that is P": ("P", lambda arrays: {}, "head.bias is P in the model: only B and S can be loaded"),
}


@pytest.mark.parametrize("what", OF_A_KIND)
def test_pytorch_weights_that_cannot_be_filled_are_refused(pools, arrays, what):
    layout, change, message = OF_A_KIND[what]
    call = {"arrays": {**arrays, **change(arrays)}, "layout": layout, "paths": PATHS}
    for answer in pools(4).call(f"{ON_RANK_WEIGHTS}:refusal", **call):
        assert answer == message


def test_tied_weight_under_no_name_is_missing(pools, arrays):
    call = {"arrays": {name: array for name, array in arrays.items() if name not in TIED}, "layout": "data"}
    for answer in pools(4).call(f"{ON_RANK_WEIGHTS}:refusal", paths=PATHS, **call):
        assert answer == f"{TIED[0]} or {TIED[1]} is missing"


def test_part_of_a_model_is_loaded_from_two_files(pools, tmp_path, arrays):
    weight, bias = (arrays[f"head.{name}"].astype(np.float32) for name in ("weight", "bias"))
    files = [str(tmp_path / name) for name in ("first", "second")]
    write(files[0], {"bias": bias})
    write(files[1], {"weight": weight})
    for own in pools(4).call(f"{ON_RANK_WEIGHTS}:part_from_two_files", path=WEIGHTS, files=files):
        assert (own[0] == weight).all() and (own[1] == bias).all()


def test_slice_alone_is_read_from_the_disk(pools, tmp_path):
    features = 2048
    path = tmp_path / "model.safetensors"
    write(path, {"weight": np.ones((features, features), np.float32)})
    for size in pools(2).call(f"{ON_RANK_WEIGHTS}:pages_read", path=WEIGHTS, file=str(path), features=features):
        own, page = 4 * features**2 / 2, 2**21  # Linux may read the slice with the large pages at its ends
        Checks.that(own <= size <= own + 2 * page, "in memory are", size, "bytes of the file, and must be", own)


def test_bfloat16_model_is_loaded_and_saved_as_float32(pools, tmp_path):
    target = tmp_path / "model.safetensors"
    for dtype, weight, own in pools(2).call(f"{ON_RANK_WEIGHTS}:of_16_bits", path=WEIGHTS, file=str(target)):
        assert dtype == "oneflow.bfloat16" and (own == weight).all()
    assert read(target)["weight"].dtype == np.float32 and (read(target)["weight"] == weight).all()


@pytest.mark.parametrize(
    "name, layout, wanted",
    [
        ("tensor_parallel_module", "data x tensor", [("B, B", [[0, 1], [2, 3]])] * 2),
        ("fully_sharded_module", "fully sharded", [("B", [0, 1, 2, 3])] * 2),
        ("pipeline_module", "pipeline", [("B", [1]), ("B", [2])]),
    ],
)
def test_buffer_is_whole_on_the_ranks_of_its_layer(pools, name, layout, wanted):
    for layouts in pools(4).call(
        f"{ON_RANK_TRAITS}:layouts", trait="buffer", kind="buffers", layout=layout, paths=PATHS
    ):
        Checks.equal(list(layouts.values()), wanted, "the layouts of", *layouts)


def test_parameters_that_a_subclass_adds_to_a_split_layer_are_whole(pools):
    """The plan says how weight and bias are split, and nothing of a and b, which LoRA adds."""
    call = {"trait": "adapter", "kind": "parameters", "layout": "data x tensor", "paths": PATHS}
    for layouts in pools(4).call(f"{ON_RANK_TRAITS}:layouts", **call):
        added = {name: sbp for name, (sbp, _) in layouts.items() if re.fullmatch(r"blocks\.\d\.\w+\.[ab]", name)}
        Checks.equal((len(added), set(added.values())), (4, {"B, B"}), "the SBPs of", *added)


@pytest.mark.parametrize(
    "name, expression, line",
    [
        (
            "tensor_parallel_module",
            "lay_out(Classifier(), placements('cpu', 2), {'embedding': Row})",
            "embedding is Embedding: only nn.Linear can be Row; vocab_parallel.py splits an embedding",
        ),
        (
            "tensor_parallel_module",
            "lay_out(Classifier(), placements('cpu', 2), {'blocks.0.norm': Column})",
            "blocks.0.norm is LayerNorm: only nn.Linear can be Column",
        ),
        (
            "tensor_parallel_module",
            "lay_out(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))), placements('cpu', 2), {'0': Column})",
            "0.weight is not a parameter: the forward pre-hook WeightNorm computes it, so no plan can split it; "
            "leave 0 out, or make it a parameter first, as nn.utils.remove_weight_norm does",
        ),
        (
            "tensor_parallel_module",
            "lay_out(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4), 'bias')), placements('cpu', 2), {'0': Row})",
            "0.bias is not a parameter: the forward pre-hook WeightNorm computes it, so no plan can split it; "
            "leave 0 out, or make it a parameter first, as nn.utils.remove_weight_norm does",
        ),
        (
            "fully_sharded_module",
            "shard(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))), flow.placement.all('cpu'))",
            "0.weight is not a parameter: the forward pre-hook WeightNorm computes it, from shards; "
            "compute it in forward, or make it a parameter first, as nn.utils.remove_weight_norm does",
        ),
    ],
)
def test_layer_that_cannot_be_split_is_refused_in_a_line(pools, name, expression, line):
    for _, words in pools(2).call(f"{ON_RANK_MAIN}:refused", path=PATHS[name], expression=expression):
        assert words == [line]


@pytest.mark.parametrize("layout", ["fully sharded", "fully sharded, resharded after forward"])
def test_gradient_of_a_gradient_is_that_of_one_device(pools, layout):
    call = {"names": ["gradient_of_a_gradient", "penalty_on_gradients"], "layout": layout, "graph": False}
    for outcomes in pools(2).call(f"{ON_RANK_TRAITS}:outcomes", paths=PATHS, **call):
        Checks.that(all(isinstance(off, float) and off < 1e-6 for off in outcomes.values()), outcomes)
