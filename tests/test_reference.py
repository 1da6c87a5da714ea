"""The reference's own differentiation: its gradients are those of finite differences."""

import numpy as np
import pytest

from tests.cases import CASES, PROOFS, TRAINED, proven_on, reference, reference_gpt, reference_llama
from tests.cases.ladder import Checks


def check_gradients(loss_of, weights, rng, name, step=1e-6, allowed=1e-6):
    """Along a random direction for each weight. loss_of: a function of the weights."""
    gradients = reference.gradients(loss_of(weights), weights)
    for weight, value in weights.items():
        direction = rng.standard_normal(value.exact.shape)
        moved = ({**weights, weight: reference.Value(value.exact + by * direction)} for by in (step, -step))
        up, down = (loss_of(changed).exact.item() for changed in moved)
        along = gradients[weight].exact * direction
        off = abs((up - down) / (2 * step) - along.sum())
        Checks.that(off <= allowed * np.abs(along).sum(), name, weight, "differs by", off)


@pytest.mark.parametrize("name", [name for name in TRAINED if not PROOFS[name].own_steps])
def test_gradients_of_the_reference_are_finite_differences(monkeypatch, name):
    descend, calls, rng = reference.descend, [], np.random.default_rng(1)

    def checking(weights, forward, steps, optimizer=None, rows=0, *more, **named):
        check_gradients(lambda w: forward(w, slice(rows))[1], weights, rng, name)
        calls.append(weights)
        return descend(weights, forward, steps, optimizer, rows, *more, **named)

    monkeypatch.setattr(reference, "descend", checking)
    case = CASES[name](proven_on(name)[0])
    case.draw({name: {"value": rng.standard_normal(value.exact.shape) / 2} for name, value in case.values.items()})
    assert any(calls)


@pytest.mark.parametrize("experts", [0, 4])
def test_gradients_of_the_reference_of_gpt_are_finite_differences(experts):
    rng = np.random.default_rng(1)
    w = reference_gpt.new_weights(12, 5, 2, 8, experts=experts)
    w = {name: reference.Value(value.exact + 0.3 * rng.standard_normal(value.exact.shape)) for name, value in w.items()}
    ids, targets = rng.integers(12, size=(2, 3, 5))
    check_gradients(lambda w: reference_gpt.loss_of(w, ids, targets, num_heads=2), w, rng, "gpt")


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_the_reference_of_llama_are_finite_differences(tied):
    rng = np.random.default_rng(1)
    w = reference_llama.new_weights(reference_llama.shapes(12, 8, 10, 2, 4, 2, 6, tied), seed=0)
    w = {name: reference.Value(value.exact + 0.3 * rng.standard_normal(value.exact.shape)) for name, value in w.items()}
    ids, targets = rng.integers(12, size=(2, 3, 5))
    model = (4, 0.1, reference_llama.frequencies(6, {"rope_theta": 20.0}))  # heads, epsilon, turns
    check_gradients(lambda w: reference_llama.loss_of(w, ids, targets, *model), w, rng, "llama")
