"""Measure the recipes against PyTorch and JAX, and write docs/performance.md.

    ./launch.sh bench [PART ...]

All sides take turns on the same cores. A figure is our time divided by a peer's: the median over the turns. The newest
run of each part on each CPU is stored in docs/performance.json, and the page is written from that file.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "harness")]

from benchmarks import peers  # noqa: E402
from benchmarks.peers import Peer, PeerError  # noqa: E402
from benchmarks.tables import fill, table  # noqa: E402
from oneflow_cookbook.pool import Pool, PoolError  # noqa: E402
from oneflow_cookbook.start.recipe import path_of  # noqa: E402
from oneflow_cookbook.start.signals import exit_at  # noqa: E402
from tests.cases import reference_gpt  # noqa: E402

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PAGE, RESULTS = DOCS / "performance.md", DOCS / "performance.json"
OURS = str(HERE / "ours.py")
PEERS = {"PyTorch": "torch", "JAX": "jax"}
MODES = ("eager", "graph")
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")  # of pipeline_schedules.py
PEER_SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")  # of torch.distributed.pipelining
TURNS = 5
STEPS = 5  # timed in a turn
START_UP = {"timeout": 300}  # seconds for a call to a pool

WIDE = {"batch": 512, "in_features": 1024, "hidden_size": 4096, "out_features": 1024}
STRATEGIES = {  # name -> (recipe, which is also the name of its twins; axes of their mesh; sizes; numbers of ranks)
    "data parallel, Adam": ("train_data_parallel", ["data"], WIDE, (2, 4)),
    "column-row": ("train_tensor_parallel", ["tensor"], WIDE, (2, 4)),
    "pipeline": ("train_pipeline", ["stage"], {"micro_batches": 8, **WIDE, "hidden_size": 1024}, (2, 4)),
    "data x tensor": ("train_data_tensor", ["data", "tensor"], WIDE, (4,)),
    "fully sharded, Adam": ("fully_sharded", ["data"], WIDE, (2, 4)),
}
GPT_SIZES = {"batch_size": 8, "seq_len": 128, "num_layers": 4, "hidden_size": 512, "num_heads": 8}
GPT_STRATEGIES = {  # name -> (kind of the peers, numbers of ranks)
    "one rank": ("data", (1,)),
    "data parallel": ("data", (2,)),
    "tensor parallel": ("tensor", (2,)),
    "fully sharded": ("sharded", (2,)),
}
GPT_STEPS = STEPS + 2  # the first and the last are not timed
TOLERANCE = 2e-5  # of losses, relative: frameworks add float32 numbers in different orders
SAME_LOSSES = 2  # steps of a strategy; some then diverge, as its learning rate suits the sizes of the lesson


def slowest(times_by_rank):
    """The median time of the rank that takes longest."""
    return max(statistics.median(times) for times in times_by_rank)


def in_turns(turns, sides):
    """Call each of `sides`, {name: function that returns seconds}, once in a turn; returns {name: list of seconds}.

    The first turn is not counted: it compiles.
    """
    for side in sides.values():
        side()
    seconds = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            seconds[name].append(side())
    return seconds


def ratios_of(ours, others):
    """The ratios of the turns, the smallest first."""
    return sorted(mine / other for mine, other in zip(ours, others))


def ratio(ours, others):
    return statistics.median(ratios_of(ours, others))


def row_of(name, ranks, seconds, modes=MODES):
    """A row of a table: the ratios of the fastest of our modes to each peer."""
    mode = min(modes, key=lambda mode: statistics.median(seconds[mode]))
    turns = {peer: ratios_of(seconds[mode], seconds[peer]) for peer in PEERS}
    print(f"  {name}, {ranks} ranks: {mode}", turns, file=sys.stderr, flush=True)
    ratios, spread = ({peer: of(turns[peer]) for peer in PEERS} for of in (statistics.median, lambda t: [t[0], t[-1]]))
    return {"strategy": name, "ranks": ranks, "ratios": ratios, "spread": spread, "mode": mode}


def training_times(turns, sides, what, steps):
    """in_turns of `sides`, {name: function that trains and returns {"losses", "seconds"} by rank}.

    Raises PeerError if the losses of a side in the first steps are not those of the first side.
    """
    first, losses = next(iter(sides)), {}

    def train(side):
        answers = sides[side]()
        losses[side] = np.mean([answer["losses"][:steps] for answer in answers], 0)
        if not np.allclose(losses[side], losses[first], rtol=TOLERANCE, atol=0):
            words = f"losses of {side} {losses[side].tolist()} are not those of {first} {losses[first].tolist()}"
            raise PeerError(f"{what}: {words}")
        return slowest(answer["seconds"] for answer in answers)

    return in_turns(turns, {side: partial(train, side) for side in sides})


def strategies():
    """[{"strategy", "ranks", "ratios": {peer: our time / its time}, "spread": {peer: [least, most]}, "mode": the best}]

    The peers are the twins of docs/rosetta. All sides begin with the same weights and train on the same batch.
    """
    return [strategy_row(name, ranks) for ranks in (2, 4) for name in STRATEGIES if ranks in STRATEGIES[name][-1]]


def strategy_row(name, ranks):
    recipe, axes, sizes, _ = STRATEGIES[name]
    ours = {mode: (recipe, {"graph": mode == "graph"}) for mode in MODES}
    theirs = {peer: (peer, {}) for peer in PEERS}
    if recipe == "train_pipeline":
        ours.update({schedule: ("pipeline_schedules", {"schedule": schedule}) for schedule in SCHEDULES})
        theirs = {"JAX": ("JAX", {"stages": ranks})}
        for schedule in PEER_SCHEDULES:
            theirs[f"PyTorch {schedule}"] = "PyTorch", {"stages": ranks, "schedule": schedule}
    with ExitStack() as stack:  # new ranks for each row, as graphs are never freed
        pool = stack.enter_context(Pool(ranks, **START_UP))
        processes = {peer: stack.enter_context(Peer(framework, ranks)) for peer, framework in PEERS.items()}
        sides = {}
        for side, (peer, more) in theirs.items():
            twin = str(DOCS / "rosetta" / peer.lower() / f"{recipe}.py")
            call = partial(processes[peer].call, "train_twin", file=twin, axes=axes, **more)
            sides[side] = partial(call, steps=STEPS, **sizes)
        for side, (script, more) in ours.items():
            call = partial(pool.call, f"{OURS}:losses_and_times", path=str(path_of(script)), **more)
            sides[side] = partial(call, steps=STEPS + 1, **sizes)
        seconds = training_times(TURNS, sides, f"{name}, {ranks} ranks", SAME_LOSSES)
    if "PyTorch" not in seconds:
        seconds["PyTorch"] = min((seconds[side] for side in theirs if side != "JAX"), key=statistics.median)
    return row_of(name, ranks, seconds, list(ours))


def gpt(sizes=GPT_SIZES, ranks=(1, 2), turns=TURNS):
    """The same of gpt.py. All sides begin with the same weights and train on the same text."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/weights.npz"
        save_text_and_weights(file, **sizes)
        return [
            gpt_row(name, n, file, sizes, turns)
            for n in ranks
            for name in GPT_STRATEGIES
            if n in GPT_STRATEGIES[name][1]
        ]


