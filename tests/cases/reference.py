"""What every tensor of every recipe must be, in plain numpy and float64, from the mathematics alone.

A `Value` knows what it was computed from, so that `gradients` can differentiate it: no backward is written by hand.
"""

import numpy as np

from oneflow_cookbook.measure.sbp import Layout

ROUNDING = 2e-6  # of the largest number of a tensor: 3 times what float32 was off, a fifth of a change by 1e-5
LEARNING_RATE = 0.1  # of most recipes


class Value:
    """An array in float64, how far a float32 computation of it may be off, and the dtype that the recipe returns.

    sources: the Values it was computed from, each with a function from the gradient of this Value to theirs. A Value
    without sources is an input, which float32 holds exactly; `rounded` says that it is a result all the same.
    """

    __array_ufunc__ = None  # numpy leaves `array * value` to us

    def __init__(self, exact, *sources, dtype="float32", rounded=False):
        self.exact, self.sources, self.dtype = np.asarray(exact, dtype=np.float64), sources, dtype
        self.bound = ROUNDING * np.abs(self.exact).max(initial=0) if sources or rounded else 0.0

    def same_numbers(self, exact, back):
        """A Value of some of these numbers, in any order: nothing is rounded."""
        value = Value(exact, (self, back))
        value.bound = self.bound
        return value

    def __add__(self, other):
        other = value_of(other)
        return Value(self.exact + other.exact, (self, lambda g: g), (other, lambda g: g))

    def __sub__(self, other):
        return self + -1 * value_of(other)

    def __mul__(self, other):
        other = value_of(other)
        return Value(self.exact * other.exact, (self, lambda g: g * other.exact), (other, lambda g: g * self.exact))

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self * value_of(other) ** -1

    def __pow__(self, power):
        return Value(self.exact**power, (self, lambda g: g * power * self.exact ** (power - 1)))

    def __matmul__(self, other):
        a, b = self.exact, other.exact
        return Value(a @ b, (self, lambda g: g @ b.swapaxes(-1, -2)), (other, lambda g: a.swapaxes(-1, -2) @ g))

    def __getitem__(self, index):
        def back(g):
            whole = np.zeros_like(self.exact)
            if any(isinstance(part, np.ndarray) for part in (index if isinstance(index, tuple) else [index])):
                np.add.at(whole, index, g)  # a row may be taken more than once
            else:
                whole[index] = g
            return whole

        value = self.same_numbers(self.exact[index], back)
        if np.ndim(self.bound):  # each number has its own
            value.bound = self.bound[index]
        return value

    def reshape(self, *shape):
        return self.same_numbers(self.exact.reshape(shape), lambda g: g.reshape(self.exact.shape))

    def permute(self, *axes):
        return self.same_numbers(self.exact.transpose(axes), lambda g: g.transpose(np.argsort(axes)))

    @property
    def T(self):
        """With the last two dimensions swapped."""
        return self.same_numbers(self.exact.swapaxes(-1, -2), lambda g: g.swapaxes(-1, -2))

    def sum(self, axis=None):
        return Value(self.exact.sum(axis, keepdims=True), (self, lambda g: g + 0 * self.exact))

    def mean(self, axis=None):
        total = self.sum(axis)
        return total * (total.exact.size / self.exact.size)

    def exp(self):
        power = np.exp(self.exact)
        return Value(power, (self, lambda g: g * power))

    def log(self):
        return Value(np.log(self.exact), (self, lambda g: g / self.exact))

    def relu(self):
        return Value(np.maximum(self.exact, 0), (self, lambda g: g * (self.exact > 0)))


def value_of(number):
    return number if isinstance(number, Value) else Value(number)


def gradients(loss, weights):
    """The gradient of a number with respect to each of the weights from which it was computed, by name."""
    in_order, gradient_of = {}, {id(loss): np.ones_like(loss.exact)}  # by id of a Value; sources come first

    def visit(value):
        if id(value) not in in_order:
            for source, _ in value.sources:
                visit(source)
            in_order[id(value)] = value

    visit(loss)
    for value in reversed(list(in_order.values())):
        for source, back in value.sources:
            gradient = unbroadcast(back(gradient_of[id(value)]), source.exact.shape)
            gradient_of[id(source)] = gradient_of.get(id(source), 0) + gradient
    return {name: Value(gradient_of[id(weight)], rounded=True) for name, weight in weights.items()}


