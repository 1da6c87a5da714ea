"""The text of a plan: a table of meshes, and what fills the memory and the time of a layout.

A candidate is a cost.Cost of a layout.
"""

from oneflow_cookbook.plan import devices, formulas

SHOWN = 6  # meshes in the table
NOTHING = "-"
LEGEND = """D x T x P: ranks along data, tensor and pipeline. SP: sequence parallel. sharded: weights, gradients
and Adam's state are split along data too, as in FSDP. recompute: activations, in backward.
micro-batch: sequences that a replica takes at a time. memory: of the rank that needs most.
A step is the sum of the columns after it; pipeline includes idle stages. Steps that differ by less
than 10 % are equal: that is within the error of a plan."""


def size(count):
    """Bytes in words."""
    if not count:
        return NOTHING
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def numbers(count):
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def duration(seconds, step):
    """A part of a step in words, in the unit of the step."""
    if not seconds:
        return NOTHING
    return f"{seconds:.2f} s" if step >= 1 else f"{1e3 * seconds:.1f} ms"


def name_of(mesh):
    return " x ".join(map(str, mesh))


def options_of(layout):
    names = {"sequence_parallel": "SP", "shard_weights": "sharded"}
    return ", ".join(names.get(option, option) for option in layout.options) or NOTHING


def aligned(rows, left):
    """Yield the lines of a table; the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:])]
        yield "  " + "  ".join(cells).rstrip()


def best_of_each_mesh(costs):
    """The first candidate of each mesh."""
    best = {}
    for candidate in costs:
        best.setdefault(candidate.layout.mesh, candidate)
    return list(best.values())


def heading(problem):
    """Yield lines: the model, the devices, their links."""
    model, batch_size, cluster, precision, flash = problem
    device = cluster.device
    attention = ", FlashAttention" if flash and precision == "amp" else ""
    parameters = numbers(formulas.parameters(model))
    yield f"{parameters} parameters, {batch_size} sequences of {model.seq_len} tokens a step, {precision}{attention}"
    hosts, between = "", ""
    if cluster.hosts > 1:
        hosts, between = f"{cluster.hosts} hosts of ", f", {device.between:g} GB/s from host to host"
    count = f"{cluster.ranks_per_host} device{'s' if cluster.ranks_per_host > 1 else ''}"
    peak = f"{getattr(device, precision):g} TFLOP/s ({100 * devices.EFFICIENCY:.0f} % reached)"
    yield f"{hosts}{count}: {device.memory:g} GB ({size(cluster.memory)} usable), {peak}"
    yield f"{device.inside:g} GB/s from a device to others of its host{between}"
    yield ""


def table(costs):
    """The lines of a table of candidates."""
    rows = [["D x T x P", "options", "micro-batch", "memory", "step", "compute", "data", "tensor", "pipeline"]]
    for candidate in costs:
        layout, time, step = candidate.layout, candidate.time, candidate.seconds
        parts = (step, time["compute"], time["data"], time["tensor"], time["pipeline"] + time["idle"])
        row = [name_of(layout.mesh), options_of(layout), str(layout.micro_batch), size(candidate.bytes)]
        rows.append([*row, *(duration(seconds, step) for seconds in parts)])
    return aligned(rows, left=2)


def details(candidates, problem):
    """Yield lines: the memory and the time of candidates, a column each; without empty rows."""
    rows = []
    for cells in zip(*(column_of(candidate, problem) for candidate in candidates)):
        words = [words for _, words in cells]
        if set(words) != {NOTHING}:
            rows.append([cells[0][0], *words])
    return aligned(rows, left=1)


def column_of(candidate, problem):
    """[(row of a table, words)]: how much memory a candidate needs, and how long a step takes, by part."""
    layout, step, time = candidate.layout, candidate.seconds, candidate.time
    layers = formulas.layers_of_stages(problem.model, layout.pipeline)
    tokens = problem.batch_size * problem.model.seq_len
    return [
        ("D x T x P", name_of(layout.mesh)),
        ("options", options_of(layout)),
        ("micro-batch", str(layout.micro_batch)),
        ("layers of a stage", " or ".join(map(str, sorted(set(layers), reverse=True)))),
        ("memory", size(candidate.bytes)),
        *((f"  {part}", filling(part, count, problem.precision)) for part, count in candidate.memory.items()),
        ("step", duration(step, step)),
        ("  compute", duration(time["compute"], step)),
        *((f"  {axis} axis", sending(candidate, axis)) for axis in formulas.AXES),
        ("  idle stages", duration(time["idle"], step)),
        ("tokens a second", f"{tokens / step:,.0f}"),
    ]


def filling(part, count, precision):
    """Such as "1.00 B x 2 bytes = 2.0 GB" for weights, gradients and Adam's state."""
    weight, gradient, optimizer, _ = formulas.PRECISIONS[precision]
    item = {"weights": weight, "gradients": gradient, "Adam's state": optimizer}.get(part)
    return f"{numbers(count / item)} x {item} bytes = {size(count)}" if item else size(count)


def sending(candidate, axis):
    """Such as "4.9 GB / 200 GB/s = 0.02 s"."""
    if not candidate.sent[axis]:
        return NOTHING
    rate = f"{candidate.rates[axis] / devices.GB:.3g} GB/s"
    return f"{size(candidate.sent[axis])} / {rate} = {duration(candidate.time[axis], candidate.seconds)}"


def plan(costs, problem):
    """Yield the lines of a plan."""
    best = best_of_each_mesh(costs)
    yield from heading(problem)
    yield from table(best[:SHOWN])
    if len(best) > SHOWN:
        yield f"  and {len(best) - SHOWN} more meshes"
    yield from ("", LEGEND, "", "The first:")
    yield from details(best[:1], problem)


def nothing_fits(too_large, problem):
    """Yield lines: the layout that needs least, and how much that is."""
    smallest = too_large[0]
    yield from heading(problem)
    needed = smallest.bytes / problem.cluster.memory * problem.cluster.device.memory
    yield f"Nothing fits. Take more devices, or devices of {size(needed)} for the smallest layout:"
    yield from details([smallest], problem)


def why(mesh, costs, too_large, problem):
    """Yield lines: a mesh beside the first; if it does not fit, its smallest layout."""
    own = next(candidate for candidate in (*costs, *too_large) if candidate.layout.mesh == mesh)
    first = costs[:1]
    yield from heading(problem)
    if own in first:
        yield f"{name_of(mesh)} is the first:"
    elif own in costs:
        later = duration(own.seconds - first[0].seconds, own.seconds)
        yield f"{name_of(mesh)} takes {later} longer than the first, on the right:"
    else:
        yield f"{name_of(mesh)} does not fit. Its smallest layout{', and the first on the right' if first else ''}:"
    yield from details([own, *(candidate for candidate in first if candidate is not own)], problem)
