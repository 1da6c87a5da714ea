"""Pipeline schedules: the order of the calls is the schedule.

    loss = mean((relu(x @ w0) @ w1 - y)^2)    rank 0     rank 1     SBP
    x0         (2, 4)                         whole      nothing    B
    y0         (2, 4)                         nothing    whole      B
    w0         (4, 8)                         whole      nothing    B
    w1         (8, 4)                         nothing    whole      B

x0, y0: micro-batch 0 of 4. An eager rank runs its own calls in the order of the program and skips all others. So a
schedule is a table of calls, a row a rank: F forward, B backward. I and W are the halves of B. I, the gradient of the
input, is what the stage before waits for; zero bubble's paper calls it B. W, that of the weight, can come later. On n
ranks, with m >= n micro-batches, if F, I and W take a turn, B two, sending none, a rank waits this share of a step:
    gpipe          all F, then all B             (n-1)/(m+n-1)     holds m micro-batches, from F to B or W
    1f1b           F and B in turn               (n-1)/(m+n-1)     n-k on rank k
    zero_bubble    1f1b, with W in the pauses    (n-1)/(3m+n-1)    n, some of them between I and W
Why:   the stage before waits for I alone, so W can fill the turns in which a rank would wait.
Moves: forward each stage's output, backward its gradient, (batch, hidden) between neighbours, in any order.
Run:   ./launch.sh recipes/pipelines/pipeline_schedules.py [--schedule gpipe] [--table FILE] [--measure]
Use it to choose when a rank waits and what it holds. It needs eager mode; in an nn.Graph OneFlow chooses the order.
Source: GPipe, arXiv:1811.06965; 1F1B with a flush, arXiv:2006.09503; zero bubble, ZB-H1 in arXiv:2401.10241.
"""

import argparse
import pathlib
import re
import time

import numpy as np
import oneflow as flow

WORLD_SIZES = range(2, 9)  # numbers of ranks; launch.sh refuses others


class Stage(flow.nn.Module):
    """relu(x @ w), the last stage x @ w. `backward` computes the gradient of x alone, `weight_backward` that of w.

    A bias or a norm would be used as usual: backward computes its gradient at once, which costs little.
    """

    def __init__(self, w, ranks, last):
        super().__init__()
        self.w = flow.nn.Parameter(flow.tensor(w, placement=ranks, sbp=flow.sbp.broadcast))
        self.ranks = ranks
        self.last = last
        self.pending = {}  # micro-batch -> what the gradient of w needs

    def forward(self, x, micro_batch):
        def keep(grad):
            self.pending[micro_batch] = x.detach(), grad

        out = flow.matmul(x, self.w.detach())  # without detach, backward would compute the gradient of w too
        out.register_hook(keep)
        return out if self.last else flow.relu(out)

    def weight_backward(self, micro_batch):
        x, grad = self.pending.pop(micro_batch)
        w_grad = flow.matmul(x, grad, transpose_a=True)
        self.w.grad = w_grad if self.w.grad is None else self.w.grad + w_grad


def gpipe(n, micro_batches):
    """A row for each rank: its calls, (operation, stage, micro-batch), in its order."""
    return [[(op, k, m) for op in "FB" for m in range(micro_batches)] for k in range(n)]


def one_f_one_b(n, micro_batches):
    table = []
    for k in range(n):
        forward = [("F", k, m) for m in range(micro_batches)]
        row = forward[: n - 1 - k]  # until the first micro-batch comes back
        for m in range(micro_batches):
            row += forward[n - 1 - k + m :][:1]
            row.append(("B", k, m))
        table.append(row)
    return table


def zero_bubble(n, micro_batches):
    """1F1B in which stage k computes the gradient of its weight k micro-batches late."""
    table = []
    for k, row in enumerate(one_f_one_b(n, micro_batches)):
        calls = []
        for op, _, m in row:
            if op == "F":
                calls.append(("F", k, m))
            else:
                calls.append(("I", k, m))
                if m >= k:
                    calls.append(("W", k, m - k))
        calls += [("W", k, m) for m in range(max(micro_batches - k, 0), micro_batches)]
        table.append(calls)
    return table


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}


