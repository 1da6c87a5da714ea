"""Training steps: of the recipes beside PyTorch and JAX, against the limit of the matmuls, by lever, ranks and size.

Each function measures one part of the page and returns what page.py and plots.py need, as JSON takes it. Seconds.
"""

import itertools
import os
import re
import statistics
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.formulas import BATCH, HIDDEN
from benchmarks.peers import Peer
from harness.pool import Pool
from harness.start import recipe

OURS = f"{Path(__file__).with_name('ours.py')}"
WIDE = {"batch": 512, "in_features": 1024, "hidden_size": 4096, "out_features": 1024}
SQUARE = {**WIDE, "hidden_size": 1024}
STRATEGIES = {  # name -> (kind of the peers, recipe, arguments of its run, numbers of ranks)
    "data parallel": ("data", "train_data_parallel", {"optimizer": "momentum", **WIDE}, (2, 4)),
    "column-row": ("tensor", "train_model_parallel", WIDE, (2, 4)),
    "pipeline": ("pipeline", "train_pipeline", {"micro_batches": 8, **SQUARE}, (2, 4)),
    "data x tensor": ("hybrid", "train_data_tensor", WIDE, (4,)),
    "fully sharded, Adam": ("sharded", "fully_sharded", WIDE, (2, 4)),
}
PEERS = {"PyTorch": "torch", "JAX": "jax"}
MODES = ("eager", "graph")
STEPS = 5  # that are timed at once


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


def medians(found):
    return {name: statistics.median(times) for name, times in found.items()}


def ratio(ones, others):
    """The median of the turns' ratios."""
    return statistics.median(one / other for one, other in zip(ones, others))


def compared(turns, sides):
    """{"seconds": by side, "ratio": that of the first side to the second}"""
    found = in_turns(turns, sides)
    return {"seconds": medians(found), "ratio": ratio(*found.values())}


def timed(run, *arguments, **named):
    """A function that returns the seconds of a step, which `run` measures on each rank."""
    return lambda: slowest(run(*arguments, **named))


def of_script(pool, function, script, **given):
    """What a function of ours.py returns for a recipe, by rank."""
    return pool.call(f"{OURS}:{function}", path=str(recipe.path_of(script)), **given)


def of_peer(peer, kind, given):
    """The same of a peer that trains some steps."""
    sizes = {key: value for key, value in given.items() if key in (*WIDE, "micro_batches")}
    return timed(peer.step_times, steps=STEPS, kind=kind, **sizes)


def of_recipe(pool, script, mode, given):
    """The same of a recipe."""
    return timed(of_script, pool, "step_times", script, graph=mode == "graph", steps=STEPS + 1, **given)


@contextmanager
def sides(n, names, variables=None, bind=True):
    """Yields a function from (strategy, its changed sizes and options) to {name: function that returns a step's time}.

    names: of the modes and the peers that take part, each with n ranks of its own.
    """
    with ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(PEERS[name], n)) for name in names if name in PEERS}
        pool = stack.enter_context(Pool(n, timeout=300, variables=variables, bind=bind))
        pool.call(f"{OURS}:wait")

        def of(strategy, **changed):
            kind, script, given, _ = STRATEGIES[strategy]
            given = {**given, **changed}
            return {
                name: of_peer(peers[name], kind, given) if name in peers else of_recipe(pool, script, name, given)
                for name in names
                if not (name == "JAX" and strategy == "pipeline")  # it has no pipeline of its own
            }

        yield of


def training(turns, say, short=False):
    """[{"strategy", "ranks", "seconds": by side, "best": the faster mode, "ratios": its time / a peer's, by peer}]"""
    rows = []
    for n in (2,) if short else (2, 4):
        for strategy in (name for name, row in STRATEGIES.items() if n in row[-1]):
            with sides(n, (*PEERS, *MODES)) as of:  # new ranks for each, as graphs are never freed
                rows.append(beside_peers(strategy, n, in_turns(turns, of(strategy)), say))
    return rows


def beside_peers(strategy, n, found, say):
    seconds = medians(found)
    best = min(MODES, key=seconds.get)
    ratios = {name: ratio(found[best], found[name]) for name in PEERS if name in found}
    say(strategy, n, {name: round(1e3 * one) for name, one in seconds.items()})
    return {"strategy": strategy, "ranks": n, "seconds": seconds, "best": best, "ratios": ratios}


def tall(batch, inner, hidden_size, out, n=2):
    """The shapes of a rank's five matmuls in a step of column-row; x needs no gradient."""
    part = hidden_size // n
    forward = [(batch, inner, part), (batch, part, out)]
    return [*forward, (batch, out, part), (part, batch, out), (inner, batch, part)]


