"""How good `launch.sh verify` is: write the table of docs/verify.md, or break recipes and see whether it notices.

    .venv/bin/python benchmarks/verified.py programs
    .venv/bin/python benchmarks/verified.py mutants [--every K] [recipe ...]

programs: those of tests/programs_to_verify.py, each with its mistake. mutants: of the changes of mutations.py to the
lesson of a recipe, every K-th is tried, if main then finds a difference from the same code on a single device. Prints
those that verify does not notice, and the shares: noticed, and with the first difference in the function that was
changed, or in one that it calls or that calls it.
"""

import argparse
import ast
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


def function_at(source, line):
    """The name of the innermost function around a line."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= node.end_lineno]
    return max(around, key=lambda node: node.lineno).name if around else ""


def functions_of(found, source):
    """The functions of the recipe whose lines the place of the first difference has, or a wrong entry names."""
    first = found.comparison.first
    lines = [line for _, line in first.key.place] if first else []
    lines += [int(entry.split(":")[2]) for entry in found.wrong_entries]
    return {function_at(source, line) for line in lines}


def tried(pools, name, every, path):
    """Yield (change, whether verify notices it, whether in the function that was changed) of some mutants."""
    n, options = proven_on(name)[0], ["--graph"] if modes(name) == (True,) else []
    lesson = [mutant for mutant in mutants(path_of(name).read_text()) if not mutant.in_main]
    for mutant in lesson[::every]:
        path.write_text(mutant.source)
        if not differs_by_main(pools, n, path, options):
            continue
        try:
            found = verified(pools, "-n", n, path, *options)
        except (CannotVerify, PoolError):
            yield f"{name}.py:{mutant.line}: {mutant.change}", None, False
            continue
        place = function_at(mutant.source, mutant.line) in functions_of(found, mutant.source)
        yield f"{name}.py:{mutant.line}: {mutant.change}", found.differs, place


def write_table(pools):
    """Write what verify says of each program with a mistake into the page."""
    before, after = PAGE.read_text().split(HEADER)
    rows = [row_of(program, wrong(pools, program)) for program in MISTAKES]
    PAGE.write_text(before + HEADER + "\n".join(rows) + after[after.index("\n\n") :])


def try_mutants(options):
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, pool_cache(partial(Pool, timeout=60, repeat=True)) as pools:
        for name in options.recipes or [name for name in CASES if max(proven_on(name)) > 1]:
            for change, noticed, in_place in tried(pools, name, options.every, Path(folder) / f"{name}.py"):
                outcomes.append((noticed, in_place))
                if not noticed:
                    print(f"{change}\n    {'cannot be verified' if noticed is None else 'NOT NOTICED'}", flush=True)
    noticed = sum(bool(seen) for seen, _ in outcomes)
    cannot = sum(seen is None for seen, _ in outcomes)
    in_place = sum(place for _, place in outcomes)
    print(f"{len(outcomes)} changes that main notices: verify notices {noticed}, {in_place} of them in the function")
    print(f"that was changed; {cannot} cannot be verified, {len(outcomes) - noticed - cannot} are not noticed")


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
