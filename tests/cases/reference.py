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
    dtype: str = "float32"  # that the recipe returns

    @staticmethod
    def known(exact, dtype="float32"):
        """A value that float32 holds without rounding."""
        return Value(np.asarray(exact, dtype=np.float64), np.zeros(np.shape(exact)), dtype)

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

    def rounded(self):
        """The same after float32 has rounded it once."""
        return Value(self.exact, self.bound + UNIT_ROUNDOFF * (np.abs(self.exact) + self.bound))

    def scaled(self, power_of_two):
        """Multiplied without rounding."""
        return Value(power_of_two * self.exact, power_of_two * self.bound)

    def __add__(self, other):
        return Value(self.exact + other.exact, self.bound + other.bound).rounded()

    def __sub__(self, other):
        return Value(self.exact - other.exact, self.bound + other.bound).rounded()

    def __mul__(self, other):
        inherited = self.bound * (np.abs(other.exact) + other.bound) + np.abs(self.exact) * other.bound
        return Value(self.exact * other.exact, inherited).rounded()

    def __truediv__(self, other):
        """Where the divisor may be 0 the bound is infinite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = self.exact / other.exact
            inherited = (self.bound + np.abs(quotient) * other.bound) / np.maximum(np.abs(other.exact) - other.bound, 0)
        return Value(quotient, inherited).rounded()

    def sqrt(self):
        root = np.sqrt(self.exact)
        return Value(root, root - np.sqrt(np.maximum(self.exact - self.bound, 0)) + UNIT_ROUNDOFF * root)

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


def one_layer(seed=0, batch=4, in_features=5, out_features=8, gain=1.0):
    """x, w and out = gain * x @ w."""
    rng = np.random.default_rng(seed)
    x, w = Value.drawn(rng, batch, in_features), Value.drawn(rng, in_features, out_features)
    return {"x": x, "w": w, "out": (x @ w).scaled(gain)}


def products_of_columns(x, w, parts, gain=1.0):
    """The partial sum that each part has when the contracting dimension is split."""
    inner = [split(w.exact.shape, 0, part, parts)[0] for part in range(parts)]
    return [(x[:, columns] @ w[columns]).scaled(gain) for columns in inner]


def layers(stages, seed=0, batch=4, in_features=5, out_features=8, gain=1.0):
    """x0, w0, out0 = gain * x0 @ w0, x1 = out0, ...: weights (in, out), (out, 3), (3, out), (out, 3), ..."""
    rng = np.random.default_rng(seed)
    x, values = Value.drawn(rng, batch, in_features), {}
    shapes = [(in_features, out_features), *[(out_features, 3), (3, out_features)] * stages]
    for k, shape in enumerate(shapes[:stages]):
        w = Value.drawn(rng, *shape)
        out = (x @ w).scaled(gain)
        values.update({f"x{k}": x, f"w{k}": w, f"out{k}": out})
        x = out
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


def relu(a):
    return Value(np.maximum(a.exact, 0), a.bound)


def gate(gradient, a):
    """The gradient of relu(a): where rounding may decide whether a > 0, the bound is the whole gradient."""
    unsure = np.abs(a.exact) <= a.bound
    passed = (a.exact > 0) * gradient.bound
    bound = np.where(unsure & (a.bound > 0), np.abs(gradient.exact) + gradient.bound, passed)
    return Value(gradient.exact * (a.exact > 0), bound)


def mean(a, extra=4):
    """The mean of all elements, summed in any order; `extra` roundings for dividing, also in two steps."""
    k = a.exact.size + extra
    return Value(a.exact.mean(), (a.bound.sum() + k * UNIT_ROUNDOFF * (np.abs(a.exact) + a.bound).sum()) / a.exact.size)


def constant(number):
    """A number that float32 rounds."""
    return Value(np.float64(number), np.float64(abs(number - float(np.float32(number)))))


def decided(out):
    """The largest of each row, which rounding must not be able to change."""
    rows, first = np.arange(len(out.exact)), out.exact.argmax(axis=1)
    surely, perhaps = out.exact - out.bound, out.exact + out.bound
    perhaps[rows, first] = -np.inf
    assert (surely[rows, first] > perhaps.max(axis=1)).all()
    return first


def row_sum(a):
    """The sum of the rows, in any order, as one row."""
    return Value.known(np.ones((1, a.exact.shape[0]))) @ a


def rows_together(rows):
    """Matrices, one below the other."""
    return Value(*(np.concatenate([getattr(row, part) for row in rows]) for part in ("exact", "bound")))


def batch_norm(h):
    """Each column of h minus its mean, by its standard deviation; returns that, mean, variance, and how to go back.

    The last takes the gradient of the first and gives that of h.
    """
    rows = Value.known(h.exact.shape[0])
    mean = (row_sum(h) / rows).rounded()
    centered = h - mean
    var = (row_sum(centered * centered) / rows).rounded()
    deviation = (var + constant(1e-5)).sqrt()

    def back(gradient):
        to_deviation = Value.known(-1) * row_sum(gradient * centered / (deviation * deviation))
        to_var = to_deviation / (Value.known(2) * deviation)
        to_centered = gradient / deviation + Value.known(2) * centered * to_var / rows
        return to_centered - row_sum(to_centered) / rows

    return (centered / deviation).rounded(), mean, var, back


LEARNING_RATE = 0.1  # of all recipes


class Optimizer:
    """SGD, momentum, Adam (D. Kingma and J. Ba, arXiv:1412.6980), AdamW (I. Loshchilov and F. Hutter, 1711.05101)."""

    def __init__(self, name, rate=LEARNING_RATE):
        self.name, self.rate, self.state, self.steps = name, rate, {}, 0

    def step(self, weights, gradients):
        """The new weights, by name; `state` has the moments by (weight, kind of state)."""
        self.steps += 1
        return {name: self.updated(name, weights[name], gradients[name]) for name in weights}

    def updated(self, name, w, gradient):
        """One new weight, float32 coefficients included."""
        rate = constant(self.rate)
        if self.name == "sgd":
            return w - rate * gradient
        if self.name == "momentum":
            before = self.state.get((name, "momentum_buf"))
            moment = gradient if before is None else constant(0.9) * before + gradient
            self.state[name, "momentum_buf"] = moment
            return w - rate * moment
        moments = []
        for kind, beta, new in (("exp_avg", 0.9, gradient), ("exp_avg_sq", 0.999, gradient * gradient)):
            before = self.state.get((name, kind), Value.known(0 * w.exact))
            one_minus = Value(np.float64(1 - beta), constant(beta).bound + UNIT_ROUNDOFF * (1 - beta))
            self.state[name, kind] = constant(beta) * before + one_minus * new
            correction = constant(1 - beta**self.steps)
            moments.append(self.state[name, kind] / correction)
        change = rate * (moments[0] / (moments[1].sqrt() + constant(1e-8)))
        if self.name == "adamw":
            change = change + rate * constant(0.2) * w
        return w - change


def layered(x, y, weights, gain=1.0, share=1.0, linear=()):
    """Forward and backward of loss = mean((relu(relu(x @ w0) @ w1 ...) - y)^2), no relu behind the last matmul.

    weights: by name; gain: scales the product of each matmul; share: scales the loss, such as the share of these rows
    in a larger batch; linear: the numbers of other matmuls without a relu. Returns the loss, and by name the gradients
    of the weights and of x.
    """
    gain, inputs, before = Value.known(gain), [x], []
    for i, w in enumerate(weights.values()):
        before.append(gain * (inputs[-1] @ w))
        inputs.append(before[i] if i in linear else relu(before[i]))
    error = before[-1] - y
    loss = mean(error * error)
    back, gradients = constant(2 / error.exact.size) * error, {}
    if share != 1:
        loss, back = constant(share) * loss, constant(share) * back
    for i, name in reversed(list(enumerate(weights))):
        gradients[name] = gain * (inputs[i].T @ back)
        back = gain * (back @ weights[name].T)
        if i and i - 1 not in linear:
            back = gate(back, before[i - 1])
    return loss, {**gradients, "x": back}


def trained(
    optimizer="momentum",
    seed=0,
    steps=3,
    batch=8,
    in_features=4,
    hidden=8,
    out_features=4,
    layers=2,
    gain=1.0,
    input_gradient=False,
    shrink=1,
    widths=None,
    linear=(),
):
    """What training on one device gives, by name: x, y, w0, w1, ..., gradients, state, new weights, the losses.

    shrink: a power of two, by which the weights that are drawn are divided; widths: of all layers, in place of the
    sizes; linear: see `layered`.
    """
    widths = widths or [in_features, *[hidden] * (layers - 1), out_features]
    rng = np.random.default_rng(seed)
    x, y = Value.drawn(rng, batch, widths[0]), Value.drawn(rng, batch, widths[-1])
    drawn = {f"w{i}": Value.drawn(rng, *shape) for i, shape in enumerate(zip(widths, widths[1:]))}
    weights = {name: Value.known(w.exact / shrink) for name, w in drawn.items()}
    values, losses, update, gradients = {"x": x, "y": y, **weights}, [], Optimizer(optimizer), {}
    for _ in range(steps):
        loss, gradients = layered(x, y, weights, gain, linear=linear)
        weights = update.step(weights, gradients)
        losses.append(loss)
    with_gradient = [*weights, *["x"] * input_gradient] if steps else []
    values.update({f"{name} grad": gradients[name] for name in with_gradient})
    values.update({f"{name} {kind}": state for (name, kind), state in update.state.items()})
    values.update({f"new {name}": w for name, w in weights.items()})
    return {**values, "losses": stacked(losses)}


def gradient_parts(parts, steps=3, gain=1.0, optimizer="momentum", **sizes):
    """By name of the weight: what each part of the rows adds to its gradient in the last step."""
    values = trained(optimizer, steps=steps - 1, gain=gain, **sizes)
    x, y, weights = values["x"], values["y"], {name: values[f"new {name}"] for name in ("w0", "w1")}
    found = {f"{name} grad": [] for name in weights}
    for part in range(parts):
        rows = split(x.exact.shape, 0, part, parts)
        share = constant(x[rows].exact.shape[0] / x.exact.shape[0])
        gradients = layered(x[rows], y[rows], weights, gain)[1]
        for name in weights:
            found[f"{name} grad"].append(share * gradients[name])
    return found


def micro_losses(ranks, steps, micro_batches, gain=1.0, **sizes):
    """The losses of the micro-batches in the last step: the i-th has the i-th part of the rows of each rank."""
    values = trained(steps=steps - 1, gain=gain, **sizes)
    x, y, losses = values["x"], values["y"], []
    rows = np.arange(len(x.exact)).reshape(ranks, micro_batches, -1)
    for i in range(micro_batches):
        part = rows[:, i].ravel()
        weights = {name: values[f"new {name}"] for name in ("w0", "w1")}
        losses.append(layered(x[part], y[part], weights, gain)[0])
    return stacked(losses)


def stacked(numbers):
    """A list of numbers as one vector."""
    return Value(*(np.array([getattr(number, part) for number in numbers]) for part in ("exact", "bound")))