def unbroadcast(gradient, shape):
    """The gradient of an array of this shape that numpy has stretched to the shape of `gradient`."""
    added = gradient.ndim - len(shape)
    stretched = [added + i for i, size in enumerate(shape) if size == 1 != gradient.shape[added + i]]
    return gradient.sum((*range(added), *stretched), keepdims=True).reshape(shape)


def split(shape, dim, position, parts):
    """The slices of part `position` of `parts`, as OneFlow cuts."""
    return Layout(f"S({dim})", list(range(parts))).slices(shape, position)


def rows_of(count, parts):
    """The slice of the rows that each part has."""
    return [split((count,), 0, position, parts)[0] for position in range(parts)]


def drawn(rng, *shape, by=1):
    """An input: float32 from the start, divided by a power of two."""
    return Value(rng.standard_normal(shape, dtype=np.float32) / by)


def unknown(*shape):
    """A value that OneFlow draws at random: only that all ranks agree on it can be asserted."""
    return Value(np.full(shape, np.nan))


def total(values):
    return Value(sum(value.exact for value in values), rounded=True)


def one_layer(seed=0, batch=4, in_features=5, out_features=8, matmul_scale=1.0):
    """x, w and out = matmul_scale * x @ w."""
    rng = np.random.default_rng(seed)
    x, w = drawn(rng, batch, in_features), drawn(rng, in_features, out_features)
    return {"x": x, "w": w, "out": matmul_scale * (x @ w)}


def layers(stages, seed=0, batch=4, in_features=5, hidden_size=8, out_features=3, matmul_scale=1.0):
    """x0, w0, out0 = matmul_scale * x0 @ w0, x1 = out0, ...: weights (in, hidden), (hidden, hidden), (hidden, out)."""
    rng = np.random.default_rng(seed)
    x, values = drawn(rng, batch, in_features), {}
    features = [in_features, *[hidden_size] * (stages - 1), out_features]
    for k, shape in enumerate(zip(features, features[1:])):
        w = drawn(rng, *shape)
        values.update({f"x{k}": x, f"w{k}": w, f"out{k}": matmul_scale * (x @ w)})
        x = values[f"out{k}"]
    return values


def conversions(source, seed=0, rows=4, columns=6, world_size=None):
    """x, and what each of the ranks `source` holds of a P whose sum it is, by what that P was made of.

    Returns ([x], of local tensors: parts that are drawn, of S(0), of S(1): own block and zeros, of B: rank 0 has all).
    """
    rng = np.random.default_rng(seed)
    parts = rng.integers(-9, 10, (world_size, rows, columns)).astype(np.float64)[list(source)]
    x, padded = parts.sum(axis=0), np.zeros((2, *parts.shape))
    for dim, position in np.ndindex(2, len(source)):
        cut = split(x.shape, dim, position, len(source))
        padded[dim, position][cut] = x[cut]
    first = [x] + [0 * x] * (len(source) - 1)
    return tuple([Value(part) for part in blocks] for blocks in ([x], parts, *padded, first))


class Optimizer:
    """SGD, momentum, Adam (D. Kingma and J. Ba, arXiv:1412.6980), AdamW (I. Loshchilov and F. Hutter, 1711.05101).

    decay: the weight decay of AdamW. graph: as in an nn.Graph, which computes Adam's bias correction in float32 too;
    1 - 0.999 is another number there.
    """

    def __init__(self, name="sgd", rate=LEARNING_RATE, graph=False, decay=0.2):
        self.name, self.rate, self.graph, self.decay = name, rate, graph, decay
        self.state, self.steps = {}, 0

    def step(self, weights, gradients):
        """The new weights, by name; `state` has the moments by the names that recipes give them."""
        self.steps += 1
        changes = {name: self.change(name, w.exact, gradients[name].exact) for name, w in weights.items()}
        return {name: Value(w.exact - self.rate * changes[name], rounded=True) for name, w in weights.items()}

    def change(self, name, w, gradient):
        if self.name == "sgd":
            return gradient
        if self.name == "momentum":
            return self.moment(f"{name} momentum_buf", 0.9, gradient)
        mean = self.average(f"{name} exp_avg", 0.9, gradient)
        square = self.average(f"{name} exp_avg_sq", 0.999, gradient**2)
        return mean / (np.sqrt(square) + 1e-8) + (self.decay * w if self.name == "adamw" else 0)

    def moment(self, name, beta, new):
        before = self.state[name].exact if name in self.state else 0
        self.state[name] = Value(beta * before + new, rounded=True)
        return self.state[name].exact

    def average(self, name, beta, new):
        """Of all that came so far, corrected for the zeros at the start."""
        held = np.float32(beta)
        power = held ** np.float32(self.steps) if self.graph else beta**self.steps
        return self.moment(name, float(held), (1 - float(held)) * new) / (1 - float(power))


