"""Make the checkpoints of tests/data/llama: transformers draws and saves them, and computes logits and greedy tokens.

    python benchmarks/transformers_llama.py [FOLDER]

Needs torch and transformers in an environment of its own; PyTorch 2.13.0 and transformers 5.24.0 made tests/data/llama.
The weights are larger and the epsilon and the angles of RoPE are others than usual, so that each of them shows.
"""

import json
import pathlib
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "llama"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS = {  # folder -> (config, dtype, bytes of a file at most)
    "grouped": (
        {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.01, "rope_theta": 50.0, **NO_END},
        torch.float32,
        "40KB",
    ),
    "one_kv_head": (
        {
            **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True},
            **{**NO_END, "eos_token_id": 62},  # greedy search writes it behind two of the prompts
            "rope_parameters": {**LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 32},
        },
        torch.bfloat16,
        "1GB",
    ),
}
PROMPTS = [[1, 5, 9, 33, 12, 60, 7], [7, 2], [21, 40, 3, 17]]
NEW_TOKENS = 8


def padded(prompts):
    """Left-padded ids, and the mask of what is no padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def reference(folder):
    """The logits of each prompt, and what greedy search writes behind it, in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = padded(PROMPTS)
    with torch.no_grad():
        out = model.generate(
            **inputs,
            **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0},
            **{"return_dict_in_generate": True, "output_scores": True},
        )
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    best = torch.stack(out.scores).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3, "rounding must not choose a token"
    tokens = [row[inputs["input_ids"].shape[1] :].tolist() for row in out.sequences]
    eos = model.generation_config.eos_token_id
    tokens = [row[: row.index(eos) + 1] if eos in row else row for row in tokens]
    rounded = [[[float(f"{number:.7g}") for number in row] for row in rows.tolist()] for rows in logits]
    return {"tokens": tokens, "logits": rounded}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    results = {"torch": torch.__version__, "transformers": transformers.__version__, "prompts": PROMPTS}
    for name, (options, dtype, shard_size) in MODELS.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **options, initializer_range=0.3))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.3)
        model.to(dtype).save_pretrained(folder / name, max_shard_size=shard_size)
        results[name] = reference(folder / name)
    (folder / "transformers.json").write_text(json.dumps(results) + "\n")
    for path in sorted(folder.rglob("*.*")):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
