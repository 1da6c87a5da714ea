"""Measure the recipes against PyTorch and JAX, and write docs/performance.md.

    ./launch.sh bench [--short]

Each figure that compares comes from one run in which the frameworks take turns on the same cores; medians, and of
ratios the median of the turns' ratios. It takes some minutes (the page says how many on 2 cores); --short has one turn,
prints, and writes nothing.
"""

import argparse
import datetime
import itertools
import os
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import peers  # noqa: E402
from harness import recipe  # noqa: E402
from harness.pages import table  # noqa: E402
from harness.pool import Pool, PoolError  # noqa: E402
from harness.ranks import blas_kernels  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
OURS = f"{Path(__file__).with_name('ours.py')}"
WIDE = {"batch": 512, "in_features": 1024, "hidden": 4096, "out_features": 1024}
SQUARE = {"batch": 512, "in_features": 1024, "hidden": 1024, "out_features": 1024}
STRATEGIES = {  # name -> (kind of the peers, recipe, its options, sizes, numbers of ranks)
    "data parallel": ("data", "train_data_parallel", {"optimizer": "momentum"}, WIDE, (2, 4)),
    "column, then row": ("tensor", "train_model_parallel", {"input_gradient": "no"}, WIDE, (2, 4)),
    "pipeline, 8 micro-batches": ("pipeline", "train_pipeline", {"micro_batches": 8}, SQUARE, (2, 4)),
    "data x tensor": ("hybrid", "train_hybrid", {}, WIDE, (4,)),
}
STEPS = 5  # in a turn, the first of which is not counted
COLLECTIVES = {
    "all-reduce": ("P", "B"),
    "all-gather": ("S(0)", "B"),
    "reduce-scatter": ("P", "S(0)"),
    "all-to-all": ("S(0)", "S(1)"),
}
SIZES = [2**k for k in (10, 14, 18, 22, 24, 26)]  # bytes, 1 KB to 64 MB


def slowest(by_rank):
    """The median step of the rank that takes longest."""
    return max(statistics.median(times) for times in by_rank)


def in_turns(turns, sides):
    """Call each of `sides`, name -> function, once in a turn; name -> list of seconds. The first turn is dropped."""
    for side in sides.values():
        side()
    found = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            found[name].append(side())
    return found


def ratio(ones, others):
    return statistics.median(one / other for one, other in zip(ones, others))


def say(*words):
    print(*words, file=sys.stderr, flush=True)


def of_peer(peer, **given):
    """A function that trains some steps and returns the time of one."""
    return lambda: slowest(peer.step_times(steps=STEPS, **given))


def of_recipe(pool, script, graph, given):
    """The same of a recipe."""
    path = str(recipe.RECIPES / f"{script}.py")
    return lambda: slowest(pool.call(f"{OURS}:step_times", path=path, graph=graph, steps=STEPS + 1, **given))


def training(turns):
    """Rows of the table of training steps."""
    rows = []
    for n, (name, (kind, script, options, sizes, ranks)) in itertools.product((2, 4), STRATEGIES.items()):
        if n not in ranks:
            continue
        given = {**options, **sizes}
        of_both = {key: given[key] for key in given if key in sizes or key == "micro_batches"}
        with ExitStack() as stack:
            pool = stack.enter_context(Pool(n, timeout=300))
            sides = {"PyTorch": of_peer(stack.enter_context(peers.Peer("torch", n)), kind=kind, **of_both)}
            if kind != "pipeline":
                sides["JAX"] = of_peer(stack.enter_context(peers.Peer("jax", n)), kind=kind, **of_both)
            sides.update({mode: of_recipe(pool, script, mode == "graph", given) for mode in ("eager", "graph")})
            found = in_turns(turns, sides)
        medians = {side: statistics.median(times) for side, times in found.items()}
        best = min(("eager", "graph"), key=medians.get)
        fastest = min((side for side in medians if side in ("PyTorch", "JAX")), key=medians.get)
        columns = ("eager", "graph", "PyTorch", "JAX")
        cells = [f"{1e3 * medians[side]:.0f}" if side in medians else "–" for side in columns]
        rows.append([name, n, *cells, f"{ratio(found[best], found[fastest]):.2f} ({best} / {fastest})"])
        say(*rows[-1])
    return rows


def gemm_limit(turns):
    """Column, then row on 2 ranks: the share of the step that its matmuls take if nothing else runs."""
    batch, inner, hidden, out = WIDE.values()
    half = hidden // 2
    shapes = [
        *((batch, inner, half), (batch, half, out)),  # forward
        *((batch, out, half), (half, batch, out), (inner, batch, half)),  # backward; x needs no gradient
    ]
    _, script, options, sizes, _ = STRATEGIES["column, then row"]
    with Pool(2, timeout=300) as pool:
        sides = {"matmuls": lambda: slowest(pool.call(f"{OURS}:gemm_times", shapes=shapes, steps=STEPS))}
        for mode in ("eager", "graph"):
            sides[mode] = of_recipe(pool, script, mode == "graph", {**options, **sizes})
        found = in_turns(turns, sides)
    rows = [[mode, f"{100 * ratio(found['matmuls'], found[mode]):.0f} %"] for mode in ("eager", "graph")]
    say(*rows)
    return rows


