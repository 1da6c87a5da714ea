"""Llama: weights that transformers saved give its logits and greedy tokens; a rank reads and holds its own slices."""

import json
import shutil

import numpy as np
import pytest

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import MAIN, Checks
from tests.cases.reference_llama import shapes
from tests.jobs import LAUNCH, Run
from tests.safetensors import read, write

ON_RANK = str(ROOT / "tests" / "on_rank_llama.py")
LLAMA = str(path_of("llama"))
DATA = ROOT / "tests" / "data" / "llama"
KNOWN = json.loads((DATA / "transformers.json").read_text())  # by benchmarks/transformers_llama.py
KINDS = ("", "generation_")  # of config.json
PROMPTS, NEW_TOKENS = KNOWN["prompts"], 8
HEADS = {"grouped": (2, 8), "one_kv_head": (1, 12)}  # of keys, and their size
RUNS = [  # checkpoint, number of ranks, ranks of a stage
    *(("grouped", n, tensor) for n, tensor in ((2, 2), (1, 1), (2, 1), (4, 4), (4, 2))),
    *(("one_kv_head", n, tensor) for n, tensor in ((2, 2), (1, 1), (2, 1), (4, 4), (4, 2))),
]


def check_generated(pool, folder, name, tensor, known=None):
    """Logits and tokens are those of transformers, and each rank reads and caches what belongs to its own heads."""
    call = {"folder": str(folder), "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "tensor": tensor}
    known, (heads, head_dim) = known or KNOWN[name], HEADS[name]
    for rank, result in enumerate(pool.call(f"{ON_RANK}:generated", path=LLAMA, **call)):
        for how in ("tokens", "without a cache"):
            Checks.equal(result[how], known["tokens"], f"rank {rank}: {how}")
        for i, logits in enumerate(known["logits"]):
            off = np.abs(result["logits"][i] - logits).max()
            Checks.that(off <= 1e-4, f"rank {rank}: the logits of prompt {i} are off transformers' by", off)
        Checks.equal(result["read"], result["held"], f"rank {rank} reads its own numbers, which")
        shape = (len(PROMPTS), max(heads, tensor) // tensor, max(map(len, PROMPTS)) + NEW_TOKENS, head_dim)
        Checks.equal(result["keys"], {shape}, f"rank {rank}: the shape of its keys in each layer")


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run[1:] == (2, 2) else pytest.mark.slow) for run in RUNS], ids=str
)
def test_logits_and_tokens_are_those_of_transformers(pools, run):
    name, n, tensor = run
    check_generated(pools(n), DATA / name, name, tensor)


def arrays_of(folder):
    """{name: array} of a checkpoint."""
    return {name: array for path in folder.glob("*.safetensors") for name, array in read(path).items()}


def write_checkpoint(folder, arrays, config):
    """A checkpoint of a single file."""
    write(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")
    return folder


def config_of(name, **changes):
    """The config.json of a checkpoint, with changes; None takes an entry away."""
    entries = {**json.loads((DATA / name / "config.json").read_text()), **changes}
    return {key: value for key, value in entries.items() if value is not None}


def test_single_file_of_float16_and_a_config_of_transformers_4(pools, tmp_path):
    """Its rope_theta stands by itself. Rounded weights shift the logits a little; the tokens stay."""
    arrays = {name: array.astype(np.float16) for name, array in arrays_of(DATA / "grouped").items()}
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float16)  # old checkpoints have it
    config = config_of("grouped", rope_parameters=None, rope_theta=50.0, head_dim=None)
    folder = write_checkpoint(tmp_path, arrays, config)
    call = {"folder": str(folder), "prompts": PROMPTS, "max_new_tokens": 4}
    for result in pools(2).call(f"{ON_RANK}:generated", path=LLAMA, **call):
        off = [np.abs(own - known).max() for own, known in zip(result["logits"], KNOWN["grouped"]["logits"])]
        assert 1e-5 < max(off) < 0.05
        assert result["tokens"] == result["without a cache"]


