"""docs/performance-details.md: a section for each other part of bench. No figure stands here."""

from benchmarks.formulas import BATCH, FEATURES, HIDDEN, crossings, grouped, step_time
from benchmarks.layout import by_cpu, each, filled, left_out, ms, percent, plot, when, with_ranks

INTRODUCTION = """# Performance: the details

[README](../README.md) · [all pages](README.md) · [performance](performance.md), the short page

[The short page](performance.md) has ratios to PyTorch and JAX. This page says where they come from. `./launch.sh bench`
makes it too. Where a table does not name the CPU, [the last table](#when-and-on-what) does. The takeaways:

{takeaways}
"""

ALT = {  # what is in a plot
    "scaling": "milliseconds of a step on 1, 2 and 4 ranks: strong and weak scaling of data parallel "
    "and column-row; shaded: more ranks than cores",
    "sizes": "the time of data parallel, column-row and pipeline against the hidden size, by "
    "OneFlow, PyTorch and the formula, and where two cross",
    "collectives": "GB a second that a rank sends, of four collectives on 2 and on 4 ranks, against the "
    "tensor's size: OneFlow beside gloo",
}


def spread(figures, form="{:.1f}"):
    """The smallest and the largest of some figures, or one where both look the same."""
    ends = dict.fromkeys(form.format(one).replace("%", " %") for one in (min(figures), max(figures)))
    return " to ".join(ends)


def takeaways(found):
    """What a reader should remember, as a list: of each part that was measured."""

    def of(part, name, pick=lambda data: data):
        return [row[name] for record in found.get(part, {}).values() for row in pick(record["data"])]

    blas = of("levers", "gain", lambda rows: [row for row in rows if "OpenBLAS" in row["lever"]])
    bound = of("levers", "gain", lambda rows: [row for row in rows if "bound to its cores" in row["lever"]])
    slow = of("kernels", "ratio", lambda rows: [row for row in rows if row["kernel"] == "(1024, 512) - (1024, 1)"])
    waits = of("idle", "idle", lambda data: [row for row in data["rows"] if row["micro_batches"] == 8])
    first = of("plan", "first", lambda data: [data])
    words = (
        (blas, "{:.1f}", "A current OpenBLAS makes a step {} times as fast."),
        (bound, "{:.1f}", "Binding the ranks to cores makes a step {} times as fast."),
        (slow, "{:.0f}", "A subtraction that broadcasts one column takes {} times as long as PyTorch's: avoid it."),
        (waits, "{:.0%}", "A pipeline of 2 stages with 8 micro-batches is idle for {} of a step."),
        (first, "{:.2f}", "The layout that [plan](choosing.md) puts first takes {} times the time of the fastest one."),
    )
    return "\n".join(f"- {text.format(spread(figures, form))}" for figures, form, text in words if figures)


def limit(records):
    def matmuls(data):
        fastest = min(data["matmuls"].values())
        return [[name, ms(seconds), f"{seconds / fastest:.2f}"] for name, seconds in data["matmuls"].items()]

    def shares(data):
        alone, update = data["shares"]["eager"], data["parts"]["update"] / data["parts"]["step"]
        yield ["five matmuls, alone", percent(alone)]
        yield ["update, SGD with momentum", percent(update)]
        yield ["all else: relu, loss, all-reduce, waiting", percent(1 - alone - update)]

    def modes(data, cpu):
        return f"On the {cpu} these matmuls are {percent(data['shares']['graph'])} of a step in a graph."

    return f"""## The limit

How fast can a step of column-row be on 2 ranks? Not faster than its five matmuls alone, which this table times. No
recipe can make OpenBLAS's `sgemm` faster.

{by_cpu(["framework", "matmuls alone, ms", "/ fastest"], records, matmuls)}
Where the time of an eager step goes:

{by_cpu(["part", "of the step"], records, shares)}
{each(records, modes)}"""


