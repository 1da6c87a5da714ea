"""The traps of recipes, most of transformers: without its cure, a recipe sends more. And experts, and rounding."""

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import CASES, PROOFS
from tests.cases import reference_transformer as reference
from tests.cases.ladder import Checks, assert_close
from tests.cases.measuring import PER_STEP, training_sizes

WHERE = "flow.where(self.mask == 0, scores, flow.full_like(scores, -1e9))"
LOSS = "flow._C.sparse_softmax_cross_entropy(logits + self.unused, targets)"
ENTROPY = "flow.nn.functional.cross_entropy(logits + self.unused, targets)"
TRAPS = [  # recipe, cure, what a user would write without it, graph or not, how many times as much it sends at least
    ("transformer_block", ", grad_sbp=x.sbp", "", False, 2.5),
    ("transformer_block", ", grad_sbp=x.sbp", "", True, 1.3),
    ("transformer_block", "(scores + self.mask)", WHERE, False, 4.0),
    ("transformer_block", "(scores + self.mask)", WHERE, True, 3.0),  # with longer sequences it aborts
    ("sequence_parallel", ", grad_sbp=rows", "", False, 1.2),
    ("vocab_parallel", LOSS, ENTROPY, False, 5.0),
]


def without(tmp_path, name, cure, other):
    """The path of a copy of a recipe without its cure."""
    source = path_of(name).read_text()
    assert cure in source
    path = tmp_path / f"{name}.py"
    path.write_text(source.replace(cure, other))
    return str(path)


@pytest.mark.parametrize("name, cure, other, graph, times", TRAPS)
def test_recipe_without_its_cure_sends_more(pools, tmp_path, name, cure, other, graph, times):
    sizes = training_sizes(name, **PROOFS[name].measured_at)
    results = pools(4).call(PER_STEP, path=without(tmp_path, name, cure, other), graph=graph, **sizes)
    sent, wanted = results[0], 4 * CASES[name](4, graph, **sizes).sends[0]
    Checks.that(sent >= times * wanted, name, "sends", sent / wanted, "times as much")


def with_equal_logits(path, graph):
    """On a rank: the result of mixture_of_experts.py, by name, if all experts are equally likely."""
    from oneflow_cookbook.measure.entry import call_entry

    module = load(path)

    class Model(module.MixtureOfExperts):
        def __init__(self, config, router, *more):
            super().__init__(config, 0 * router, *more)

    module.MixtureOfExperts = Model
    model, losses, balance_losses, loads, dropped = call_entry(module, {"graph": graph, "steps": 1})
    weights = {f"new {name}": w.numpy() for name, w in model.named_parameters()}
    numbers = {"losses": losses, "balance_losses": balance_losses, "loads": loads, "dropped": dropped}
    return {**weights, **{name: np.array(value) for name, value in numbers.items()}}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("n", [2, 3])
def test_token_goes_to_the_first_experts_where_all_are_equally_likely(pools, n, graph):
    values = reference.mixture_of_experts(router_scale=0.0)
    assert values["loads"].exact.tolist() == [[64, 64, 0, 0, 0, 0, 0, 0]]
    assert values["dropped"].exact.tolist() == [2 * 8 * (8 - 3)]  # the first two have 3 slots for 8 tokens
    path = str(path_of("mixture_of_experts"))
    for seen in pools(n).call(f"{__file__}:with_equal_logits", path=path, graph=graph):
        for name, value in seen.items():
            assert_close(value, values[name], name)


def test_tokens_are_spread_over_the_experts_by_the_balance_loss_alone():
    """As the page says: in numpy, to which the ladder compares the recipe."""
    first, last = {}, {}
    for coef in (0.0, 0.3):
        values = reference.mixture_of_experts(steps=20, aux_loss_coef=coef)
        first[coef], *_, last[coef] = values["balance_losses"].exact
    assert first[0.0] == first[0.3] and abs(last[0.0] - first[0.0]) < 0.05 and last[0.3] < first[0.3] - 0.25


def rounding():
    """On a rank: how much permute changes the numbers of a global tensor on CPU, by shape."""
    import oneflow as flow

    largest = {}
    for shape in ((8, 8), (8, 2, 4), (7, 8), (8, 16), (16, 16)):
        x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        tensor = flow.tensor(x, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
        order = (*range(1, len(shape)), 0)
        largest[shape] = np.abs(tensor.permute(*order).numpy() - x.transpose(order)).max()
    return largest


def test_permute_of_8_by_8_rounds(pools):
    """So all_gather_kv, ulysses and ring_attention transpose keys within the matmul."""
    [largest] = pools(1).call(f"{__file__}:rounding")
    assert {shape for shape, off in largest.items() if off > 0} == {(8, 8), (8, 2, 4)} and max(largest.values()) < 1e-4