def one_by_default(cases):
    """These cases of a test, all but the first of them slow."""
    return [pytest.param(*case, marks=pytest.mark.slow if i else (), id=str(case[-1])) for i, case in enumerate(cases)]


def outputs(pool, folder, arrays, **changes):
    """Logits and tokens of a checkpoint with these changes in its config.json, on rank 0."""
    folder.mkdir()
    call = {"folder": str(write_checkpoint(folder, arrays, config_of("grouped", **changes))), "prompts": PROMPTS}
    result = pool.call(f"{ON_RANK}:generated", path=LLAMA, max_new_tokens=4, **call)[0]
    return result["logits"], result["tokens"]


DEFAULTS = [  # an entry that config.json may lack, as that of Llama 1 does; and its value in transformers
    ("rope_parameters", {"rope_theta": 10000.0}),
    ("num_key_value_heads", 4),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", False),
]


@pytest.mark.parametrize("name, value", one_by_default(DEFAULTS))
def test_entry_that_a_config_lacks_has_the_default_of_transformers(pools, tmp_path, name, value):
    arrays = arrays_of(DATA / "grouped")
    if name == "rms_norm_eps":  # small numbers, so that it counts
        arrays = {key: 0.01 * array for key, array in arrays.items()}
    for key in [key for key in arrays if key.endswith(("k_proj.weight", "v_proj.weight"))]:
        arrays[key] = np.tile(arrays[key], (2, 1)) if name == "num_key_value_heads" else arrays[key]
    (logits, tokens), (wanted, wanted_tokens) = (
        outputs(pools(2), tmp_path / folder, arrays, **{name: entry})
        for folder, entry in (("lacks it", None), ("has it", value))
    )
    assert tokens == wanted_tokens and all((own == other).all() for own, other in zip(logits, wanted))


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_every_token_of_a_list_of_eos_token_id_ends_a_row(pools, tmp_path, where):
    folder = shutil.copytree(DATA / "grouped", tmp_path / "copy")
    new = KNOWN["grouped"]["tokens"]
    ends = [63, new[1][2], new[0][1]]
    entries = {**json.loads((folder / "config.json").read_text()), "eos_token_id": ends}
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / where).write_text(json.dumps(entries if where == "config.json" else {"eos_token_id": ends}))
    cut = [row[: min(i for i, token in enumerate([*row, 63]) if token in ends) + 1] for row in new]
    call = {"folder": str(folder), "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS}
    for result in pools(2).call(f"{ON_RANK}:generated", path=LLAMA, **call):
        assert result["tokens"] == result["without a cache"] == cut


@pytest.mark.slow
def test_llama3_scaling_of_transformers_4(pools, tmp_path):
    """Its rope_scaling names the type, and rope_theta stands beside it."""
    rope = config_of("one_kv_head")["rope_parameters"]
    old = {"rope_parameters": None, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config_of("one_kv_head", **old)))
    for name in ("model.safetensors", "generation_config.json"):
        shutil.copy(DATA / "one_kv_head" / name, tmp_path)
    check_generated(pools(2), tmp_path, "one_kv_head", 2)


SIZES = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512, "head_dim": 32}


@pytest.mark.parametrize("n, tensor", [(2, 2), *(pytest.param(4, t, marks=pytest.mark.slow) for t in (1, 2, 4))])
def test_formula_of_bytes_for_a_token_is_what_the_ranks_send(pools, n, tensor):
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 1}
    results = pools(n).call(f"{ON_RANK}:bytes_of_a_token", path=LLAMA, tensor=tensor, batch=128, **sizes)
    sent, [formula] = sum(own for own, _ in results), {stated for _, stated in results}
    Checks.that(abs(sent - formula) <= 0.02 * formula + 40_000, "the ranks send", sent, "and by the formula", formula)


