"""What docs/silently-wrong.md says and its examples do not show. Each function is called on the ranks of a pool."""

import numpy as np
import oneflow as flow
from oneflow import nn
from oneflow.nn.functional import embedding

B, S = flow.sbp.broadcast, flow.sbp.split


def indexing_on_a_mesh():
    """With the index in B and a split gradient, each rank adds up only what it picked; y[i] = x stores half."""
    mesh = flow.placement("cpu", [[0], [1]])
    i = flow.tensor([0, 1, 2, 3], placement=mesh, sbp=[B, B])
    mask = flow.ones(4, 4, placement=mesh, sbp=[B, B]) > 0
    for pick in (lambda x: x[i], lambda x: x[[0, 1, 2, 3]], lambda x: x[i, i], lambda x: x[mask]):
        x = flow.ones(4, 4, placement=mesh, sbp=[B, B], requires_grad=True)
        picked = pick(x)
        picked.to_global(sbp=[S(0), B]).sum().backward()
        assert x.grad.sbp == (B, B)
        assert x.grad.to_local().sum().item() == picked.numel() / 2  # and should be picked.numel()
    y = flow.zeros(4, placement=mesh, sbp=[B, B])
    y[i.to_global(sbp=[S(0), B])] = flow.ones(4, placement=mesh, sbp=[S(0), B])
    assert y.sbp == (B, B) and y.to_local().sum().item() == 2  # of 4


def what_to_write_in_place_of_indexing():
    """The table of the page, in each layout: values and gradients are those of numpy."""
    for gradient in (S(0), B):
        picks_are_right(flow.placement.all("cpu"), B, S(0), gradient)
        picks_are_right(flow.placement("cpu", [[0], [1]]), [B, B], [S(0), B], [gradient, B])
        picks_are_right(flow.placement("cpu", [[0, 1]]), [B, B], [B, S(0)], [B, gradient])


def picks_are_right(ranks, whole, split, gradient):
    """whole, split: SBPs of x; the indices are split. gradient: the SBP of the result, and so of its gradient."""
    values, i, j = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([1, 3, 0, 1]), np.array([2, 0, 1, 2])
    masked, order = values % 2 == 0, np.array([1, 3, 0, 2])
    rows, columns, mask, places = (flow.tensor(a, placement=ranks, sbp=split) for a in (i, j, masked, order))
    fixes = [
        (lambda x: flow.index_select(x, 0, rows), lambda x: x[i]),
        (lambda x: flow._C.gather(x, rows.reshape(2, 2), 0), lambda x: x[i.reshape(2, 2)]),
        (lambda x: embedding(rows, x), lambda x: x[i]),
        (lambda x: flow.index_select(x, 1, columns), lambda x: x[:, j]),
        (lambda x: flow._C.gather(x.reshape(-1), rows * x.shape[1] + columns, 0), lambda x: x[i, j]),
        (lambda x: flow.gather(x, 1, columns.unsqueeze(1)).squeeze(1), lambda x: x[np.arange(4), j]),
        (lambda x: flow.where(mask, x, flow.zeros_like(x)), lambda x: x * masked),
        (lambda x: flow.index_select(x, 0, flow.argwhere(mask[:, 0]).squeeze(1)), lambda x: x[masked[:, 0]]),
        (
            lambda x: flow.scatter(flow.zeros_like(x), 0, places.unsqueeze(1).expand(*x.shape), x),
            lambda x: x[np.argsort(order)],
        ),
    ]
    for number, (pick, expected) in enumerate(fixes):
        for sbp in (whole, split):
            x = flow.tensor(values, placement=ranks, sbp=sbp, requires_grad=True)
            picked = pick(x)
            assert picked.numpy().tolist() == expected(values).tolist(), number
            (picked.to_global(sbp=gradient) ** 2).sum().backward()
            units = np.eye(12, dtype=np.float32).reshape(12, 4, 3)  # each element of x alone
            grad = [(2 * expected(values) * expected(unit)).sum() for unit in units]
            assert x.grad.numpy().reshape(-1).tolist() == grad, number


def norms():
    """That of a split tensor of one dimension is a sum of norms, unless it needs a gradient."""
    values, ranks = np.arange(16, dtype=np.float32), flow.placement.all("cpu")
    t = flow.tensor(values, placement=ranks, sbp=S(0))
    halves = np.linalg.norm(values[:8]) + np.linalg.norm(values[8:])
    found = [t.norm(), flow.linalg.norm(t), flow.linalg.vector_norm(t)]
    found += [t.norm(dim=0), flow.linalg.norm(t, dim=0), flow.linalg.vector_norm(t, dim=0)]
    assert np.allclose([norm.numpy() for norm in found], halves)
    assert np.isclose(t.requires_grad_().norm().item(), np.linalg.norm(values))


def dropout_with_a_seed():
    """Each layer draws the same mask, whatever flow.manual_seed has set; of local tensors, each rank too."""
    ranks = flow.placement.all("cpu")
    x = flow.ones(8, 64, placement=ranks, sbp=S(0))
    out = nn.Dropout(0.5)(x).numpy()
    flow.manual_seed(1)
    assert (nn.Dropout(0.5)(x).numpy() == out).all()
    own = nn.Dropout(0.5)(flow.ones(8, 64))
    assert (own.to_global(ranks, B).numpy() == own.numpy()).all()  # B is rank 0's


def rand_with_different_seeds():
    """A tensor in B from flow.rand is the same on all ranks, though their seeds differ."""
    ranks = flow.placement.all("cpu")
    flow.manual_seed(flow.env.get_rank())
    own = flow.rand(1000, placement=ranks, sbp=B).to_local()
    assert (own.to_global(ranks, B).numpy() == own.numpy()).all()


def running_mean():
    """Labelled B, that of BatchNorm is each rank's own."""
    rows, ranks = np.array([[0], [1], [2], [30]], np.float32), flow.placement.all("cpu")
    norm = nn.BatchNorm1d(1).to_global(ranks, B)
    norm(flow.tensor(rows, placement=ranks, sbp=S(0)))
    assert norm.running_mean.sbp == (B,)
    own = np.array_split(rows, 2)[flow.env.get_rank()].mean()
    assert np.isclose(norm.running_mean.to_local().item(), 0.1 * own)  # momentum is 0.1