LEVERS = {  # what launch.sh sets -> (strategy, what a pool takes to be without it, where to set it elsewhere)
    f"`OPENBLAS_CORETYPE={blas_kernels() or ''}`": (
        "column, then row",
        {"variables": {"OPENBLAS_CORETYPE": ""}},  # OpenBLAS chooses itself
        "`export` it",
    ),
    "each rank bound to its cores": (
        "data parallel",
        {"bind": False},
        "`taskset`, or `os.sched_setaffinity` before OneFlow",
    ),
}


def levers(turns):
    """Rows of the table of levers: the time of a step without each, over that with it, on 2 ranks in eager mode."""
    rows = []
    for lever, (strategy, without, elsewhere) in LEVERS.items():
        _, script, options, sizes, _ = STRATEGIES[strategy]
        with Pool(2, timeout=300) as one, Pool(2, timeout=300, **without) as other:
            sides = {"with": one, "without": other}
            found = in_turns(turns, {k: of_recipe(v, script, False, {**options, **sizes}) for k, v in sides.items()})
        rows.append([lever, strategy, f"{ratio(found['without'], found['with']):.2f} x", elsewhere])
        say(*rows[-1])
    return rows


def collectives(turns, sizes):
    """Rows of the table of collectives: milliseconds, and the ratio to gloo's."""
    rows = []
    for n in (2, 4):
        with peers.Peer("torch", n) as torch, Pool(n, timeout=300) as pool:
            for name, (old, new) in COLLECTIVES.items():
                row = [name, f"{old} → {new}", n]
                for size in sizes:
                    given = {"elements": size // 4, "steps": 6 if size > 2**20 else 30}
                    found = in_turns(
                        turns, {"gloo": of_gloo(torch, name, given), "ours": of_move(pool, old, new, given)}
                    )
                    ms = 1e3 * statistics.median(found["ours"])
                    row.append(f"{ms:.2f} ({ratio(found['ours'], found['gloo']):.2f})")
                rows.append(row)
                say(*row)
    return rows


def of_gloo(torch, name, given):
    return lambda: slowest(torch.step_times(kind="collective", name=name, **given))


def of_move(pool, old, new, given):
    return lambda: slowest(pool.call(f"{OURS}:move_times", old=old, new=new, **given))


def words(size):
    return f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"


def machine():
    with open("/proc/cpuinfo") as lines:
        models = [line.split(": ")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {(models or [platform.machine()])[0]}"


def page(minutes, steps, limit, gains, moves):
    """docs/performance.md."""
    wide, square = (" x ".join(str(size) for size in sizes.values()) for sizes in (WIDE, SQUARE))
    return PAGE_TEXT.format(
        machine=machine(),
        date=datetime.date.today(),
        oneflow=version("oneflow"),
        peers=", ".join(line for line in peers.REQUIREMENTS if "==" in line),
        minutes=f"{minutes:.0f}",
        wide=wide,
        square=square,
        steps=steps,
        limit=limit,
        gains=gains,
        moves=moves,
    )


PAGE_TEXT = """# Performance

Made by `./launch.sh bench` ({minutes} minutes) on {machine}, {date}: OneFlow {oneflow}, {peers}. Milliseconds are
medians and belong to this machine; ratios are medians of turns in one run, in which the frameworks alternate on the
same cores; OneFlow's and PyTorch's ranks are bound to theirs. Above 1 we are slower.

## A training step

The recipes' own loops, with SGD and momentum 0.9, float32; batch, features in, hidden, features out: {wide}, in the
pipeline {square}. PyTorch: DistributedDataParallel, DTensor, GPipe of distributed.pipelining on gloo; its data x tensor
is DTensor with an all-reduce of gradients by hand. JAX: sharded jit, a host device for each rank, one process; no
pipeline. Where there are more ranks than cores, the times also say what waiting costs.

{steps}
Of a step of column, then row on 2 ranks the matmuls alone, five for each rank with nothing else to do, take:

{limit}
## Levers

{gains}
What `launch.sh` sets, and what a step on 2 ranks in eager mode takes without it over what it takes with it. OneFlow
0.9.0 comes with an OpenBLAS that knows CPUs by their model; on one that is newer than itself it takes kernels without
AVX. Its scheduling thread never sleeps while work is under way, and if ranks are free to move it takes a core from one
that computes.

## Collectives

`to_global` from one SBP to another in eager mode, milliseconds, and in parentheses the ratio to gloo's collective of as
many bytes (the size is that of the whole tensor).

{moves}"""


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh bench", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one turn, fewer sizes; printed, not written")
    options = parser.parse_args(arguments)
    if not peers.PYTHON.exists():
        needs = "bench needs PyTorch and JAX, in an environment of their own; type"
        parser.exit(2, f"launch.sh: {needs}\n  {peers.HOW_TO_MAKE}\n")
    try:
        return measure(options.short)
    except (peers.PeerError, PoolError) as error:
        print(f"launch.sh: bench: {error}", file=sys.stderr)
        return 1


def measure(short):
    begin, turns, sizes = time.monotonic(), 1 if short else 3, SIZES[1::2] if short else SIZES
    steps = table(["strategy", "ranks", "eager, ms", "graph, ms", "PyTorch, ms", "JAX, ms", "ratio"], training(turns))
    limit = table(["mode", "matmuls alone / step"], gemm_limit(turns))
    gains = table(["lever", "strategy", "gain", "under another launcher"], levers(turns))
    moves = table(["collective", "SBP", "ranks", *map(words, sizes)], collectives(turns, sizes))
    text = page((time.monotonic() - begin) / 60, steps, limit, gains, moves)
    if short:
        print(text)
    else:
        PAGE.write_text(text)
        print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
