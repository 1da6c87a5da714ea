"""docs/performance.md: the takeaways, a training step and a GPT beside PyTorch and JAX. No figure stands here."""

from benchmarks.gpt import SIZES, TRAINED
from benchmarks.layout import by_cpu, each, filled, left_out, ms, name_of, percent, ratios_to_peers, times

INTRODUCTION = """# Performance

[README](../README.md) · [all pages](README.md) · next: [performance: the details](performance-details.md)

How fast are the recipes on a CPU, beside PyTorch and JAX? Each machine here has {cores} cores: in
rows with more ranks, ranks share them. The takeaways:

{takeaways}
"""
MEASURED = """## How this is measured

- `./launch.sh bench` measures, and makes this page.
- Times belong to a machine, so compare the ratios. All sides take turns on the same cores. A ratio is the median over
  several turns of one run.
- The ranks of OneFlow and of PyTorch are bound to their cores. Each machine has {cores} cores; more ranks share them.
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
            "- A pipeline needs a graph with micro-batches: only there do its stages overlap. For the other",
            "  strategies, sometimes eager mode is faster and sometimes nn.Graph.",
            "- On a slow link, choose the strategy that sends least at your sizes. The",
            "  [atlas](sbp-atlas.md#what-a-training-step-costs) has what each strategy sends.",
            "- Start at most one rank for each core. Beyond that, ranks compete for cores.",
            "- Start the ranks with `launch.sh`. It binds each rank to its cores and loads a current OpenBLAS, the two",
            "  [options that are costliest to forget](performance-details.md#levers).",
            "- No GPU has run the recipes yet. What a rank sends and keeps follows from the layout, so it should be",
            "  the same there. The times will not be: measure them.",
        ]
    )


def ratios_in_words(found, part, what):
    """A line for each CPU: between which ratios to PyTorch's time the rows without shared cores lie."""
    for cpu, record in found.get(part, {}).items():
        cores = record["machine"]["cores"]
        ratios = [row["ratios"]["PyTorch"] for row in record["data"] if row["ranks"] <= cores]
        between = f"{min(ratios):.2f} to {max(ratios):.2f} times"
        yield f"- {what} on up to {cores} ranks takes {between} as long as PyTorch's on an {name_of(cpu)}."


def training(records):
    return f"""## A training step

Each figure is our time divided by PyTorch's or JAX's. Ours is that of the faster mode, eager or nn.Graph. Above 1 we
are slower.

{ratios_to_peers(records)}
Two differences explain most ratios:

- PyTorch multiplies with MKL, and OneFlow with OpenBLAS. Which of them is faster depends on the CPU and on the size:
  see [the limit](performance-details.md#the-limit) and [kernels](performance-details.md#kernels).
- JAX's devices are in one process and exchange data through its memory. The ranks of OneFlow and PyTorch send it over
  sockets: [collectives](performance-details.md#collectives) has what that takes.

The same steps in milliseconds. Each time is the median of its own turns, while a ratio above is the median of the
ratios turn by turn. So the quotient of two of these times can differ from that ratio.

{times(records)}
Column-row is tensor parallelism as in Megatron-LM: the first weight is split by columns, the second by rows.

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

JAX runs jit on sharded arrays, in one process with a host device for each rank. We measured no pipeline in
JAX.
"""


def gpt(records):
    heads, sequences, length = SIZES["num_heads"], SIZES["batch_size"], SIZES["seq_len"]

    def differences(data, cpu):
        largest = max(row["difference"] for row in data)
        return f"On the {cpu}, no loss of the first {TRAINED} steps differs from PyTorch's by more than {largest:.1g}."

    machines = " and ".join(f"an {name_of(cpu)}" for cpu in records)
    header = ["strategy", "ranks", "side", "matmuls, ms", "share of step", "update, ms", "share of step"]
    return f"""## A GPT

This is a step of [gpt.py](../recipes/transformer/gpt.py), measured on {machines}. The model has
{SIZES["num_layers"]} layers of hidden size {SIZES["hidden_size"]} and {heads} heads, and the batch {sequences}
sequences of {length} characters. It trains with AdamW in float32. One rank uses all cores, so more ranks have no more
cores than one. Again, each figure is our time divided by the peer's:

{ratios_to_peers(records)}
All sides start from the same weights and train on the same text. {each(records, differences)}

The same steps in milliseconds:

{times(records)}
PyTorch runs data parallel with DistributedDataParallel, tensor parallel with DTensor and fully sharded with FSDP2. Its
attention and its AdamW are fused. With DTensor, the vocabulary and the loss are split as well. JAX runs jit on sharded
arrays.

Where does the time go? "Matmuls" is the time of all matmuls of one rank's step, run on their own. "Update" is AdamW.
Each share is of the step's time in the table above, for OneFlow of its eager step. Rows with more ranks than cores are
left out.

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
    texts = [INTRODUCTION.format(cores=first["cores"], takeaways=takeaways(found))]
    texts += [section(found[section.__name__]) for section in (training, gpt) if section.__name__ in found]
    missing = [section.__name__ for section in (training, gpt) if section.__name__ not in found]
    if missing:
        texts.append(left_out(missing))
    texts.append(MEASURED.format(cores=first["cores"], oneflow=oneflow[1], versions=versions))
    return filled("\n\n".join(texts)) + "\n"
