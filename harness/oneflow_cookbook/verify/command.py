"""`launch.sh verify`: run a script on n ranks and on one rank with the same entries, and compare what both compute."""

import contextlib
import functools
import json
import re
import shlex
import signal
import tempfile
from pathlib import Path

from oneflow_cookbook.pool import Pool, PoolError
from oneflow_cookbook.start.ending import BAD_INPUT, TIME_LIMIT_REACHED
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import checked, file_of
from oneflow_cookbook.start.output import say
from oneflow_cookbook.start.signals import exit_at
from oneflow_cookbook.verify.cause import cause_of
from oneflow_cookbook.verify.compare import compare, pairs_by_name, pairs_of
from oneflow_cookbook.verify.findings import (
    Findings,
    local_parameters,
    missing_gradients,
    never_updated,
    no_updates,
    other_parameters,
    suspicious,
    unused_runs,
    wrong_entries,
)
from oneflow_cookbook.verify.values import Run

OBSERVE = "oneflow_cookbook.verify.observer:observe_script"
TIMEOUT = 600.0  # seconds for each run of the script, by default
NUDGES = (1, 2)  # seeds of the runs whose entries are changed in their last bit
NOTHING = (
    "no global tensor of it can be compared; verify does not follow local tensors, flow.comm and "
    "DistributedDataParallel: compare their losses and weights with those of a script for one device"
)
AGREES, DIFFERS, CANNOT = 0, 1, 2  # exit codes


class CannotVerify(Exception):
    """Its text says why a script cannot be verified."""


def on_new_ranks(calls, timeout):
    """The answers of observe_script, by rank, to calls that run at the same time: [(ranks, arguments)].

    Raises PoolError. All in this thread, so that a signal's SystemExit ends all ranks at once.
    """
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(Pool(ranks, timeout)) for ranks, _ in calls]
        for pool, (_, arguments) in zip(pools, calls):
            pool.begin(OBSERVE, **arguments)
        return [pool.results() for pool in pools]


class Runner:
    """Runs scripts, and reads what they have recorded into folders of their own inside `folder`."""

    def __init__(self, call, folder):
        """call: on_new_ranks with a timeout, or what does the same."""
        self.call, self.folder = call, folder

    def observed(self, ranks, name, **arguments):
        """(Run of a script, why it cannot be compared or None). Raises PoolError."""
        return self.all_observed(ranks, {name: arguments})[0]

    def all_observed(self, ranks, runs):
        """The same of several runs at once. runs: {name of the folder: arguments}."""
        for name in runs:
            (self.folder / name).mkdir()
        calls = [(ranks, {"folder": str(self.folder / name), **arguments}) for name, arguments in runs.items()]
        answers = self.call(calls)
        return [(Run(self.folder / name, ranks), by_rank[0]) for name, by_rank in zip(runs, answers)]


def on_n_ranks(runner, ranks, **arguments):
    """The Run of a script on n ranks. Raises CannotVerify, PoolError."""
    parallel, cannot = runner.observed(ranks, "parallel", **arguments)
    if cannot:
        raise CannotVerify(cannot)
    refuse_random(parallel)
    return parallel


def on_one_rank(runner, parallel, **arguments):
    """(the Run of the same script on one rank, the number of ranks that it was told). Raises CannotVerify.

    It is told 1, so that factors of n are checked too, and if it then makes other entries, the n of the run `parallel`.
    """
    reasons = {}
    for told_size in dict.fromkeys((1, parallel.world_size)):
        told_so = {"world_size": told_size, "strict": told_size == 1}
        try:
            run, cannot = runner.observed(1, f"told {told_size}", **told_so, **arguments)
        except PoolError as error:
            cannot = shortened(error, arguments["script"]["path"])
        if cannot is None:
            return run, told_size
        reasons[told_size] = cannot
    raise CannotVerify(f"on one rank the script does something else: {reasons[parallel.world_size]}")


def on_single_device(runner, **arguments):
    """The Run of another script, for one device. Raises CannotVerify, PoolError."""
    alone, cannot = runner.observed(1, "single", **arguments)
    if cannot:
        raise CannotVerify(cannot)
    refuse_random(alone)
    return alone


def with_other_rounding(runner, **arguments):
    """The Runs on one rank whose entries are changed in their last bit, differently in each. Raises CannotVerify."""
    observed = runner.all_observed(1, {f"nudged {seed}": {**arguments, "nudge": seed} for seed in NUDGES})
    for _, cannot in observed:
        if cannot:
            raise CannotVerify(f"with other rounding the script does something else: {cannot}")
    return [run for run, _ in observed]