def save_text_and_weights(file, batch_size, seq_len, num_layers, hidden_size, num_heads):
    """Write what gpt.py begins with and what it trains on in GPT_STEPS steps, for the peers."""
    vocab_size = reference_gpt.vocab_size_of(num_heads)
    weights = reference_gpt.new_weights(vocab_size, seq_len, num_layers, hidden_size)
    batches = [reference_gpt.batch_of(step, batch_size, seq_len) for step in range(1, GPT_STEPS + 1)]
    rows = [np.concatenate((ids, targets[:, -1:]), 1) for ids, targets in batches]
    np.savez(file, rows=rows, **{name: weight.exact.astype(np.float32) for name, weight in weights.items()})


def gpt_row(name, ranks, file, sizes, turns):
    kind, _ = GPT_STRATEGIES[name]
    layout = {"tensor": ranks} if kind == "tensor" else {"shard_weights": kind == "sharded"}
    arguments = {"path": str(path_of("gpt")), "steps": GPT_STEPS, **layout, **sizes}
    with ExitStack() as stack:
        sides = {}
        for peer, framework in PEERS.items():
            process = stack.enter_context(Peer(framework, ranks))
            sides[peer] = partial(process.call, "train_gpt", kind=kind, file=file, heads=sizes["num_heads"])
        pool = stack.enter_context(Pool(ranks, **START_UP))
        for mode in MODES:
            sides[mode] = partial(pool.call, f"{OURS}:losses_and_times", graph=mode == "graph", **arguments)
        seconds = training_times(turns, sides, f"gpt, {name}, {ranks} ranks", GPT_STEPS)
    return row_of(name, ranks, seconds)


