"""The attention of a block of gpt.py on 2 x 2 ranks as a picture: columns, heads, rows, and the sum of their parts."""

from harness.measure.sbp import Layout, split_dim
from harness.measure.steps import bytes_of
from harness.report import equation
from harness.report.forward import Move, Tensor
from harness.report.svg import Picture

TITLE = "Attention on 2 × 2 ranks: batch along axis 0, heads along axis 1."
SIZES = {  # first so that each number is drawn, then so that what was sent is the content of tensors
    "small": {"batch_size": 4, "seq_len": 2, "hidden_size": 4, "num_heads": 2},
    "large": {"batch_size": 16, "seq_len": 64, "hidden_size": 96, "num_heads": 4},
}
for sizes in SIZES.values():
    sizes.update(graph=False, data=2, tensor=2, num_layers=1, steps=1)
CELL = 8


class Activation(Tensor):
    """A tensor (seq_len, batch, hidden), of which one token is drawn: (batch, hidden)."""

    def __init__(self, name, colour, one):
        self.whole = one["sbp"]
        dims = [sbp if split_dim(sbp) is None else f"S({split_dim(sbp) - 1})" for sbp in self.whole.split(", ")]
        super().__init__(name, colour, one["shape"][1:], Layout(", ".join(dims), one["ranks"]))

    @property
    def sbp(self):
        return self.whole

    @property
    def shape_in_words(self):
        return f"(s, {', '.join(map(str, self.shape))})"


def picture(small, large):
    """small, large: what `measure_script` said on each rank at SIZES."""
    steps, drawn = small[0]["steps"], Picture(TITLE)
    first, last = (
        next(k for k, step in enumerate(steps) if step["what"] == "matmul" and f'self.weight("{name}")' in step["text"])
        for name in ("qkv", "project")
    )
    x, qkv, heads = three(steps[first], "x", "qkv", "q k v")
    drawn.heading("columns: each rank makes q, k and v of its heads")
    equation.product(drawn, [x, qkv, heads], CELL)
    moved = max(result["steps"][k]["sent"] for result in large for k in range(first, last + 1))
    assert moved < 0.01 * bytes_of(large[0]["steps"][last]["outputs"][0]), moved
    drawn.heading("heads: softmax(q @ k.T + mask) @ v on each rank")
    drawn.lines(0, "nothing moves, neither for the columns nor for the heads", fill="move")
    drawn.down += 6
    values, project, partial = three(steps[last], "values", "project", "partial")
    drawn.heading("rows: each rank has one part of the sum")
    where = equation.product(drawn, [values, project, partial], CELL)
    move = next(k for k in range(last, len(steps)) if steps[k]["what"] == "to_global")
    sent = [result["steps"][move]["sent"] / bytes_of(large[0]["steps"][move]["inputs"][0]) for result in large]
    summed = Activation("summed", "out", steps[move]["outputs"][0])
    equation.meshes(drawn, [Move(partial, summed, sent)], where, CELL)
    words = "filled: what the rank holds; dashed: the whole tensor; striped: one part of a sum"
    drawn.lines(0, f"{words}; mesh: axis 0 runs down, axis 1 across")
    drawn.lines(0, "x: the normed residual, to which summed is added; s: the letters of a text, of which one is drawn")
    return drawn


def three(step, *names):
    """The tensors of a matmul of an activation and a weight."""
    x, w = step["inputs"]
    return (
        Activation(names[0], "x" if names[0] == "x" else "out", x),
        Tensor(names[1], "w0" if names[1] == "qkv" else "w1", w["shape"], Layout(w["sbp"], w["ranks"])),
        Activation(names[2], "out" if "P" not in step["outputs"][0]["sbp"] else "partial", step["outputs"][0]),
    )