def read_table(text):
    """The table that a reader has written, a line for each rank, such as F0 F1 B0 B1; raises ValueError."""
    table = []
    for k, line in enumerate(text.strip().splitlines()):
        words = re.sub(r"\bb(\d+) +B\1\b", r"B\1", line).split()  # main prints B in two turns, and pauses as dots
        words = [word for word in words if word != "."]
        for word in words:
            if not re.fullmatch("[FBIW][0-9]{1,9}", word):
                raise ValueError(f"line {k + 1}: {word[:20]!r} is not F, B, I or W and a number, such as F0")
        table.append([(word[0], k, int(word[1:])) for word in words])
    return table


def check(table, n, micro_batches):
    """Raises ValueError if a rank lacks a call, repeats one, has another's, or waits for a call that waits for it."""
    if len(table) != n:
        raise ValueError(f"it takes a line for each of the {n} ranks, not {len(table)}")
    for k, row in enumerate(table):
        operations = {}
        for op, stage, m in row:
            if stage != k:
                raise ValueError(f"rank {k} has {op}{m} of stage {stage}; its stage is {k}")
            operations.setdefault(m, []).append(op)
        for m in (*range(min(micro_batches, len(row) + 1)), *operations):  # their number may be huge
            calls = " ".join(operations.get(m, []))
            if m >= micro_batches or calls not in ("F B", "F I W"):
                words = f"rank {k} has {calls or 'nothing'} for micro-batch {m} of {micro_batches}"
                raise ValueError(f"{words}; it takes F B or F I W, where I is the gradient of the input")
    in_turns(table)


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
            stuck = ", ".join(f"{row[0][0].upper()}{row[0][2]} of rank {rank}" for rank, row in enumerate(rows) if row)
            raise ValueError(f"{stuck}: each of these waits for a call that comes later")
        for row, call in zip(rows, turn):
            if call:
                row.pop(0)
                done.add(call)
        done.update(("I", k, m) for op, k, m in filter(None, turn) if op == "B")  # B includes I
        turns.append(turn)
    return turns


def needs(call, last):
    """The calls that must end before this one. last: the number of the last stage."""
    op, k, m = call
    if op == "F":
        return {("F", k - 1, m)} if k else set()
    if op in "WB":
        return {("I" if op == "W" else "b", k, m)}
    return {("F", k, m)} | ({("I", k + 1, m)} if k < last else set())


def run_step(model, table, x, y):
    """Make the calls of a table on lists of micro-batches; returns the loss. The gradients of the weights add up."""
    last, elements = len(model) - 1, sum(part.nelement() for part in y)
    inputs = {(0, m): part.detach().requires_grad_() for m, part in enumerate(x)}  # else no hook runs on stage 0
    outputs, out_grads, loss = {}, {}, 0
    for turn in in_turns(table):
        calls = [call for call in turn if call]
        for op, k, m in calls:
            if op == "F":
                outputs[k, m] = model[k](inputs[k, m], m)
                if k == last:
                    outputs[k, m] = flow.nn.functional.mse_loss(outputs[k, m], y[m], reduction="sum") / elements
                    loss = loss + outputs[k, m].detach()
            if op in "BI":
                outputs.pop((k, m)).backward(out_grads.pop((k, m), None))
            if op in "BW":
                model[k].weight_backward(m)
        for op, k, m in calls:  # a rank receives after its own call, which then need not wait
            if op == "F" and k < last:
                inputs[k + 1, m] = outputs[k, m].detach().to_global(placement=model[k + 1].ranks).requires_grad_()
            if op in "BI" and k > 0:
                out_grads[k - 1, m] = inputs.pop((k, m)).grad.to_global(placement=model[k - 1].ranks)
    return loss


def placements(device, n):
    """The ranks of each stage: one rank a stage."""
    return [flow.placement(device, [rank]) for rank in range(n)]


def make(stages, micro_batches, batch, in_features, hidden_size, out_features):
    """The model, and the micro-batches of x and y."""
    if micro_batches > batch:
        raise ValueError(f"{micro_batches} micro-batches of {batch} rows: each needs one")
    features = [in_features, *[hidden_size] * (len(stages) - 1), out_features]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, in_features), dtype=np.float32)
    y = rng.standard_normal((batch, out_features), dtype=np.float32)
    weights = [rng.standard_normal(shape, dtype=np.float32) / 2 for shape in zip(features, features[1:])]

    x = [flow.tensor(part, placement=stages[0], sbp=flow.sbp.broadcast) for part in np.array_split(x, micro_batches)]
    y = [flow.tensor(part, placement=stages[-1], sbp=flow.sbp.broadcast) for part in np.array_split(y, micro_batches)]
    last = len(stages) - 1
    model = flow.nn.Sequential(*[Stage(w, stages[k], last=k == last) for k, w in enumerate(weights)])
    return model, x, y


