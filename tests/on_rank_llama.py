"""What the tests of llama.py call on the ranks of a pool."""

import contextlib
import io
import pathlib
import sys
import types

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.calls import replaced
from oneflow_cookbook.measure.rank_memory import memory_size
from oneflow_cookbook.measure.sent import sent_by
from oneflow_cookbook.start import recipe


def opened(path, folder, tensor=0):
    """The recipe, the model of a folder on all ranks, `tensor` of them in a stage, and how many numbers were read."""
    module, sizes = recipe.load(path), []
    copy = module.copy

    def counting(array, local):
        sizes.append(array.size)
        copy(array, local)

    stages = module.placements("cpu", flow.env.get_world_size(), tensor)
    config, weights = module.read_config(folder), module.open_checkpoint(folder)
    module.check_weights(weights, config)
    with replaced({(module, "copy"): counting}):
        model, _ = module.train(stages, config, weights=weights, steps=0)
    return module, model, sum(sizes)


def generated(path, folder, prompts, max_new_tokens, tensor=0):
    """Greedy tokens with and without a cache, the logits of each prompt, and what this rank has read and holds."""
    module, model, read = opened(path, folder, tensor)
    caches = model.new_caches(len(prompts), max(map(len, prompts)) + max_new_tokens)
    keys = [tuple(cache.k.to_local().shape) for cache in caches if flow.env.get_rank() in cache.k.placement.ranks]
    return {
        "tokens": module.generate(model, prompts, max_new_tokens, caches),
        "without a cache": module.generate(model, prompts, max_new_tokens),
        "logits": [logits[-len(prompt) :] for prompt, logits in zip(prompts, module.logits_of(model, prompts))],
        "keys": set(keys),
        "read": read,
        "held": sum(w.to_local().numel() for w in model.parameters()),
    }


def bytes_of_a_token(path, tensor, batch, **sizes):
    """What this rank sends to decode a column, and what all ranks send by the recipe's formula."""
    module = recipe.load(path)
    stages = module.placements("cpu", flow.env.get_world_size(), tensor)
    model, _ = module.train(stages, module.Config(**sizes), steps=0)
    caches, columns = model.new_caches(batch, 8), model.columns_of(np.ones((batch, 8), bool))
    ids = np.ones((batch, 5), int)
    with flow.no_grad():
        head = model.head()
        model.next_tokens(ids, columns, head, 0, caches)
        _, sent = sent_by(lambda: model.next_tokens(ids[:, :1], columns, head, 5, caches))
    return sent, module.bytes_per_token(model, batch)


def growth(path, folder):
    """The peak of memory that this rank gains while it loads a folder, pages of files included, in bytes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = memory_size("VmRSS")
    _, model, _ = opened(path, folder)
    flow._oneflow_internal.eager.Sync()
    assert model
    return memory_size("VmHWM") - before


def main_seen(path, arguments):
    """Run main by a clock of four times: what this rank prints; (columns, has a cache) of each call of next_tokens."""
    module, fed, out, ticks = recipe.load(path), [], io.StringIO(), iter((100, 102, 110, 114))
    next_tokens = module.LlamaForCausalLM.next_tokens

    def seen(model, ids, columns, head, begin=0, caches=None):
        fed.append((ids.shape[1], caches is not None))
        return next_tokens(model, ids, columns, head, begin, caches)

    clock = types.SimpleNamespace(monotonic=lambda: next(ticks))
    changed = {(module, "time"): clock, (module.LlamaForCausalLM, "next_tokens"): seen}
    with replaced({**changed, (sys, "argv"): [path, *arguments]}), contextlib.redirect_stdout(out):
        module.main()
    return out.getvalue().splitlines(), fed
