"""`./launch.sh plan`: which layouts of a model fit, and what they cost. Runs with any Python from 3.8 on."""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oneflow_cookbook.plan import cost, devices, formulas, model, report  # noqa: E402

NOTHING_FITS, BAD_INPUT = 1, 2
SIZES = ("num_layers", "hidden_size", "num_heads", "seq_len", "vocab_size")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a line."""

    def error(self, message):
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(BAD_INPUT)


def parser():
    options = Parser(
        prog="launch.sh plan",
        description="Which layouts fit a model onto devices, and what do they cost?",
        epilog="Exit code: 0, or 1 if no layout fits (with --why: not this mesh), or 2 after bad input.",
    )

    def option(name, text, number=None, **more):
        options.add_argument(name, type=number or positive(int), help=text, **{"metavar": "N", **more})

    option("--config", "config.json of a GPT- or Llama-like model, in place of the sizes", str, metavar="FILE")
    option("--num-layers", "of a GPT without biases whose head is tied to the embedding")
    option("--hidden-size", None)
    option("--num-heads", None)
    option("--seq-len", "tokens of a sequence; with --config, by default the longest that the model takes")
    option("--vocab-size", None)
    option("--global-batch-size", "sequences of a step", required=True)
    option("--hosts", "default: 1", default=1)
    option("--gpus-per-host", "default: 8", default=8)
    names = ", ".join(devices.DEVICES)
    text = f"{names}; the next four options replace numbers of its data sheet"
    option("--device", text, str.lower, choices=devices.DEVICES, required=True, metavar="NAME")
    option("--memory", "GB of a device", positive(float))
    option("--tflops", "peak of a device", positive(float))
    option("--bandwidth-inside", "GB/s that a device sends to others of its host", positive(float))
    option("--bandwidth-between", "GB/s that a host sends to others", positive(float))
    option("--precision", "default: amp, in 16 bit", str, choices=formulas.PRECISIONS, default="amp", metavar=None)
    options.add_argument("--no-flash-attention", action="store_true", help="keep the scores, as fp32 always does")
    option("--why", "compare this mesh with the first", nargs=3, metavar=("D", "T", "P"))
    return options


def positive(number):
    """A type of argparse: a number above 0, int or float."""

    def parsed(text):
        try:
            value = number(text)
        except ValueError:
            kind = "whole number" if number is int else "number; write it without a unit"
            raise argparse.ArgumentTypeError(f"{text} is not a {kind}") from None
        if not 0 < value <= 1e7:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 10000000")
        return value

    return parsed


def model_of(options):
    """The Model that the options describe; ValueError if they describe none."""
    typed = {name: getattr(options, name) for name in SIZES if getattr(options, name)}
    if options.config:
        wrong = [option_of(name) for name in typed if name != "seq_len"]
        if wrong:
            raise ValueError(f"--config has the sizes; leave out {', '.join(wrong)}")
        return model.of_config(options.config, options.seq_len)
    missing = [option_of(name) for name in SIZES if name not in typed]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}; or name a config.json: --config FILE")
    return model.Model(**typed)


def option_of(name):
    return f"--{name.replace('_', '-')}"


def cluster_of(options):
    """The Cluster that the options describe."""
    typed = {
        "memory": options.memory,
        options.precision: options.tflops,
        "inside": options.bandwidth_inside,
        "between": options.bandwidth_between,
    }
    device = devices.DEVICES[options.device]._replace(**{field: value for field, value in typed.items() if value})
    return devices.Cluster(options.hosts, options.gpus_per_host, device)


def no_such_layout(problem):
    """Why a mesh is none, or no mesh is one."""
    sizes = problem.model
    heads = f"{sizes.kv_heads} key-value heads" if sizes.kv_heads else f"{sizes.num_heads} heads"
    return (
        f"no such layout: D x T x P must be the {problem.cluster.ranks} devices; D must divide the"
        f" {problem.batch_size} sequences of a step, T the {heads}; P may be at most {sizes.num_layers}, the layers"
    )


def answer(options):
    """(the lines to print, whether a layout fits, with --why this one); ValueError if the options make no plan."""
    flash = not options.no_flash_attention
    problem = cost.Problem(model_of(options), options.global_batch_size, cluster_of(options), options.precision, flash)
    fit, too_large = cost.ranked(problem)
    if not fit and not too_large:
        raise ValueError(no_such_layout(problem))
    if options.why:
        mesh = tuple(options.why)
        fitting, others = ({candidate.layout.mesh for candidate in costs} for costs in (fit, too_large))
        if mesh not in fitting | others:
            raise ValueError(f"--why {' '.join(map(str, mesh))}: {no_such_layout(problem)}")
        return report.why(mesh, fit, too_large, problem), mesh in fitting
    if fit:
        return report.plan(fit, problem), True
    return report.nothing_fits(too_large, problem), False


def main(arguments=None):
    """Print a plan; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        lines, fits = answer(options)
    except ValueError as error:
        print(f"launch.sh plan: {error}", file=sys.stderr)
        return BAD_INPUT
    for line in lines:
        print(line)
    return 0 if fits else NOTHING_FITS


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it without a traceback
    sys.exit(main())