def kernels(records):
    def rows(data):
        for row in data:
            yield [row["kernel"], *(f"{1e3 * one:.2f}" for one in row["seconds"].values()), f"{row['ratio']:.2f}"]

    def slowest(records):
        measured = [row for record in records.values() for row in record["data"]]
        return max(measured, key=lambda row: row["ratio"])["kernel"]

    return f"""## Kernels

Milliseconds of single operations on one core, in float32. The slowest beside PyTorch is
`{slowest(records)}`. gpt.py avoids broadcasting with expand.

{by_cpu(["operation", "OneFlow", "PyTorch", "ratio"], records, rows)}"""


def busy(records):
    def rows(data):
        for row in data:
            idle = max(0.0, row["step"] - row["others"] - row["scheduling"])
            shares = [percent(part / row["step"]) for part in (row["others"], row["scheduling"], idle)]
            yield [f"{with_ranks(row)}, {row['mode']}", ms(row["step"]), *shares, f"{row['gain']:.2f}"]

    header = ["strategy", "step, ms", "working", "scheduling thread", "idle", "nice 19"]
    return f"""## What the first core does

What do the ranks on the first core do in a step? They work, they are idle, or OneFlow's scheduling thread runs.

That thread, `vm::VirtualMachine::ScheduleLoop`, never sleeps while work is under way. It calls `sched_yield` again and
again, even while the rank waits for a message. So its share is mostly waiting.

For the last column that thread ran at nice 19, the lowest priority. The figure is the time of a step at normal
priority, divided by that at nice 19. Below 1, the lower priority makes the step slower.

{by_cpu(header, records, rows)}"""


def plan(records):
    def rows(data):
        for row in sorted(data["rows"], key=lambda row: row["measured"]):
            micro_batches = "" if row["micro_batches"] == 1 else f", {row['micro_batches']} micro-batches"
            ratio = f"{row['plan'] / row['measured']:.2f}"
            yield [row["layout"] + micro_batches, ms(row["measured"]), ms(row["plan"]), ratio]

    def orders(data, cpu):
        return (
            f"On the {cpu}, the plan's first choice takes {data['first']:.2f} times the time of the fastest layout."
            f" The rank correlation (Spearman) of planned and measured times is {data['spearman']:.2f}."
        )

    return f"""## The plan, beside runs

How well does [plan](choosing.md) predict a step? These are steps of gpt.py in a graph on 2 ranks, one on each core.
The plan takes three rates from the same run: the arithmetic of a step on one rank, an all-reduce of 16 MB, and an
update. The ratio is the plan's time divided by the measured one.

{each(records, orders)}

{by_cpu(["data x tensor x pipeline", "measured, ms", "plan, ms", "ratio"], records, rows)}"""


def levers(records):
    def rows(data):
        return [[row["lever"], row["strategy"], f"{row['gain']:.2f}", row["set"]] for row in data]

    return f"""## Levers

What does each option bring, on 2 ranks in eager mode? The gain is the time of a step without it, divided by the time
with it. Each option that we set was disabled on its own. Each one that we do not set was enabled on its own.

{by_cpu(["lever", "strategy", "gain", "set by"], records, rows, keys=2)}
The first is the largest. OneFlow 0.9.0 contains an old OpenBLAS. It chooses kernels by the model of the CPU, and newer
models get kernels without AVX. So `launch.sh` loads OpenBLAS 0.3.34 first. `COOKBOOK_BLAS=builtin` switches that off.

With a different launcher, and for processes that a rank starts, type
`export LD_PRELOAD=$PWD/.venv/lib/libopenblas.so`."""


def scaling(records):
    def rows(data):
        for (kind, strategy), own in grouped(data, "kind", "strategy").items():
            for side in ("eager", "PyTorch"):
                times = [row["seconds"][side] for row in own]
                yield [f"{kind}, {strategy}, {side}", *(f"{ms(one)} ({times[0] / one:.2f})" for one in times)]

    header = ["scaling", "1 rank", "2 ranks", "4 ranks"]
    return f"""## Scaling

Milliseconds of a step. In parentheses is the time on 1 rank, divided by this time.

- Strong scaling splits a batch of 512 over the ranks. The ideal in parentheses is the number of ranks.
- Weak scaling gives each rank 256 rows. The ideal is 1.

Each rank computes on one core only. Where ranks share the 2 cores, do not expect them to be faster. In the picture, the
dashed line is the ideal on 2 cores.

{plot("scaling", ALT["scaling"])}

{by_cpu(header, records, rows)}"""


