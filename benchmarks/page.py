"""docs/performance.md, made from docs/performance.json: each part of it a section. No figure stands here."""

import re
import textwrap

from benchmarks.formulas import BATCH, FEATURES, HIDDEN, crossings, grouped, step_time
from benchmarks.gpt import SIZES, TRAINED
from harness.report.tables import table

SIDES = ("eager", "graph", "PyTorch", "JAX")
INTRODUCTION = """# Performance

[README](../README.md) · [all pages](README.md) · next: [clusters](clusters.md)

What follows for you:

- On a slow link take the strategy that sends least at your sizes: the [atlas](sbp-atlas.md) has the bytes.

- Neither a graph nor eager mode is always faster. A pipeline is faster in a graph: only there its stages overlap.

- Start at most one rank for each core: with more, ranks take time from each other.

- `launch.sh` sets what costs most to forget: a core for each rank, a current OpenBLAS, as many threads as cores.

- On GPUs the bytes and the memory of each rank are the same. Times are not: measure them there.

Made by `./launch.sh bench` from runs on {cores} cores of {model}, Linux {kernel}, with {versions}; parts that were
measured elsewhere are named at the end. Times belong to a machine; what counts are ratios, medians of turns in one run,
in which the sides alternate on the same cores. OneFlow's and PyTorch's ranks are bound to their cores. Where there are
more ranks than cores, ranks share them.
"""


def plot(name, words):
    """A plot, light or dark as the page is."""
    path = f"pictures/performance-{name}"
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
    return f'<picture>\n{dark}\n<img align="top" alt="{words}" src="{path}.svg">\n</picture>'


def ms(seconds):
    """Seconds in milliseconds, three digits."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def laid_out(text):
    """The same text with its paragraphs filled, so that numbers of any length fit in."""
    blocks = re.split(r"\n{2,}", text.strip())
    return "\n\n".join(
        block if block[0] in "|!#<" else textwrap.fill(block, 120, break_on_hyphens=False) for block in blocks
    )


def percent(share):
    return f"{100 * share:.0f} %"


def beside_peers(rows):
    lines = []
    for row in rows:
        cells = [ms(row["seconds"][side]) if side in row["seconds"] else "–" for side in SIDES]
        ratios = [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "–" for peer in SIDES[2:]]
        lines.append([row["strategy"], row["ranks"], *cells, row["best"], *ratios])
    return table(["strategy", "ranks", *(f"{side}, ms" for side in SIDES), "faster mode", "/ PyTorch", "/ JAX"], lines)


def training(rows):
    return f"""## A training step

The recipes' own loops, SGD with momentum 0.9, float32, batch 512, 1024 features in and out, hidden 4096; the pipeline
has 1024 everywhere, a layer on each rank, and 8 micro-batches; fully sharded has Adam. PyTorch, on gloo:
DistributedDataParallel; DTensor; GPipe of distributed.pipelining; DTensor with an all-reduce of the gradients by hand;
FSDP2. JAX: sharded jit, one process, a host device for each rank, which it does not bind; it has no pipeline. The last
columns are the faster mode's time over the peer's: above 1 we are slower.

{beside_peers(rows)}
Where a ratio stays above 1, the next sections show why. PyTorch's matmuls, by MKL, are faster on this CPU than
OpenBLAS's, those of small micro-batches most of all (The limit, Kernels): data parallel, column, then row and data x
tensor lose about that. Pipelines lose that too, and their stages wait for each other (What the first core does). JAX's
ranks share one memory, so that no all-reduce crosses a socket: column, then row and fully sharded pay for theirs, most
of all where ranks share a core (Collectives). Data parallel and data x tensor on more ranks than cores vary from run to
run, and with them the ratio to PyTorch's.
"""


def limit(data):
    fastest = min(data["matmuls"].values())
    rows = [[name, ms(seconds), f"{seconds / fastest:.2f}"] for name, seconds in data["matmuls"].items()]
    alone, update = (one / data["parts"]["step"] for one in (data["matmuls"]["OneFlow"], data["parts"]["update"]))
    shares = [
        ["five matmuls, alone", percent(alone)],
        ["update, SGD with momentum", percent(update)],
        ["all else: relu, loss, all-reduce, waiting", percent(1 - alone - update)],
    ]
    return f"""## The limit

