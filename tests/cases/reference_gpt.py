"""The GPT of recipes/transformer/gpt.py in plain numpy, float64, on one device: forward, backward, AdamW, sampling."""

import math
import pydoc_data.topics

import numpy as np

FUTURE = -1e9  # added to the scores of letters that are not there yet


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x / deviation, deviation


def normed_backward(grad, unit, deviation):
    inner = (grad * unit).mean(-1, keepdims=True)
    return (grad - grad.mean(-1, keepdims=True) - unit * inner) / deviation


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu_and_slope(x):
    erf = np.fromiter(map(math.erf, (x / math.sqrt(2)).ravel().tolist()), float, x.size).reshape(x.shape)
    below = 0.5 * (1 + erf)  # the chance that a normal number is below x
    return x * below, below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def summed(x, grad):
    """The gradient of w in x @ w."""
    return x.reshape(-1, x.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])


def block(x, w, name, heads):
    """One layer; returns its output, and a function from the output's gradient to x's gradient and the weights'."""
    batch, length, width = x.shape
    scale = (width // heads) ** -0.5

    def of_heads(t):
        return t.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)

    def together(t):
        return t.transpose(0, 2, 1, 3).reshape(batch, length, -1)

    unit, deviation = normed(x)
    a = unit * w[name + "norm"]
    q, k, v = np.split(of_heads(a @ w[name + "qkv"]), 3, -1)
    chances = softmax(q @ k.swapaxes(2, 3) * scale + np.triu(np.full((length, length), FUTURE), 1))
    values = together(chances @ v)
    y = x + values @ w[name + "project"]
    unit_mlp, deviation_mlp = normed(y)
    b = unit_mlp * w[name + "norm_mlp"]
    hidden, slope = gelu_and_slope(b @ w[name + "up"])

    def backward(grad):
        found = {name + "down": summed(hidden, grad)}
        grad_up = grad @ w[name + "down"].T * slope
        found[name + "up"] = summed(b, grad_up)
        grad_b = grad_up @ w[name + "up"].T
        found[name + "norm_mlp"] = (grad_b * unit_mlp).sum((0, 1))
        grad = grad + normed_backward(grad_b * w[name + "norm_mlp"], unit_mlp, deviation_mlp)
        found[name + "project"] = summed(values, grad)
        grad_values = of_heads(grad @ w[name + "project"].T)
        grad_chances = grad_values @ v.swapaxes(2, 3)
        grad_scores = chances * (grad_chances - (grad_chances * chances).sum(-1, keepdims=True)) * scale
        parts = grad_scores @ k, grad_scores.swapaxes(2, 3) @ q, chances.swapaxes(2, 3) @ grad_values
        grad_qkv = together(np.concatenate(parts, -1))
        found[name + "qkv"] = summed(a, grad_qkv)
        grad_a = grad_qkv @ w[name + "qkv"].T
        found[name + "norm"] = (grad_a * unit).sum((0, 1))
        return grad + normed_backward(grad_a * w[name + "norm"], unit, deviation), found

    return y + hidden @ w[name + "down"], backward


def layers_of(w):
    return sum(name.endswith(".qkv") for name in w)


def logits_of(w, ids, heads):
    """The logits, (batch, length, letters), and a function from their gradient to that of each weight."""
    x, backwards = w["embedding.tokens"][ids] + w["embedding.positions"], []
    for i in range(layers_of(w)):
        x, backward = block(x, w, f"blocks.{i}.", heads)
        backwards.append(backward)
    unit, deviation = normed(x)
    last = unit * w["head.norm"]

    def backward(grad):
        found = {"embedding.tokens": summed(grad, last)}
        grad = grad @ w["embedding.tokens"]
        found["head.norm"] = (grad * unit).sum((0, 1))
        grad = normed_backward(grad * w["head.norm"], unit, deviation)
        for one in reversed(backwards):
            grad, of_block = one(grad)
            found.update(of_block)
        np.add.at(found["embedding.tokens"], ids, grad)  # the same table is used at both ends
        found["embedding.positions"] = grad.sum(0)
        return found

    return last @ w["embedding.tokens"].T, backward


def loss_and_gradients(w, ids, targets, heads):
    logits, backward = logits_of(w, ids, heads)
    chances = softmax(logits)
    loss = -np.log(np.take_along_axis(chances, targets[..., None], -1)).mean()
    grad = chances.copy()
    np.put_along_axis(grad, targets[..., None], np.take_along_axis(grad, targets[..., None], -1) - 1, -1)
    return loss, backward(grad / targets.size)


def text():
    """The letters, sorted, and the text as their numbers."""
    whole = "".join(pydoc_data.topics.topics.values())
    letters = sorted(set(whole))
    number = {letter: i for i, letter in enumerate(letters)}
    return letters, np.array([number[letter] for letter in whole])


def batch_of(step, numbers, batch, length, seed=0):
    starts = np.random.default_rng([seed, step]).integers(len(numbers) - length, size=(batch, 1))
    rows = numbers[starts + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def new_weights(letters, length, layers, width, seed=0):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return (0.05 * rng.standard_normal(shape, dtype=np.float32)).astype(np.float64)

    w = {"embedding.tokens": drawn(letters, width), "embedding.positions": drawn(length, width)}
    for i in range(layers):
        w.update({f"blocks.{i}.norm": np.ones(width), f"blocks.{i}.qkv": drawn(width, 3 * width)})
        w.update({f"blocks.{i}.project": drawn(width, width), f"blocks.{i}.norm_mlp": np.ones(width)})
        w.update({f"blocks.{i}.up": drawn(width, 4 * width), f"blocks.{i}.down": drawn(4 * width, width)})
    return {**w, "head.norm": np.ones(width)}


def clipped(gradients, most):
    """Scaled down together, so that their norm is at most `most`; 0: as they are."""
    norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    return (
        {name: gradient * min(1, most / (norm + 1e-6)) for name, gradient in gradients.items()} if most else gradients
    )


def trained(steps, batch=16, length=8, layers=4, width=16, heads=4, clip=0.0, seed=0, sample=0):
    """AdamW: the losses, that of the next batch included; the first gradients; the weights; the letters drawn."""
    letters, numbers = text()
    w = new_weights(-(-len(letters) // heads) * heads, length, layers, width, seed)
    m, v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    losses, first = [], None
    for step in range(1, steps + 1):
        loss, gradients = loss_and_gradients(w, *batch_of(step, numbers, batch, length, seed), heads)
        gradients = clipped(gradients, clip)
        first, losses = first or gradients, [*losses, loss]
        for name, g in gradients.items():
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g * g
            move = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)
            w[name] = w[name] - 1e-3 * (move + 0.01 * w[name])
    losses.append(loss_and_gradients(w, *batch_of(steps + 1, numbers, batch, length, seed), heads)[0])
    return {
        "heads": heads,
        "losses": losses,
        "first": first,
        "weights": w,
        "drawn": drawn_letters(w, sample, len(letters), heads, seed),
    }


def drawn_letters(w, count, letters, heads, seed):
    seen, rng, length = [0], np.random.default_rng(seed), len(w["embedding.positions"])
    for _ in range(count):
        last = seen[-length:]
        ids = np.array([last + [0] * (length - len(last))])
        sums = np.exp(logits_of(w, ids, heads)[0][0, len(last) - 1, :letters]).cumsum()
        seen.append(int(np.searchsorted(sums, rng.random() * sums[-1])))
    return seen
