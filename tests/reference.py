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
    def known(exact):
        """A value that float32 holds without rounding."""
        return Value(np.asarray(exact, dtype=np.float64), np.zeros(np.shape(exact)))

    @staticmethod
    def unknown(*shape):
        """A value that OneFlow draws at random: only that all ranks agree on it can be asserted."""
        return Value(np.full(shape, np.nan), np.zeros(shape))

    @staticmethod
    def drawn(rng, *shape):
        """An input: float32 from the start, so without rounding."""
        return Value.known(rng.standard_normal(shape, dtype=np.float32))

    def __matmul__(self, other):
        """N. Higham, Accuracy and Stability of Numerical Algorithms, section 3.5: |error| <= k u |a| |b|, any order."""
        size = np.abs(self.exact) @ np.abs(other.exact)
        k = self.exact.shape[1]
        inherited = self.bound @ (np.abs(other.exact) + other.bound) + np.abs(self.exact) @ other.bound
        return Value(self.exact @ other.exact, inherited * (1 + k * UNIT_ROUNDOFF) + k * UNIT_ROUNDOFF * size)

    def __getitem__(self, index):
        return Value(self.exact[index], self.bound[index])

    @property
    def T(self):
        return Value(self.exact.T, self.bound.T)


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
    return values


def conversions(source, seed=0, rows=4, columns=6, world_size=None):
    """x, the parts whose sum it is, one for each of the ranks `source`, and what a P made of a split x holds there."""
    rng = np.random.default_rng(seed)
    parts = rng.integers(-9, 10, (world_size, rows, columns)).astype(np.float64)[list(source)]
    x, zeros = parts.sum(axis=0), np.zeros((rows, columns))
    padded = {}
    for dim in (0, 1):
        padded[dim] = [zeros.copy() for _ in source]
        for position, part in enumerate(padded[dim]):
            cut = split(x.shape, dim, position, len(source))
            part[cut] = x[cut]
    first = [x] + [zeros] * (len(source) - 1)
    return tuple([Value.known(part) for part in blocks] for blocks in ([x], parts, padded[0], padded[1], first))


def mesh(seed=0, batch=4, in_features=4, out_features=8):
    """x, w, out = x @ w, partial = out.T @ x, and the two parts of that sum: one from each half of the batch."""
    rng = np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, in_features), Value.drawn(rng, in_features, out_features)
    out = x @ w
    halves = [split(x.exact.shape, 0, position, 2) for position in (0, 1)]
    return x, w, out, out.T @ x, [out[half].T @ x[half] for half in halves]