Column, then row on 2 ranks. A rank's five matmuls of a step with nothing else to do, in milliseconds, and over those of
the fastest: what no recipe can change is the kernel for them, OpenBLAS's `sgemm`.

{table(["framework", "matmuls alone, ms", "/ fastest"], rows)}
Of a step these matmuls are {percent(data["shares"]["eager"])} in eager mode and {percent(data["shares"]["graph"])}
in a graph, medians of turns. Where an eager step goes, in one run:

{table(["part", "of the step"], shares)}"""


def busy(rows):
    lines = []
    for row in rows:
        idle = max(0.0, row["step"] - row["others"] - row["scheduling"])
        cells = [percent(one / row["step"]) for one in (row["others"], row["scheduling"], idle)]
        step = [row["strategy"], row["ranks"], row["mode"], ms(row["step"])]
        lines.append([*step, *cells, f"{row['gain']:.2f}"])
    header = ["strategy", "ranks", "mode", "step, ms", "working", "OneFlow's scheduling thread", "idle", "nice 19"]
    return f"""## What the first core does

The CPU time of the threads of the ranks that share it, in a step. The thread in OneFlow that schedules operations
(`vm::VirtualMachine::ScheduleLoop`) does not sleep while work is under way, a message that it waits for included: it
calls `sched_yield` without end. So its share is mostly time in which the rank waits. With this thread at the lowest
priority a step takes about as long: the last column is the time without that, divided by the time with it.

{table(header, lines)}"""


def gpt(rows):
    lines = []
    for row in (row for row in rows if "parts" in row):
        for side, parts in row["parts"].items():
            step, rest = parts["step"], parts["step"] - parts["backward"] - parts["update"]
            times = (step, rest, parts["backward"], parts["update"], parts["matmuls"])
            shares = [percent(parts[part] / step) for part in ("update", "matmuls")]
            lines.append([row["strategy"], row["ranks"], side, *map(ms, times), *shares])
    header = ["strategy", "ranks", "side", "step, ms", "forward", "backward", "update", "matmuls alone"]
    heads, sequences, length = SIZES["num_heads"], SIZES["batch_size"], SIZES["seq_len"]
    return f"""## A GPT

A step of [gpt.py](../recipes/transformer/gpt.py): {SIZES["num_layers"]} layers of width {SIZES["hidden_size"]},
{heads} heads, {sequences} sequences of {length} letters, float32, AdamW. PyTorch: one process,
DistributedDataParallel, DTensor with the vocabulary and the loss split too, FSDP2; its fused attention and AdamW. JAX:
sharded jit. All begin with the same weights and train on the same text; in the first {TRAINED} steps no loss differs
from PyTorch's by more than {max(row["difference"] for row in rows):.1g}.

{beside_peers(rows)}
Where the time goes, on at most one rank for each core: the parts of a step, OneFlow's in eager mode, and a rank's
matmuls of a step with nothing else to do. What is sent belongs to the part that waits for it. What OneFlow loses, it
loses in its kernels (Kernels): gelu, a broadcast along the last dimension in each norm, copies for transposed tensors
and heads, and matmuls that are OpenBLAS's. This is why the recipe's norms expand what they subtract.

{table([*header, "update / step", "matmuls / step"], lines)}"""


def levers(rows):
    lines = [[row["lever"], row["strategy"], f"{row['gain']:.2f}", row["set"]] for row in rows]
    return f"""## Levers

A step's time without it over that with it, on 2 ranks in eager mode; each is taken away alone from all others, and what
was tried and is not set is added alone.