def descend(weights, forward, steps, optimizer=None, rows=0, parts=0):
    """Train; forward: (weights, slice of the rows) -> (tensors by name, loss). rows: how many there are.

    Returns by name the tensors and gradients of the last step, the optimizer's state, the new weights and the losses;
    and {"w grad": what each of `parts` of the rows adds to the last gradient of w}.
    """
    optimizer, losses = optimizer or Optimizer(), []
    tensors, last_gradients, last_weights = {}, {}, weights
    for _ in range(steps):
        last_weights, (tensors, loss) = weights, forward(weights, slice(rows))
        last_gradients = gradients(loss, weights)
        weights = optimizer.step(weights, last_gradients)
        losses.append(loss.exact.item())
    added = {f"{name} grad": [] for name in last_gradients}
    for part in rows_of(rows, parts):
        share = forward(last_weights, part)[1] * ((part.stop - part.start) / rows)
        for name, gradient in gradients(share, last_weights).items():
            added[f"{name} grad"].append(gradient)
    values = {**tensors, **{f"{name} grad": gradient for name, gradient in last_gradients.items()}, **optimizer.state}
    values.update({f"new {name}": w for name, w in weights.items()})
    return {**values, "losses": Value(losses, rounded=True)}, added


def mlp(x, weights, matmul_scale=1.0, linear=()):
    """relu(relu(x @ w0) @ w1 ...); linear: numbers of matmuls without relu, besides the last."""
    for i, w in enumerate(weights.values()):
        x = matmul_scale * (x @ w)
        x = x if i in (*linear, len(weights) - 1) else x.relu()
    return x


def mse(out, y):
    return ((out - y) ** 2).mean()


def mlp_inputs(seed=0, batch=8, in_features=4, hidden_size=8, out_features=4, layers=2, weights_divided_by=1):
    """x, y and {"w0", "w1", ...: weight} of an MLP."""
    widths = [in_features, *[hidden_size] * (layers - 1), out_features]
    return inputs_of_widths(widths, seed, batch, weights_divided_by)


def inputs_of_widths(widths, seed=0, batch=8, weights_divided_by=1):
    """The same, with the number of features before the first layer and behind each one."""
    rng = np.random.default_rng(seed)
    x, y = drawn(rng, batch, widths[0]), drawn(rng, batch, widths[-1])
    shapes = zip(widths, widths[1:])
    return x, y, {f"w{i}": drawn(rng, *shape, by=weights_divided_by) for i, shape in enumerate(shapes)}


def train_mlp(inputs, optimizer, steps=3, matmul_scale=1.0, linear=(), parts=0):
    """Train an MLP on the mean squared error. inputs: as `mlp_inputs` returns them; linear: see `mlp`.

    Returns x, y, the initial weights and what `descend` returns, by name; and what each of `parts` adds to gradients.
    """
    x, y, weights = inputs

    def forward(w, rows):
        return {}, mse(mlp(x[rows], w, matmul_scale, linear), y[rows])

    values, added = descend(weights, forward, steps, optimizer, len(x.exact), parts)
    return {"x": x, "y": y, **weights, **values}, added


def trained(optimizer="momentum", steps=3, matmul_scale=1.0, **sizes):
    """The values by name of an MLP of these sizes, trained on one device."""
    values, _ = train_mlp(mlp_inputs(**sizes), Optimizer(optimizer), steps, matmul_scale)
    return values
