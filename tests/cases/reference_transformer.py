"""What the transformer recipes must give, in plain numpy and float64; a tape has the rules of differentiation."""

import numpy as np

from tests.cases.reference import Value

ROUNDING = 2e-6  # of the largest number of a tensor: 5 times what float32 was off, a fifth of a change by 1e-5
RATE = 0.1  # of SGD


class Array:
    """A float64 array that knows what it was computed from, so that `backward` can tell its gradient."""

    def __init__(self, exact, *sources):
        self.exact, self.sources = np.asarray(exact, dtype=np.float64), sources  # (Array, gradient of self -> its own)

    def __add__(self, other):
        return Array(self.exact + other.exact, (self, lambda g: g), (other, lambda g: g))

    def __sub__(self, other):
        return Array(self.exact - other.exact, (self, lambda g: g), (other, lambda g: -g))

    def __mul__(self, other):
        return Array(self.exact * other.exact, (self, lambda g: g * other.exact), (other, lambda g: g * self.exact))

    def __truediv__(self, other):
        return self * Array(1 / other.exact, (other, lambda g: -g / other.exact**2))

    def __matmul__(self, other):
        a, b = self.exact, other.exact
        return Array(a @ b, (self, lambda g: g @ b.swapaxes(-1, -2)), (other, lambda g: a.swapaxes(-1, -2) @ g))

    def __getitem__(self, index):
        def back(g):
            whole = np.zeros_like(self.exact)
            np.add.at(whole, index, g)
            return whole

        return Array(self.exact[index], (self, back))

    def reshape(self, *shape):
        return Array(self.exact.reshape(shape), (self, lambda g: g.reshape(self.exact.shape)))

    def permute(self, *axes):
        return Array(self.exact.transpose(axes), (self, lambda g: g.transpose(np.argsort(axes))))

    @property
    def T(self):
        """With the last two dimensions swapped."""
        return Array(self.exact.swapaxes(-1, -2), (self, lambda g: g.swapaxes(-1, -2)))

    def sum(self, axis=None):
        return Array(self.exact.sum(axis, keepdims=True), (self, lambda g: g + 0 * self.exact))

    def mean(self, axis=None):
        total = self.sum(axis)
        return total * Array(total.exact.size / self.exact.size)

    def sqrt(self):
        root = np.sqrt(self.exact)
        return Array(root, (self, lambda g: g / (2 * root)))

    def exp(self):
        power = np.exp(self.exact)
        return Array(power, (self, lambda g: g * power))

    def log(self):
        return Array(np.log(self.exact), (self, lambda g: g / self.exact))

    def relu(self):
        return Array(np.maximum(self.exact, 0), (self, lambda g: g * (self.exact > 0)))


def backward(loss):
    """The gradient of a number by the id of each Array that it was computed from."""
    order, gradients = {}, {id(loss): np.ones_like(loss.exact)}

    def visit(array):
        if id(array) not in order:
            for source, _ in array.sources:
                visit(source)
            order[id(array)] = array

    visit(loss)
    for array in reversed(list(order.values())):
        for source, back in array.sources:
            gradient = back(gradients[id(array)])
            added = gradient.ndim - source.exact.ndim
            stretched = [
                i + added for i, size in enumerate(source.exact.shape) if size == 1 != gradient.shape[i + added]
            ]
            gradient = gradient.sum((*range(added), *stretched), keepdims=True).reshape(source.exact.shape)
            gradients[id(source)] = gradients.get(id(source), 0) + gradient
    return gradients


def value(exact):
    """What float32 computes: a Value with the bound above."""
    exact = np.asarray(exact)
    return Value(exact, np.full(exact.shape, ROUNDING * np.abs(exact).max(initial=0)))