Ranks load OpenBLAS 0.3.34 before OneFlow, which then calls it instead of its own. Its own knows CPUs by their model,
and takes kernels without AVX for one newer than itself. `COOKBOOK_BLAS=builtin` switches back. Beside another launcher,
and for processes that a rank starts, type `export LD_PRELOAD=$PWD/.venv/lib/libopenblas.so`.

{table(["lever", "strategy", "gain", "set by"], lines)}"""


def kernels(rows):
    lines = [
        [row["kernel"], *(f"{1e3 * seconds:.2f}" for seconds in row["seconds"].values()), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    return f"""## Kernels

Operations of a step alone on one core, milliseconds, float32: what a recipe cannot change but by taking another one.

{table(["operation", "OneFlow", "PyTorch", "ratio"], lines)}"""


def scaling(rows):
    lines = []
    for (kind, strategy), own in grouped(rows, "kind", "strategy").items():
        for side in ("eager", "PyTorch"):
            times = [row["seconds"][side] for row in own]
            lines.append([kind, strategy, side, *(f"{ms(one)} ({times[0] / one:.2f})" for one in times)])
    return f"""## Scaling

Milliseconds, and in parentheses the time on 1 rank over it: ideal is the number of ranks for strong scaling (a batch of
512 in all), and 1 for weak scaling (256 for each rank). Each rank has one core. Where there are more ranks than cores,
ranks share them: then more ranks cannot be faster in strong scaling, and need as many times the time as share a core in
weak scaling. The dashed line is that ideal.

{plot("scaling", "milliseconds of a step against the number of ranks")}

{table(["scaling", "strategy", "side", "1 rank", "2 ranks", "4 ranks"], lines)}"""


def sizes(data, cores):
    lines, rates = [], data["per_rank"]
    for (strategy, ranks), rows in grouped(data["steps"], "strategy", "ranks").items():
        for side in ("eager", "PyTorch"):
            lines.append([strategy, ranks, side, *(ms(row["seconds"][side]) for row in rows)])
        formula = [step_time(strategy, ranks, row["hidden_size"], rates, cores) for row in rows]
        lines.append([strategy, ranks, "formula", *map(ms, formula)])
    kinds = ("bytes", "formula", "eager", "PyTorch")
    crossed = [
        [f"{one} · {other}", *(f"{where[kind]:.0f}" if where[kind] else "none" for kind in kinds)]
        for one, other, where in crossings(data, cores)
    ]
    return f"""## How cost grows with size

Milliseconds of a step with a batch of {BATCH}, {FEATURES} features in and out, by hidden
size; on 2 ranks the three strategies do the same work. The formula adds up, with rates measured in the same run,
matmuls at {rates["flops"] / 1e9:.0f} GFLOP/s, the update at {1e9 * rates["update"]:.2f} ns a parameter, and bytes at
{rates["bytes"] / 1e9:.2f} GB/s, those of an all-reduce of 16 MB. Dotted lines: where data parallel and column, then row
take the same time, by the formula and in eager mode.

{plot("sizes", "milliseconds of a step against the hidden size")}

{table(["strategy", "ranks", "side", *HIDDEN], lines)}
The hidden size from {HIDDEN[0]} to {HIDDEN[-1]} at which one of two strategies becomes the better one: in bytes that
a rank sends, by the formula for time, and in measured time. "none": one of them is better over the whole range. By
bytes data parallel and column, then row cross at batch x out / (in + out), and the pipeline sends less than column,
then row below hidden = out; time adds what bytes do not know, the update (all weights on each rank against half of
them) and waiting.

{table(["strategies", *kinds], crossed)}"""


def idle(data):
    lines = [
        [row["micro_batches"], f"{row['ratio']:.2f}", percent(row["idle"]), percent(row["formula"])]
        for row in data["rows"]
    ]
    return f"""## Idle pipeline stages

