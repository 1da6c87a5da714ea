"""Models with one unusual trait each train under every layout as on one device, or are refused with a line."""

import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.on_rank_traits import RESHARDED

ON_RANK = str(ROOT / "tests" / "on_rank_traits.py")
PATHS = {f"{name}_module": str(path_of(f"{name}_module")) for name in ("tensor_parallel", "fully_sharded", "pipeline")}
LAYOUTS = {"data": 2, "tensor": 2, "data x tensor": 4, "fully sharded": 2, RESHARDED: 2, "pipeline": 2}  # -> ranks
RUNS = [(layout, graph) for layout in LAYOUTS for graph in (False, True) if not (graph and layout == RESHARDED)]
SHARDED = ("fully sharded", RESHARDED)
ALWAYS, IN_A_GRAPH = (False, True), (True,)
# Trait, or trait and layout -> what it is refused with, under which layouts, and whether in a graph alone
REFUSED = {
    "tied_on_two_stages": ("is tied to a weight on stage 0: pass the weight to the later part", ["pipeline"], ALWAYS),
    "root_parameter": ("positions is in none of the parts", ["pipeline"], ALWAYS),
    "value_kept_in_self": ("keeps auxiliary in self, which nn.Graph loses; return it", LAYOUTS, IN_A_GRAPH),
    "counter_in_self": ("keeps calls in self, which nn.Graph loses; return it", LAYOUTS, IN_A_GRAPH),
    **dict.fromkeys(
        ("buffer_changed_in_place", "shared_buffer_changed_in_place"),
        ("changes total in place, which nn.Graph loses; train in eager mode", LAYOUTS, IN_A_GRAPH),
    ),
    "max_norm": ("changes weight in place, which nn.Graph loses", LAYOUTS, IN_A_GRAPH),
    **dict.fromkeys(
        (("max_norm", layout) for layout in SHARDED),
        ("changes weight in place, as it has max_norm", SHARDED, ALWAYS),
    ),
    "collections_that_parts_change": (
        "forward changes an argument, which nn.Graph loses; return it instead",
        ["pipeline"],
        IN_A_GRAPH,
    ),
    **dict.fromkeys(
        ("forward_hook", "pre_hook_that_looks"),
        ("has a forward hook, which nn.Graph does not call; train in eager mode", LAYOUTS, IN_A_GRAPH),
    ),
    **dict.fromkeys(
        (("weight_norm", "tensor"), ("weight_that_a_hook_sets", "tensor"), ("parametrized", "tensor")),
        ("blocks.0.up.weight is not a parameter: ", ["tensor"], ALWAYS),
    ),
    **dict.fromkeys(
        ((name, layout) for name in ("weight_norm", "weight_that_a_hook_sets") for layout in SHARDED),
        (".weight is not a parameter: the forward pre-hook ", SHARDED, ALWAYS),
    ),
    ("parameter_whose_data_a_hook_sets", "tensor"): (
        "the weight of a Column is oneflow.sbp.broadcast, not oneflow.sbp.split(dim=0): the forward pre-hook put_data",
        ["tensor"],
        ALWAYS,
    ),
    "sliced_sequential": ("AssertionError", LAYOUTS, IN_A_GRAPH),  # OneFlow's own, for any model
    "lstm": ("LSTM.forward keeps _flat_weights in self, which nn.Graph loses", LAYOUTS, IN_A_GRAPH),
}
# (Trait, layout) -> in which modes it trains differently from one device, as the page says
DIFFERENT = {("batch_norm", layout): IN_A_GRAPH if layout in ("tensor", "pipeline") else ALWAYS for layout in LAYOUTS}

# Data parallel is lay_out with an empty plan; data x tensor shares the code of tensor. So these traits are enough, with
# BatchNorm, which a split batch changes.
FEW = [
    *("plain", "frozen", "adapter", "tied_on_two_stages", "buffer", "own_parameters", "keywords_and_none"),
    *("batch_norm", "buffer_changed_in_place"),
]
# A graph takes seconds to compile, and the three recipes prepare a model for it by the same code. So each trait trains
# in one under one layout: those for which a pipeline has code of its own there, the others under tensor parallelism.
# Each layout also trains a plain model, and refuses what it must. In eager mode each trait trains under each layout,
# but for those that no code of the recipes treats in a way of its own: they train fully sharded alone.
SHARED = [
    *("shared_module", "weight_of_another_layer", "tied_weight_as_an_argument", "parameter_list", "no_grad_inside"),
    *("no_bias", "scalar_parameter_and_shared_buffer", "super_forward"),
]
PLAIN_CODE = [
    *("rotary_table", "convolution", "lstm", "sliced_sequential", "methods_and_train_mode", "average_by_deepcopy"),
    *("parameter_groups", "evaluation_between_steps"),
]
PASSED = [f"{kind}_between_parts" for kind in ("tuple", "dict", "named_tuple", "dataclass")]
EAGER = ["penalty_on_gradients", "parameter_whose_data_a_hook_sets"]  # the loop adds the first, a graph refuses hooks
OWN = {
    "fully sharded": [*SHARED, "root_parameter", "max_norm"],
    "pipeline": [*SHARED, *PASSED, "tied_on_one_stage", "two_inputs"],
}


@pytest.mark.parametrize("layout, graph", RUNS)
def test_trait_trains_as_on_one_device_or_is_refused(pools, layout, graph):
    pool = pools(LAYOUTS[layout])
    names = pool.call(f"{ON_RANK}:names")[0]
    assert {*FEW, *SHARED, *PASSED, *PLAIN_CODE} <= set(names)
    if not graph and layout != "fully sharded":
        names = [name for name in names if name not in PLAIN_CODE]
    if layout in ("data", "data x tensor"):
        names = ["plain", "batch_norm"] if graph else FEW
    elif graph and layout == "tensor":
        names = [name for name in names if name == "plain" or name not in (*OWN["pipeline"], *EAGER)]
    elif graph:
        names = [name for name in names if name in (*FEW, *OWN[layout], *REFUSED)]
    for by_name in pool.call(f"{ON_RANK}:outcomes", names=names, layout=layout, graph=graph, paths=PATHS):
        for name, outcome in by_name.items():
            words, layouts, modes = REFUSED.get((name, layout), REFUSED.get(name, ("", [], ())))
            if layout in layouts and graph in modes:
                Checks.that(words in str(outcome), layout, name, "is not refused:", outcome)
            else:
                Checks.that(isinstance(outcome, float), layout, name, "is refused:", outcome)
                differs = graph in DIFFERENT.get((name, layout), ())
                Checks.that((outcome <= 1e-4) != differs, layout, name, "is off one device by", outcome)
