"""The case of recipes/transformer/llama.py: how it trains. tests/test_llama.py proves what it loads and generates."""

import json
import shutil
from pathlib import Path

import numpy as np

from oneflow_cookbook.measure.sbp import Layout
from oneflow_cookbook.start.recipe import ROOT
from tests.cases import reference_llama
from tests.cases.recipe_case import Case, Main, case_of_recipe, reduced, shares
from tests.cases.reference import Value

SPLITS = {"embed_tokens": "S(0)", "lm_head": "S(0)", "q_proj": "S(0)", "k_proj": "S(0)", "v_proj": "S(0)"}
SPLITS.update({"gate_proj": "S(0)", "up_proj": "S(0)", "o_proj": "S(1)", "down_proj": "S(1)"})  # others are B
LLAMA3 = {"rope_type": "llama3", "rope_theta": 20.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16


CHECKPOINTS = ROOT / "tests" / "data" / "llama"  # that transformers saved
REFUSED = [
    *("--tensor 3", "--tensor -1", "--prompt-ids 1,x", "--prompt-ids 32", "--checkpoint FOLDER/one_layer"),
    *("--prompt-ids 1 --graph --checkpoint FOLDER/one_layer", "--prompt-ids 1 --checkpoint FOLDER/none"),
]
DAMAGED = {  # what is wrong with a checkpoint -> what changes: entries of its config.json, or the bytes of its file
    "other_model": {"model_type": "mistral"},
    "bias": {"attention_bias": True},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "no_factor": {"rope_parameters": {"rope_type": "llama3"}},
    "no_vocabulary": {"vocab_size": None},
    "odd_head": {"head_dim": 7},
    "text_for_a_number": {"head_dim": "8"},
    "text_for_a_token": {"eos_token_id": "</s>"},
    "two_ropes": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "text_for_rope": {"rope_parameters": "llama3"},
    "three_heads_of_keys": {"num_key_value_heads": 3},
    "three_heads": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "one_row": {"intermediate_size": 1},
    "other_shape": {"intermediate_size": 50},
    "another_layer": {"num_hidden_layers": 3},
    "one_layer": {"num_hidden_layers": 1},
    "no_json": b"{",
    "cut_off": lambda content: content[:-1],
    "cut_off_header": lambda content: content[:100],
    "another_head": lambda content: with_head(content),
    "wrapped": lambda content: with_names(content, lambda name: f"module.{name}"),
    "float64": lambda content: content.replace(b'"BF16"', b'"F64" '),
}


def with_names(content, change):
    """A file whose weights have other names."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps({change(name): entry for name, entry in header.items() if name != "__metadata__"}).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def with_head(content):
    """A file whose lm_head has the numbers of embed_tokens, but not in their order."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    embedding = header["model.embed_tokens.weight"]
    shifted = [offset + (2 if embedding["data_offsets"][0] == 0 else -2) for offset in embedding["data_offsets"]]
    text = json.dumps({**header, "lm_head.weight": {**embedding, "data_offsets": shifted}}).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def damaged(folder):
    """Copies of a checkpoint, each with one fault."""
    source = CHECKPOINTS / "one_kv_head"
    config, content = json.loads((source / "config.json").read_text()), (source / "model.safetensors").read_bytes()
    for name, fault in DAMAGED.items():
        copy = Path(folder, name)
        copy.mkdir()
        text = (
            fault.decode()
            if isinstance(fault, bytes)
            else json.dumps({**config, **fault} if isinstance(fault, dict) else config)
        )
        (copy / "config.json").write_text(text)
        (copy / "model.safetensors").write_bytes(fault(content) if callable(fault) else content)
    without = shutil.copytree(Path(folder, "one_layer"), Path(folder, "no_files"))
    (without / "model.safetensors").unlink()
    link = shutil.copytree(without, Path(folder, "link"))
    (link / "model.safetensors").symlink_to("nowhere")


def llama_sizes(n):
    other = {"batch": 3, "seq_len": 5, "vocab_size": 37, "intermediate_size": 27, "hidden_size": 20, "head_dim": 6}
    other.update(
        {
            "num_key_value_heads": 1 if n > 1 else 2,
            "rms_norm_eps": 0.1,
            "rope_parameters": LLAMA3,
            "steps": 2,
            "seed": 1,
        }
    )
    if n == 3:  # which does not divide the 4 heads that are the default
        other.update({"num_attention_heads": 9, "num_key_value_heads": 3})
    stages = {"tensor": n // 2, "num_hidden_layers": 3, "tie_word_embeddings": True, "steps": 2}
    return {"other": other, **({"stages": stages} if n > 1 else {})}


@case_of_recipe(
    llama_sizes,
    refused={"--max-new-tokens 0": "1 or more"},
    equivalent={
        r"\.to_global\(grad_sbp=B\)$": "it is B either way",
        r"broadcast\] \* len\(t\.sbp\)\)\)\(hidden\)": "it is B already",
        r"broadcast\] \* len\(t\.sbp\)\)\)\(flow\.matmul\(head, hidden": "it is gathered in any case",
        r"flow\.matmul\(head \* 1\.00001|\(\(flow\.matmul\(head, hidden": "the largest stays the largest",
        r"^logits\.to_global\(sbp=B\) -> logits$|argmax\(0\).*: B -> S\(0\)$": "argmax gathers what is split",
        r"^flow\.tensor\(array, placement.*\(array\[:, ::-1\]\.copy\(\)": "its second dimension has one element",
        r"abs\(logits\)\.max\(\) -> 5e-5$": "a smaller tolerance, which these logits meet",
    },
    tests=["tests/test_llama.py"],
    main=Main(
        arguments=["--steps", "2", "--max-new-tokens", "2", "--prompt-ids", "3,4", "30"],
        comparisons=2,
        prints={
            False: [
                "[0] layers 0 to 1: 8,864 of 17,568 weights, keys (2, 1, 4, 8) and values in each layer",
                "[0] 3,4 -> 25,14",
                "[0] 30 -> 6,9",
                "[0] 188 tokens/s with the cache",
                "[0] all ranks together send 2,816 bytes for a token of each prompt",
                "[0] 266 tokens/s without it, and the same tokens",
                "[0] the same tokens and logits on a single device",
                "[1] layers 0 to 1: 8,864 of 17,568 weights, keys (2, 1, 4, 8) and values in each layer",
            ],
            True: [
                "[0] layers 0 to 1: 8,864 of 17,568 weights, keys (2, 1, 4, 8) and values in each layer",
                "[0] 3,4 -> 25,14",
                "[0] 30 -> 6,9",
                "[0] 285 tokens/s with the cache",
                "[0] all ranks together send 2,816 bytes for a token of each prompt",
                "[0] 276 tokens/s without it, and the same tokens",
                "[0] the same tokens and logits on a single device",
                "[1] layers 0 to 1: 8,864 of 17,568 weights, keys (2, 1, 4, 8) and values in each layer",
            ],
        },
        alone={"tensor": [0]},
        other_lines=["--graph --tensor 1 --steps 3 --max-new-tokens 3"],
        elsewhere=("prompt_ids", "max_new_tokens", "checkpoint", "check"),
        defaults={"steps": (40, 3)},
        refused=[
            *REFUSED,
            "--tensor 1 --prompt-ids 1 --checkpoint FOLDER/one_layer",
            *(f"--prompt-ids 1 --checkpoint FOLDER/{name}" for name in [*DAMAGED, "no_files", "link"]),
        ],
        make_files=damaged,
    ),
    measured_at={"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 256, "batch": 16, "seq_len": 16},
)
def llama(
    n,
    graph=False,
    tensor=0,
    seed=0,
    steps=3,
    batch=8,
    seq_len=8,
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_parameters=None,
    tie_word_embeddings=False,
    matmul_scale=1.0,
):
    tensor = tensor or n
    stages, tied, heads = np.arange(n).reshape(-1, tensor).tolist(), tie_word_embeddings, num_attention_heads
    own_stage = [i * len(stages) // num_hidden_layers for i in range(num_hidden_layers)]  # of each layer
    sizes = (vocab_size, hidden_size, intermediate_size, num_hidden_layers, heads, num_key_value_heads, head_dim, tied)
    shapes, turns = reference_llama.shapes(*sizes), reference_llama.frequencies(head_dim, rope_parameters or {})
    training = (heads, rms_norm_eps, turns, seed, steps, batch, seq_len, matmul_scale)
    values = reference_llama.trained(shapes, *training)
    ids, targets = reference_llama.batch_of(steps - 1, vocab_size, batch, seq_len, seed)
    angles = np.tile(np.arange(seq_len)[:, None] * turns, (batch, 1, 1, 2))
    values.update({"ids": Value(ids, dtype="int64"), "targets": Value(targets, dtype="int64")})
    values.update({"cos": Value(np.cos(angles), rounded=True), "sin": Value(np.sin(angles), rounded=True)})
    values.update(
        {"hidden": Value(np.zeros((batch, 1, 1, seq_len))), "all_hidden": Value(np.full((seq_len, seq_len), -1e9))}
    )

    def layout_of(name):
        parts = name.split(".")
        stage = own_stage[int(parts[2])] if "layers" in parts else 0 if "embed_tokens" in parts else -1
        is_replicated = parts[-2] in ("k_proj", "v_proj") and num_key_value_heads < tensor
        return "B" if is_replicated else SPLITS.get(parts[-2], "B"), stages[stage]

    def gradient_of(name):
        """In a graph OneFlow chooses: that of k and v is summed as a reduce-scatter; on one rank all are the same."""
        sbp, ranks = layout_of(name)
        if name.endswith(("k_proj.weight", "v_proj.weight")) and sbp == "B":
            return "S(0)", ranks
        return ("B" if tensor == 1 and name == head_name else sbp), ranks

    head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    layout = {"ids": ("B", stages[0])}
    layout.update(dict.fromkeys(("targets", "cos", "sin", "hidden", "all_hidden"), ("B", stages[-1])))
    for name in shapes:
        layout.update({name: layout_of(name), f"{name} grad": gradient_of(name) if graph else layout_of(name)})
    head = layout_of(head_name)[0], stages[-1]

    def work_of(rank):
        """Its part of each weight, times all tokens, and the scores and values of its heads."""
        [stage] = [i for i, ranks in enumerate(stages) if rank in ranks]
        used = [name for name in shapes if name != "model.embed_tokens.weight" and len(shapes[name]) == 2]
        held = sum(Layout(*layout_of(name)).size(shapes[name], rank) for name in used)
        if tied:
            held += Layout(head[0], head[1]).size(shapes[head_name], rank)
        own_heads = shares(tensor, heads, own_stage.count(stage))[stages[stage].index(rank)]
        return 2 * batch * seq_len * (held + 2 * own_heads * seq_len * head_dim)

    tokens, cross_entropy = batch * seq_len, 5 if graph else 8  # numbers for each token that OneFlow reduces in it
    return Case(
        values,
        [work_of(rank) for rank in range(n)],
        layout,
        sends=[reduced(tensor, tokens * (hidden_size * (2 + 4 * num_hidden_layers) + cross_entropy))] * n,
    )
