"""Interleaved pipeline: each rank holds several stages, so it waits less and sends more.

    chunk a: w0, w1; chunk b: w2, w3          rank 0     rank 1     SBP
    w0         (4, 8)                         whole      nothing    B
    w1         (8, 8)                         nothing    whole      B
    w2         (8, 8)                         whole      nothing    B
    w3         (8, 4)                         nothing    whole      B

With v chunks stage k is on rank k modulo n. A micro-batch visits each rank v times, for 1/v of the work each time, and
its first visit to the last rank comes v times earlier: of n ranks and m micro-batches each waits (n-1)/(vm+n-1) of the
time, in 1F1B (n-1)/(m+n-1). The order is the paper's: n micro-batches visit chunk after chunk, then the next n; rank
k begins with 2 (n-k-1) + (v-1) n forward calls, then takes forward and backward in turn. m is a multiple of n.
In eager mode the order of the calls is the schedule: see pipeline_schedules.py.
Why:   the last rank begins after 1/v of the others' layers, so all wait v times less at both ends of a step.
Moves: forward each stage's output, backward its gradient: (batch, hidden) at nv-1 borders, where 1F1B has n-1.
Run:   ./launch.sh recipes/pipelines/interleaved_pipeline.py [--chunks 2] [--rounds 2]
Use it when few micro-batches make the ranks wait, and links are fast. It holds more than 1F1B, on rank 0 only if m > n.
Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training", arXiv:2104.04473, section 2.2.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class Stage(flow.nn.Module):
    def __init__(self, w, ranks, last):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))
        self.ranks = ranks
        self.last = last

    def forward(self, x):
        out = flow.matmul(x, self.w)
        return out if self.last else flow.relu(out)


def interleaved(n, micro_batches, chunks):
    """A row for each rank: its calls, (operation, stage, micro-batch), in its order."""
    table = []
    for rank in range(n):
        forward, backward = [], []
        for first in range(0, micro_batches, n):  # n micro-batches visit all chunks before the next n begin
            group = range(first, first + n)
            forward += [("F", chunk * n + rank, m) for chunk in range(chunks) for m in group]
            backward += [("B", chunk * n + rank, m) for chunk in reversed(range(chunks)) for m in group]
        warm_up = 2 * (n - rank - 1) + (chunks - 1) * n
        row = forward[:warm_up]
        for i, call in enumerate(backward):
            row += forward[warm_up + i :][:1]
            row.append(call)
        table.append(row)
    return table


def in_turns(table):
    """What the ranks do at the same time, turn by turn: the call of each rank, or None where it waits.

    B takes two turns, "b" and "B". Raises ValueError if no rank can continue.
    """
    last = max(k for row in table for _, k, _ in row)
    rows = [[(half, k, m) for op, k, m in row for half in ("bB" if op == "B" else op)] for row in table]
    done, turns = set(), []
    while any(rows):
        turn = [row[0] if row and needs(row[0], last) <= done else None for row in rows]
        if not any(turn):
            raise ValueError("each rank waits for a call that comes later")
        for row, call in zip(rows, turn):
            if call:
                row.pop(0)
                done.add(call)
        turns.append(turn)
    return turns


def needs(call, last):
    """The calls that must end before this one. last: the number of the last stage."""
    op, k, m = call
    if op == "F":
        return {("F", k - 1, m)} if k else set()
    if op == "B":
        return {("b", k, m)}
    return {("F", k, m)} | ({("B", k + 1, m)} if k < last else set())


def run_step(model, table, x, y):
    """Make the calls of a table on lists of micro-batches; returns the loss. The gradients of the weights add up."""
    last, elements = len(model) - 1, sum(part.nelement() for part in y)
    inputs = {(0, m): part for m, part in enumerate(x)}
    outputs, out_grads, loss = {}, {}, 0
    for turn in in_turns(table):
        calls = [call for call in turn if call]
        for op, k, m in calls:
            if op == "F":
                outputs[k, m] = model[k](inputs[k, m])
                if k == last:
                    outputs[k, m] = flow.nn.functional.mse_loss(outputs[k, m], y[m], reduction="sum") / elements
                    loss = loss + outputs[k, m].detach()
            if op == "B":
                outputs.pop((k, m)).backward(out_grads.pop((k, m), None))
        for op, k, m in calls:  # a rank receives after its own call, which then need not wait
            if op == "F" and k < last:
                inputs[k + 1, m] = outputs[k, m].detach().to_global(placement=model[k + 1].ranks).requires_grad_()
            if op == "B" and k > 0:
                out_grads[k - 1, m] = inputs.pop((k, m)).grad.to_global(placement=model[k - 1].ranks)
    return loss


def placements(device, n, chunks=2):
    """The ranks of each stage: stage k is on rank k modulo n."""
    return [flow.placement(device, [stage % n]) for stage in range(n * chunks)]


def train(stages, chunks=2, steps=3, rounds=1, batch=24, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement for each stage; returns the model and the loss of each step."""
    features = [in_features, *[hidden_size] * (len(stages) - 1), out_features]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(features, features[1:])]

    micro_batches = rounds * len(stages) // chunks
    x = [flow.tensor(part, placement=stages[0], sbp=flow.sbp.broadcast) for part in np.array_split(x, micro_batches)]
    y = [flow.tensor(part, placement=stages[-1], sbp=flow.sbp.broadcast) for part in np.array_split(y, micro_batches)]
    last = len(stages) - 1
    model = flow.nn.Sequential(*[Stage(w, stages[k], last=k == last) for k, w in enumerate(weights)])
    table = interleaved(len(stages) // chunks, micro_batches, chunks)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = run_step(model, table, x, y)
        optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--chunks", type=int, choices=[2, 3, 4], default=2, help="stages of each rank")
    parser.add_argument("--rounds", type=int, choices=[1, 2, 3], default=1, help="micro-batches for each rank")
    args = parser.parse_args()

    n, chunks, rounds = flow.env.get_world_size(), args.chunks, args.rounds
    rank = flow.env.get_rank()
    model, losses = train(placements(args.device, n, chunks), chunks, rounds=rounds)
    here = [f"w{k}" for k, stage in enumerate(model) if stage.w.to_local().nelement()]
    print(f"rank {rank} holds {', '.join(here)}")
    one_device = [flow.placement(args.device, [0])] * (n * chunks)  # the same code on a single device
    _, alone = train(one_device, chunks, rounds=rounds)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if rank == 0:
        m = rounds * n
        turns = in_turns(interleaved(n, m, chunks))
        for k in range(n):
            calls = [turn[k] for turn in turns]
            names = [f"{call[0]}{call[2]}{'abcd'[call[1] // n]}" if call else ".  " for call in calls]
            held = np.cumsum([(op == "F") - (op == "B") for op, _, _ in filter(None, calls)]).max() / chunks
            print(f"rank {k}: {' '.join(names)}  waits {calls.count(None) / len(calls):.0%}, holds {held:g}")
        print(f"F0a is forward of micro-batch 0 in chunk a; 1F1B waits {(n - 1) / (m + n - 1):.0%}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
