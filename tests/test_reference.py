"""The reference differentiates by itself: its gradients are those of finite differences."""

import numpy as np
import pytest

from tests.cases import CASES, PROOFS, TRAINED, proven_on, reference
from tests.cases.ladder import Checks


@pytest.mark.parametrize("name", [name for name in TRAINED if not PROOFS[name].own_steps])
def test_gradients_of_the_reference_are_finite_differences(monkeypatch, name):
    """Along a random direction for each weight."""
    descend, checked, rng, step = reference.descend, [], np.random.default_rng(1), 1e-6

    def checking(weights, forward, steps, update=None, rows=0, *options, **named):
        found = reference.gradients(forward(weights, slice(rows))[1], weights)
        for weight, one in weights.items():
            way = rng.standard_normal(one.exact.shape)
            moved = ({**weights, weight: reference.Value(one.exact + by * way)} for by in (step, -step))
            up, down = (forward(changed, slice(rows))[1].exact.item() for changed in moved)
            along = found[weight].exact * way
            apart = abs((up - down) / (2 * step) - along.sum())
            Checks.that(apart <= 1e-6 * np.abs(along).sum(), name, weight, "differs by", apart)
            checked.append(weight)
        return descend(weights, forward, steps, update, rows, *options, **named)

    monkeypatch.setattr(reference, "descend", checking)
    case = CASES[name](proven_on(name)[0])
    case.draw({name: {"value": rng.standard_normal(value.exact.shape) / 2} for name, value in case.values.items()})
    assert checked