def sizes(records):
    cores = next(iter(records.values()))["machine"]["cores"]

    def rows(data):
        for (strategy, ranks), own in grouped(data["steps"], "strategy", "ranks").items():
            for side in ("eager", "PyTorch"):
                yield [f"{strategy}, {ranks} ranks, {side}", *(ms(row["seconds"][side]) for row in own)]
            formula = [step_time(strategy, ranks, row["hidden_size"], data["per_rank"], cores) for row in own]
            yield [f"{strategy}, {ranks} ranks, formula", *map(ms, formula)]

    def crossed(data):
        for one, other, where in crossings(data, cores):
            yield [f"{one} · {other}", *(f"{where[kind]:.0f}" if where[kind] else "none" for kind in kinds)]

    def rates(data, cpu):
        flops, update, sent = (data["per_rank"][name] for name in ("flops", "update", "bytes"))
        return (
            f"On the {cpu}, matmuls run at {flops / 1e9:.0f} GFLOP/s, an update takes {1e9 * update:.2f} ns a"
            f" parameter, and an all-reduce of 16 MB moves {sent / 1e9:.2f} GB/s."
        )

    kinds = ("bytes", "formula", "eager", "PyTorch")
    return f"""## How cost grows with size

Milliseconds of a step, by hidden size, with a batch of {BATCH} and {FEATURES} features in and out. On 2 ranks the three
strategies do the same work. The picture divides the time by the hidden size, with which most of the work grows.

The formula adds the times of matmuls, update and communication, at rates from the same run.

{each(records, rates)}

{plot("sizes", ALT["sizes"])}

{by_cpu(["strategy", *HIDDEN], records, rows)}
At which hidden size from {HIDDEN[0]} to {HIDDEN[-1]} does the better of two strategies change? The columns compare them
by the bytes that a rank sends, by the formula for time, and by measured time. "none" means that one strategy is better
at all sizes.

{by_cpu(["strategies", *kinds], records, crossed)}
By bytes, data parallel and column-row cross at batch x out / (in + out). The pipeline sends less than column-row while
hidden is smaller than out. The measured time also has the update, which is of all weights in data parallel and of half
of them in the other two, and the time that ranks wait for each other."""


def idle(records):
    def rows(data):
        for row in data["rows"]:
            yield [row["micro_batches"], f"{row['ratio']:.2f}", percent(row["idle"]), percent(row["formula"])]

    return f"""## Idle pipeline stages

A graph of train_pipeline.py on 2 ranks splits a batch of 2048 into m micro-batches. With m = 1 one stage works after
the other, and half of that step is the work of one stage. Idle is the share of a step beyond that half. The last column
is GPipe's formula for p = 2 stages.

{by_cpu(["m", "step / step with m = 1", "idle", "(p-1)/(m+p-1)"], records, rows)}
Why is more idle than the formula says? The formula assumes equal stages. Here the first stage needs no gradient of its
input, so the last one has 3 of the 5 matmuls. That alone leaves 1 - 5/6 = 17 % idle. Matmuls of small micro-batches
are also slower, and that extra time counts as idle here."""


