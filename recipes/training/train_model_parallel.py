"""Train model parallel: columns, then rows; one all-reduce each way.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0         rank 1         SBP
    x          (8, 4)                         whole          whole          B
    y          (8, 4)                         whole          whole          B
    w0         (4, 8)                         columns 0-3    columns 4-7    S(1)
    w1         (8, 4)                         rows 0-3       rows 4-7       S(0)
    w0 grad    (4, 8)                         columns 0-3    columns 4-7    S(1)
    w1 grad    (8, 4)                         rows 0-3       rows 4-7       S(0)
    x grad     (8, 4)                         whole          whole          B

x @ w0 and its relu are split by columns, as w1's rows need them. The product with w1 is a partial sum, and so is x's
gradient. The layer before this one needs it; the first layer of a network does not: input_gradient=False in run.

Moves: forward an all-reduce of out, 2 (n-1)/n x its bytes from each of n ranks; backward the same of x's gradient.
Run:   ./launch.sh recipes/training/train_model_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/train_model_parallel.py [--graph]
Use it when a layer does not fit on one device and links are fast: every layer sends its activations.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
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
        hidden = flow.relu(flow.matmul(x, self.w0))
        out = flow.matmul(hidden, self.w1).to_global(sbp=flow.sbp.broadcast)
        return flow.nn.functional.mse_loss(out, y)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, x, y):
        if x.requires_grad:
            x.retain_grad()  # an input of a graph is not a leaf: autograd would drop its gradient
        loss = self.module(x, y)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        x_grad = [x.grad.to_global(sbp=flow.sbp.broadcast)] if x.requires_grad else []  # a graph leaves it P
        return (loss, module.w0.grad, module.w1.grad, *x_grad)


def run(
    graph=False, device="cpu", seed=0, steps=3, input_gradient=True, batch=8, in_features=4, hidden=None, out_features=4
):
    """Some steps in float32; returns x, y, the weights before and after, gradients, optimizer state, and the losses."""
    hidden = hidden or max(8, flow.env.get_world_size())  # a column of w0 for each rank, at least
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    w0 = rng.standard_normal((in_features, hidden), dtype=np.float32)
    w1 = rng.standard_normal((hidden, out_features), dtype=np.float32)

    ranks = flow.placement(device, list(range(flow.env.get_world_size())))
    x = flow.tensor(x, placement=ranks, sbp=flow.sbp.broadcast, requires_grad=input_gradient)
    y = flow.tensor(y, placement=ranks, sbp=flow.sbp.broadcast)
    w0 = flow.tensor(w0, placement=ranks, sbp=flow.sbp.split(1))
    w1 = flow.tensor(w1, placement=ranks, sbp=flow.sbp.split(0))
    module = Network(w0, w1)
    update = flow.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            loss, *gradients = model(x, y)
        else:
            update.zero_grad(set_to_none=True)
            x.grad = None
            loss = model(x, y)
            loss.backward()
            update.step()
            gradients = [tensor.grad for tensor in (module.w0, module.w1, x) if tensor.requires_grad]
        losses.append(loss)

    tensors = {"x": x, "y": y, "w0": w0, "w1": w1, **dict(zip(("w0 grad", "w1 grad", "x grad"), gradients))}
    state = model.state_dict() if graph else update.state_dict()["state"]
    for i in (0, 1):
        tensors[f"w{i} momentum_buf"] = state[f"module.w{i}-momentum"] if graph else state[i]["momentum_buf"]
    return {**tensors, "new w0": module.w0, "new w1": module.w1, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    tensors = run(**vars(parser.parse_args()))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name, tensor in list(tensors.items())[:4]:  # x, y, w0, w1; a row for each rank: its local shape
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:5}{str(tuple(tensor.shape)):8}{tensor.sbp[0]!s:26}local shapes", *map(tuple, held.tolist()))

    x, y, *weights = (tensors[name].numpy() for name in ("x", "y", "w0", "w1"))  # collective: all ranks call it
    losses, momentum = tensors["losses"].numpy(), [0, 0]
    for loss in losses:  # SGD with momentum on a single device
        hidden = np.maximum(x @ weights[0], 0)
        error = hidden @ weights[1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        error *= 2 / error.size
        back = error @ weights[1].T * (hidden > 0)
        columns = np.array_split(range(len(weights[1])), len(held))  # of w0, on each rank
        terms = [back[:, own] @ weights[0][:, own].T for own in columns]  # of x's gradient
        for i, gradient in enumerate([x.T @ back, hidden.T @ error]):
            momentum[i] = 0.9 * momentum[i] + gradient
            weights[i] -= 0.1 * momentum[i]
    for name, value in zip(("new w0", "new w1", "x grad"), (*weights, sum(terms))):
        np.testing.assert_allclose(tensors[name].numpy(), value, rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        print("x grad[0, 0], summed over the ranks:", " + ".join(f"{term[0, 0]:.4f}" for term in terms))
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
