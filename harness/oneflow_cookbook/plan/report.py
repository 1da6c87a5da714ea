"""The text of a plan: a table of layouts, the first in detail, why it is the first, and the command that runs it.

A candidate is a cost.Cost of a layout.
"""

import re
import textwrap

from oneflow_cookbook.plan import cost, devices, formulas

WIDTH = 100  # characters
SHOWN = 6  # layouts in the table
TIE = 1.1  # times as long: within the error of a plan
PARTS = {  # key of Cost.time -> in words
    "matmuls": "matmuls",
    "weights": "reads of the weights in each micro-batch",
    "tensor": "tensor-axis communication",
    "pipeline": "communication between stages",
    "idle": "idle stages",
    "data": "data-axis communication",
    "update": "the update",
}
CHANGES = {  # field of a Device -> a change of it, in words
    "between": "the bandwidth between hosts were {} higher",
    "inside": "intra-host bandwidth were {} higher",
    "flops": "the devices computed {} faster",
}


def size(count):
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds):
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def true_keys(texts):
    """The keys whose value is true."""
    return [text for text, applies in texts.items() if applies]


def aligned(rows, left=2):
    """Yield the lines of a table; the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:])]
        yield "  " + "   ".join(cells).rstrip()


def wrapped(line):
    """A line of prose wrapped at 100 characters; lines of a table or a command as they are."""
    if "   " in line.strip() or "\n" in line or len(line) <= WIDTH:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    hanging = indent + "  " if indent else ""
    tied = re.sub(r"(\d) (GB|MB|TFLOP|s|ms|%)(?!\w)", "\\1\0\\2", line)  # a number stays with its unit
    return textwrap.fill(tied, WIDTH, subsequent_indent=hanging, break_on_hyphens=False).replace("\0", " ")


def name_of(layout):
    """Such as "2 x 8 x 1, sequence parallel, micro-batch 4"."""
    options = {
        "sequence parallel": layout.sequence_parallel,
        "sharded weights": layout.shard_weights,
        f"micro-batch {layout.micro_batch}": True,
        f"{layout.recompute} recomputation": layout.recompute != "none",
    }
    return ", ".join([" x ".join(map(str, layout.mesh)), *true_keys(options)])


def best_of_each_mesh(costs):
    """The fastest candidate of each mesh; costs: fastest first."""
    best = {}
    for candidate in costs:
        best.setdefault(candidate.layout.mesh, candidate)
    return list(best.values())


def share_of_peak(candidate, problem):
    """The operations of a step, without recomputation, relative to what all devices could do in its time."""
    peak = problem.cluster.device.flops[problem.cluster.precision] * problem.cluster.ranks
    return formulas.flops(problem.model, problem.batch_size) / candidate.seconds / peak


def tokens_a_second(candidate, problem):
    return problem.batch_size * problem.model.seq_len / candidate.seconds


def heading(problem):
    """Yield two lines: the model, and the cluster."""
    cluster, model = problem.cluster, problem.model
    parameters = f"{formulas.parameters(model) / 1e9:.2f} B parameters"
    yield f"{parameters}, {problem.batch_size} sequences of {model.seq_len} tokens a step, {cluster.precision}"
    links = f"{cluster.device.inside / 1e9:g} GB/s between the devices of a host"
    if cluster.hosts > 1:
        links += f", {cluster.device.between / 1e9:g} GB/s from host to host"
    ranks = f"{cluster.ranks_per_host} device{'s' * (cluster.ranks_per_host > 1)}"
    hosts = f"{cluster.hosts} hosts of {ranks}" if cluster.hosts > 1 else ranks
    device = f"{size(cluster.device.memory)} ({cluster.device.hbm / 1e9:g} GB/s)"
    memory = f"{device}, of which a plan may use {size(cluster.memory)}"
    peak = f"{cluster.device.flops[cluster.precision] / 1e12:.3g} TFLOP/s"
    yield f"{hosts}: {memory}, {peak}, of which matmuls reach {100 * cluster.efficiency:.0f} %; {links}"


def table(costs, problem):
    """The fastest layout of each mesh."""
    body = [
        [
            " x ".join(map(str, candidate.layout.mesh)),
            short(candidate),
            str(candidate.layout.micro_batch),
            size(candidate.bytes),
            duration(candidate.seconds),
            f"{tokens_a_second(candidate, problem):,.0f}",
            f"{100 * share_of_peak(candidate, problem):.0f} %",
        ]
        for candidate in costs
    ]
    return aligned([["D x T x P", "options", "micro-batch", "memory", "step", "tokens/s", "of the peak"], *body])


def short(candidate):
    """The options of a layout in a table, and the layers of its stages if they are not equal."""
    layout = candidate.layout
    options = {
        "SP": layout.sequence_parallel,
        "sharded": layout.shard_weights,
        layout.recompute: layout.recompute != "none",
    }
    return ", ".join([*true_keys(options), *unequal_stages(candidate)])


def unequal_stages(candidate):
    """["8 or 7 layers"], or [] if all stages have the same number."""
    least, most = min(candidate.layers), max(candidate.layers)
    return [f"{most} or {least} layer{'s' * (least > 1)}"] if least < most else []


def detail(candidate):
    """Yield lines: layers of unequal stages, memory, bytes and time of a candidate by part."""
    yield from (f"  a stage has {layers}" for layers in unequal_stages(candidate))
    yield "  memory of the fullest rank: " + ", ".join(
        f"{part} {size(count)}" for part, count in candidate.memory.items()
    )
    used = [axis for axis, count in candidate.sent.items() if count]
    sent = [f"{axis} axis {size(candidate.sent[axis])} {candidate.links[axis]}" for axis in used]
    yield "  a rank sends in a step: " + (", ".join(sent) or "nothing")
    parts = [f"{PARTS[part]} {duration(seconds)}" for part, seconds in candidate.time.items() if seconds]
    yield "  time of a step: " + ", ".join(parts)


def faster(cluster, change, factor):
    """The cluster with one field of its devices, a key of CHANGES, larger by a factor."""
    device = cluster.device
    if change == "flops":
        changed = device._replace(flops={name: factor * rate for name, rate in device.flops.items()})
    else:
        changed = device._replace(**{change: factor * getattr(device, change)})
    return cluster._replace(device=changed)


def factor_for(second, first, change, problem, most=100):
    """The factor of a change that makes the second candidate as fast as the first; None if more than `most`."""

    def loses(factor):
        cluster = faster(problem.cluster, change, factor)
        times = [
            cost.cost(problem.model, candidate.layout, problem.batch_size, cluster).seconds
            for candidate in (second, first)
        ]
        return times[0] > times[1]

    if loses(most):
        return None
    low, high = 1.0, float(most)
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if loses(middle) else (low, middle)
    return high


def differences(candidate, other):
    """In words, where a candidate takes more or less time than another; small differences are added up."""
    by_part = {part: candidate.time[part] - other.time[part] for part in candidate.time}
    largest = max(map(abs, by_part.values()))
    named = {part: seconds for part, seconds in by_part.items() if abs(seconds) >= largest / 10}
    words = [f"{PARTS[part]} {signed(seconds)}" for part, seconds in sorted(named.items(), key=lambda pair: -pair[1])]
    rest = sum(by_part.values()) - sum(named.values())
    return ", ".join([*words, f"all else {signed(rest)}"] if rest else words)


def signed(seconds):
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def reasons(costs, refused, problem):
    """Yield lines: why the first is first, when the second would be, and what was too large."""
    first, *others = costs
    longest = max(first.time, key=first.time.get)
    yield f"It spends {100 * first.time[longest] / first.seconds:.0f} % of a step on {PARTS[longest]}."
    if others:
        yield about_second(first, others[0], problem)
        if others[0].seconds < TIE * first.seconds:
            yield "A difference below 10 % is within the error of a plan: take the simpler one, or measure both."
    quicker = [candidate for candidate in refused if candidate.seconds < first.seconds]
    if quicker:
        closest = min(quicker, key=lambda candidate: candidate.bytes)
        yield (
            f"Faster, but too large: {name_of(closest.layout)} takes {duration(closest.seconds)} and needs"
            f" {size(closest.bytes)}."
        )
    else:
        yield "No layout that is too large would be faster."


def about_second(first, second, problem):
    """A line: how much slower the second is, and what would make it win."""
    difference = (
        f"The second, {name_of(second.layout)}, takes {duration(second.seconds - first.seconds)} longer:"
        f" {differences(second, first)}."
    )
    changes = CHANGES if problem.cluster.hosts > 1 else {name: CHANGES[name] for name in ("inside", "flops")}
    factors = {change: factor_for(second, first, change, problem) for change in changes}
    possible = {change: factor for change, factor in factors.items() if factor}
    if not possible:
        return f"{difference} Even links or devices 100 times as fast would not make it win."
    change = min(possible, key=possible.get)
    return f"{difference} It would win if {CHANGES[change].format(f'{possible[change]:.3g} times')}."


def command(layout, problem):
    """Yield lines: the command that runs a layout, or why there is none."""
    capability = problem.cluster.device.capability
    lacks = missing_in_gpt(layout, problem)
    if capability and capability > devices.NEWEST_CAPABILITY:
        yield f"No command: OneFlow 0.9.0 has no code for these GPUs, of compute capability {capability}."
    elif lacks:
        yield f"No recipe runs this plan: gpt.py has no {', no '.join(lacks)}."
        yield "docs/your-model.md shows how to lay out a model of your own."
    else:
        yield "To try the layout with gpt.py, which has a small vocabulary of its own:"
        if problem.cluster.hosts > 1:
            yield "On each host, with its own number for K:"
        yield run_of_gpt(layout, problem)


def run_of_gpt(layout, problem):
    """The command that trains a layout."""
    model, cluster = problem.model, problem.cluster
    data, tensor, pipeline = layout.mesh
    hosts = f"--nnodes {cluster.hosts} --node_rank K --master_addr HOST0 " if cluster.hosts > 1 else ""
    device = " --device cuda" if problem.on_gpus else ""
    options = {
        "--sequence-parallel": layout.sequence_parallel,
        "--shard-weights": layout.shard_weights,
        "--recompute full": layout.recompute == "full",
    }
    parts = [
        f"./launch.sh {hosts}-n {cluster.ranks_per_host} gpt{device}",
        " ".join([f"--graph --data {data} --tensor {tensor} --pipeline {pipeline}", *true_keys(options)]),
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --num-heads {model.num_heads}"
        f" --seq-len {model.seq_len}",
        f"--batch-size {problem.batch_size} --micro-batches {layout.micro_batches(problem.batch_size)}",
    ]
    return "  " + " \\\n    ".join(parts)


def missing_in_gpt(layout, problem):
    """The parts of a plan that gpt.py does not have."""
    model = problem.model
    return true_keys(
        {
            "mixed precision": problem.cluster.precision == "amp",
            "selective recomputation": layout.recompute == "selective",
            "grouped heads": model.kv_size != model.query_size,
            "gated MLP": model.gated,
            "biases": model.biases,
            "untied head": not model.tied,
            "more than 1,024 ranks": problem.cluster.ranks > 1024,
            "rotary positions": not model.learned_positions,
        }
    )


def plan(costs, refused, problem):
    """Yield the lines of a plan."""
    best = best_of_each_mesh(costs)
    yield from heading(problem)
    yield ""
    yield from table(best[:SHOWN], problem)
    if len(best) > SHOWN:
        yield f"  and {len(best) - SHOWN} more meshes"
    yield "D x T x P: ranks along data, tensor, pipeline. SP: sequence parallel."
    yield "sharded: weights, along data; gathered weights are kept until backward."
    yield "selective, full: recomputation."
    yield ""
    yield f"The first, {name_of(best[0].layout)}:"
    yield from detail(best[0])
    yield ""
    yield from reasons(best, refused, problem)
    yield ""
    yield from command(best[0].layout, problem)


def nothing_fits(refused, problem):
    """Yield lines: by how much the smallest layout is too large, and the least that would suffice."""
    smallest = refused[0]
    yield from heading(problem)
    yield ""
    yield (
        f"Nothing fits: the smallest layout, {name_of(smallest.layout)}, needs {size(smallest.bytes)} and a device has"
        f" {size(problem.cluster.memory)} for it."
    )
    yield from detail(smallest)
    yield f"Devices of {size(smallest.bytes / problem.cluster.memory * problem.cluster.device.memory)} would do."
    hosts = fewest_hosts(problem)
    if hosts:
        yield f"So would {hosts} hosts of {problem.cluster.ranks_per_host}."
    if problem.recompute != formulas.RECOMPUTE:
        fit, _ = cost.ranked(problem.model, problem.batch_size, problem.cluster)
        if fit:
            yield f"So would --recompute {fit[0].layout.recompute}."


def fewest_hosts(problem):
    """The number of hosts, 2 to 64 times as many, on which a layout fits; None if not even then."""
    for factor in (2, 4, 8, 16, 32, 64):
        cluster = problem.cluster._replace(hosts=factor * problem.cluster.hosts)
        fit, _ = cost.ranked(problem.model, problem.batch_size, cluster, problem.recompute)
        if fit:
            return cluster.hosts
    return None


def why(mesh, costs, refused, problem):
    """Yield lines: why a mesh does not fit, or is slower than the first."""
    name = " x ".join(map(str, mesh))
    own = next((candidate for candidate in costs if candidate.layout.mesh == mesh), None)
    yield from heading(problem)
    yield ""
    if own is None:
        smallest = next(candidate for candidate in refused if candidate.layout.mesh == mesh)
        yield f"{name} does not fit: {name_of(smallest.layout)}, its smallest layout, needs {size(smallest.bytes)}."
        yield from detail(smallest)
        return
    first = costs[0]
    rate = f"{tokens_a_second(own, problem):,.0f} tokens/s"
    yield f"{name_of(own.layout)}: {size(own.bytes)}, {duration(own.seconds)}, {rate}"
    yield from detail(own)
    if own.layout.mesh == first.layout.mesh:
        yield "It is the first."
    else:
        yield f"The first is {name_of(first.layout)}, {duration(first.seconds)}."
        yield about_second(first, own, problem).replace("The second", "This one", 1)
    yield ""
    yield from command(own.layout, problem)
