"""How good `launch.sh verify` is: write the table of docs/verify.md, or break recipes and see whether it notices.

    .venv/bin/python benchmarks/verified.py programs
    .venv/bin/python benchmarks/verified.py mutants [--every K] [recipe ...]

programs: those of tests/programs_to_verify.py, each with its mistake. mutants: of the changes of mutations.py to the
lesson of a recipe, every K-th is tried, if main then finds a difference from the same code on a single device. Prints
those that verify does not notice, and how many it does.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mutations import mutants  # noqa: E402
from harness.pool import Pool, PoolError, pool_cache  # noqa: E402
from harness.start.recipe import HARNESS, path_of  # noqa: E402
from harness.verify.command import CannotVerify  # noqa: E402
from tests.cases import CASES, modes, proven_on  # noqa: E402
from tests.cases.verifying import HEADER, MISTAKES, PAGE, row_of, verified, wrong  # noqa: E402

MAIN = f"{HARNESS / 'measure' / 'main.py'}:main_of"


def differs_by_main(pools, n, path, options):
    """Whether main's own comparison fails on some rank; False if the changed recipe does not run at all."""
    try:
        answers = pools(n).call(MAIN, path=str(path), arguments=options)
    except PoolError:
        return False
    return any(code == 1 for code, _, _ in answers)


def tried(pools, name, every, path):
    """Yield (change, whether verify notices it, None if it cannot verify it) of some mutants."""
    n, options = proven_on(name)[0], ["--graph"] if modes(name) == (True,) else []
    lesson = [mutant for mutant in mutants(path_of(name).read_text()) if not mutant.in_main]
    for mutant in lesson[::every]:
        path.write_text(mutant.source)
        if not differs_by_main(pools, n, path, options):
            continue
        try:
            found = verified(pools, "-n", n, path, *options)
        except (CannotVerify, PoolError):
            yield f"{name}.py:{mutant.line}: {mutant.change}", None
            continue
        yield f"{name}.py:{mutant.line}: {mutant.change}", found.differs


def write_table(pools):
    """Write what verify says of each program with a mistake into the page."""
    before, after = PAGE.read_text().split(HEADER)
    rows = [row_of(program, wrong(pools, program)) for program in MISTAKES]
    PAGE.write_text(before + HEADER + "\n".join(rows) + after[after.index("\n\n") :])


def try_mutants(options):
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, pool_cache(partial(Pool, timeout=60, repeat=True)) as pools:
        for name in options.recipes or [name for name in CASES if max(proven_on(name)) > 1]:
            for change, noticed in tried(pools, name, options.every, Path(folder) / f"{name}.py"):
                outcomes.append(noticed)
                if not noticed:
                    print(f"{change}\n    {'cannot be verified' if noticed is None else 'NOT NOTICED'}", flush=True)
    noticed, cannot = sum(map(bool, outcomes)), outcomes.count(None)
    words = f"verify notices {noticed}, cannot verify {cannot}, and misses {len(outcomes) - noticed - cannot}"
    print(f"{len(outcomes)} changes that main notices: {words}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("programs")
    mutating = commands.add_parser("mutants")
    mutating.add_argument("recipes", nargs="*", metavar="recipe", help="default: all of them")
    mutating.add_argument("--every", type=int, default=1, metavar="K", help="try only every K-th change")
    options = parser.parse_args()
    if options.command == "mutants":
        try_mutants(options)
        return
    with pool_cache(partial(Pool, timeout=60, repeat=True)) as pools:
        write_table(pools)


if __name__ == "__main__":
    main()
