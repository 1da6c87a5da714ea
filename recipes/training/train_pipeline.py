"""Train a pipeline: micro-batches overlap the stages.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0     rank 1     SBP
    x          (8, 4)                         whole      nothing    B
    y          (8, 4)                         nothing    whole      B
    w0         (4, 8)                         whole      nothing    B
    w1         (8, 4)                         nothing    whole      B
    w0 grad    (4, 8)                         whole      nothing    B
    w1 grad    (8, 4)                         nothing    whole      B

With one batch, one stage works at a time. A graph cuts the batch into m micro-batches, and stage 0 takes the next while
stage 1 has the first: the n stages are idle for (n-1)/(m+n-1) of the time, and the weights come out the same. Eager
mode takes one micro-batch after the other through all stages: the same values, without overlap.

Moves: forward each stage's output, backward its gradient, (batch, hidden) between neighbours, whatever m is.
Run:   ./launch.sh recipes/training/train_pipeline.py [--graph] [--micro-batches 4]
       python -m oneflow.distributed.launch --nproc_per_node 2 recipes/training/train_pipeline.py [--graph]
Use it when there are many layers, or links are slow: it moves the least. Take m several times n.
Source: Y. Huang et al., "GPipe", arXiv:1811.06965.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 65)


class Stage(flow.nn.Module):
    def __init__(self, w, rank, last):
        super().__init__()
        self.rank, self.last = rank, last
        self.w = flow.nn.Parameter(flow.tensor(w, placement=rank, sbp=flow.sbp.broadcast))

    def forward(self, x):
        # without identity OneFlow 0.9.0 updates the weights wrongly when a graph accumulates gradients, silently
        out = flow.matmul(x.to_global(placement=self.rank), flow._C.identity(self.w))
        return out if self.last else flow.relu(out)


class TrainingGraph(flow.nn.Graph):
    def __init__(self, stages, optimizer, micro_batches):
        super().__init__()
        self.stages = stages
        for k, stage in enumerate(stages):
            self.stages[k].to(flow.nn.graph.GraphModule).set_stage(k, stage.rank)
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x, y):
        loss = flow.nn.functional.mse_loss(self.stages(x), y)
        loss.backward()  # in a graph this includes the mean over micro-batches and the update
        return loss


def run(graph=False, device="cpu", seed=0, steps=3, micro_batches=2, batch=8, in_features=4, hidden=8, out_features=4):
    """Some steps in float32; returns x, y, weights, gradients (eager), optimizer state, and losses."""
    rng, n = np.random.default_rng(seed), flow.env.get_world_size()
    widths = [in_features, *[hidden] * (n - 1), out_features]
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(widths, widths[1:])]

    ranks = [flow.placement(device, [rank]) for rank in range(n)]
    x = flow.tensor(x, placement=ranks[0], sbp=flow.sbp.broadcast)
    y = flow.tensor(y, placement=ranks[-1], sbp=flow.sbp.broadcast)
    stages = flow.nn.Sequential(*[Stage(w, rank, last=rank == ranks[-1]) for w, rank in zip(weights, ranks)])
    tensors = {"x": x, "y": y, **{f"w{k}": stage.w.detach().clone() for k, stage in enumerate(stages)}}
    update = flow.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
    model = TrainingGraph(stages, update, micro_batches) if graph else stages
    losses = []
    for _ in range(steps):
        if graph:
            loss = model(x, y).mean()  # of the m micro-batches
        else:
            update.zero_grad(set_to_none=True)
            parts = zip(x.chunk(micro_batches), y.chunk(micro_batches))
            loss = sum(flow.nn.functional.mse_loss(model(x_part), y_part) for x_part, y_part in parts) / micro_batches
            loss.backward()
            update.step()
        losses.append(loss)

    if not graph:
        tensors.update({f"w{k} grad": stage.w.grad for k, stage in enumerate(stages)})
    state = model.state_dict() if graph else update.state_dict()["state"]
    for k in range(n):
        tensors[f"w{k} momentum_buf"] = state[f"stages.{k}.w-momentum"] if graph else state[k]["momentum_buf"]
    return {**tensors, **{f"new w{k}": stage.w for k, stage in enumerate(stages)}, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--micro-batches", type=int, choices=[1, 2, 4, 8], default=2)
    args = parser.parse_args()
    tensors = run(**vars(args))

    n, m = flow.env.get_world_size(), args.micro_batches
    ranks = flow.placement("cpu", list(range(n)))
    for name, tensor in list(tensors.items())[: n + 2]:  # x, y, w0, w1, ...; a row for each rank: its local shape
        held = flow.tensor([list(tensor.to_local().shape)]).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()
        if flow.env.get_rank() == 0:
            print(f"{name:5}{str(tuple(tensor.shape)):8}{tensor.sbp[0]!s:24}local shapes", *map(tuple, held.tolist()))

    x, y, *weights = (tensor.numpy() for tensor in list(tensors.values())[: n + 2])  # collective: all ranks call it
    losses, momentum = tensors["losses"].numpy(), [0] * n
    for loss in losses:  # SGD with momentum, the whole batch on a single device
        inputs = [x]
        for w in weights[:-1]:
            inputs.append(np.maximum(inputs[-1] @ w, 0))
        error = inputs[-1] @ weights[-1] - y
        np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
        back = 2 / error.size * error
        for k in reversed(range(n)):
            momentum[k] = 0.9 * momentum[k] + inputs[k].T @ back
            back = back @ weights[k].T * (inputs[k] > 0)
            weights[k] -= 0.1 * momentum[k]
    for k in range(n):
        np.testing.assert_allclose(tensors[f"new w{k}"].numpy(), weights[k], rtol=1e-4, atol=1e-5)
    if flow.env.get_rank() == 0:
        idle = f"{(n - 1) / (m + n - 1):.0%} in a graph; in eager mode {(n - 1) / n:.0%}, as with m = 1"
        print(f"idle share of the stages, (n-1)/(m+n-1) with n = {n} and m = {m}: {idle}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
