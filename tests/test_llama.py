"""Llama: weights that transformers saved give its logits and its greedy tokens, on every mesh."""

import json

import numpy as np
import pytest

from harness.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_llama.py")
LLAMA = str(path_of("llama"))
DATA = ROOT / "tests" / "data" / "llama"
KNOWN = json.loads((DATA / "transformers.json").read_text())  # by benchmarks/transformers_llama.py
NEW_TOKENS = 8
MESHES = [(n, tensor) for n in (1, 2, 4) for tensor in (1, 2, 4) if n % tensor == 0 and n // tensor <= 2]
RUNS = [(name, *mesh) for name in ("grouped", "one_kv_head") for mesh in MESHES]
QUICK = [("grouped", 2, 2), ("one_kv_head", 2, 2)]


def check_generated(pool, folder, name, tensor):
    """Logits and tokens are those of transformers, and each rank caches the keys of its own heads."""
    call = {"folder": str(folder), "prompts": KNOWN["prompts"], "max_new_tokens": NEW_TOKENS, "tensor": tensor}
    for rank, result in enumerate(pool.call(f"{ON_RANK}:generated", path=LLAMA, **call)):
        for how in ("tokens", "without a cache"):
            Checks.equal(result[how], KNOWN[name]["tokens"], f"rank {rank}: {how}")
        for i, logits in enumerate(KNOWN[name]["logits"]):
            off = np.abs(result["logits"][i] - logits).max()
            Checks.that(off <= 1e-4, f"rank {rank}: the logits of prompt {i} are off transformers' by", off)
        heads, head_dim = {"grouped": (2, 8), "one_kv_head": (1, 12)}[name]
        shape = (len(KNOWN["prompts"]), max(heads, tensor) // tensor, 7 + NEW_TOKENS, head_dim)
        Checks.equal(result["keys"], {shape}, f"rank {rank}: the shape of its keys in each layer")


@pytest.mark.parametrize("run", [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow) for run in RUNS], ids=str)
def test_logits_and_tokens_are_those_of_transformers(pools, run):
    name, n, tensor = run
    check_generated(pools(n), DATA / name, name, tensor)