def limit(turns, say):
    """Column-row on 2 ranks: {"matmuls": seconds of a step's matmuls alone, by framework, "shares": of a step's
    time, that they are, by mode, "parts": seconds of the parts of an eager step}."""
    work = {"shapes": tall(*WIDE.values()), "steps": STEPS}
    _, script, given, _ = STRATEGIES["column-row"]
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(2, timeout=300))
        peers = {name: stack.enter_context(Peer(PEERS[name], 2)) for name in PEERS}
        alone = {name: timed(peer.step_times, kind="matmuls", **work) for name, peer in peers.items()}
        alone["OneFlow"] = timed(pool.call, f"{OURS}:matmul_times", **work)
        found = in_turns(turns, {**alone, **{mode: of_recipe(pool, script, mode, given) for mode in MODES}})
        [parts, *_] = of_script(pool, "parts_of_step", script, steps=STEPS + 3, **given)
    shares = {mode: ratio(found["OneFlow"], found[mode]) for mode in MODES}
    say(shares)
    return {"matmuls": {name: statistics.median(found[name]) for name in alone}, "shares": shares, "parts": parts}


LEVERS = {  # -> strategy, what sets it, and without it the keywords of `sides` or the recipe's arguments
    "OpenBLAS 0.3.34 in place of the one in OneFlow": (
        *("column-row", "launch.sh; elsewhere `LD_PRELOAD`"),
        {"variables": {"COOKBOOK_BLAS": "builtin"}},
    ),
    "each rank bound to its cores": ("data parallel", "launch.sh; elsewhere `taskset`", {"bind": False}),
    "`zero_grad(set_to_none=True)`, PyTorch's default, in place of OneFlow's": (
        *("data parallel", "the recipes", {"change": "zeros"}),
    ),
    "`mse_loss` in place of `((out - y) ** 2).mean()`": ("data parallel", "the recipes", {"change": "squares"}),
    "`SGD` with momentum in place of plain `SGD`": ("data parallel", "`--optimizer momentum`", {"optimizer": "sgd"}),
}
TRIED = {  # what is not set, with the variable that sets it -> strategy
    "huge pages: `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`": "column-row",
    "computing on the scheduling thread: `ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD=0`": "data parallel",
    "kernels without oneDNN: `ONEFLOW_ENABLE_ONEDNN_OPTS=0`": "pipeline",
}


def levers(turns, say):
    """[{"lever", "strategy", "gain": a step's time without it / with it, "set": what sets it}], eager, on 2 ranks.

    Each is taken away alone from all that launch.sh and the recipes have; what was tried and is not set is added alone.
    """
    rows = []

    def compare(lever, strategy, set_by, with_it, without_it, arguments):
        with sides(2, ("eager",), **with_it) as one, sides(2, ("eager",), **without_it) as other:
            pair = {"without": other(strategy, **arguments)["eager"], "with": one(strategy)["eager"]}
            gain = compared(2 * turns, pair)["ratio"]
        rows.append({"lever": lever, "strategy": strategy, "gain": gain, "set": set_by})
        say(f"{lever}: {gain:.2f}")

    for lever, (strategy, set_by, without) in LEVERS.items():
        of_ranks = {"variables", "bind"} & set(without)
        compare(lever, strategy, set_by, {}, *((without, {}) if of_ranks else ({}, without)))
    for lever, strategy in TRIED.items():
        [variable] = re.findall(r"`(\w+)=(.*)`", lever)
        compare(lever, strategy, "not set, only tried", {"variables": dict([variable])}, {}, {})
    return rows


# Operations of a step: name -> (what it does, shapes of what it takes); the loss and the updates take the same shapes.
KERNELS = {
    "matmul (512, 1024) @ (1024, 2048)": ("matmul", [(512, 1024), (1024, 2048)]),
    "of a micro-batch: matmul (64, 1024) @ (1024, 1024)": ("matmul", [(64, 1024), (1024, 1024)]),
    "its weight's gradient: (1024, 64) @ (64, 1024)": ("matmul", [(1024, 64), (64, 1024)]),
    "a gradient added to .grad, (1024, 1024)": ("add", [(1024, 1024), (1024, 1024)]),
    "relu (512, 2048)": ("relu", [(512, 2048)]),
    "mse_loss (512, 1024)": ("mse_loss", [(512, 1024), (512, 1024)]),
    "((out - y) ** 2).mean()": ("squares", [(512, 1024), (512, 1024)]),
    "gelu (1024, 2048)": ("gelu", [(1024, 2048)]),
    "(1024, 512) - (1024, 1)": ("minus", [(1024, 512), (1024, 1)]),
    "the same with expand": ("expand", [(1024, 512), (1024, 1)]),
    "a copy of (512, 1024), transposed": ("transpose", [(512, 1024)]),
    "SGD with momentum, (2048, 2048)": ("momentum", [(2048, 2048)]),
    "SGD without momentum, (2048, 2048)": ("sgd", [(2048, 2048)]),
    "Adam": ("adam", [(2048, 2048)]),
}


def kernels(turns, say):
    """[{"kernel", "seconds": by framework, "ratio": ours / PyTorch's}], of one rank on one core."""
    rows = []
    with cores(1), Pool(1, timeout=300) as pool, Peer("torch", 1) as torch:
        for name, (kind, shapes) in KERNELS.items():
            given = {"kernel": kind, "shapes": shapes, "steps": 30}
            ours = timed(pool.call, f"{OURS}:kernel_times", **given)
            pair = {"OneFlow": ours, "PyTorch": timed(torch.step_times, kind="kernel", **given)}
            rows.append({"kernel": name, **compared(2 * turns, pair)})
            say(name, {side: f"{1e3 * one:.3f} ms" for side, one in rows[-1]["seconds"].items()})
    return rows


