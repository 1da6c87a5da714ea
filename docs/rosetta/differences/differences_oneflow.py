"""Where OneFlow, PyTorch and JAX differ in meaning: questions to OneFlow.

Run:   ./launch.sh -n 2 docs/rosetta/differences/differences_oneflow.py
The same of PyTorch and JAX: differences_pytorch.py, differences_jax.py.
"""

import pathlib
import tempfile

import numpy as np
import oneflow as flow

B, S = flow.sbp.broadcast, flow.sbp.split
RANK = flow.env.get_rank()
RANKS = flow.placement.all("cpu")


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


def tensor(array, sbp):
    return flow.tensor(np.array(array, dtype=np.float32), placement=RANKS, sbp=sbp)


def to_local_of_a_replica():
    """Each rank uses a replicated weight for its own row: the gradients must be added up."""
    w = tensor([1.0, 1.0], B).requires_grad_()
    x = np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)  # gradient of the sum over both rows: [4, 6]
    (flow.tensor(x[RANK]) * w.to_local()).sum().backward()
    say("to_local, a row each:", f"gradient {w.grad.to_local().tolist()}")
    w = tensor([1.0, 1.0], B).requires_grad_()
    (flow.tensor(x[0]) * w.to_local()).sum().backward()  # the gradient of the sum is [1, 2]
    say("to_local, the same row:", f"gradient {w.grad.to_local().tolist()}")


def to_local_of_a_partial_sum():
    x, w = tensor([[1.0, 2.0], [3.0, 4.0]], S(1)), tensor([[1.0], [1.0]], S(0)).requires_grad_()
    out = flow.matmul(x, w)  # P
    out.to_local().sum().backward()
    gradient = w.grad.to_global(sbp=B).to_local().tolist()
    say("to_local of a partial sum:", f"{out.to_local().tolist()} of {out.numpy().tolist()}, gradient {gradient}")


def implicit_conversion():
    a, b = tensor(np.ones((4, 4)), S(0)), tensor(np.ones((4, 4)), S(1))
    say("rows + columns:", (a + b).sbp[0])
    try:
        a + flow.ones(4, 4)
    except RuntimeError as error:
        say("rows + a local tensor:", type(error).__name__)


def uneven_rows():
    x = tensor(np.arange(5), S(0))
    mean = x.mean()
    value = mean.numpy()  # collective
    say("5 rows on 2:", f"{x.to_local().numel()} on rank 0, mean {value}, {mean.sbp[0]}")


def gradient_of_a_replica():
    w = tensor(np.ones((4, 2)), B).requires_grad_()
    x = tensor(np.ones((2, 4)), S(0))
    flow.matmul(x, w).sum().backward()
    say("gradient of a replicated weight:", w.grad.sbp[0])


def loss_of_the_whole_batch():
    """Each row of q needs all rows of v, as in a contrastive loss: the gradient of v is the mean of q, 2."""
    q = tensor([1.0, 3.0], S(0))
    for grad_sbp in (None, S(0)):
        v = tensor([2.0, 5.0], S(0)).requires_grad_()
        loss = (q * v.to_global(sbp=B, grad_sbp=grad_sbp).sum()).mean()
        loss.backward()
        say("loss of the whole batch:", f"grad_sbp={grad_sbp}, gradient {v.grad.numpy().tolist()}")


def dropout():
    flow.manual_seed(0)
    kept = flow.nn.functional.dropout(tensor(np.ones(64), S(0)), 0.5).to_global(sbp=B).to_local().numpy() > 0
    say("dropout:", "the same mask on both shards" if (kept[:32] == kept[32:]).all() else "different masks")


def checkpoint():
    w = tensor(np.arange(16).reshape(4, 4), S(0))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model") if RANK == 0 else "only rank 0 writes"
        flow.save({"w": w}, path, global_dst_rank=0)
        files = sorted(file.name for file in pathlib.Path(folder, "model").rglob("out")) if RANK == 0 else []
        loaded = flow.load(path, global_src_rank=0)["w"].to_global(placement=RANKS, sbp=S(1))
    say("checkpoint:", f"{len(files)} file with the whole of w, loaded as {tuple(loaded.to_local().shape)}")


def main():
    to_local_of_a_replica()
    to_local_of_a_partial_sum()
    implicit_conversion()
    uneven_rows()
    gradient_of_a_replica()
    loss_of_the_whole_batch()
    dropout()
    checkpoint()


if __name__ == "__main__":
    main()
