"""The text of a plan: a table of layouts, one of them in detail, three sentences, and a command."""

import dataclasses
import re
import textwrap

from harness.plan import cost, devices, formulas

WIDTH = 100  # characters
SHOWN = 6  # layouts in the table
TIE = 1.1  # times as long: the plan itself may be off by as much
PARTS = {  # of a step's time, as one says them
    "matmuls": "matmuls",
    "weights": "reads of the weights in each micro-batch",
    "tensor": "tensor-axis communication",
    "pipeline": "communication between stages",
    "idle": "idle stages",
    "data": "data-axis communication",
    "update": "the update",
}
CHANGES = {  # what of a cluster one may change -> what it is called
    "between": "the bandwidth between hosts were {} higher",
    "inside": "intra-host bandwidth were {} higher",
    "flops": "the devices computed {} faster",
}


def size(count):
    """Of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds):
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def rows(header, body, left=2):
    """Lines of a table whose columns are as wide as they need be; the first ones start at the left."""
    cells = [header, *body]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        words = (
            word.ljust(width) if i < left else word.rjust(width) for i, (word, width) in enumerate(zip(row, widths))
        )
        yield "  " + "   ".join(words).rstrip()


def wrapped(line):
    """A line of prose in lines of 100 characters; one of a table or a command as it is."""
    if "   " in line.strip() or "\n" in line or len(line) <= WIDTH:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    hanging = indent + "  " if indent else ""
    tied = re.sub(r"(\d) (GB|MB|TFLOP|s|ms|%)(?!\w)", "\\1\0\\2", line)  # a number stays with its unit
    return textwrap.fill(tied, WIDTH, subsequent_indent=hanging, break_on_hyphens=False).replace("\0", " ")


def name_of(layout):
    """Such as "2 x 8 x 1, sequence parallel, micro-batch 4"."""
    options = [" x ".join(map(str, layout.mesh))]
    options += ["sequence parallel"] * layout.sequence_parallel + ["sharded weights"] * layout.shard_weights
    options.append(f"micro-batch {layout.micro_batch}")
    options += [f"{layout.recompute} recomputation"] * (layout.recompute != "none")
    return ", ".join(options)


def best_of_each_mesh(costs):
    found = {}
    for one in costs:
        found.setdefault(one.layout.mesh, one)
    return list(found.values())


def share_of_peak(one, case):
    """What a step must compute, not what is computed again, of what all devices could in its time."""
    peak = case.cluster.device.flops[case.cluster.precision] * case.cluster.ranks
    return formulas.flops(case.model, case.batch_size) / one.seconds / peak


def tokens_a_second(one, case):
    return case.batch_size * case.model.seq_len / one.seconds


def heading(case):
    cluster, model = case.cluster, case.model
    parameters = f"{formulas.parameters(model) / 1e9:.2f} B parameters"
    yield f"{parameters}, {case.batch_size} sequences of {model.seq_len} tokens a step, {cluster.precision}"
    links = f"{cluster.device.inside / 1e9:g} GB/s between the devices of a host"
    if cluster.hosts > 1:
        links += f", {cluster.device.between / 1e9:g} GB/s from host to host"
    ranks = f"{cluster.ranks_per_host} device{'s' * (cluster.ranks_per_host > 1)}"
    hosts = f"{cluster.hosts} hosts of {ranks}" if cluster.hosts > 1 else ranks
    device = f"{size(cluster.device.memory)} ({cluster.device.hbm / 1e9:g} GB/s)"
    memory = f"{device}, of which a plan may use {size(cluster.memory)}"
    peak = f"{cluster.device.flops[cluster.precision] / 1e12:.3g} TFLOP/s"
    yield f"{hosts}: {memory}, {peak}, of which matmuls reach {100 * cluster.efficiency:.0f} %; {links}"


def table(costs, case):
    """The fastest layout of each mesh."""
    body = [
        [
            " x ".join(map(str, one.layout.mesh)),
            short(one),
            str(one.layout.micro_batch),
            size(one.bytes),
            duration(one.seconds),
            f"{tokens_a_second(one, case):,.0f}",
            f"{100 * share_of_peak(one, case):.0f} %",
        ]
        for one in costs
    ]
    return rows(["D x T x P", "options", "micro-batch", "memory", "step", "tokens/s", "of the peak"], body)


def short(one):
    """The options of a layout in a table, and the layers of its stages if they are not equal."""
    layout = one.layout
    options = ["SP"] * layout.sequence_parallel + ["sharded"] * layout.shard_weights
    options += [layout.recompute] * (layout.recompute != "none")
    return ", ".join([*options, *unequal_stages(one)])


def unequal_stages(one):
    """["8 or 7 layers"], or [] if all stages of a layout have as many."""
    least, most = min(one.layers), max(one.layers)
    return [f"{most} or {least} layer{'s' * (least > 1)}"] if least < most else []


def detail(one):
    """Layers of unequal stages, memory, bytes and time of a layout by part."""
    yield from (f"  a stage has {layers}" for layers in unequal_stages(one))
    yield "  memory of the fullest rank: " + ", ".join(f"{part} {size(count)}" for part, count in one.memory.items())
    used = [axis for axis, count in one.sent.items() if count]
    sent = [f"{axis} axis {size(one.sent[axis])} {one.links[axis]}" for axis in used]
    yield "  a rank sends in a step: " + (", ".join(sent) or "nothing")
    parts = [f"{PARTS[part]} {duration(seconds)}" for part, seconds in one.time.items() if seconds]
    yield "  time of a step: " + ", ".join(parts)


def faster(cluster, change, factor):
    """The cluster with something of it faster by a factor."""
    device = cluster.device
    if change == "flops":
        changed = device._replace(flops={name: factor * rate for name, rate in device.flops.items()})
    else:
        changed = device._replace(**{change: factor * getattr(device, change)})
    return cluster._replace(device=changed)


def factor_for(second, first, change, case, most=100):
    """How much faster something must be for the second layout to be as fast as the first; None beyond `most` times."""

    def loses(factor):
        cluster = faster(case.cluster, change, factor)
        times = [cost.cost(case.model, one.layout, case.batch_size, cluster).seconds for one in (second, first)]
        return times[0] > times[1]

    if loses(most):
        return None
    low, high = 1.0, float(most)
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if loses(middle) else (low, middle)
    return high


def differences(one, other):
    """In words, where one layout takes more or less time than another; parts below a tenth of the largest as one."""
    by_part = {part: one.time[part] - other.time[part] for part in one.time}
    largest = max(map(abs, by_part.values()))
    named = {part: seconds for part, seconds in by_part.items() if abs(seconds) >= largest / 10}
    words = [f"{PARTS[part]} {signed(seconds)}" for part, seconds in sorted(named.items(), key=lambda pair: -pair[1])]
    rest = sum(by_part.values()) - sum(named.values())
    return ", ".join([*words, f"all else {signed(rest)}"] if rest else words)


def signed(seconds):
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def reasons(costs, refused, case):
    """Why the first is first, when the second would be, and what was too large."""
    first, *others = costs
    part, seconds = max(first.time.items(), key=lambda pair: pair[1])
    yield f"It spends {100 * seconds / first.seconds:.0f} % of a step on {PARTS[part]}."
    if others:
        yield about_second(first, others[0], case)
        if others[0].seconds < TIE * first.seconds:
            yield "A difference below 10 % is within the error of a plan: take the simpler one, or measure both."
    quicker = [one for one in refused if one.seconds < first.seconds]
    if quicker:
        closest = min(quicker, key=lambda one: one.bytes)
        yield (
            f"Faster, but too large: {name_of(closest.layout)} takes {duration(closest.seconds)} and needs"
            f" {size(closest.bytes)}."
        )
    else:
        yield "No layout that is too large would be faster."


def about_second(first, second, case):
    says = (
        f"The second, {name_of(second.layout)}, takes {duration(second.seconds - first.seconds)} longer:"
        f" {differences(second, first)}."
    )
    changes = CHANGES if case.cluster.hosts > 1 else {name: CHANGES[name] for name in ("inside", "flops")}
    factors = {change: factor_for(second, first, change, case) for change in changes}
    possible = {change: factor for change, factor in factors.items() if factor}
    if not possible:
        return f"{says} Even links or devices 100 times as fast would not make it win."
    change = min(possible, key=possible.get)
    return f"{says} It would win if {CHANGES[change].format(f'{possible[change]:.3g} times')}."


def command(layout, case):
    """The lines that run a layout, or why no recipe does and what comes near."""
    capability = case.cluster.device.capability
    if capability and capability > devices.NEWEST_CAPABILITY:
        yield f"No command: OneFlow 0.9.0 has no code for these GPUs, of compute capability {capability}."
        return
    lacks = missing_in_gpt(layout, case)
    if lacks:
        nearest = layout_in_float32(layout, case)
        yield f"No recipe runs this plan as it is: gpt.py has no {', no '.join(lacks)}."
        yield "docs/your-model.md shows how to lay out a model of your own."
        end = "." if case.cluster.hosts > 1 else ":"
        yield f"To try the mesh with gpt.py in float32, {how_in_float32(layout, nearest, case)}{end}"
        layout = nearest
    if case.cluster.hosts > 1:
        yield "On each host, with its own number for K:"
    yield run_of_gpt(layout, case)


def run_of_gpt(layout, case):
    """The command that trains a layout."""
    model, cluster = case.model, case.cluster
    data, tensor, pipeline = layout.mesh
    hosts = f"--nnodes {cluster.hosts} --node_rank K --master_addr HOST0 " if cluster.hosts > 1 else ""
    device = " --device cuda" if case.on_gpus else ""
    options = ["--sequence-parallel"] * layout.sequence_parallel + ["--shard-weights"] * layout.shard_weights
    options += ["--recompute full"] * (layout.recompute == "full")
    parts = [
        f"./launch.sh {hosts}-n {cluster.ranks_per_host} gpt{device}",
        " ".join([f"--graph --data {data} --tensor {tensor} --pipeline {pipeline}", *options]),
        f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --num-heads {model.num_heads}"
        f" --seq-len {model.seq_len}",
        f"--batch-size {case.batch_size} --micro-batches {layout.micro_batches(case.batch_size)}",
    ]
    return "  " + " \\\n    ".join(parts)


def layout_in_float32(layout, case):
    """The nearest layout on the same mesh that fits in float32: gpt.py has no other precision.

    A smaller micro-batch first, then full recomputation. If nothing fits, the layout itself.
    """
    own = "none" if layout.recompute == "selective" else layout.recompute
    for recompute in (own, "full"):
        for micro_batch in reversed(cost.divisors(layout.micro_batch)):
            nearest = dataclasses.replace(layout, recompute=recompute, micro_batch=micro_batch)
            if in_float32(nearest, case) <= case.cluster.memory:
                return nearest
    return dataclasses.replace(layout, recompute=own)


def in_float32(layout, case):
    """The bytes that a layout needs on a rank in float32."""
    return sum(cost.memory(case.model, layout, case.batch_size, "fp32").values())


def how_in_float32(layout, nearest, case):
    """In words, what must change for float32 and what a rank then needs."""
    needs = in_float32(nearest, case)
    if needs > case.cluster.memory:
        return f"which needs about {size(needs)} a rank, too much for these devices, take fewer layers"
    changes = [f"micro-batch {nearest.micro_batch}"] * (nearest.micro_batch != layout.micro_batch)
    changes += [f"{nearest.recompute} recomputation"] * (nearest.recompute not in (layout.recompute, "none"))
    changes += ["no recomputation"] * (layout.recompute == "selective" and nearest.recompute == "none")
    if changes:
        return f"take {' and '.join(changes)}, which needs about {size(needs)} a rank"
    return f"which needs about {size(needs)} a rank"


def missing_in_gpt(layout, case):
    """What of a plan gpt.py does not have."""
    model, found = case.model, []
    found += ["mixed precision"] * (case.cluster.precision == "amp")
    found += ["selective recomputation"] * (layout.recompute == "selective")
    found += ["grouped heads"] * (model.kv_size != model.query_size)
    found += ["gated MLP"] * model.gated
    found += ["biases"] * model.biases
    found += ["untied head"] * (not model.tied)
    found += ["more than 1,024 ranks"] * (case.cluster.ranks > 1024)
    found += ["rotary positions"] * (not model.learned_positions)
    return found


def plan(costs, refused, case):
    """The lines of a plan."""
    best = best_of_each_mesh(costs)
    yield from heading(case)
    yield ""
    yield from table(best[:SHOWN], case)
    if len(best) > SHOWN:
        yield f"  and {len(best) - SHOWN} more meshes"
    yield "D x T x P: ranks along data, tensor, pipeline. SP: sequence parallel."
    yield "sharded: weights, along data; gathered weights are kept until backward."
    yield "selective, full: recomputation."
    yield ""
    yield f"The first, {name_of(best[0].layout)}:"
    yield from detail(best[0])
    yield ""
    yield from reasons(best, refused, case)
    yield ""
    yield from command(best[0].layout, case)


def nothing_fits(refused, case):
    """By how much the smallest layout is too large, and the least that would do."""
    smallest = refused[0]
    yield from heading(case)
    yield ""
    yield (
        f"Nothing fits: the smallest layout, {name_of(smallest.layout)}, needs {size(smallest.bytes)} and a device has"
        f" {size(case.cluster.memory)} for it."
    )
    yield from detail(smallest)
    yield f"Devices of {size(smallest.bytes / case.cluster.memory * case.cluster.device.memory)} would do."
    hosts = next(fewest_hosts(case), None)
    if hosts:
        yield f"So would {hosts} hosts of {case.cluster.ranks_per_host}."
    if case.recompute != formulas.RECOMPUTE:
        fit, _ = cost.ranked(case.model, case.batch_size, case.cluster)
        if fit:
            yield f"So would --recompute {fit[0].layout.recompute}."


def fewest_hosts(case):
    """Yields numbers of hosts, the least first, on which a layout fits."""
    hosts = case.cluster.hosts
    while hosts < 64 * case.cluster.hosts:
        hosts *= 2
        if cost.ranked(case.model, case.batch_size, case.cluster._replace(hosts=hosts), case.recompute)[0]:
            yield hosts


def why(mesh, costs, refused, case):
    """Why a mesh does not fit, or is slower than the first."""
    name = " x ".join(map(str, mesh))
    mine = [one for one in costs if one.layout.mesh == mesh]
    yield from heading(case)
    yield ""
    if not mine:
        too_large = [one for one in refused if one.layout.mesh == mesh]
        smallest = too_large[0]
        yield f"{name} does not fit: {name_of(smallest.layout)}, its smallest layout, needs {size(smallest.bytes)}."
        yield from detail(smallest)
        return
    first, own = costs[0], mine[0]
    rate = f"{tokens_a_second(own, case):,.0f} tokens/s"
    yield f"{name_of(own.layout)}: {size(own.bytes)}, {duration(own.seconds)}, {rate}"
    yield from detail(own)
    if own.layout.mesh == first.layout.mesh:
        yield "It is the first."
    else:
        yield f"The first is {name_of(first.layout)}, {duration(first.seconds)}."
        yield about_second(first, own, case).replace("The second", "This one", 1)
    yield ""
    yield from command(own.layout, case)
