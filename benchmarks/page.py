"""docs/performance.md: the takeaways, a training step and a GPT beside PyTorch and JAX. No figure stands here."""

from benchmarks.gpt import SIZES, TRAINED
from benchmarks.layout import beside_peers, by_cpu, each, filled, left_out, ms, name_of, percent

INTRODUCTION = """# Performance

[README](../README.md) · [all pages](README.md) · next: [clusters](clusters.md)

How fast are the recipes on a CPU, beside PyTorch and JAX? Takeaways:

{takeaways}

`./launch.sh bench` makes this page from its runs. Times belong to a machine, so look at the ratios: each is the median
over several turns of one run, in which all sides take turns on the same cores. The ranks of OneFlow and of PyTorch are
bound to their cores. Each CPU here has {cores} cores; where there are more ranks than that, ranks share cores. The
versions: {versions}. [The details](performance-details.md) have the kernels, the collectives, scaling, launch
times, and the date of each measurement.
"""


def takeaways(found):
    """What a reader should remember, as a list."""
    return "\n".join(
        [
            *(ratios_in_words(found, "training", "A step of the small models below")),
            *(ratios_in_words(found, "gpt", "A step of a GPT")),
            "- Neither eager mode nor nn.Graph is always faster. A pipeline needs a graph: there its stages overlap.",
            "- On a slow link, choose the strategy that sends least at your sizes: see the [atlas](sbp-atlas.md).",
            "- Start at most one rank for each core. With more, they take time from each other.",
            "- `launch.sh` sets the options that are costliest to forget: it binds each rank to its cores, and loads a",
            "  current OpenBLAS.",
            "- On GPUs the bytes and the memory of each rank are the same, and the times are not: measure them there.",
        ]
    )


def ratios_in_words(found, part, what):
    """A line for each CPU: between which ratios to PyTorch's time the rows of a part lie."""
    for cpu, record in found.get(part, {}).items():
        ratios = [row["ratios"]["PyTorch"] for row in record["data"]]
        yield f"- {what} takes {min(ratios):.2f} to {max(ratios):.2f} times as long as PyTorch's on an {name_of(cpu)}."


def training(records):
    return f"""## A training step

The recipes' own loops, with SGD and momentum 0.9 in float32. A batch has 512 rows, input and output 1024 features, the
hidden layer 4096. The pipeline has a layer of 1024 x 1024 on each rank, and 8 micro-batches. Fully sharded trains with
Adam.

PyTorch runs on gloo: DistributedDataParallel; DTensor; GPipe of distributed.pipelining; DTensor with an all-reduce
of the gradients by hand; FSDP2. JAX runs jit on sharded arrays, in one process with a host device for each rank. It has
no pipeline.

The last columns are our time, in the faster mode, divided by the peer's. Above 1 we are slower.

{beside_peers(records)}
Two differences explain most ratios. PyTorch multiplies with MKL, OneFlow with OpenBLAS: which is faster depends on the
CPU and on the size ([the limit](performance-details.md#the-limit), [kernels](performance-details.md#kernels)). JAX's
devices share one memory, so nothing that they exchange crosses a socket
([collectives](performance-details.md#collectives)).
"""


def gpt(records):
    heads, sequences, length = SIZES["num_heads"], SIZES["batch_size"], SIZES["seq_len"]

    def differences(data, cpu):
        largest = max(row["difference"] for row in data)
        return f"On the {cpu}, no loss of the first {TRAINED} steps differs from PyTorch's by more than {largest:.1g}."

    header = ["strategy", "ranks", "side", "step, ms", "forward", "backward", "update", "matmuls alone"]
    header += ["update / step", "matmuls / step"]
    return f"""## A GPT

A step of [gpt.py](../recipes/transformer/gpt.py): {SIZES["num_layers"]} layers, hidden size {SIZES["hidden_size"]},
{heads} heads, {sequences} sequences of {length} characters, float32, AdamW. PyTorch: one process;
DistributedDataParallel; DTensor, which also splits the vocabulary and the loss; FSDP2. It has its fused attention and
its fused AdamW. JAX: jit on sharded arrays. All start from the same weights and train on the same text.

{each(records, differences)}

{beside_peers(records)}
Where the time goes, on at most one rank for each core: the parts of a step, OneFlow's in eager mode, and the matmuls of
a rank with nothing else to do. Waiting for a message counts for the part that waits.

{by_cpu(header, records, parts_of_gpt, keys=3)}"""


def parts_of_gpt(data):
    for row in (row for row in data if "parts" in row):
        for side, parts in row["parts"].items():
            step, rest = parts["step"], parts["step"] - parts["backward"] - parts["update"]
            times = (step, rest, parts["backward"], parts["update"], parts["matmuls"])
            shares = [percent(parts[part] / step) for part in ("update", "matmuls")]
            yield [row["strategy"], row["ranks"], side, *map(ms, times), *shares]


def page(found):
    """The text of the page; found: {part: {CPU: record}}."""
    first = next(iter(next(iter(found.values())).values()))["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    texts = [INTRODUCTION.format(takeaways=takeaways(found), cores=first["cores"], versions=versions)]
    missing = [section.__name__ for section in (training, gpt) if section.__name__ not in found]
    if missing:
        texts.append(left_out(missing))
    texts += [section(found[section.__name__]) for section in (training, gpt) if section.__name__ in found]
    return filled("\n\n".join(texts)) + "\n"