@pytest.mark.slow
def test_rank_never_holds_a_whole_split_weight(tmp_path):
    """While it loads, a new rank gains less memory than the largest weight takes, its pages of the file included."""
    sizes = {"vocab_size": 65536, "hidden_size": 512, "intermediate_size": 64}
    of = shapes(*sizes.values(), layers=1, heads=8, kv_heads=8, head_dim=8, tied=True)
    arrays = {name: np.ones(shape, np.float32) for name, shape in of.items()}
    more = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    config = config_of("grouped", **sizes, **more, tie_word_embeddings=True)
    largest = arrays["model.embed_tokens.weight"].nbytes
    folder = str(write_checkpoint(tmp_path, arrays, config))
    with Pool(8) as pool:  # OneFlow gives no memory back, so older ranks may gain nothing
        results = pool.call(f"{ON_RANK}:growth", path=LLAMA, folder=folder)
    for grown in results:
        Checks.that(largest / 8 <= grown < largest, "a rank gains", grown, "bytes; the weight has", largest)


@pytest.mark.parametrize(
    "tensor, layers",
    [(2, ["0 to 1", "0 to 1"]), pytest.param(1, ["0 to 0", "1 to 1"], marks=pytest.mark.slow)],
)
def test_main_writes_the_tokens_of_transformers(pools, tensor, layers):
    """It computes all columns of the prompts, then one column a token; without a cache all columns each time."""
    texts = [",".join(map(str, prompt)) for prompt in PROMPTS]
    arguments = ["--checkpoint", str(DATA / "grouped"), "--prompt-ids", *texts, "--tensor", str(tensor), "--check"]
    longest, count = max(map(len, PROMPTS)), len(PROMPTS) * NEW_TOKENS
    cached = [(longest, True), *[(1, True)] * (NEW_TOKENS - 1)]
    uncached = [(longest + i, False) for i in range(NEW_TOKENS)]
    wanted = [f"{text} -> {','.join(map(str, new))}" for text, new in zip(texts, KNOWN["grouped"]["tokens"])]
    wanted += [f"{count // 2} tokens/s with the cache", f"{count // 4} tokens/s without it, and the same tokens"]
    for rank, (lines, fed) in enumerate(pools(2).call(f"{ON_RANK}:main_seen", path=LLAMA, arguments=arguments)):
        assert lines[0].startswith(f"layers {layers[rank]}: ")
        assert fed == [*cached, *uncached, *uncached]  # on all ranks, and on one
        assert rank or [line for line in lines if line in wanted] == wanted