def split(rows, parts):
    """The slices of equal parts of the rows."""
    return [slice(i * rows // parts, (i + 1) * rows // parts) for i in range(parts)]


def descent(w, forward, steps, rows, parts=1, inputs=()):
    """Steps of SGD; forward: (weights, slice of the rows) -> (tensors by name, loss). `inputs` keep their values.

    Returns by name what the last step made, its gradients, the new weights and the losses; and what each of `parts` of
    the rows adds to the gradients.
    """
    losses = []
    for _ in range(steps):
        before, (made, loss) = w, forward(w, slice(rows))
        gradients = backward(loss)
        changes = {name: 0 if name in inputs else RATE * gradients[id(one)] for name, one in w.items()}
        w = {name: Array(one.exact - changes[name]) for name, one in w.items()}
        losses.append(loss.exact.item())
    of_parts = [backward(forward(before, part)[1] * Array(1 / parts)) for part in split(rows, parts)]
    added = {f"{name} grad": [value(of_part[id(one)]) for of_part in of_parts] for name, one in before.items()}
    values = {name: value(one.exact) for name, one in made.items()}
    values.update({f"{name} grad": value(gradients[id(one)]) for name, one in before.items()})
    values.update({f"new {name}": value(one.exact) for name, one in w.items() if name not in inputs})
    return {**values, "losses": value(losses)}, added


def norm(x):
    """Of each row minus its mean, by its standard deviation."""
    centered = x - x.mean(-1)
    return centered / ((centered * centered).mean(-1) + Array(1e-5)).sqrt()


def softmax(x):
    power = (x - Array(x.exact.max(-1, keepdims=True))).exp()
    return power / power.sum(-1)


def mse(out, y):
    return ((out - y) * (out - y)).mean()


def cross_entropy(logits, targets):
    """The mean over the rows."""
    shifted = logits - Array(logits.exact.max(-1, keepdims=True))
    return (shifted.exp().sum(-1).log() - shifted[np.arange(len(targets)), targets].reshape(-1, 1)).mean()


def drawn(rng, shape, by=1):
    """An input: float32 divided by a power of two."""
    return rng.standard_normal(shape, dtype=np.float32).astype(np.float64) / by


def attention(q, k, v, gain, causal=True):
    """Of (..., sequence, head size); returns the scores, their softmax, and what they make of v."""
    scores = gain * (q @ k.T) * Array(q.exact.shape[-1] ** -0.5)
    mask = np.triu(np.full(scores.exact.shape[-2:], -1e9 if causal else 0.0), k=1)
    weights = softmax(scores + Array(mask))
    return scores, weights, gain * (weights @ v)


def block(x, w, samples, heads, gain, sequence_first=False):
    """Pre-norm attention and MLP of tokens, (samples x sequence, features) or the other way; its tensors by name."""
    tokens, features = x.exact.shape
    shape, order, back = (samples, tokens // samples), (0, 2, 1, 3), (0, 2, 1, 3)
    if sequence_first:
        shape, order, back = shape[::-1], (1, 2, 0, 3), (2, 0, 1, 3)
    normed0 = norm(x) * w["norm0"]
    qkv = gain * (normed0 @ w["w_qkv"])
    by_head, size = qkv.reshape(*shape, heads, -1).permute(*order), features // heads
    q, k, v = (by_head[..., i * size : (i + 1) * size] for i in range(3))
    scores, weights, mixed = attention(q, k, v, gain)
    mixed = mixed.permute(*back).reshape(tokens, features)
    residual = x + gain * (mixed @ w["w_out"])
    normed1 = norm(residual) * w["norm1"]
    hidden = (gain * (normed1 @ w["w_up"])).relu()
    made = {"gathered0": normed0, "qkv": qkv, "scores": scores, "attention": weights, "mixed": mixed}
    made.update({"residual": residual, "gathered1": normed1, "hidden": hidden})
    return {**made, "out": residual + gain * (hidden @ w["w_down"])}


def trained_block(returned, seed, steps, samples, sequence, heads, head_size, parts=1, gain=1.0, sequence_first=False):
    """x, y, the weights, those tensors of the block that are `returned`, gradients, new weights and losses, by name.

    Also what each of `parts` of the samples adds to the gradients of the last step.
    """
    rng, features = np.random.default_rng(seed), heads * head_size
    x, y = (Array(drawn(rng, (samples * sequence, features))) for _ in range(2))
    shapes = {"norm0": (features,), "w_qkv": (features, 3 * features), "w_out": (features, features)}
    shapes.update({"norm1": (features,), "w_up": (features, 4 * features), "w_down": (4 * features, features)})
    w = {name: Array(drawn(rng, shape, by=4)) for name, shape in shapes.items()}
    values = {name: Value.known(one.exact) for name, one in {"x": x, "y": y, **w}.items()}

    def forward(w, part):
        rows = x[part]
        made = block(rows, w, samples * len(rows.exact) // len(x.exact), heads, Array(gain), sequence_first)
        return {name: made[name] for name in returned}, mse(made["out"], y[part])

    trained, added = descent(w, forward, steps, samples * sequence, parts=parts)
    return {**values, **trained}, added


def vocab_parallel(seed=0, steps=1, tokens=8, vocabulary=61, padded=61, features=4, parts=1, gain=1.0):
    """The same for a language model of two tables; `parts`: of the tokens."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(vocabulary, size=(2, tokens))
    w = {"table": Array(drawn(rng, (padded, features))), "head": Array(drawn(rng, (features, padded)))}
    unused = Array(np.where(np.arange(padded) < vocabulary, 0, -1e9))
    values = {"ids": Value.known(ids, "int64"), "targets": Value.known(targets, "int64")}
    values.update({name: Value.known(one.exact) for name, one in w.items()})

    def forward(w, part):
        x = w["table"][ids[part]]
        logits = Array(gain) * (x @ w["head"])
        return {"x": x, "logits": logits}, cross_entropy(logits + unused, targets[part])

    trained, added = descent(w, forward, steps, tokens, parts=parts)
    counts = [np.bincount(ids[part], minlength=padded)[:, None] + np.zeros(features) for part in split(tokens, parts)]
    values.update(trained)
    values["indexed grad"] = Value.known(sum(counts))
    return values, {**added, "indexed grad": [Value.known(one) for one in counts]}


def context_parallel(seed=0, steps=1, sequence=8, heads=4, head_size=4, gain=1.0):
    """Steps of SGD of q, k and v on sum((out - y)^2), out = attention(q, k, v) of (sequence, heads, head size)."""
    rng = np.random.default_rng(seed)
    q, k, v, y = (Array(drawn(rng, (sequence, heads, head_size))) for _ in range(4))
    w = {"q": q, "k": k, "v": v}

    def forward(w, part):
        scores, _, mixed = attention(*(w[name].permute(1, 0, 2) for name in "qkv"), Array(gain))
        out = mixed.permute(1, 0, 2)
        return {"scores": scores, "out": out}, ((out - y) * (out - y)).sum()

    values = {name: Value.known(one.exact) for name, one in {**w, "y": y}.items()}
    trained, _ = descent(w, forward, steps, sequence)
    return {**values, **trained}


def mixture_of_experts(n, seed=0, steps=1, tokens=8, features=4, hidden_features=8, capacity=3, gain=1.0):
    """Steps of SGD on mean((out - y)^2), of n experts and `tokens` on each of n ranks; x is a weight that stays."""
    rng, gain = np.random.default_rng(seed), Array(gain)
    x, y = (Array(drawn(rng, (n * tokens, features))) for _ in range(2))
    shapes = {"router": (features, n), "w_up": (n, features, hidden_features), "w_down": (n, hidden_features, features)}
    w = {"x": x, **{name: Array(drawn(rng, shape)) for name, shape in shapes.items()}}
    values = {name: Value.known(one.exact) for name, one in {"x": x, "y": y, **w}.items()}

    def forward(w, part):
        odds = softmax(gain * (w["x"] @ w["router"]))
        expert, rows = odds.exact.argmax(axis=1), np.arange(n * tokens)
        best = np.sort(odds.exact, axis=1)
        assert n == 1 or (best[:, -1] - best[:, -2] > 1e-4).all(), "rounding must not choose the expert"
        dispatch = np.zeros((n, tokens, n, capacity))
        for rank, token in np.ndindex(n, tokens):
            own = expert[rank * tokens : (rank + 1) * tokens]
            place = (own[:token] == own[token]).sum()
            if place < capacity:
                dispatch[rank, token, own[token], place] = 1
        slots = dispatch.reshape(n, tokens, n * capacity)
        sent = gain * (Array(slots.swapaxes(1, 2)) @ w["x"].reshape(n, tokens, features))
        sent = sent.reshape(n, n, capacity, features)
        own = sent.permute(1, 0, 2, 3).reshape(n, n * capacity, features)
        hidden = (gain * (own @ w["w_up"])).relu()
        done = (gain * (hidden @ w["w_down"])).reshape(n, n, capacity, features).permute(1, 0, 2, 3)
        back = gain * (Array(slots) @ done.reshape(n, n * capacity, features))
        out = w["x"] + odds[rows, expert].reshape(-1, 1) * back.reshape(n * tokens, features)
        made = {"odds": odds.reshape(n, tokens, n), "dispatch": Array(slots), "sent": sent, "arrived": sent}
        return {**made, "hidden": hidden, "out": out}, mse(out, y)

    trained, _ = descent(w, forward, steps, n * tokens, inputs=("x",))
    return {**values, **trained}
