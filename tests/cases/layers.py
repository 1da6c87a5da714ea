"""Layers of oneflow.nn in plain numpy and float64. Their gradients are central differences."""

import math

import numpy as np

EPSILON, STEP = 1e-5, 1e-5
MAX_NORM = 16.0
GRADIENT = " grad"


def linear(x, weight, bias):
    return x @ weight.T + bias


def conv2d(x, weight, bias):
    """A kernel of 3 x 3, with a border of zeros."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = x.shape[2:]
    parts = [
        np.einsum("nihw,oi->nohw", padded[:, :, i : i + height, j : j + width], weight[:, :, i, j])
        for i in range(3)
        for j in range(3)
    ]
    return sum(parts) + bias[:, None, None]


def normalized(x, axes):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + EPSILON)


def layer_norm(x, weight, bias):
    return normalized(x, 1) * weight + bias


def batch_norm(x, weight, bias):
    """x: (batch, channels, ...)."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    return normalized(x, (0, *range(2, x.ndim))) * weight.reshape(shape) + bias.reshape(shape)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def cross_entropy(x, targets):
    return np.mean(np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), targets])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, h, c, weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0):
    """x: (time, batch, features)."""
    out, h, c = [], h[0], c[0]
    for now in x:
        gates = now @ weight_ih_l0.T + bias_ih_l0 + h @ weight_hh_l0.T + bias_hh_l0
        i, f, g, o = np.split(gates, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.stack(out)


FUNCTIONS = {
    "Linear": linear,
    "Embedding": lambda ids, weight: weight[ids],
    "LayerNorm": layer_norm,
    "Conv2d": conv2d,
    "BatchNorm1d": batch_norm,
    "BatchNorm2d": batch_norm,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": gelu,
    "CrossEntropyLoss": cross_entropy,
    "LSTM": lstm,
}


def expected(kind, arrays, clipped):
    """The value of "out" and of each gradient, for the "arrays" that on_rank_layers.py returned."""
    names = [name[: -len(GRADIENT)] for name in arrays if name.endswith(GRADIENT)]
    inputs = {name: arrays[name].astype(np.float64) for name in names}
    parameters = [name for name in names if name != "x"]

    def forward():
        if kind == "Dropout":
            return 2 * inputs["x"] * (arrays["out"] != 0)
        x = inputs.get("x", arrays["x"])
        return FUNCTIONS[kind](x, *arrays["more"], **{name: inputs[name] for name in parameters})

    values = {"out": forward()}
    for name, array in inputs.items():
        values[name + GRADIENT] = difference(lambda: (forward() * arrays["d"]).sum(), array)
    if clipped:
        norm = math.sqrt(sum((values[name + GRADIENT] ** 2).sum() for name in parameters))
        for name in parameters:
            values[name + GRADIENT] *= min(1, MAX_NORM / norm)
    return values


def difference(function, array):
    """The gradient of a function that reads this array, of which each number is changed in turn."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        value, ends = array[index], []
        for step in (STEP, -STEP):
            array[index] = value + step
            ends.append(function())
        array[index] = value
        gradient[index] = (ends[0] - ends[1]) / (2 * STEP)
    return gradient
