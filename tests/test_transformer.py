"""The reference of the transformer recipes: its gradients are those of finite differences."""

import numpy as np
import pytest

from tests.cases import CASES, TRANSFORMERS
from tests.cases import reference_transformer as reference
from tests.cases.ladder import Checks


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_gradients_of_the_reference_are_finite_differences(monkeypatch, name):
    """Along a random direction for each weight."""
    descent, checked, rng, step = reference.descent, [], np.random.default_rng(1), 1e-6

    def checking(w, forward, steps, rows, **options):
        gradients = reference.backward(forward(w, slice(rows))[1])
        for weight, one in w.items():
            way = rng.standard_normal(one.exact.shape)
            moved = ({**w, weight: reference.Array(one.exact + by * way)} for by in (step, -step))
            up, down = (forward(weights, slice(rows))[1].exact.item() for weights in moved)
            wanted = (gradients[id(one)] * way).sum()
            apart = abs((up - down) / (2 * step) - wanted)
            Checks.that(apart <= 1e-6 * np.abs(gradients[id(one)] * way).sum(), name, weight, "differs by", apart)
            checked.append(weight)
        return descent(w, forward, steps, rows, **options)

    monkeypatch.setattr(reference, "descent", checking)
    values = CASES[name](2).values
    assert checked and {f"{weight} grad" for weight in checked} <= set(values)
