"""docs/performance.md: the takeaways, a training step and a GPT beside PyTorch and JAX. No figure stands here."""

from benchmarks.gpt import SIZES, TRAINED
from benchmarks.layout import by_cpu, each, filled, left_out, ms, name_of, percent, ratios_to_peers, times

INTRODUCTION = """# Performance

[README](../README.md) · [all pages](README.md) · next: [performance: the details](performance-details.md)

How fast are the recipes on a CPU, beside PyTorch and JAX? The takeaways:

{takeaways}
"""
MEASURED = """## How this is measured

- `./launch.sh bench` measures, and makes this page.
- Times belong to a machine, so compare the ratios. All sides take turns on the same cores. A ratio is the median over
  several turns of one run.
- The ranks of OneFlow and of PyTorch are bound to their cores. Each CPU here has {cores} cores. Where there are more
  ranks than cores, ranks share them.
- The versions: oneflow {oneflow}, with the packages of requirements.txt; for the peers {versions}.

[The details](performance-details.md) have the kernels, the collectives, scaling and launch times, and the date of each
measurement.
"""


def takeaways(found):
    """What a reader should remember, as a list."""
    return "\n".join(
        [
            *(ratios_in_words(found, "training", "A step of the small models below")),
            *(ratios_in_words(found, "gpt", "A step of a GPT")),
            "- A pipeline needs a graph: only there do its stages overlap. Otherwise neither eager mode nor nn.Graph",
            "  is always faster.",
            "- On a slow link, choose the strategy that sends least at your sizes. The",
            "  [atlas](sbp-atlas.md#what-a-training-step-costs) has what each strategy sends.",
            "- Start at most one rank for each core. Beyond that, ranks compete for cores.",
            "- Start the ranks with `launch.sh`. It binds each rank to its cores and loads a current OpenBLAS, the two",
            "  [options that are costliest to forget](performance-details.md#levers).",
            "- On GPUs, each rank sends and keeps as much as here. The times are different: measure them there.",
        ]
    )


def ratios_in_words(found, part, what):
    """A line for each CPU: between which ratios to PyTorch's time the rows of a part lie."""
    for cpu, record in found.get(part, {}).items():
        ratios = [row["ratios"]["PyTorch"] for row in record["data"]]
        yield f"- {what} takes {min(ratios):.2f} to {max(ratios):.2f} times as long as PyTorch's on an {name_of(cpu)}."


def training(records):
    return f"""## A training step

The figures are our time, in the faster mode, divided by the peer's. Above 1 we are slower.

{ratios_to_peers(records)}
Two differences explain most ratios:

- PyTorch multiplies with MKL, and OneFlow with OpenBLAS. Which of them is faster depends on the CPU and on the size:
  see [the limit](performance-details.md#the-limit) and [kernels](performance-details.md#kernels).
- JAX's devices share one memory. Nothing that they exchange crosses a socket: see
  [collectives](performance-details.md#collectives).

The same steps in milliseconds:

{times(records)}
The recipes run their own loops in float32, with SGD and momentum 0.9. Fully sharded trains with Adam. A batch has 512
rows, with 1024 features in and out and a hidden layer of 4096. The pipeline has a layer of 1024 x 1024 on each rank,
and 8 micro-batches.

PyTorch runs on gloo:

| strategy | PyTorch |
| --- | --- |
| data parallel | DistributedDataParallel |
| column-row | DTensor |
| pipeline | GPipe of distributed.pipelining |
| data x tensor | DTensor, with an all-reduce of the gradients by hand |
| fully sharded | FSDP2 |

JAX runs jit on sharded arrays, in one process with a host device for each rank. It has no pipeline.
"""


def gpt(records):
    heads, sequences, length = SIZES["num_heads"], SIZES["batch_size"], SIZES["seq_len"]

    def differences(data, cpu):
        largest = max(row["difference"] for row in data)
        return f"On the {cpu}, no loss of the first {TRAINED} steps differs from PyTorch's by more than {largest:.1g}."

    header = ["strategy", "ranks", "side", "matmuls alone, ms", "of a step", "update, ms", "of a step"]
    return f"""## A GPT

A step of [gpt.py](../recipes/transformer/gpt.py) with {SIZES["num_layers"]} layers of hidden size
{SIZES["hidden_size"]}, {heads} heads, and {sequences} sequences of {length} characters. It trains with AdamW in
float32. Again, this is our time divided by the peer's:

{ratios_to_peers(records)}
All sides start from the same weights and train on the same text. {each(records, differences)}

The same steps in milliseconds:

{times(records)}
PyTorch runs one process, DistributedDataParallel, DTensor or FSDP2. With DTensor it also splits the vocabulary and the
loss. It has its fused attention and its fused AdamW. JAX runs jit on sharded arrays.

Where does the time go? "Matmuls alone" is all matmuls of one rank's step, timed with nothing else running. The update
is AdamW's. OneFlow runs in eager mode, with at most one rank for each core. A share of a step is that of the
milliseconds above.

{by_cpu(header, records, parts_of_gpt, keys=3)}"""


def parts_of_gpt(data):
    for row in (row for row in data if "parts" in row):
        for side, parts in row["parts"].items():
            step = row["seconds"]["eager" if side == "OneFlow" else side]
            times = [(ms(parts[part]), percent(parts[part] / step)) for part in ("matmuls", "update")]
            yield [row["strategy"], row["ranks"], side, *sum(times, ())]


def page(found):
    """The text of the page; found: {part: {CPU: record}}."""
    first = next(iter(next(iter(found.values())).values()))["machine"]
    oneflow, *peers = first["versions"].items()
    versions = ", ".join(f"{name} {number}" for name, number in peers)
    texts = [INTRODUCTION.format(takeaways=takeaways(found))]
    texts += [section(found[section.__name__]) for section in (training, gpt) if section.__name__ in found]
    missing = [section.__name__ for section in (training, gpt) if section.__name__ not in found]
    if missing:
        texts.append(left_out(missing))
    texts.append(MEASURED.format(cores=first["cores"], oneflow=oneflow[1], versions=versions))
    return filled("\n\n".join(texts)) + "\n"
