"""The lines that the mains of recipes print, computed: functions (n, rank, facts of each call, graph, report)."""

import math
import re


def computing(report):
    """The calls of train or run: [{argument: value}]."""
    return [arguments for name, arguments in report["calls"] if name in ("train", "run")]


def share(size, n, rank):
    """How many of `size` rows a rank has."""
    return size // n + (rank < size % n)


def only_rank_0(function):
    return lambda n, rank, facts, graph, report: function(n, rank, facts, graph, report) if rank == 0 else []


def bubble(n, rank, facts, graph, report):
    m = computing(report)[0]["micro_batches"]
    return [
        f"pipeline bubble, (n-1)/(m+n-1) with n = {n} and m = {m}: {round(100 * (n - 1) / (m + n - 1))}% of the time"
    ]


def all_reduces(n, rank, facts, graph, report):
    m = computing(report)[0]["micro_batches"]
    times, when = (2, "the last") if graph else (2 * m, "each")
    return [f"all-reduces in a step: {times}, of the gradients of 2 weights after {when} micro-batch"]


def ages(n, rank, facts, graph, report):
    """The gradients of the last worker are as old as the steps since it fetched weights."""
    every = computing(report)[0]["sync_every"]
    slow, usual = facts[0]["losses"], facts[1]["losses"]
    return [
        f"step {k}: the gradients are {'0 ' * (n - 1)}{k % every} steps old, loss {slow[k]:.4f}, "
        f"without a slow worker {usual[k]:.4f}"
        for k in range(len(slow))
    ]


def mixture(n, rank, facts, graph, report):
    """The choices are those of all tokens, of which none is lost on the way to an expert."""
    seen, choices = facts[0], 64 * computing(report)[0]["top_k"]
    loads = [" ".join(str(int(number)) for number in seen["loads"][step]) for step in (0, -1)]
    assert sum(map(int, loads[0].split())) == choices
    lines = [
        f"step {step}: tokens of each expert {load}; {int(dropped)} of {choices} choices dropped"
        for step, load, dropped in zip((1, len(seen["losses"])), loads, (seen["dropped"][0], seen["dropped"][-1]))
    ]
    return [*lines, f"balance loss {seen['balance_losses'][0]:.4f} -> {seen['balance_losses'][-1]:.4f}"]


def held(words):
    """How many numbers of the parameters a rank holds, of how many; words: behind that."""

    def lines(n, rank, facts, graph, report):
        here, whole = (sum(math.prod(tensor[i]) for tensor in facts[0]["tensors"]) for i in (1, 2))
        return [f"{here:,} of {whole:,} {words}"]

    return lines


def parts_held(n, rank, facts, graph, report):
    names = [name for name, local, _, _ in facts[0]["tensors"] if math.prod(local)]
    return [f"{len(names)} of {len(facts[0]['tensors'])} parameters: {names[0]} to {names[-1]}"]


def blocks(n, rank, facts, graph, report, words=""):
    """A line for each tensor of which this rank holds a block; that of stage k is printed as wk."""
    held = [(name, local, shape) for name, local, shape, _ in facts[0]["tensors"] if math.prod(local)]
    return [re.sub(r"^(\d+)\.w", r"w\1", f"{name} {local} of {shape}{words}") for name, local, shape in held]


def of_pipeline(n, rank, facts, graph, report):
    lines = blocks(n, rank, facts, graph, report, ", and nothing of other stages")
    return [*lines, *(bubble(n, rank, facts, graph, report) if rank == 0 else [])]


def sums_of_blocks(header, first):
    """The table of rank 0: of each tensor from number `first` on, the sum of the block on each rank."""

    def lines(n, rank, facts, graph, report):
        by_rank = [{name: total for name, _, _, total in calls[0]["tensors"]} for calls in report["facts_of_ranks"]]
        rows = list(by_rank[0])[first:]
        return [header, *(f"{name:12} {' '.join(str(int(sums[name])) for sums in by_rank)}" for name in rows)]

    return only_rank_0(lines)


def ring_chunks(n, rank, facts, graph, report):
    """In round i a rank passes on what its neighbour has added up: the chunk of a number one less."""
    add = " ".join(str((rank - i) % n) for i in range(n - 1))
    finished = " ".join(str((rank + 1 - i) % n) for i in range(n - 1))
    return [f"sends chunks {add} to add, then finished chunks {finished}"]


def epochs(n, rank, facts, graph, report):
    numbers = [" ".join(str(int(number)) for number in own.ravel()) for own in facts[0]["loaded"]]
    return [f"epoch {epoch}: samples {own}" for epoch, own in enumerate(numbers)]


def means_of_means(n, rank, facts, graph, report):
    """The rows of each rank, and on rank 0 the mean of the ranks' means: of loss and accuracy together."""
    samples = [calls[0]["tensors"] for calls in report["facts_of_ranks"]]
    means = [total / shape[0] for tensors in samples for name, shape, _, total in tensors if name == "samples"]
    lines = [f"{share(25, n, rank)} of 25 rows: loss ..."]
    printed = re.search(r"mean of the ranks' means: loss ([\d.]+), accuracy ([\d.]+)", report["out"])
    if rank == 0 and (not printed or abs(sum(map(float, printed.groups())) - sum(means) / n) > 2e-4):
        lines.append(f"mean of the ranks' means: a loss and an accuracy of together {sum(means) / n:.4f}")
    return lines


def saved_by_half(n, rank, facts, graph, report):
    """The first half of the ranks trains first, half of the steps, and saves where all load from."""
    first, second = computing(report)[:2]
    shape = next(shape for name, _, shape, _ in facts[0]["tensors"] if name == "w")
    lines = [f"saved w {tuple(shape) if rank < max(1, n // 2) else (0, 0)} of {tuple(shape)}"]
    if first["checkpoint_dir"] is None or first["checkpoint_dir"] != second["checkpoint_dir"]:
        lines.append("a checkpoint of the first call, which the second loads")
    if first["steps"] != second["steps"] // 2:
        lines.append("half of the steps in the first call")
    return lines


def resumed(n, rank, facts, graph, report):
    losses = facts[0]["losses"]
    return [
        f"loss {losses[0]:.4f} in step 1 -> {losses[-1]:.4f} in step {len(losses)}",
        "starts with step 1: no checkpoint",
    ]