PARTS = {"strategies": strategies, "gpt": gpt}


def cpu():
    """The name of this machine's CPU."""
    with open("/proc/cpuinfo") as lines:
        models = [line.split(": ")[1].strip() for line in lines if line.startswith("model name")]
    return re.sub(r"\(R\)|\(TM\)| Processor", "", (models or [platform.machine()])[0])


def measured(part):
    """A record of docs/performance.json."""
    cores = len(os.sched_getaffinity(0))
    return {"date": str(datetime.date.today()), "cores": cores, "rows": json.loads(json.dumps(PARTS[part]()))}


def page(results):
    """docs/performance.md with the ratios of {part: {CPU: record}}."""
    ratios = partial(by_cpu, results)
    tables = {
        "strategies": ratios("strategies", "strategy", list(PEERS), "mode"),
        "gpt": ratios("gpt", "strategy", list(PEERS), "mode"),
    }
    return fill(PAGE.read_text(), tables)


def by_cpu(results, part, first, columns, last=None):
    """A table with a row for each row of `part` on each CPU, and under it the dates.

    first: the key of what a row is of. The machines have 2 cores, so 4 ranks are only in rows of what needs 4.
    """
    lines = []
    for name, record in results[part].items():
        on_two = {row[first] for row in record["rows"] if row["ranks"] == 2}
        for number, row in enumerate(record["rows"]):
            if row["ranks"] > 2 and row[first] in on_two:
                continue
            ranks = f", {row['ranks']} ranks" if row["ranks"] > 1 else ""
            cells = [f"{row['ratios'][column]:.2f}{spread_of(row, column)}" for column in columns]
            lines.append((number, [row[first] + ranks, name, *cells, *([row[last]] if last else [])]))
    header = [first, "CPU", *(f"/ {column}" if column[0].isalpha() else column for column in columns)]
    rows = [cells for _, cells in sorted(lines, key=lambda line: line[0])]
    dates = ", ".join(f"{name} on {record['date']}" for name, record in results[part].items())
    return table([*header, *(["faster mode"] if last else [])], rows) + f"\nMeasured: {dates}.\n"


def spread_of(row, column):
    """The smallest and the largest ratio of a turn, where they are known."""
    return " ({:.2f} to {:.2f})".format(*row["spread"][column]) if "spread" in row else ""


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: no such part; there are {', '.join(PARTS)}")
    if not peers.PYTHON.exists():
        needs = "bench needs PyTorch and JAX, in an environment of their own; type"
        parser.exit(2, f"launch.sh: {needs}\n  {peers.HOW_TO_MAKE}\n")
    try:
        for part in options.parts or PARTS:
            print(part, file=sys.stderr, flush=True)
            results = json.loads(RESULTS.read_text())
            results[part] = dict(sorted({**results[part], cpu(): measured(part)}.items()))
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            PAGE.write_text(page(results))
    except (PeerError, PoolError) as error:
        print(f"launch.sh: bench: {error}", file=sys.stderr)
        return 1
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    exit_at(signal.SIGTERM, signal.SIGHUP)
    sys.exit(main())
