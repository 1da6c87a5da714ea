"""Which layout? `./launch.sh plan --help`. Runs with any Python from 3.8 on, and needs nothing but it."""

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from harness.plan import cost, devices, formulas, model, report  # noqa: E402
from harness.plan.case import Case  # noqa: E402

NOTHING_FITS, BAD_INPUT = 1, 2
SIZES = {  # -> what --help says of it
    "num_layers": None,
    "hidden_size": None,
    "num_heads": "for grouped heads, a gated MLP or an untied head use --config",
    "seq_len": "tokens of a sequence in training; with --config, by default the longest that the model takes",
    "vocab_size": None,
}
LARGEST = {"memory": 1e4, "tflops": 1e5, "bandwidth": 1e5}  # in the units of the options


class Parser(argparse.ArgumentParser):
    """One whose errors are a line."""

    def error(self, message):
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(BAD_INPUT)


def parser():
    it = Parser(
        prog="launch.sh plan",
        description="Which layout fits a model onto devices, and which is the fastest?",
        epilog="Exit code: 0, or 1 if no layout fits (with --why: not this mesh), or 2 after bad input.",
    )
    it.add_argument("--config", metavar="FILE", help="config.json of a GPT- or Llama-like model, in place of the sizes")
    for name in SIZES:
        it.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=SIZES[name])
    it.add_argument("--global-batch-size", type=positive, metavar="N", required=True, help="sequences of a step")
    it.add_argument("--hosts", type=positive, default=1, metavar="N", help="default: 1")
    it.add_argument("--gpus-per-host", type=positive, metavar="N", help="default: 8; of a CPU: its cores")
    cpu = "cpu: that of this machine; its three bandwidths are assumed to be {:g}, {:g} and {:g} GB/s"
    cpu = cpu.format(*devices.CPU_BANDWIDTHS)
    it.add_argument("--device", type=str.lower, choices=[*devices.DEVICES, "cpu"], help=cpu)
    memory, tflops, bandwidth = (amount(largest) for largest in LARGEST.values())
    it.add_argument("--memory", type=memory, metavar="GB", help="of a device, in place of the table's")
    it.add_argument("--tflops", type=tflops, metavar="T", help="peak of a device")
    it.add_argument("--bandwidth-memory", type=bandwidth, metavar="GB/S", help="of a device's own memory")
    it.add_argument("--bandwidth-inside", type=bandwidth, metavar="GB/S", help="that a device sends inside its host")
    it.add_argument("--bandwidth-between", type=bandwidth, metavar="GB/S", help="that a host sends to others")
    it.add_argument("--precision", choices=list(formulas.PRECISIONS), help="default: amp, on a CPU fp32")
    it.add_argument("--recompute", choices=[*formulas.RECOMPUTE, "any"], default="any", help="default: any")
    it.add_argument("--why", type=positive, nargs=3, metavar=("D", "T", "P"), help="explain this mesh")
    it.add_argument("--json", action="store_true", help="print every layout")
    return it


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def amount(largest):
    """A type of argparse: a number above 0 and up to `largest`."""

    def number(text):
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a number; write it without a unit") from None
        if not 0 < value <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {largest:g}; see --help for the unit")
        return value

    return number


def model_of(options):
    """The Model that the options describe; ValueError if they describe none."""
    given = [name for name in SIZES if getattr(options, name)]
    if options.config:
        wrong = [name for name in given if name != "seq_len"]
        if wrong:
            raise ValueError(f"--config has the sizes; leave out --{wrong[0].replace('_', '-')}")
        return model.of_config(options.config, options.seq_len)
    missing = [f"--{name.replace('_', '-')}" for name in SIZES if name not in given]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise ValueError(f"{', '.join(missing)} {verb} missing; or name a config.json: --config FILE")
    sizes = {name: getattr(options, name) for name in SIZES}
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise ValueError(f"--num-heads {sizes['num_heads']} does not divide --hidden-size {sizes['hidden_size']}")
    return model.Model(**sizes)


def cluster_of(options):
    ranks = options.gpus_per_host or 8
    if options.device == "cpu":
        cores, device = devices.this_machine()
        ranks = options.gpus_per_host or cores
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
    device = device._replace(
        flops=flops,
        memory=options.memory * devices.GB if options.memory else device.memory,
        hbm=options.bandwidth_memory * devices.GB if options.bandwidth_memory else device.hbm,
        inside=options.bandwidth_inside * devices.GB if options.bandwidth_inside else device.inside,
        between=options.bandwidth_between * devices.GB if options.bandwidth_between else device.between,
    )
    return devices.Cluster(options.hosts, ranks, device, precision, devices.EFFICIENCY)


def case_of(options):
    recompute = formulas.RECOMPUTE if options.recompute == "any" else (options.recompute,)
    return Case(model_of(options), options.global_batch_size, cluster_of(options), recompute, options.device != "cpu")


def none_divides(case):
    """Why no layout divides the sizes."""
    cluster, sizes = case.cluster, case.model
    return (
        f"no such layout: data x tensor x pipeline must be {cluster.ranks}; data must divide the {case.batch_size}"
        f" sequences of a step, tensor the {heads_of(sizes)}; pipeline may be at most {sizes.num_layers}, the layers"
    )


def heads_of(sizes):
    return f"{sizes.kv_heads} key-value heads" if sizes.kv_heads else f"{sizes.num_heads} heads"


def what_does_not_divide(mesh, case):
    """Why a mesh is no layout of the case."""
    (data, tensor, pipeline), sizes = mesh, case.model
    ranks = data * tensor * pipeline
    if ranks != case.cluster.ranks:
        return f"{data} x {tensor} x {pipeline} is {ranks}, and there are {case.cluster.ranks} devices"
    divided = {
        f"{data} replicas do not divide the {case.batch_size} sequences of a step": case.batch_size % data,
        f"{tensor} tensor ranks do not divide the {heads_of(sizes)}": (sizes.kv_heads or sizes.num_heads) % tensor,
        f"{pipeline} stages are more than the {sizes.num_layers} layers": pipeline > sizes.num_layers,
    }
    return "; ".join(words for words, rest in divided.items() if rest)


def as_json(one, fits):
    return {**dataclasses.asdict(one), "bytes": one.bytes, "seconds": one.seconds, "fits": fits}


def answer(options):
    """(the lines to print, whether anything fits); ValueError if the options make no plan."""
    case = case_of(options)
    fit, refused = cost.ranked(case.model, case.batch_size, case.cluster, case.recompute)
    if not fit and not refused:
        raise ValueError(none_divides(case))
    if options.json:
        rows = [*(as_json(one, True) for one in fit), *(as_json(one, False) for one in refused)]
        return [json.dumps(rows)], bool(fit)
    if options.why:
        mesh = tuple(options.why)
        if not any(one.layout.mesh == mesh for one in (*fit, *refused)):
            raise ValueError(f"--why {' '.join(map(str, mesh))}: {what_does_not_divide(mesh, case)}")
        return report.why(mesh, fit, refused, case), any(one.layout.mesh == mesh for one in fit)
    if fit:
        return report.plan(fit, refused, case), True
    return report.nothing_fits(refused, case), False


def main(arguments=None):
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