A graph of train_pipeline.py on {data["ranks"]} ranks with m micro-batches of one batch of 2048. The step with one
micro-batch, in which one stage works after the other, is the work of both; what is not work in a step of both is idle.
The formula knows equal stages only: here the last has 3 of the 5 matmuls, since the first needs no gradient of its
input, which alone leaves 1 - 5/6 = 17 % idle, and smaller micro-batches have slower matmuls (see Kernels).

{table(["m", "step / step with m = 1", "idle", "(n-1)/(m+n-1)"], lines)}"""


def collectives(data):
    sizes = list(dict.fromkeys(row["bytes"] for row in data["moves"]))
    lines = []
    for key, rows in grouped(data["moves"], "collective", "sbp", "ranks").items():
        lines.append([*key, *(f"{ms(row['seconds']['ours'])} ({row['ratio']:.2f})" for row in rows)])
    copies = {row["bytes"]: row["bytes"] / row["seconds"] / 1e9 for row in data["copies"]}
    lines.append(["copy in memory, GB/s", "", "", *(f"{copies[size]:.1f}" for size in sizes)])
    return f"""## Collectives

`to_global` from one SBP to another in eager mode, milliseconds, and in parentheses the ratio to gloo's collective of as
many bytes; the size is that of the whole tensor. The last row is what copying as much in memory reaches.

{plot("collectives", "bytes a second of each collective against the tensor's size")}

{table(["collective", "SBP", "ranks", *map(size_in_words, sizes)], lines)}"""


def size_in_words(size):
    return f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"


def launches(data):
    lines = [
        [row["ranks"], *(f"{seconds:.2f}" for seconds in row["seconds"].values()), f"{row['ratio']:.2f}"]
        for row in data["pairs"]
    ]
    return f"""## Launch

From the command to its end, seconds, for a job that adds up one number: `./launch.sh` with OneFlow against
torchrun with PyTorch and gloo.

{table(["ranks", "launch.sh", "torchrun", "ratio"], lines)}
{data["alone"]} launches on 4 ranks: median {data["median"]:.2f} s, longest {data["longest"]:.2f} s;
{data["stalls"]} fell into the 10 s sleep of a rank that looks for rank 0 too early.
"""


def fresh_clone(rows):
    lines = [[row["phase"], f"{row['seconds']:.1f}"] for row in rows]
    return f"""## From a fresh clone to the first result

`git clone`, then `./launch.sh recipes/data_parallel.py`, seconds, with nothing in uv's cache; the download depends on
the network. Another clone then links to the cache.

{table(["phase", "seconds"], lines)}"""


def suite(data):
    return f"""## The test suite

`./launch.sh test`: {data["tests"]} tests, {data["checks"]} checks against numpy and the declared layouts,
{data["seconds"]:.0f} s.
"""


SECTIONS = (
    training,
    limit,
    kernels,
    busy,
    gpt,
    levers,
    scaling,
    sizes,
    idle,
    collectives,
    launches,
    fresh_clone,
    suite,
)


def page(found):
    """The text of the page, with a section for each part that was measured."""
    first = next(iter(found.values()))["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    texts = [INTRODUCTION.format(**{**first, "versions": versions})]
    for section in SECTIONS:
        if section.__name__ in found:
            part = found[section.__name__]
            more = [part["machine"]["cores"]] if section is sizes else []
            texts.append(section(part["data"], *more))
    lines = []
    for name, part in found.items():
        machine = "{cores} cores of {model}".format(**part["machine"])
        lines.append([f"`./launch.sh bench {name}`", part["date"], machine, part["minutes"]])
    total = sum(part["minutes"] for part in found.values())
    lines.append(["`./launch.sh bench`", "", "", f"{total:.0f}"])
    when = table(["part", "measured on", "with", "minutes"], lines)
    return laid_out("\n\n".join([*texts, f"## When, and with what\n\n{when}"])) + "\n"
