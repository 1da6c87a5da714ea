"""The formulas of `./launch.sh plan` against runs of gpt.py: memory of activations, bytes with micro-batches."""

import dataclasses

import pytest

from oneflow_cookbook.plan import formulas
from oneflow_cookbook.plan.model import Model
from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases import gpt_meshes as gpt
from tests.cases.ladder import Checks

GPT, ON_RANK = str(path_of("gpt")), str(ROOT / "tests" / "on_rank_gpt.py")
PLAIN = {"batch_size": 8, "seq_len": 256, "hidden_size": 512, "num_heads": 8}


@pytest.mark.parametrize("tensor, changes", [(1, {"seq_len": 128, "hidden_size": 1024}), (2, {})])
def test_memory_of_a_layer_s_activations_is_within_15_percent(tensor, changes):
    """The difference of 8 layers and 2: what else a forward pass takes is the same."""
    sizes, grown, sequence_parallel = {**PLAIN, **changes}, [], tensor > 1
    for num_layers in (2, 8):
        with Pool(tensor, timeout=120, repeat=True) as pool:  # OneFlow gives no memory back
            arguments = {"tensor": tensor, "sequence_parallel": sequence_parallel, **sizes}
            by_rank = pool.call(f"{ON_RANK}:growth_in_forward", path=GPT, num_layers=num_layers, **arguments)
            grown.append(max(by_rank))
    model = Model(1, sizes["hidden_size"], sizes["num_heads"], sizes["seq_len"], 96)
    tokens = sizes["batch_size"] * sizes["seq_len"]
    options = ["sequence_parallel"] if sequence_parallel else []
    activations = formulas.activations(model, tokens, tensor, options, "fp32")
    copies = 4 * formulas.matrices(model) / tensor  # of the weights, by identity
    measured = (grown[1] - grown[0]) / 6
    wanted = activations + copies
    Checks.that(abs(wanted - measured) <= 0.15 * measured, "a layer holds", measured, "not", wanted)


@pytest.mark.parametrize(
    "mesh, layout, micro_batches",
    [
        ((2, 1, 1), (), 4),
        ((2, 1, 1), ("shard_weights",), 4),
        ((2, 1, 1), ("shard_weights", "recompute"), 1),
        ((1, 2, 1), ("recompute",), 1),
        ((1, 1, 2), (), 4),
    ],
    ids=str,
)
def test_bytes_of_a_graph_are_those_of_the_formula(pools, mesh, layout, micro_batches):
    options = {"shard_weights": "shard_weights" in layout, "recompute": "full" if "recompute" in layout else "none"}
    options.update(steps=3, graph=True, micro_batches=micro_batches)
    layers = {"num_layers": mesh[2]}  # one for each stage
    sizes, model = {**gpt.SIZES, **layers}, dataclasses.replace(gpt.MODEL, **layers)
    seen = pools(2).call(gpt.TRAINED, path=GPT, **gpt.mesh_of(mesh), **options, **sizes)
    sent = sum(gpt.sent_in_a_step(seen).values())
    wanted = sum(formulas.moved(model, mesh, gpt.SIZES["batch_size"], layout, 4, micro_batches).values())
    Checks.that(abs(sent - wanted) <= 0.05 * wanted, mesh, layout, "sends", sent, "and must send", wanted)
