"""Run a script on all ranks, for `show` and `bytes`: what its command line means, and what it did.

If each parameter of its function `train` or `run` has a default or is a recipe's placement, only that is called; else
the whole script runs. Its output is not shown.
"""

import re
from pathlib import Path

from oneflow_cookbook.pool import Pool
from oneflow_cookbook.start import recipe
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.options import Parser, checked, file_of

MEASURE_SCRIPT = "oneflow_cookbook.measure.script:measure_script"
MEMORY = "oneflow_cookbook.measure.rank_memory:memory"
TIMEOUT = 600.0  # seconds, by default: as the output is not shown, nobody notices a script that hangs


def run(command, arguments):
    """Run the script of a command line.

    Returns (options, {name: value} for its `train` or `run`, the results of measure_script by rank, those of memory if
    it was asked for). Raises UsageError, PoolError.
    """
    options = checked(arguments, command, ["--memory"])
    if options.memory and command != "show":
        raise UsageError(f"{command} has no --memory, but show has")
    keywords = keywords_of(options.script, options.arguments)
    timeout = TIMEOUT if options.timeout is None else options.timeout
    script = {"path": file_of(options), "module": options.module, "argv": options.arguments, "keywords": keywords}
    with Pool(options.nproc_per_node, timeout) as pool:
        results = pool.call(MEASURE_SCRIPT, **script)
    if "refusal" in results[0]:
        raise UsageError(results[0]["refusal"])
    memory = []
    if options.memory:  # of new ranks, as a record keeps tensors alive
        with Pool(options.nproc_per_node, timeout) as pool:
            memory = pool.call(MEMORY, **script)
    return options, keywords, results, memory


def keywords_of(script, arguments):
    """{name: value} for a script's `train` or `run`, from the command line; None if the whole script must run.

    Raises UsageError.
    """
    try:
        defaults = recipe.entry_options(script)
    except ValueError:  # it has no such function, or the function needs more than options
        return None
    parser = Parser(prog=str(script), add_help=False, allow_abbrev=False)
    options = {name: f"--{name.replace('_', '-')}" for name in defaults}
    for name, default in defaults.items():
        if isinstance(default, bool):
            parser.add_argument(options[name], action="store_true", default=default)
            continue
        first = (*default, None)[0] if isinstance(default, tuple) else default
        number = "+" if isinstance(default, tuple) else None
        parser.add_argument(options[name], type=int if first is None else type(first), nargs=number, default=default)
    try:
        keywords = vars(parser.parse_args(arguments))
    except UsageError as error:
        known = " ".join(options.values()) or "none"
        raise UsageError(f"{script}: {str(error).split(';')[0]}; the parameters of its run are {known}") from None
    if recipe.RECIPES in Path(script).resolve().parents:
        for name, value in keywords.items():
            least = 0 if defaults[name] == 0 else 1
            if type(value) is int and value < least:
                raise UsageError(f"{script}: {options[name]} must be {least} or more, got {value}")
    return keywords


def in_words(error):
    """The text of a PoolError, without the name of our function."""
    return re.sub(rf"({MEASURE_SCRIPT}|{MEMORY}): ", "", str(error), count=1)