def busy(turns, say):
    """[{"strategy", "ranks", "mode", "scheduling", "others", "step": seconds, "gain"}]: what the ranks of a core do in
    a step, by CPU time, summed over the ranks on the first core; its time / that with scheduling threads at nice 19.
    """
    rows = []
    for n in (2, 4):
        with Pool(n, timeout=300) as pool, Pool(n, timeout=300) as nice:
            nice.call(f"{OURS}:lower_scheduling_thread")
            cores = min(n, len(os.sched_getaffinity(0)))
            for strategy, mode in [*((name, "eager") for name in STRATEGIES), ("pipeline", "graph")]:
                _, script, given, ranks = STRATEGIES[strategy]
                if n in ranks:
                    found = of_script(pool, "cpu_times", script, steps=10, graph=mode == "graph", **given)[::cores]
                    total = {kind: sum(one[kind] for one in found) for kind in ("scheduling", "others")}
                    sides = {name: of_recipe(one, script, mode, given) for name, one in (("", pool), ("nice", nice))}
                    costs = {**total, "step": found[0]["step"], "gain": compared(turns, sides)["ratio"]}
                    rows.append({"strategy": strategy, "ranks": n, "mode": mode, **costs})
                    say(rows[-1])
    return rows


@contextmanager
def cores(count):
    """While it lasts, this process, and what it starts, keeps to the first `count` cores."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def scaling(turns, say):
    """[{"strategy", "kind": "strong" or "weak", "ranks", "seconds": by side}]: each rank has one core at most."""
    rows, names = [], ("eager", "PyTorch")
    for n in (1, 2, 4):
        with cores(n), sides(n, names, {"OMP_NUM_THREADS": "1"}) as of:
            for kind, strategy in itertools.product(("strong", "weak"), ("data parallel", "column-row")):
                batch = 512 if kind == "strong" else 256 * n
                seconds = medians(in_turns(turns, of(strategy, batch=batch)))
                rows.append({"strategy": strategy, "kind": kind, "ranks": n, "seconds": seconds})
                say(rows[-1])
    return rows


def sizes(turns, say):
    """{"steps": [{"strategy", "ranks", "hidden_size", "seconds": by side}], "per_rank": {"flops": of a rank's matmuls
    in a second, "update": seconds for each parameter, "bytes": of an all-reduce in a second}}; the batch is BATCH."""
    rows = []
    for strategy, n in {"data parallel": 2, "column-row": 2, "pipeline": 2, "data x tensor": 4}.items():
        with sides(n, ("eager", "PyTorch")) as of:
            for hidden_size in HIDDEN:
                seconds = medians(in_turns(turns, of(strategy, batch=BATCH, hidden_size=hidden_size)))
                rows.append({"strategy": strategy, "ranks": n, "hidden_size": hidden_size, "seconds": seconds})
                say(rows[-1])
    return {"steps": rows, "per_rank": rates(turns)}


def rates(turns):
    """What formulas for a step's time need, measured with 2 ranks at work: see `sizes`."""
    shapes, elements = tall(*WIDE.values()), 2**22
    with Pool(2, timeout=300) as pool:
        moved = timed(pool.call, f"{OURS}:move_times", old="P", new="B", elements=elements, steps=2 * STEPS)

        def update():
            _, script, given, _ = STRATEGIES["data parallel"]
            return max(one["update"] for one in of_script(pool, "parts_of_step", script, steps=STEPS, **given))

        matmuls = timed(pool.call, f"{OURS}:matmul_times", shapes=shapes, steps=STEPS)
        seconds = medians(in_turns(turns, {"matmuls": matmuls, "moved": moved, "update": update}))
    parameters = WIDE["hidden_size"] * (WIDE["in_features"] + WIDE["out_features"])
    flops = sum(2 * rows * inner * columns for rows, inner, columns in shapes)
    return {
        "flops": flops / seconds["matmuls"],
        "update": seconds["update"] / parameters,
        "bytes": 4 * elements / seconds["moved"],
    }


def idle(turns, say):
    """{"ranks", "rows": [{"micro_batches", "ratio": a step / one with one micro-batch, "idle", "formula"}]}.

    A graph of recipes/training/train_pipeline.py. With one micro-batch the stages work one after the other, so that
    its time is the work of all of them; what is not work in n times the time of a step is idle.
    The formula: (n-1)/(m+n-1).
    """
    rows, n = [], 2
    for m in (2, 4, 8, 16):
        with sides(n, ("graph",)) as of:  # new ranks for each, as graphs are never freed
            pair = {count: of("pipeline", micro_batches=count, batch=2048)["graph"] for count in (m, 1)}
            shorter = compared(turns, pair)["ratio"]
        formula = (n - 1) / (m + n - 1)
        rows.append({"micro_batches": m, "ratio": shorter, "idle": 1 - 1 / (n * shorter), "formula": formula})
        say(rows[-1])
    return {"ranks": n, "rows": rows}
