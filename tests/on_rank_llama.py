"""What the tests of llama.py call on the ranks of a pool."""

import oneflow as flow

from harness.start import recipe


def opened(path, folder, tensor=0):
    """The recipe, and the model of a folder on all ranks, `tensor` of them in a stage."""
    module = recipe.load(path)
    stages = module.placements("cpu", flow.env.get_world_size(), tensor)
    config, weights = module.read_config(folder), module.open_checkpoint(folder)
    module.check_weights(weights, config)
    model, _ = module.train(stages, config, weights, steps=0)
    return module, model


def generated(path, folder, prompts, max_new_tokens, tensor=0):
    """Greedy tokens with and without a cache, the logits of each prompt, and the shape of this rank's keys."""
    module, model = opened(path, folder, tensor)
    caches = model.new_caches(len(prompts), max(map(len, prompts)) + max_new_tokens)
    keys = [tuple(cache.k.to_local().shape) for cache in caches if flow.env.get_rank() in cache.k.placement.ranks]
    return {
        "tokens": module.generate(model, prompts, max_new_tokens, caches),
        "without a cache": module.generate(model, prompts, max_new_tokens),
        "logits": [logits[-len(prompt) :] for prompt, logits in zip(prompts, module.logits_of(model, prompts))],
        "keys": set(keys),
    }
