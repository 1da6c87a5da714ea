"""Loss placement: on one rank with all outputs, or a part on each.

    --loss first                   rank 0      rank 1      SBP
    x                  (8, 4)      rows 0-3    rows 4-7    S(0)
    y                  (8, 4)      whole       nothing     B
    out                (8, 4)      rows 0-3    rows 4-7    S(0)
    out at the loss    (8, 4)      whole       nothing     B
    w0 grad            (4, 8)      whole       whole       B
    w1 grad            (8, 4)      whole       whole       B

out moves to where the labels y are. --loss first: all of y is on rank 0. --loss other: all of y is on the last rank,
which does nothing else. --loss each: y is split like out, and each rank's loss is a part of a partial sum, P.

Moves: first: (n-1)/n of out to rank 0, (n-1)/n of its gradient back; eager mode sends as much from each of n ranks.
       other: out and its gradient, once. each: neither. All: the all-reduce of train_data_parallel.py.
Run:   ./launch.sh recipes/by_hand/loss_placement.py [--graph] [--loss each|first|other]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/by_hand/loss_placement.py [--graph]
Use it to choose: take "each" unless the loss needs all outputs in one place, as a ranking of the whole batch does.
Source: OneFlow documentation, oneflow.Tensor.to_global (grad_sbp).
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Network(flow.nn.Module):
    def __init__(self, w0, w1):
        super().__init__()
        self.w0 = flow.nn.Parameter(w0.clone())
        self.w1 = flow.nn.Parameter(w1.clone())

    def forward(self, x, y):
        out = flow.matmul(flow.relu(flow.matmul(x, self.w0)), self.w1)
        # without grad_sbp each rank gets the whole gradient of out, and runs backward for the whole batch
        there = out.to_global(placement=y.placement, sbp=y.sbp, grad_sbp=flow.sbp.split(0))
        return flow.nn.functional.mse_loss(there, y), out, there


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss, out, there = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return loss, out, there, module.w0.grad, module.w1.grad


def run(graph=False, device="cpu", seed=0, steps=3, loss="first", batch=None, in_features=4, hidden=8, out_features=4):
    """Some steps of SGD; returns x, y, weights before and after, the last step's outputs and gradients, the losses."""
    n = flow.env.get_world_size()
    batch = batch or max(8, n)  # a row for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(n - 1 if loss == "other" else n)))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.split(0))
    if loss == "each":
        y = flow.tensor(y, placement=ranks, sbp=flow.sbp.split(0))
    else:
        y = flow.tensor(y, placement=flow.placement(device, [n - 1 if loss == "other" else 0]), sbp=flow.sbp.broadcast)
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.broadcast)
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.broadcast)
    module = Network(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            value, out, there, w0_grad, w1_grad = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            value, out, there = model(x, y)
            value.backward()
            update.step()
            w0_grad, w1_grad = module.w0.grad, module.w1.grad
        losses.append(value.to_global(sbp=flow.sbp.broadcast))

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, "out": out, "out at the loss": there}
    tensors.update({"w0 grad": w0_grad, "w1 grad": w1_grad, "new w0": module.w0, "new w1": module.w1})
    return {**tensors, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    words = "on each rank that has rows of x, on the first one, or on another one"
    parser.add_argument("--loss", choices=["each", "first", "other"], default="first", help=words)
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name in ("x", "y", "out", "out at the loss"):  # a row for each rank: the shape of what it holds
        tensor = tensors[name]
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:16}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, gradients = tensors["losses"].numpy(), [tensors[f"w{i} grad"].numpy() for i in (0, 1)]
    for loss in losses:  # SGD on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        expected = [x.T @ (error @ weights[1].T * (hidden > 0)), hidden.T @ error]
        weights = [w - 0.1 * gradient for w, gradient in zip(weights, expected)]
    for i in (0, 1):
        np.testing.assert_allclose(gradients[i], expected[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tensors[f"new w{i}"].numpy(), weights[i], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print(f"the loss is on ranks {tensors['losses'].placement.ranks.tolist()}")
        print("norm of the gradient of w0 and w1:", *(f"{np.linalg.norm(gradient):.4f}" for gradient in gradients))
        print(f"gradients and weights equal those on a single device, loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