def train(stages, schedule="1f1b", steps=3, micro_batches=4, batch=8, in_features=4, hidden_size=8, out_features=4):
    """Train in float32 on a placement for each stage; returns the model and the loss of each step.

    schedule: its name, or a table for these stages and micro-batches.
    """
    table = SCHEDULES[schedule](len(stages), micro_batches) if isinstance(schedule, str) else schedule
    check(table, len(stages), micro_batches)
    model, x, y = make(stages, micro_batches, batch, in_features, hidden_size, out_features)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = run_step(model, table, x, y)
        optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def seconds_of_step(table, micro_batches, *placements_of_stages, size=1024):
    """The time of a step with larger matrices, without the update, on each of these lists: the shortest of six."""
    runs = [make(stages, micro_batches, 64 * micro_batches, size, size, size) for stages in placements_of_stages]
    seconds = [[] for _ in runs]
    for _ in range(6):  # in turn, so that a slow moment of the machine meets all
        for (model, x, y), times in zip(runs, seconds):
            flow.comm.barrier()
            begin = time.perf_counter()
            run_step(model, table, x, y)
            for stage in model:
                stage.w.grad.to_local().numpy()  # waits until it is computed
            flow.comm.barrier()
            times.append(time.perf_counter() - begin)
    return [min(times) for times in seconds]


def describe(table):
    """A line for each rank: its calls in turns, how often it waits, the micro-batches that it holds at most."""
    turns = in_turns(table)
    for rank, row in enumerate(table):
        calls = [turn[rank] for turn in turns]
        names = " ".join(f"{call[0]}{call[2]}" if call else ". " for call in calls)
        held = np.cumsum([1 if op == "F" else -1 if op in "BW" else 0 for op, _, _ in row]).max()
        yield f"rank {rank}: {names}  waits {calls.count(None) / len(calls):.0%}, holds {held}"


def parsed(n):
    """The options, the schedule, its table and the number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    either.add_argument("--table", metavar="FILE", help="your own schedule: a line for each rank, such as F0 F1 B0 B1")
    parser.add_argument(
        "--micro-batches", type=int, choices=range(1, 17), metavar="M", help="of --schedule; 4 if not given"
    )
    parser.add_argument("--measure", action="store_true", help="how long ranks wait; give each rank a core of its own")
    args = parser.parse_args()
    if args.table is not None and args.micro_batches:
        parser.error("--micro-batches: the table says how many there are")
    try:
        if args.table is None:
            m = args.micro_batches or 4
            table = SCHEDULES[args.schedule](n, m)
        else:
            table = read_table(pathlib.Path(args.table).read_text(encoding="utf-8-sig"))
            m = 1 + max((m for row in table for _, _, m in row), default=0)
        check(table, n, m)
    except (OSError, ValueError) as error:
        source = f"--schedule {args.schedule}" if args.table is None else f"--table {args.table}"
        parser.error(f"{source}: {getattr(error, 'strerror', None) or error}")
    return args, args.schedule if args.table is None else table, table, m


def main():
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    args, schedule, table, m = parsed(n)
    stages, one_device = placements(args.device, n), [flow.placement(args.device, [0])] * n
    model, losses = train(stages, schedule, micro_batches=m, batch=max(8, m))
    shape, whole = tuple(model[rank].w.to_local().shape), tuple(model[rank].w.shape)
    print(f"w{rank} {shape} of {whole}, and nothing of other stages")
    _, alone = train(one_device, schedule, micro_batches=m, batch=max(8, m))  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if args.measure:
        together, alone = seconds_of_step(table, m, stages, one_device)
    if rank == 0:
        print(*describe(table), sep="\n")
        if args.measure:
            print(f"a step takes {together * 1000:.0f} ms, on one rank {alone * 1000:.0f}: ", end="")
            print(f"each rank waits or sends {1 - alone / n / together:.0%} of the time, with a core of its own")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
