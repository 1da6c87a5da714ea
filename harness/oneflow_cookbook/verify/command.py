"""`launch.sh verify`: run a script on n ranks and on one rank with the same sources, and compare what both compute."""

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
from oneflow_cookbook.verify.findings import Findings, suspicious_lines, unused_lines, wrong_lines
from oneflow_cookbook.verify.values import Run

OBSERVE = "oneflow_cookbook.verify.observer:observe_script"
TIMEOUT = 600.0  # seconds for each run of the script, by default
NUDGES = (1, 2)  # seeds of the runs whose sources are changed in their last bit
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

    def observed(self, ranks, runs):
        """The Runs of several scripts at once, by {name of the folder: arguments}. Raises CannotVerify, PoolError."""
        for name in runs:
            (self.folder / name).mkdir()
        calls = [(ranks, {"folder": str(self.folder / name), **arguments}) for name, arguments in runs.items()]
        for cannot, *_ in self.call(calls):
            if cannot:
                raise CannotVerify(cannot)
        return [Run(self.folder / name, ranks) for name in runs]

    def repeatable(self, ranks, name, **arguments):
        """The Run of a script that draws no random numbers that cannot be replayed."""
        [run] = self.observed(ranks, {name: arguments})
        for line, function in [place for facts in run.facts for place in facts["random"]]:
            advice = (
                "set its p to 0 for this" if function == "dropout" else "draw them before, as a tensor with a placement"
            )
            words = f"{function} draws random numbers that another run cannot repeat; {advice}"
            raise CannotVerify(f"{line}: {words}")
        return run

    def on_one_rank(self, parallel, **arguments):
        """(the Run of the same script on one rank, what the script is told there).

        It is told that there is 1 rank, so that factors of n are checked too, and if it then makes other sources, that
        there are the n of the run `parallel`.
        """
        for stated_size in (1, parallel.world_size):
            stated = {"world_size": stated_size, "strict": stated_size == 1}
            try:
                [run] = self.observed(1, {f"told {stated_size}": {**stated, **arguments}})
                return run, stated
            except PoolError as error:
                reason = shortened(error, arguments["script"]["path"])
            except CannotVerify as error:
                reason = error
        raise CannotVerify(f"on one rank the script does something else: {reason}")


def findings(options, call=None):
    """The Findings of a script. Raises UsageError, CannotVerify, or PoolError if it fails on n ranks.

    call: what runs observe_script, in place of on_new_ranks.
    """
    if call is None:
        timeout = TIMEOUT if options.timeout is None else options.timeout or 1e9
        call = functools.partial(on_new_ranks, timeout=timeout)
    n, path = options.nproc_per_node, file_of(options)
    script = {"path": path, "module": options.module, "argv": options.arguments}
    single = script if options.against is None else single_device(options.against)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(call, Path(folder))
        parallel = runner.repeatable(n, "parallel", script=script, steps=options.steps)
        arguments = {"script": single, "steps": options.steps, "replay": (str(parallel.folder), n)}
        stated, matching, other = {}, pairs_by_name, f"in {Path(single['path']).name}"
        if options.against is None:
            alone, stated = runner.on_one_rank(parallel, **arguments)
            matching, other = pairs_of, "on one rank"
        else:
            alone = runner.repeatable(1, "single", **arguments)
        try:
            others = runner.observed(1, {f"nudged {seed}": {**arguments, **stated, "nudge": seed} for seed in NUDGES})
        except CannotVerify as reason:
            raise CannotVerify(f"with other rounding the script does something else: {reason}") from None
        comparison = compare(parallel, alone, others, *matching(parallel, alone))
        if not comparison.agreeing and not comparison.differing:
            raise CannotVerify(NOTHING)
        cause, failed = None, None
        if comparison.first:
            try:
                [again] = runner.observed(n, {"again": {"script": script, "steps": options.steps}})
            except (PoolError, CannotVerify) as error:
                again, failed = {}, shortened(error, path)
            cause = cause_of(comparison, parallel, again)
        return Findings(
            options,
            stated.get("world_size", 1),
            comparison,
            cause,
            list(wrong_lines(parallel, alone, other)),
            suspicious_lines(parallel, alone),
            list(unused_lines(parallel, others, failed)),
        )


def single_device(command):
    """The arguments of run_script for a command such as "single.py --layers 2". Raises UsageError."""
    try:
        path, *arguments = shlex.split(command) or [""]
    except ValueError as error:
        raise UsageError(f"--against {command}: {error}") from None
    if not Path(path).is_file():
        raise UsageError(f"--against {path}: there is no such file; name the script for a single device")
    return {"path": str(Path(path).resolve()), "module": None, "argv": arguments}


def shortened(error, file):
    """The line of a PoolError's traceback that names the error, with the line of the script where it was raised."""
    lines = str(error).splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines[-1:]
    places = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(error))
    return f"{named[-1].strip().rstrip(':')}" + (f" in line {places[-1]} of {Path(file).name}" if places else "")


def options_of(arguments):
    """The command line of `launch.sh verify`. Raises UsageError."""
    options = checked(arguments, "verify", ["--json"], {"--steps": (int, 3), "--against": (str, None)})
    if options.steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {options.steps}")
    if options.nproc_per_node < 2:
        raise UsageError("verify compares several ranks with one: type -n 2 or more")
    return options


def main(arguments):
    """Run `launch.sh verify` with these arguments; returns the exit code."""
    exit_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        options = options_of(arguments)
        result = findings(options)
    except UsageError as error:
        say(str(error))
        return BAD_INPUT
    except CannotVerify as reason:
        say(f"cannot verify {options.script}: {reason}")
        return CANNOT
    except PoolError as error:
        say(re.sub(rf"{re.escape(OBSERVE)}: ", "", str(error), count=1))
        return TIME_LIMIT_REACHED if error.hung else CANNOT
    print(json.dumps(result.as_dict(), indent=1) if options.json else result.as_text())
    return DIFFERS if result.differs else AGREES