def findings(options, call=None):
    """The Findings of a script. Raises UsageError, CannotVerify, or PoolError if it fails on n ranks.

    call: what runs observe_script, in place of on_new_ranks.
    """
    if call is None:
        timeout = TIMEOUT if options.timeout is None else options.timeout or 1e9
        call = functools.partial(on_new_ranks, timeout=timeout)
    script = {"path": file_of(options), "module": options.module, "argv": options.arguments}
    single = script if options.against is None else single_device(options.against)
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(call, Path(name))
        parallel = on_n_ranks(runner, options.nproc_per_node, script=script, steps=options.steps)
        arguments = {"script": single, "steps": options.steps, "replay": (str(parallel.folder), parallel.world_size)}
        if options.against is None:
            alone, told_size = on_one_rank(runner, parallel, **arguments)
            arguments.update(world_size=told_size, strict=told_size == 1)
        else:
            alone, told_size = on_single_device(runner, **arguments), 1
        others = with_other_rounding(runner, **arguments)
        matching = pairs_of if options.against is None else pairs_by_name
        comparison = compare(parallel, alone, others, *matching(parallel, alone))
        if not comparison.agreeing and not comparison.differing:
            raise CannotVerify(NOTHING)
        cause, failed = None, None
        if comparison.first:
            again, failed = second_run(runner, options.nproc_per_node, script=script, steps=options.steps)
            cause = cause_of(comparison, parallel, again)
        return Findings(
            options,
            told_size,
            comparison,
            cause,
            wrong_lines(options, parallel, alone),
            suspicious(parallel, alone),
            [*no_updates(parallel), *unused_runs(others, failed)],
        )


def second_run(runner, ranks, **arguments):
    """(a second Run on n ranks, {} if it fails; how it failed or None)"""
    try:
        return runner.observed(ranks, "again", **arguments)[0], None
    except PoolError as error:
        return {}, shortened(error, arguments["script"]["path"])


def wrong_lines(options, parallel, alone):
    """Lines on mistakes beside the values that differ."""
    other = "on one rank" if options.against is None else f"in {Path(shlex.split(options.against)[0]).name}"
    return [
        *missing_gradients(parallel, alone, other),
        *never_updated(parallel),
        *local_parameters(parallel),
        *wrong_entries(parallel, alone),
        *other_parameters(alone),
    ]


def single_device(command):
    """The arguments of run_script for a command such as "single.py --layers 2". Raises UsageError."""
    try:
        path, *arguments = shlex.split(command) or [""]
    except ValueError as error:
        raise UsageError(f"--against {command}: {error}") from None
    if not Path(path).is_file():
        raise UsageError(f"--against {path}: there is no such file; name the script for a single device")
    return {"path": str(Path(path).resolve()), "module": None, "argv": arguments}


def refuse_random(parallel):
    """Raises CannotVerify if a run has drawn random numbers that cannot be replayed."""
    random = [place for facts in parallel.facts for place in facts["random"]]
    if random:
        where, what = random[0]
        advice = "set its p to 0 for this" if what == "dropout" else "draw them before, as a tensor with a placement"
        raise CannotVerify(f"{where}: {what} draws random numbers that another run cannot repeat; {advice}")


def shortened(error, file):
    """The line of a PoolError's traceback that names the error, with the line of the script where it was raised."""
    lines = str(error).splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines[-1:]
    places = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(error))
    return f"{named[-1].strip().rstrip(':')}" + (f" in line {places[-1]} of {Path(file).name}" if places else "")


def options_of(arguments):
    """The command line of `launch.sh verify`. Raises UsageError."""
    options = checked(arguments, ["--json"], {"--steps": (int, 3), "--against": (str, None)})
    if options.steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {options.steps}")
    if options.nnodes > 1:
        raise UsageError("verify runs on one host: type no --nnodes, and -n 4 for four ranks")
    if options.nproc_per_node < 2:
        raise UsageError("verify compares several ranks with one: type -n 2 or more")
    return options


def main(arguments):
    """Run `launch.sh verify` with these arguments; returns the exit code."""
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        options = options_of(arguments)
        found = findings(options)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    except CannotVerify as reason:
        say(f"cannot verify {options.script}: {reason}")
        return CANNOT
    except PoolError as error:
        say(re.sub(rf"{re.escape(OBSERVE)}: ", "", str(error), count=1))
        return TIME_LIMIT_REACHED if error.hung else CANNOT
    print(json.dumps(found.as_dict(), indent=1) if options.json else found.as_text())
    return DIFFERS if found.differs else AGREES
