"""Replicate, scatter, gather: nn.DataParallel step by step, then by SBP.

    --way steps                    rank 0      rank 1      SBP
    x                   (8,)       whole       nothing     B
    table               (27, 4)    whole       nothing     B
    scattered x         (8,)       rows 0-3    rows 4-7    S(0)
    replicated table    (27, 4)    whole       whole       B
    out                 (8, 27)    rows 0-3    rows 4-7    S(0)
    gathered out        (8, 27)    whole       nothing     B

x is a text, a number for each letter; out = table[x] @ w guesses the next one. w and its gradient move like table's.

Moves: from rank 0 n-1 copies of table and w, (n-1)/n of x and of out's gradient; to it n-1 gradients, (n-1)/n of out.
       Eager mode sends more: (n-1)/n from every rank, and an all-reduce. --way sbp: only an all-reduce of gradients.
Run:   ./launch.sh recipes/by_hand/replicate_scatter_gather.py [--graph] [--way steps|sbp]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/replicate_scatter_gather.py [--graph]
Use it to read code with nn.DataParallel; to train use --way sbp, x S(0) and weights B: no rank has more to do.
Source: PyTorch documentation, torch.nn.DataParallel.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
TEXT = "the quick brown fox jumps over the lazy dog "


class StepByStep(flow.nn.Module):
    def __init__(self, table, w, ranks):
        super().__init__()
        self.table = flow.nn.Parameter(table.clone())
        self.w = flow.nn.Parameter(w.clone())
        self.ranks = ranks

    def forward(self, x, y):
        x = x.to_global(placement=self.ranks, sbp=flow.sbp.split(0))  # scatter
        # without identity a graph aborts OneFlow 0.9.0 (register.cpp:75) when a parameter itself moves to other ranks
        table, w = flow._C.identity(self.table), flow._C.identity(self.w)
        table = table.to_global(placement=self.ranks, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.partial_sum)
        w = w.to_global(placement=self.ranks, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.partial_sum)  # replicate both
        out = flow.matmul(flow.nn.functional.embedding(x, table), w)  # each rank its own rows
        # without grad_sbp each rank gets the whole gradient of out, and runs backward for the whole batch
        gathered = out.to_global(placement=y.placement, sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.split(0))  # gather
        return flow.nn.functional.mse_loss(gathered, y), x, table, w, out, gathered


class BySBP(StepByStep):
    def forward(self, x, y):
        out = flow.matmul(flow.nn.functional.embedding(x, self.table), self.w)
        return (flow.nn.functional.mse_loss(out, y),)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, *between = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return loss, between, module.table.grad, module.w.grad


def run(graph=False, device="cpu", seed=0, steps=3, way="steps", batch=None, hidden=4):
    """Some steps of SGD; returns x, y, the weights, what moves in the last step, gradients, new weights, the losses."""
    batch = batch or max(8, flow.env.get_world_size())  # a letter for each rank, at least
    letters = np.resize([ALPHABET.index(letter) for letter in TEXT], batch + 1).astype(np.int32)  # again and again
    x, y = letters[:-1], np.eye(len(ALPHABET), dtype=np.float32)[letters[1:]]  # from each letter to the next
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((len(ALPHABET), hidden), dtype=np.float32)
    w = rng.standard_normal((hidden, len(ALPHABET)), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    home, split = (ranks, flow.sbp.split(0)) if way == "sbp" else (flow.placement(device, [0]), flow.sbp.broadcast)
    x, y = (flow.tensor(array, placement=home, sbp=split) for array in (x, y))
    table, w = (flow.tensor(array, placement=home, sbp=flow.sbp.broadcast) for array in (table, w))
    module = (BySBP if way == "sbp" else StepByStep)(table, w, ranks)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, between, table_grad, w_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            loss, *between = model(x, y)
            loss.backward()
            update.step()
            table_grad, w_grad = module.table.grad, module.w.grad
        losses.append(loss.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "table": table, "w": w}
    tensors.update(zip(("scattered x", "replicated table", "replicated w", "out", "gathered out"), between))
    tensors.update({"table grad": table_grad, "w grad": w_grad, "new table": module.table, "new w": module.w})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=["steps", "sbp"], default="steps", help="move tensors by hand, or give SBPs")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in list(tensors.items())[:-3]:  # a row for each rank: the shape of what it holds
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:17}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, y, table, w, losses = (tensors[name].numpy() for name in ("x", "y", "table", "w", "losses"))  # collective
    for loss in losses:  # SGD on a single device
        error = table[x] @ w - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        table, w = table - 0.1 * np.eye(len(ALPHABET))[x].T @ (error @ w.T), w - 0.1 * table[x].T @ error
    np.testing.assert_allclose(tensors["new table"].numpy(), table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tensors["new w"].numpy(), w, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
