"""Programs that `launch.sh verify` must find right, and with --wrong must find wrong: tests of it run them.

    python -m oneflow.distributed.launch --nproc_per_node 2 tests/programs_to_verify.py divided_by_ranks [--wrong]

Each function is a program of its own; `wrong` is a mistake after public reports, or an entry of silently-wrong.md.
"""

import sys

import numpy as np
import oneflow as flow
from oneflow import nn

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
ROWS = S(0)
cross_entropy = nn.functional.cross_entropy


def everywhere():
    return flow.placement.all("cpu")


def ranks():
    return everywhere().ranks.size


class MLP(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = norm
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        return self.down(flow.relu(self.norm(self.up(x))))


def model(norm=None, seed=0):
    flow.manual_seed(seed)
    return MLP(norm or nn.Identity()).to_global(placement=everywhere(), sbp=B)


def batch(rng, rows=8, sbp=ROWS):
    x = flow.tensor(rng.standard_normal((rows, 8), dtype=np.float32), placement=everywhere(), sbp=sbp)
    return x, flow.tensor(rng.integers(4, size=rows), placement=everywhere(), sbp=sbp)


def train(model, loss_of, before_update=lambda: None, lr=0.1, optimizer=flow.optim.SGD, data=batch):
    """Four steps; loss_of(x, y) -> the loss."""
    optimizer, rng = optimizer(model.parameters(), lr=lr), np.random.default_rng(0)
    for _ in range(4):
        loss = loss_of(*data(rng))
        optimizer.zero_grad()
        loss.backward()
        before_update()
        optimizer.step()
        loss.numpy()


def tensor_parallel(layer_bias=B):
    """An MLP whose first layer is column parallel, its second row parallel."""
    mlp = model()
    for layer, weight, bias in ((mlp.up, S(0), S(0)), (mlp.down, S(1), layer_bias)):
        layer.weight.data = layer.weight.data.to_global(sbp=weight)
        layer.bias.data = layer.bias.data.to_global(sbp=bias)
    return mlp


def in_b(rng):
    return batch(rng, sbp=B)


def divided_by_ranks(wrong):
    mlp = model()
    train(mlp, lambda x, y: cross_entropy(mlp(x), y) / (flow.env.get_world_size() if wrong else 1))


def divided_by_own_rows(wrong):
    """The sum over all rows, divided by the rows of one rank."""
    mlp = model()

    def loss(x, y):
        rows = x.to_local().shape[0] if wrong else x.shape[0]
        return cross_entropy(mlp(x), y, reduction="sum") / rows

    train(mlp, loss)


def mean_of_means(wrong):
    """Each rank averages over its own valid tokens, and the averages are averaged."""
    mlp = model()

    def loss(x, y):
        losses, valid = cross_entropy(mlp(x), y, reduction="none"), (y != 0).float()
        if not wrong:
            return (losses * valid).sum() / valid.sum()
        own = (losses.to_local() * valid.to_local()).sum() / valid.to_local().sum()
        return own.to_global(placement=everywhere(), sbp=P) / flow.env.get_world_size()

    train(mlp, loss)


def same_batch_on_all_ranks(wrong):
    mlp = model()

    def data(rng):
        x, y = rng.standard_normal((8, 8), dtype=np.float32), rng.integers(4, size=8)
        own = slice(None) if wrong else slice(*(8 // ranks() * (flow.env.get_rank() + i) for i in (0, 1)))
        return [flow.tensor(array[own]).to_global(placement=everywhere(), sbp=S(0)) for array in (x, y)]

    train(mlp, lambda x, y: cross_entropy(mlp(x), y), data=data)


def batch_norm(wrong):
    mlp = model(nn.BatchNorm1d(16) if wrong else nn.LayerNorm(16))
    train(mlp, lambda x, y: cross_entropy(mlp(x), y))


def shuffled_in_b(wrong):
    flow.manual_seed(1)
    mlp = model(seed=flow.env.get_rank() if wrong else 0)

    def loss(x, y):
        order = flow.randperm(8, placement=everywhere(), sbp=B)
        return cross_entropy(mlp(x.to_global(sbp=B)[order]), y.to_global(sbp=B)[order])

    train(mlp, loss)


def cast_of_a_sum(wrong):
    """The sum of the losses as a whole number: each rank's part loses its fraction."""
    mlp = model()
    with flow.no_grad():
        x, y = batch(np.random.default_rng(0))
        total = cross_entropy(mlp(x), y, reduction="sum")
        (total if wrong else total.to_global(sbp=B)).to(flow.int64).numpy()


def clipped_by_a_norm(wrong, norm_of=lambda gradient: flow.linalg.norm(gradient)):
    """Clipping by a norm that is that of shards."""
    mlp = tensor_parallel()

    def clip():
        gradients = [parameter.grad for parameter in mlp.parameters()]
        if not wrong:
            nn.utils.clip_grad_norm_(mlp.parameters(), 0.1)
            return
        norm = flow.sqrt(sum(norm_of(gradient).to_global(sbp=B) ** 2 for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(0.1 / norm.numpy().item())

    train(mlp, lambda x, y: cross_entropy(mlp(x), y), clip, data=in_b)


def clipped_by_own_norm(wrong):
    """Clipping by the norm of what this rank holds."""
    mlp = tensor_parallel()

    def clip():
        parts = [parameter.grad for parameter in mlp.parameters()]
        parts = [part.to_local() for part in parts] if wrong else parts
        norm = sum((part * part).sum().numpy().item() for part in parts) ** 0.5
        for parameter in mlp.parameters():
            parameter.grad.mul_(0.1 / norm)

    train(mlp, lambda x, y: cross_entropy(mlp(x), y), clip, data=in_b)


def bias_in_p(wrong):
    mlp = tensor_parallel(layer_bias=P if wrong else B)
    train(mlp, lambda x, y: cross_entropy(mlp(x), y), data=in_b)


class RowParallel(nn.Module):
    """A row-parallel layer by hand. With the mistake each rank adds the bias to its own addend."""

    def __init__(self, linear, wrong):
        super().__init__()
        self.weight, self.bias, self.wrong = linear.weight, linear.bias, wrong

    def forward(self, x):
        out = flow.matmul(x, self.weight, transpose_b=True)
        if self.wrong:
            return (out.to_local() + self.bias.to_local()).to_global(placement=everywhere(), sbp=P)
        return out.to_global(sbp=B) + self.bias


def bias_of_each_rank(wrong):
    mlp = tensor_parallel()
    flow.nn.init.normal_(mlp.down.bias)
    mlp.down = RowParallel(mlp.down, wrong)
    train(mlp, lambda x, y: cross_entropy(mlp(x), y), data=in_b)


def rows_of_an_embedding(wrong):
    """weight[ids] in place of nn.Embedding."""
    flow.manual_seed(0)
    table = nn.Embedding(10, 4).to_global(placement=everywhere(), sbp=B)

    def data(rng):
        return (flow.tensor(rng.integers(10, size=8), placement=everywhere(), sbp=S(0)),)

    train(table, lambda ids: ((table.weight[ids] if wrong else table(ids)) ** 2).sum(), data=data)


def column_of_a_mesh(wrong):
    """x[i] in place of gather, whose gradient arrives in P: no copies differ, but the gradient is not all of it."""
    rows = flow.placement("cpu", [[rank] for rank in range(ranks())])
    flow.manual_seed(0)
    table = nn.Linear(3, 8, bias=False).to_global(placement=rows, sbp=(B, B))
    table.weight.data = table.weight.data.to_global(sbp=(S(0), B))

    def data(rng):
        ids = flow.tensor(rng.integers(8, size=4), placement=rows, sbp=(B, B))
        x = flow.tensor(rng.standard_normal((4, 6), dtype=np.float32), placement=rows, sbp=(S(1), B))
        return ids, x, flow.tensor(rng.standard_normal((6, 1), dtype=np.float32), placement=rows, sbp=(S(0), B))

    def loss(ids, x, w):
        column = table.weight[:, 0]
        picked = column[ids] if wrong else flow._C.gather(column, ids, 0)
        return (picked.to_global(sbp=(B, B)) * flow.matmul(x, w)[:, 0]).sum()

    train(table, loss, data=data)


def rotated(x, wrong):
    """Interleaved pairs (a, b) -> (-b, a) of the last dimension."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    if wrong:
        return flow.stack([-b, a], dim=-1).reshape(*x.shape)
    return flow.cat([(-b).unsqueeze(-1), a.unsqueeze(-1)], dim=-1).reshape(*x.shape)


def stacked(wrong):
    """The gradient of stack of a split tensor."""
    mlp = tensor_parallel()
    train(mlp, lambda x, y: cross_entropy(mlp.down(rotated(mlp.up(x), wrong)), y), data=in_b)


def maximum_of_p(wrong):
    """The gradient of logsumexp of logits in P; it shows from 3 ranks on."""
    flow.manual_seed(0)
    head = nn.Linear(12, 32, bias=False).to_global(placement=everywhere(), sbp=B)
    head.weight.data = head.weight.data.to_global(sbp=S(1))

    def data(rng):
        return (flow.tensor(rng.standard_normal((32, 12), dtype=np.float32), placement=everywhere(), sbp=S(1)),)

    def loss(x):
        logits = head(x)
        return flow.logsumexp(logits if wrong else logits.to_global(sbp=B), 1).sum()

    train(head, loss, data=data)


def labels_without_offset(wrong):
    """Row i of a similarity matrix belongs to item i of the batch; each rank numbers its own rows from 0."""
    mlp = model()

    def loss(x, _):
        own = 8 // ranks()
        first = 0 if wrong else own * flow.env.get_rank()
        labels = flow.arange(first, first + own).to_global(placement=x.placement, sbp=S(0))
        out = mlp(x)
        return cross_entropy(flow.matmul(out, out.to_global(sbp=B), transpose_b=True), labels)

    train(mlp, loss)


def optimizer_before_layout(wrong):
    """model.to_global makes new parameters, which an optimizer that was made before it does not have."""
    flow.manual_seed(0)
    mlp = MLP(nn.Identity())
    if not wrong:
        mlp.to_global(placement=everywhere(), sbp=B)
    optimizer = flow.optim.SGD(mlp.parameters(), lr=0.1)
    mlp.to_global(placement=everywhere(), sbp=B)
    rng = np.random.default_rng(0)
    for _ in range(4):
        x, y = batch(rng)
        optimizer.zero_grad()
        cross_entropy(mlp(x), y).backward()
        optimizer.step()


class Graph(nn.Graph):
    def __init__(self, mlp, optimizer, ignored, micro_batches):
        super().__init__()
        self.mlp, self.ignored = mlp, ignored
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = cross_entropy(self.mlp(x), y, ignore_index=self.ignored)
        loss.backward()
        return loss


def padded_micro_batches(wrong):
    """A micro-batch of a graph is a part of each rank's rows, and padding makes their numbers of tokens unequal."""
    mlp = model()
    graph = Graph(mlp, flow.optim.SGD(mlp.parameters(), lr=0.1), 0 if wrong else -100, 2)
    y = np.array([1, 2, 0, 0, 1, 2, 1, 2])  # 0 is padding
    for _ in range(3):
        x = flow.tensor(
            np.random.default_rng(0).standard_normal((8, 8), dtype=np.float32), placement=everywhere(), sbp=S(0)
        )
        graph(x, flow.tensor(y, placement=everywhere(), sbp=S(0))).numpy()


def learning_rate_in_a_graph(wrong):
    mlp = model()
    optimizer = flow.optim.SGD(mlp.parameters(), lr=0.1 / (flow.env.get_world_size() if wrong else 1))
    graph = Graph(mlp, optimizer, -100, 1)
    rng = np.random.default_rng(0)
    for _ in range(3):
        graph(*batch(rng)).numpy()


if __name__ == "__main__":
    globals()[sys.argv[1]]("--wrong" in sys.argv[2:])