def timeline(records):
    def shares(data, cpu):
        ranks = ", and ".join(
            f"for {percent(sum(end - begin for begin, end in lane) / data['step'])} on rank {rank}"
            for rank, lane in enumerate(data["busy"])
        )
        return f"On the {cpu}, a step took {ms(data['step'])} ms. Threads ran {ranks}."

    [micro_batches] = {record["data"]["micro_batches"] for record in records.values()}
    return f"""## A pipeline in time

When does each rank work? This is the same graph on 2 ranks with {micro_batches} micro-batches. A block is a time in
which a thread of the rank was running, the scheduling thread aside. The lanes above it are the order of GPipe, in which
only matmuls take time.

OneFlow's own profiler aborts on a CPU. So the states of the threads were read from outside, about every half
millisecond. That takes some of the ranks' time.

{each(records, shares)}

{plot("timeline", "when each rank computes in a step of a pipeline: by the formula, and measured")}
"""


def collectives(records):
    moves = next(iter(records.values()))["data"]["moves"]
    names = dict.fromkeys((row["collective"], row["sbp"]) for row in moves)

    def rows(data):
        for (ranks, size), own in grouped(data["moves"], "ranks", "bytes").items():
            cells = {
                (row["collective"], row["sbp"]): f"{ms(row['seconds']['ours'])} ({row['ratio']:.2f})" for row in own
            }
            yield [f"{ranks} ranks, {size_in_words(size)}", *(cells[name] for name in names)]

    def copies(data):
        for row in data["copies"]:
            yield [size_in_words(row["bytes"]), f"{row['bytes'] / row['seconds'] / 1e9:.1f}"]

    return f"""## Collectives

Milliseconds of a `to_global` from one SBP to a different one, in eager mode. In parentheses is that time divided by
the time of gloo's collective for as many bytes. The sizes are those of the whole tensor.

{plot("collectives", ALT["collectives"])}

{by_cpu(["tensor", *map("<br>".join, names)], records, rows)}
For comparison, this is how fast each CPU copies as many bytes in memory:

{by_cpu(["size", "GB/s"], records, copies)}"""


def size_in_words(size):
    return f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"


def launches(records):
    def rows(data):
        for row in data["pairs"]:
            yield [row["ranks"], *(f"{seconds:.2f}" for seconds in row["seconds"].values()), f"{row['ratio']:.2f}"]

    def stalls(data, cpu):
        return (
            f"On the {cpu}, the median of {data['alone']} launches on 4 ranks is {data['median']:.2f} s, and the"
            f" slowest took {data['longest']:.2f} s. {data['stalls'] or 'None'} of them waited for a second attempt."
        )

    return f"""## Launch

Seconds from the command to its end, for a job that sums one number. `./launch.sh` starts OneFlow. torchrun starts
PyTorch with gloo.

{by_cpu(["ranks", "launch.sh", "torchrun", "ratio"], records, rows)}
A rank that looks for rank 0 too early tries again after 10 s.

{each(records, stalls)}
"""


def fresh_clone(records):
    def rows(data):
        return [[row["phase"], f"{row['seconds']:.1f}"] for row in data]

    return f"""## From a fresh clone to the first result

Seconds of `git clone` and `./launch.sh recipes/data_parallel.py`, with an empty cache of uv. The download depends on
the network. A second clone on the same machine links to the cache, and is faster.

{by_cpu(["phase", "seconds"], records, rows)}"""


def suite(records):
    def rows(data):
        yield [data["tests"], data["checks"], f"{data['seconds']:.0f}"]

    return f"""## The test suite

`./launch.sh test` against numpy and the declared layouts.

{by_cpu(["tests", "checks", "seconds"], records, rows, keys=2)}"""


SECTIONS = (
    limit,
    kernels,
    busy,
    plan,
    levers,
    scaling,
    sizes,
    idle,
    timeline,
    collectives,
    launches,
    fresh_clone,
    suite,
)


def page(found):
    """The text of the page; found: {part: {CPU: record}}."""
    texts = [INTRODUCTION.format(takeaways=takeaways(found))]
    missing = [section.__name__ for section in SECTIONS if section.__name__ not in found]
    if missing:
        texts.append(left_out(missing))
    texts += [section(found[section.__name__]) for section in SECTIONS if section.__name__ in found]
    return filled("\n\n".join([*texts, f"## When, and on what\n\n{when(found)}"])) + "\n"
