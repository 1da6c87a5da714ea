"""What `plan` expects of gpt.py on 2 ranks of this machine, beside the time that each layout takes. Seconds."""

import numpy as np

from benchmarks.steps import OURS, cores, rates, slowest
from harness.plan import cost, formulas
from harness.plan.devices import Cluster, Device
from harness.plan.model import Model
from harness.pool import Pool
from harness.start.recipe import path_of
from tests.cases import reference_gpt

SIZES = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "seq_len": 128}
BATCH_SIZE = 16
STEPS = 7  # that are timed at once, and one before them
UPDATE = 2 * (4 + 8) + 4  # bytes of a parameter that AdamW reads and writes, as `plan` has it


def layouts():
    """Those of 2 ranks that are compared: each mesh, with each option that it has, in 1 and in 4 micro-batches."""
    for micro_batches in (1, 4):
        for mesh, options in (
            ((2, 1, 1), ({}, {"shard_weights": True}, {"recompute": "full"})),
            ((1, 2, 1), ({}, {"sequence_parallel": True}, {"recompute": "full"})),
            ((1, 1, 2), ({}, {"recompute": "full"})),
        ):
            for option in options:
                yield cost.Layout(*mesh, micro_batch=BATCH_SIZE // mesh[0] // micro_batches, **option)


def step_time(pool, layout):
    """The median step of a graph of gpt.py, on the slowest rank."""
    options = {name: getattr(layout, name) for name in ("shard_weights", "sequence_parallel", "recompute")}
    mesh = {axis: getattr(layout, axis) for axis in formulas.AXES}
    given = {**SIZES, **mesh, **options, "batch_size": BATCH_SIZE, "micro_batches": layout.micro_batches(BATCH_SIZE)}
    found = pool.call(f"{OURS}:losses_and_times", path=str(path_of("gpt")), steps=STEPS + 2, graph=True, **given)
    return slowest(one["seconds"] for one in found)


def cluster_of(found, model, alone):
    """2 ranks of this machine with measured rates. alone: seconds of a step of gpt.py on one rank."""
    update = found["update"] * formulas.parameters(model)
    flops = formulas.flops(model, BATCH_SIZE) / (alone - update)
    memory_rate = UPDATE / found["update"]
    device = Device(1e12, {"fp32": flops}, found["bytes"], found["bytes"], memory_rate, "measured")
    return Cluster(1, 2, device, "fp32", 1.0)


def ranks_of(values):
    """The place of each value in their order, from 0 on; equal values share the mean of their places."""
    values = np.asarray(values)
    below, equal = ((values[:, None] > values).sum(1), (values[:, None] == values).sum(1))
    return below + (equal - 1) / 2


def spearman(ones, others):
    """The correlation of the two orders: 1 if they are the same, -1 if one is the reverse."""
    return float(np.corrcoef(ranks_of(ones), ranks_of(others))[0, 1])


def name_of(layout):
    """The mesh and the options in words."""
    words = [name.replace("_", " ") for name in ("sequence_parallel", "shard_weights") if getattr(layout, name)]
    words += ["full recomputation"] * (layout.recompute == "full")
    return ", ".join([" x ".join(map(str, layout.mesh)), *words])


def plan(turns, say):
    """{"rows": [{"layout", "micro_batches", "plan", "measured"}], "spearman", "first": what plan puts first over the
    best, both as measured}."""
    model = Model(**SIZES, vocab_size=reference_gpt.vocab_size_of(SIZES["num_heads"]))
    with cores(1), Pool(1, timeout=300) as pool:  # one core, as each of two ranks has
        alone = step_time(pool, cost.Layout(1, 1, 1, BATCH_SIZE))
    cluster = cluster_of(rates(turns), model, alone)
    chosen, rows = list(layouts()), []
    for layout in chosen:
        with Pool(2, timeout=300) as pool:  # new ranks for each layout, as graphs are never freed
            seconds = step_time(pool, layout)
        expected = cost.cost(model, layout, BATCH_SIZE, cluster).seconds
        facts = {"layout": name_of(layout), "micro_batches": layout.micro_batches(BATCH_SIZE)}
        rows.append({**facts, "plan": expected, "measured": seconds})
        say(rows[-1])
    expected, measured = ([row[side] for row in rows] for side in ("plan", "measured"))
    first = measured[int(np.argmin(expected))] / min(measured)
    return {"rows": rows, "spearman": spearman(expected, measured), "first": first}
