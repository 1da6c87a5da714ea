"""`launch.sh verify`: run a script on n ranks and on one rank with the same entries, and compare what both compute."""

import functools
import json
import re
import shlex
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.pool import Pool, PoolError
from harness.start.ending import BAD_INPUT, TIME_LIMIT_REACHED
from harness.start.errors import UsageError
from harness.start.options import checked, file_of
from harness.start.output import say
from harness.start.recipe import HARNESS
from harness.start.signals import exit_at
from harness.verify.cause import cause_of
from harness.verify.compare import compare, pairs_by_name, pairs_of
from harness.verify.findings import Findings, never_updated, other_parameters, suspicious, wrong_entries
from harness.verify.values import Run

OBSERVE = f"{HARNESS / 'verify' / 'observer.py'}:observe_script"
TIMEOUT = 600.0  # seconds for each run of the script, by default
NUDGES = (1, 2)  # seeds of the runs whose entries are changed in their last bit
NOTHING = (
    "no global tensor of it can be compared; verify does not follow local tensors, flow.comm and "
    "DistributedDataParallel: compare their losses and weights with those of a script for one device"
)
AGREES, DIFFERS, CANNOT = 0, 1, 2  # exit codes


class CannotVerify(Exception):
    """Its text says why a script cannot be verified."""


def on_new_ranks(ranks, timeout, **arguments):
    """The answers of observe_script, by rank. Raises PoolError."""
    with Pool(ranks, timeout) as pool:
        return pool.call(OBSERVE, **arguments)


def observed(call, ranks, folder, **arguments):
    """Run a script by `call`, such as on_new_ranks; returns (its Run, why it cannot be replayed or None)."""
    folder.mkdir()
    answers = call(ranks, folder=str(folder), **arguments)
    return Run(folder, ranks), answers[0]


def on_one_rank(call, folder, parallel, **arguments):
    """(the Run of a script on one rank, the number of ranks that it was told). Raises CannotVerify.

    It is told 1, so that factors of n are checked too, and if it then makes other entries, the n of the run `parallel`.
    """
    reasons = {}
    for told_size in dict.fromkeys((1, parallel.world_size)):
        told_so = {"world_size": told_size, "strict": told_size == 1}
        try:
            run, cannot = observed(call, 1, folder / f"told {told_size}", **told_so, **arguments)
        except PoolError as error:
            cannot = shortened(error, arguments["script"]["path"])
        if cannot is None:
            return run, told_size
        reasons[told_size] = cannot
    raise CannotVerify(f"on one rank the script does something else: {reasons[parallel.world_size]}")


def findings(options, call=None):
    """The Findings of a script. Raises UsageError, CannotVerify, or PoolError if it fails on n ranks.

    call: runs observe_script one after another, in place of on_new_ranks.
    """
    threads = 1 if call else len(NUDGES)
    if call is None:
        timeout = TIMEOUT if options.timeout is None else options.timeout or 1e9
        call = functools.partial(on_new_ranks, timeout=timeout)
    script = {"path": file_of(options), "module": options.module, "argv": options.arguments}
    single = script if options.against is None else single_device(options.against)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parallel, _ = observed(call, options.nproc_per_node, folder / "parallel", script=script, steps=options.steps)
        refuse_random(parallel)
        arguments = {"script": single, "steps": options.steps, "replay": (str(parallel.folder), parallel.world_size)}
        if options.against is None:
            alone, told_size = on_one_rank(call, folder, parallel, **arguments)
            arguments.update(world_size=told_size, strict=told_size == 1)
        else:
            (alone, _), told_size = observed(call, 1, folder / "single", **arguments), 1
            refuse_random(alone)

        def nudged(seed):
            run, cannot = observed(call, 1, folder / f"nudged {seed}", nudge=seed, **arguments)
            if cannot:
                raise CannotVerify(f"with other rounding the script does something else: {cannot}")
            return run

        with ThreadPoolExecutor(threads) as executor:
            others = list(executor.map(nudged, NUDGES))
        matching = pairs_of if options.against is None else pairs_by_name
        comparison = compare(parallel, alone, others, *matching(parallel, alone))
        if not comparison.agreeing and not comparison.differing:
            raise CannotVerify(NOTHING)
        cause = None
        if comparison.first:
            again, _ = observed(call, options.nproc_per_node, folder / "again", script=script, steps=options.steps)
            cause = cause_of(comparison, parallel, again)
        wrong = [*never_updated(parallel), *wrong_entries(parallel), *other_parameters(alone)]
        return Findings(options, told_size, comparison, cause, wrong, suspicious(parallel, alone))


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
