"""`./launch.sh plan`: choose a layout for a model and a cluster. Runs with any Python from 3.8 on, without packages."""

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oneflow_cookbook.plan import cost, devices, formulas, model, report  # noqa: E402

NOTHING_FITS, BAD_INPUT = 1, 2
SIZES = {  # option of the model -> its help
    "num_layers": None,
    "hidden_size": None,
    "num_heads": "for grouped heads, a gated MLP or an untied head use --config",
    "seq_len": "tokens of a sequence in training; with --config, by default the longest that the model takes",
    "vocab_size": None,
}
LARGEST = {"memory": 1e4, "tflops": 1e5, "bandwidth": 1e5}  # values that are accepted, in the units of the options


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a line."""

    def error(self, message):
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(BAD_INPUT)


def parser():
    options = Parser(
        prog="launch.sh plan",
        description="Which layout fits a model onto devices, and which is the fastest?",
        epilog="Exit code: 0, or 1 if no layout fits (with --why: not this mesh), or 2 after bad input.",
    )
    options.add_argument(
        "--config", metavar="FILE", help="config.json of a GPT- or Llama-like model, in place of the sizes"
    )
    for name in SIZES:
        options.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=SIZES[name])
    options.add_argument("--global-batch-size", type=positive, metavar="N", required=True, help="sequences of a step")
    options.add_argument("--hosts", type=positive, default=1, metavar="N", help="default: 1")
    options.add_argument(
        "--gpus-per-host",
        type=positive,
        metavar="N",
        help="default: 8; with --device cpu, the cores of this machine, which the ranks share",
    )
    cpu = "cpu: that of this machine; its three bandwidths are assumed to be {:g}, {:g} and {:g} GB/s"
    cpu = cpu.format(*devices.CPU_BANDWIDTHS)
    options.add_argument("--device", type=str.lower, choices=[*devices.DEVICES, "cpu"], help=cpu)
    memory, tflops, bandwidth = (amount(largest) for largest in LARGEST.values())
    options.add_argument("--memory", type=memory, metavar="GB", help="of a device, in place of the table's")
    options.add_argument("--tflops", type=tflops, metavar="T", help="peak of a device")
    options.add_argument("--bandwidth-memory", type=bandwidth, metavar="GB/S", help="of a device's own memory")
    options.add_argument(
        "--bandwidth-inside", type=bandwidth, metavar="GB/S", help="that a device sends inside its host"
    )
    options.add_argument("--bandwidth-between", type=bandwidth, metavar="GB/S", help="that a host sends to others")
    options.add_argument("--precision", choices=list(formulas.PRECISIONS), help="default: amp, on a CPU fp32")
    options.add_argument("--recompute", choices=[*formulas.RECOMPUTE, "any"], default="any", help="default: any")
    options.add_argument("--why", type=positive, nargs=3, metavar=("D", "T", "P"), help="explain this mesh")
    options.add_argument("--json", action="store_true", help="print every layout")
    return options


def positive(text):
    """A type of argparse: a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def amount(largest):
    """A type of argparse: a number above 0 and up to `largest`."""

    def number(text):
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a number; write it without a unit") from None
        if not 0 < value <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {largest:g}")
        return value

    return number


def model_of(options):
    """The Model that the options describe; ValueError if they describe none."""
    typed = [name for name in SIZES if getattr(options, name)]
    if options.config:
        wrong = [name for name in typed if name != "seq_len"]
        if wrong:
            raise ValueError(f"--config has the sizes; leave out --{wrong[0].replace('_', '-')}")
        return model.of_config(options.config, options.seq_len)
    missing = [f"--{name.replace('_', '-')}" for name in SIZES if name not in typed]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise ValueError(f"{', '.join(missing)} {verb} missing; or name a config.json: --config FILE")
    sizes = {name: getattr(options, name) for name in SIZES}
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise ValueError(f"--num-heads {sizes['num_heads']} does not divide --hidden-size {sizes['hidden_size']}")
    return model.Model(**sizes)


