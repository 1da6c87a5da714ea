"""What every tensor of every recipe must be, in plain numpy and float64, from the mathematics alone.

`Value` carries a bound on the rounding of float32 along with the number, so that no test has a tolerance of its own.
"""

from dataclasses import dataclass

import numpy as np

UNIT_ROUNDOFF = np.finfo(np.float32).eps / 2


@dataclass
class Value:
    """A number in float64 and how far a float32 computation of it may be off, elementwise."""

    exact: np.ndarray
    bound: np.ndarray

    @staticmethod
    def drawn(rng, *shape):
        """An input: float32 from the start, so without rounding."""
        exact = rng.standard_normal(shape, dtype=np.float32).astype(np.float64)
        return Value(exact, np.zeros(shape))

    def __matmul__(self, other):
        """N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.5: |error| <= k u |a| |b|, any order."""
        size = np.abs(self.exact) @ np.abs(other.exact)
        k = self.exact.shape[1]
        inherited = self.bound @ (np.abs(other.exact) + other.bound) + np.abs(self.exact) @ other.bound
        return Value(self.exact @ other.exact, inherited * (1 + k * UNIT_ROUNDOFF) + k * UNIT_ROUNDOFF * size)

    def __getitem__(self, index):
        return Value(self.exact[index], self.bound[index])


def split(shape, dim, position, parts):
    """The slices of part `position` of `parts`, as OneFlow cuts: the first parts are the larger ones by one."""
    small, larger = divmod(shape[dim], parts)
    start = position * small + min(position, larger)
    cut = [slice(None)] * len(shape)
    cut[dim] = slice(start, start + small + (position < larger))
    return tuple(cut)


def one_layer(world_size, seed=0, batch=4, in_features=5, out_features=8):
    """x, w and out = x @ w; also the partial sum that each rank has when the contracting dimension is split."""
    rng = np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, in_features), Value.drawn(rng, in_features, out_features)
    parts = []
    for rank in range(min(world_size, in_features)):
        inner = split((in_features,), 0, rank, world_size)[0]
        parts.append(x[:, inner] @ w[inner])
    return {"x": x, "w": w, "out": x @ w, "partial": x @ w}, {"partial": parts}


def layers(stages, seed=0, batch=4, in_features=5, out_features=8):
    """x0, w0, out0 = x0 @ w0, x1 = out0, ...: weights (in, out), (out, 3), (3, out), (out, 3), ..."""
    rng = np.random.default_rng(seed)
    x, values = Value.drawn(rng, batch, in_features), {}
    shapes = [(in_features, out_features)]
    while len(shapes) < stages:
        shapes.append((out_features, 3) if shapes[-1][1] == out_features and len(shapes) % 2 else (3, out_features))
    for k, shape in enumerate(shapes):
        w = Value.drawn(rng, *shape)
        values.update({f"x{k}": x, f"w{k}": w, f"out{k}": x @ w})
        x = x @ w
    return values, {}
