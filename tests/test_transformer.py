"""The reference of the transformer recipes: its gradients are those of finite differences."""

import numpy as np
import pytest

from harness.start.recipe import path_of
from tests.cases import CASES
from tests.cases import reference_transformer as reference
from tests.cases.ladder import Checks

NAMES = [name for name in CASES if path_of(name).parent.name == "transformer"]


def difference(w, name, index, loss_of, step=1e-5):
    """By how much the loss changes with one element of a weight."""
    losses = []
    for sign in (1, -1):
        moved = w[name].exact.copy()
        moved[index] += sign * step
        losses.append(loss_of({**w, name: reference.Array(moved)}).exact.item())
    return (losses[0] - losses[1]) / (2 * step)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_reference_are_finite_differences(monkeypatch, name):
    descent, checked = reference.descent, []

    def checking(w, forward, steps, rows, **options):
        gradients = reference.backward(forward(w, slice(rows))[1])
        for weight, one in w.items():
            gradient = gradients[id(one)]
            found = np.array(
                [
                    difference(w, weight, i, lambda moved: forward(moved, slice(rows))[1])
                    for i in np.ndindex(gradient.shape)
                ]
            )
            apart = np.abs(found - gradient.ravel()).max()
            Checks.that(apart <= 1e-7 * np.abs(gradient).max() + 1e-9, name, weight, "differs by", apart)
            checked.append(weight)
        return descent(w, forward, steps, rows, **options)

    monkeypatch.setattr(reference, "descent", checking)
    values = CASES[name](2).values
    assert checked and {f"{weight} grad" for weight in checked} <= set(values)