def cluster_of(options):
    """The Cluster that the options describe; ValueError if something is missing."""
    ranks = options.gpus_per_host or 8
    if options.device == "cpu":
        ranks, device = devices.this_machine(options.gpus_per_host)
    elif options.device:
        device = devices.DEVICES[options.device]
    else:
        needed = ["memory", "tflops", "bandwidth_memory", "bandwidth_inside"]
        needed += ["bandwidth_between"] * (options.hosts > 1)
        missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(options, name)]
        if missing:
            raise ValueError(f"name a --device, or give {', '.join(missing)} too")
        device = devices.Device(0, {}, 0, 0, 0, "options")
    precision = options.precision or ("fp32" if options.device == "cpu" else "amp")
    flops = {precision: options.tflops * devices.TERA} if options.tflops else device.flops
    if not flops:
        raise ValueError("--device cpu: /proc/cpuinfo does not say how fast its clock is; give --tflops too")
    if precision not in flops:
        raise ValueError(f"--device {options.device} has no {precision}; use --precision {next(iter(flops))}")
    typed = {
        "memory": options.memory,
        "hbm": options.bandwidth_memory,
        "inside": options.bandwidth_inside,
        "between": options.bandwidth_between,
    }
    changes = {field: value * devices.GB for field, value in typed.items() if value}
    device = device._replace(flops=flops, **changes)
    return devices.Cluster(options.hosts, ranks, device, precision, devices.EFFICIENCY)


def problem_of(options):
    """The Problem that the options describe; ValueError if they describe none."""
    recompute = formulas.RECOMPUTE if options.recompute == "any" else (options.recompute,)
    return cost.Problem(
        model_of(options), options.global_batch_size, cluster_of(options), recompute, options.device != "cpu"
    )


def why_no_layout(problem):
    """Why no layout divides the sizes."""
    model = problem.model
    return (
        f"no such layout: data x tensor x pipeline must be {problem.cluster.ranks}; data must divide the"
        f" {problem.batch_size} sequences of a step, tensor the {heads_of(model)}; pipeline may be at most"
        f" {model.num_layers}, the layers"
    )


def heads_of(model):
    """Such as "8 key-value heads"."""
    return f"{model.kv_heads} key-value heads" if model.kv_heads else f"{model.num_heads} heads"


def why_not(mesh, problem):
    """Why a mesh is no layout of the problem."""
    data, tensor, pipeline = mesh
    model = problem.model
    ranks = data * tensor * pipeline
    if ranks != problem.cluster.ranks:
        return f"{data} x {tensor} x {pipeline} is {ranks}, and there are {problem.cluster.ranks} devices"
    reasons = {
        f"{data} replicas do not divide the {problem.batch_size} sequences of a step": problem.batch_size % data,
        f"{tensor} tensor ranks do not divide the {heads_of(model)}": (model.kv_heads or model.num_heads) % tensor,
        f"{pipeline} stages are more than the {model.num_layers} layers": pipeline > model.num_layers,
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


def as_json(candidate, fits):
    """A Cost as an object of JSON."""
    return {**dataclasses.asdict(candidate), "bytes": candidate.bytes, "seconds": candidate.seconds, "fits": fits}


def answer(options):
    """(the lines to print, whether a layout fits, with --why this one); ValueError if the options make no plan."""
    problem = problem_of(options)
    fit, refused = cost.ranked(problem.model, problem.batch_size, problem.cluster, problem.recompute)
    if not fit and not refused:
        raise ValueError(why_no_layout(problem))
    if options.json:
        rows = [as_json(candidate, True) for candidate in fit]
        rows += [as_json(candidate, False) for candidate in refused]
        return [json.dumps(rows)], bool(fit)
    if options.why:
        mesh = tuple(options.why)
        fits = any(candidate.layout.mesh == mesh for candidate in fit)
        if not fits and not any(candidate.layout.mesh == mesh for candidate in refused):
            raise ValueError(f"--why {' '.join(map(str, mesh))}: {why_not(mesh, problem)}")
        return report.why(mesh, fit, refused, problem), fits
    if fit:
        return report.plan(fit, refused, problem), True
    return report.nothing_fits(refused, problem), False


def main(arguments=None):
    """Print a plan; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        lines, fits = answer(options)
    except ValueError as error:
        print(f"launch.sh plan: {error}", file=sys.stderr)
        return BAD_INPUT
    for line in lines:
        print(line if options.json else report.wrapped(line))
    return 0 if fits else NOTHING_FITS


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it without a traceback
    sys.exit(main())