LAST_ROW_DIFFERS = np.zeros((600, 32), np.float32)
LAST_ROW_DIFFERS[-1, -1] = 1
WRONG = [  # what the arrays of a checkpoint have, or its config; and the error
    ({"model.norm.weight": None}, {}, "model.norm.weight is missing"),
    ({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}, {}, "q_proj.bias is not in the model"),
    ({}, {"num_key_value_heads": 4}, r"k_proj.weight is (16, 32), the model has (32, 32)"),
    ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; this recipe computes 'silu' only"),
    (
        {},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
        "RoPE of type 'dynamic'; this recipe computes",
    ),
    ({}, {"attention_bias": True}, "attention_bias is True; this recipe computes False only"),
    ({}, {"num_attention_heads": None}, "config.json has no num_attention_heads"),
    ({}, {"rope_parameters": {"rope_type": "llama3"}}, "config.json has no factor, low_freq_factor, high_freq_factor"),
    ({}, {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    (
        {},
        {"num_attention_heads": 9, "num_key_value_heads": 3},
        "--tensor 2 does not fit 9 heads with 3 of keys and values: type --tensor 1 or 3 or 9, and a multiple of it",
    ),
    ({}, {"num_attention_heads": 6, "num_key_value_heads": 3}, "--tensor 2 does not fit 6 heads with 3 of keys and"),
    ({}, {"head_dim": 7}, "head_dim 7 is odd; RoPE turns pairs"),
    ({}, {"head_dim": "8"}, "config.json: head_dim is '8', not a whole number"),
    ({}, {"rms_norm_eps": "1e-6"}, "config.json: rms_norm_eps is '1e-6', not a number"),
    ({}, {"eos_token_id": ["</s>"]}, "eos_token_id is ['</s>'], not a number or a list of numbers"),
    ({}, {"rope_parameters": {"rope_theta": "x"}}, "config.json: rope_theta is 'x', not a number"),
    ({}, {"rope_parameters": {"rope_type": ["llama3"]}}, "RoPE of type ['llama3']; this recipe computes"),
    ({}, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "both rope_scaling and rope_parameters are given"),
    ({}, {"rope_parameters": "llama3"}, "rope_scaling or rope_parameters is not an object"),
    ({}, {"tie_word_embeddings": True}, "lm_head is not embed_tokens, and config.json says tie_word_embeddings"),
    (
        {"model.embed_tokens.weight": np.zeros((600, 32), np.float32), "lm_head.weight": LAST_ROW_DIFFERS},
        {"tie_word_embeddings": True, "vocab_size": 600},
        "lm_head is not embed_tokens, and config.json says tie_word_embeddings; which one is right?",
    ),
    ({}, {"intermediate_size": 1}, "--tensor 2 is more than a weight has rows"),
]


def check_refused(pool, error, *arguments):
    """By each rank in one line, before it waits for another."""
    for code, out, err in pool.call(MAIN, path=LLAMA, arguments=[*arguments, "--prompt-ids", "1,5"]):
        Checks.that((code, out) == (2, "") and error in err.splitlines()[-1], err)


@pytest.mark.parametrize("arrays, changes, error", one_by_default(WRONG))
def test_checkpoint_of_another_model_is_refused_in_one_line(pools, tmp_path, arrays, changes, error):
    arrays = {**arrays_of(DATA / "grouped"), **arrays}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    folder = str(write_checkpoint(tmp_path, arrays, config_of("grouped", **changes)))
    check_refused(pools(2), error, "--checkpoint", folder)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--prompt-ids", "1", "--tensor", "3"], "--tensor 3 does not divide the 2 ranks"),
        (["--prompt-ids", "1,5", "64"], "--prompt-ids 64: numbers from 0 to 63, with commas between them"),
        (["--prompt-ids", "1,x"], "--prompt-ids 1,x: numbers from 0 to 63, with commas between them"),
        ([], "--checkpoint needs --prompt-ids, such as 1,5 7"),
        (["--prompt-ids", "1", "--graph"], "--graph trains, and a checkpoint is not trained here: leave it out"),
    ],
)
def test_option_that_does_not_fit_is_refused_in_one_line(pools, arguments, error):
    arguments = [*arguments, "--checkpoint", str(DATA / "grouped")]
    for code, out, err in pools(2).call(MAIN, path=LLAMA, arguments=arguments):
        assert (code, out) == (2, "") and err.splitlines()[-1].endswith(f": error: {error}")


def renamed(change):
    """The arrays of a checkpoint under other names."""
    return {change(name): array for name, array in arrays_of(DATA / "grouped").items()}


NAMES = [  # a change of the names, and the error
    (lambda name: f"module.{name}", "PyTorch's DistributedDataParallel adds module."),
    (lambda name: f"_orig_mod.{name}", "PyTorch's torch.compile adds _orig_mod."),
    (lambda name: name.replace("self_attn.", "self_attn._orig_mod."), "PyTorch's torch.compile adds _orig_mod."),
    (
        lambda name: f"module._orig_mod.{name}",
        "PyTorch's DistributedDataParallel adds module. and PyTorch's torch.compile adds _orig_mod.",
    ),
    (lambda name: f"language.{name}", "all names begin with language."),
]


@pytest.mark.parametrize("change, error", one_by_default(NAMES))
def test_names_with_a_prefix_are_refused_with_its_cause_and_the_way(pools, tmp_path, change, error):
    folder = write_checkpoint(tmp_path, renamed(change), config_of("grouped"))
    check_refused(pools(2), f" in the model: {error}; take it away, as by save_file(", "--checkpoint", str(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", *(pytest.param(f"{kind}config.json", marks=pytest.mark.slow) for kind in KINDS)]
)
def test_link_that_points_nowhere_is_refused_as_what_it_is(pools, tmp_path, name):
    """As where the snapshots of a Hugging Face cache are copied without its blobs."""
    folder = write_checkpoint(tmp_path, arrays_of(DATA / "grouped"), config_of("grouped"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/1a2b")
    error = f"{name} is a link to ../../blobs/1a2b, which is not there: where it is, copy the folder with cp -rL"
    check_refused(pools(2), error, "--checkpoint", str(folder))


def test_chinese_text_in_a_config_is_read_under_any_locale(tmp_path):
    """In a job of its own, as a locale holds for a process."""
    folder = write_checkpoint(tmp_path, arrays_of(DATA / "grouped"), config_of("grouped", comment="中文模型"))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["--checkpoint", folder, "--prompt-ids", "1,5", "--max-new-tokens", "1"]
    job = Run(LAUNCH, "-n", 1, LLAMA, *arguments, **locale).wait()
    assert (job.code, job.err) == (0, "")


def test_more_stages_than_layers_are_refused_in_one_line(pools, tmp_path):
    folder = str(write_checkpoint(tmp_path, arrays_of(DATA / "grouped"), config_of("grouped", num_hidden_layers=1)))
    check_refused(pools(2), ": error: 2 stages are more than the 1 layers", "--checkpoint", folder, "--tensor", "1")


DAMAGES = [  # a change of a file's content, the error
    (lambda content: content[:-1], "cut off or damaged at"),
    (lambda content: content[:100], "not a safetensors file, or cut off"),
    (lambda content: b"PK\3\4" + content, "not a safetensors file, or cut off"),  # a zip, as torch.save writes
    (lambda content: content.replace(b'"F32"', b'"F16"'), "cut off or damaged at"),
    (lambda content: content.replace(b'"F32"', b'"I32"'), "is I32; this recipe reads F32, F16, BF16"),
]


@pytest.mark.parametrize("change, error", one_by_default(DAMAGES))
def test_damaged_file_is_refused_in_one_line(pools, tmp_path, change, error):
    folder = write_checkpoint(tmp_path, arrays_of(DATA / "grouped"), config_of("grouped"))
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    check_refused(pools(2), error, "--checkpoint", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("content", ["{", "[1, 2]"])
def test_config_that_is_no_object_is_refused_in_one_line(pools, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    check_refused(pools(2), "config.json: not an object in JSON", "--checkpoint", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "files, error",
    [
        ({}, "no model.safetensors, and no model.safetensors.index.json with a weight_map"),
        ({"model.safetensors.index.json": {"weight_map": ["a"]}}, "index.json with a weight_map"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "gone.safetensors"}}}, "No such file or directory"),
        (
            {"generation_config.json": {"suppress_tokens": [3]}},
            "suppress_tokens is [3]; this recipe computes None only",
        ),
        ({"generation_config.json": {"min_new_tokens": 4}}, "min_new_tokens is 4; this recipe computes 0 only"),
    ],
)
def test_folder_that_transformers_reads_in_its_own_way_is_refused_in_one_line(pools, tmp_path, files, error):
    for name, content in {"config.json": config_of("grouped"), **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    check_refused(pools(2), error, "--checkpoint", str(tmp_path))


def test_single_file_is_read_where_an_index_is_left_of_an_older_one(pools, tmp_path):
    folder = shutil.copytree(DATA / "one_kv_head", tmp_path / "copy")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "old.safetensors"}}))
    check_generated(pools(2), folder, "one_kv_head", 2)


@pytest.mark.slow
def test_prompt_in_a_batch_is_continued_as_alone(pools):
    """Padding changes nothing."""
    for name in ("grouped", "one_kv_head"):
        call = {"folder": str(DATA / name), "prompts": PROMPTS[1:2], "max_new_tokens": NEW_TOKENS}
        for result in pools(2).call(f"{ON_RANK}:generated", path=LLAMA, **call):
            assert result["tokens"] == KNOWN[name]["tokens"][1:2]
