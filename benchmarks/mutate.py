"""Break every recipe on purpose, one place at a time, and see whether the tests notice.

    ./launch.sh mutate [recipe | recipe:first-last ...]

Each SBP, placement, move, stage and matmul of a recipe is changed in every way listed in mutations.py, and so are each
comparison, figure and default of its main; each cure of a trap, each refusal and each option that is handed on is left
out. A changed lesson is checked on the proof ladder, by a run of its main, and by the tests that its
case names. A changed main is judged as tests/test_mains.py does it: it must fail when a result is off, hand on its
options, print what is so, and refuse what does not work. The unchanged recipe is checked first, which shows the lines
that each check runs: a change is tried on those that run its line.
Prints a line for each change and then the survivors; exit code 1 if one has no reason in `EQUIVALENT` or in its case.
gpt:70-151 is lines 70 to 151 of gpt.py. With --count it only prints how many changes there are.
"""

import argparse
import ast
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "harness")]

from benchmarks.mutations import BY_NUMPY, WORLD, mutants  # noqa: E402
from oneflow_cookbook.pool import Pool, PoolError, pool_cache  # noqa: E402
from oneflow_cookbook.start.recipe import copied_with, path_of  # noqa: E402
from oneflow_cookbook.start.signals import exit_at  # noqa: E402
from tests.cases import (  # noqa: E402
    CASES,
    GRAPH_ONLY,
    PROOFS,
    ROOT,
    TRAINED,
    WITHOUT_CASE,
    mains,
    measuring,
    modes,
    proven_on,
    runs,
    whole_run,
)
from tests.cases import gpt_meshes as gpt  # noqa: E402
from tests.cases.ladder import OBSERVE, check_recipe  # noqa: E402

PROVED_BY = {"graph_safe": "tensor_parallel_module"}  # a module that recipes share -> the recipe whose tests prove it
REPLICATED = "to_global(sbp=[flow.sbp.broadcast] * len(t.sbp))"  # in a change by which a tensor becomes replicated
LINES = f"{ROOT / 'benchmarks' / 'on_rank_lines.py'}:call_and_lines"
EVERY = {"sequence_parallel": True, "shard_weights": True, "micro_batches": 2, "clip_grad": 0.5}
GPT = [  # what proves gpt.py: the runs of tests/test_gpt.py, and meshes on which each axis of a layout shows
    *gpt.RUNS,
    *(((2, 2, 1), {**EVERY, "graph": graph}) for graph in (False, True)),
    ((2, 2, 1), {}),
    ((1, 2, 2), {"graph": True}),
    *gpt.EXPERT_RUNS,
    *gpt.CONTEXT_RUNS,
]
MESH_2_2, MESH_BY_TENSOR = "np.arange(n).reshape(2, -1).tolist()", "np.arange(n).reshape(-1, tensor).tolist()"
MESHES = "|".join(map(re.escape, ("[[0, 1], [2, 3]]", "[[0, 3], [1, 2]]", MESH_2_2, MESH_BY_TENSOR)))
ALL = rf"(list\(range\((n|world_size|{re.escape(WORLD)})\)\)|{MESHES})"
SORTED = "OneFlow sorts the ranks of a placement"
SAME = "it is B already, and to_global keeps an SBP that it is not told to change"
# Pattern of a change, or of its line and the change -> why nothing changes; a survivor with a reason is no failure.
# A recipe's own patterns are in its case.
EQUIVALENT = {
    rf"\(\(np.array\({ALL}\) \+ 1\) % {re.escape(WORLD)}\).tolist\(\)\)$": SORTED,
    rf"\({re.escape(WORLD)} - 1 - np.array\({ALL}\)\).tolist\(\)\)$": SORTED,
    r"\(\[\[?[^,\]]+\]\]?\)\[(:1|-1:)\]\)$": "the first and the last of one rank are that rank",
    r"flow\.tensor\(\[\[.*\]\]\[::-1\]\.copy\(\)": "one row in reverse order is that row",
    r"flow\.tensor\(\[state\S+\]\[::-1\]\.copy\(\)": "one number in reverse order is that number",
    r", sbp=flow.sbp.broadcast((?:, grad_sbp=\S+)?)\) -> [\w.()]+\.to_global\(placement=[\w.[\]]+\1\)$": SAME,
    r"to_global\(sbp=x.sbp, grad_sbp=x.sbp\) -> .*\.to_global\(grad_sbp=x.sbp\)$": "it keeps its SBP either way",
    r"^flow\.tensor\((.*), device=device\) -> flow\.tensor\(\1\)$": "it shows on a GPU alone",
    r"os.close\(\w+\) -> pass$": "a few files stay open until the end",
    r"\.zero_grad\(set_to_none=True\) -> \w+\.zero_grad\(\)$": "set_to_none is faster, and the values are the same",
}


class LinePool(Pool):
    """A pool that collects which lines of a recipe its calls run, on any rank, and how many seconds each takes."""

    def __init__(self, world_size, file, lines, seconds):
        super().__init__(world_size, repeat=True)
        self.file, self.lines, self.seconds = file, lines, seconds

    def call(self, function, **arguments):
        call, begin = {"name": function, "arguments": arguments, "file": self.file}, time.monotonic()
        answers, lines = zip(*super().call(LINES, **call))
        self.seconds.append(time.monotonic() - begin)
        self.lines.update(*lines)
        return list(answers)


class BaselineFails(Exception):
    """The tests already fail for the unchanged recipe."""


@dataclass
class Check:
    """One check of a recipe: `call` takes pools, a function from a world size, and the path of the recipe."""

    words: str
    call: Callable
    lines: set = None  # of the recipe, that it runs; None: not known
    timeout: float = 300  # seconds after which a call hangs


def file_of(name):
    """The file of a recipe, or of a module of PROVED_BY."""
    return {path.stem: path for path in copied_with(path_of(PROVED_BY.get(name, name)))}[name]


def proofs(name):
    """Yield the Check of each run that proves a recipe."""
    found = []
    for mesh, more in GPT if name == "gpt" else ():
        found.append((math.prod(mesh), more.get("graph", False), partial(gpt.prove, mesh=mesh, **more)))
    for n, tensor, graph, more in whole_run.RUNS if name == "training_run" else ():
        found.append((n, graph, partial(whole_run.prove, tensor=tensor, graph=graph, **more)))
    for _, n, graph, sizes in (run for run in runs() if run[0] == name):
        found.append((n, graph, partial(check_recipe, name=name, graph=graph, sizes=sizes)))
    for n, graph, proof in found:
        call = lambda pools, path, n=n, proof=proof: proof(pools(n), path)  # noqa: E731
        yield Check(f"{n} ranks, {'graph' if graph else 'eager'}", call)
    for n, mode, more in measuring.steps_of(name) if name in TRAINED else ():
        step = partial(measuring.prove_step, name=name, n=n, mode=mode, more=more)
        yield Check(f"bytes of a step on {n} ranks, {mode}", lambda pools, path, n=n, step=step: step(pools(n), path))


def proofs_of_main(name):
    """Yield the Checks of main: in each mode, and what it refuses."""
    for graph in modes(name):
        yield Check("main", partial(mains.check_main, name=name, graph=graph))
    yield Check("main", partial(mains.check_refusals, name=name))


def failure(pools, path, check):
    """What a check of the recipe at `path` says if it fails, as a line, or None."""

    def with_timeout(world_size):
        pool = pools(world_size)
        pool.timeout = check.timeout
        return pool

    try:
        check.call(with_timeout, path=path)
        return None
    except (AssertionError, PoolError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines if isinstance(error, AssertionError) else [lines[0].split(":")[-1], lines[-1]]
        return f"{check.words}: {' '.join(' '.join(reason).split())}"


def first_red(pools, path, checks, lines=None):
    """What the first of `checks` that fails says, or None. That one is moved to the front of the list.

    Changes of the same function mostly fail in the same check. lines: of the changed statement; checks that do not run
    them are left out.
    """
    running = [check for check in checks if not lines or check.lines is None or check.lines & lines]
    for check in running:
        red = failure(pools, path, check)
        if red:
            checks.remove(check)
            checks.insert(0, check)
            return red
    return None


def find_lines(file, path, checks):
    """Run the checks of the recipe at `path` as it stands, and note their timeouts and the lines of `file` that run.

    Returns what fails, or None.
    """
    lines, seconds = set(), [0.0]
    with pool_cache(partial(LinePool, file=str(file), lines=lines, seconds=seconds)) as pools:
        for check in checks:
            red = failure(pools, path, check)
            if red:
                return red
            check.lines, check.timeout = set(lines), max(20.0, 5 * max(seconds))
            lines.clear()
            seconds[1:] = []
    return None


def statement_lines(tree, line):
    """The lines of the innermost statement with this line; of a compound one, those before its body."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
    node = max(found, key=lambda node: node.lineno)
    last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
    return set(range(node.lineno, max(last, line) + 1))


def red_test(changed, file, name):
    """The first of a case's tests that fails in a copy of the cookbook where `changed` replaces this file, or None."""
    tests = PROOFS[name].tests
    if not tests:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (copy / ".venv").symlink_to(ROOT / ".venv")
        shutil.copy(changed, copy / file.relative_to(ROOT))
        tests = tests if "-k" in tests else [*tests, "-k", name]  # as CONTRIBUTING.md tells those who change it
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return " ".join([*lines, f"pytest ended with {done.returncode}"][:1])


def why_equal(name, change, line=""):
    """Why a change has no effect, or None. line: of the recipe, which the pattern may need too."""
    patterns = {**EQUIVALENT, **PROOFS[name].equivalent}
    if name in GRAPH_ONLY:
        patterns[re.escape(BY_NUMPY)] = "it has no eager mode"
    with_line = f"{line.strip()}: {change}"
    for pattern, why in patterns.items():
        if re.search(pattern, change) or re.search(pattern, with_line):
            return why
    return None


def places_of(recipes, parser):
    """(name, its lines as a range) of each of these recipes, by default of all."""
    known = [*CASES, *WITHOUT_CASE, *PROVED_BY]
    places = []
    for recipe in recipes or known:
        name, colon, lines = recipe.partition(":")
        name, of_lines = Path(name).stem, re.fullmatch(r"(\d+)-(\d+)", lines if colon else f"1-{sys.maxsize}")
        if name not in known:
            parser.error(f"{name}: no such recipe; there are {', '.join(known)}")
        if not of_lines:
            parser.error(f"{recipe}: lines are given as {name}:70-151")
        first, last = map(int, of_lines.groups())
        places.append((name, range(first, last + 1)))
        if not mutants_of(*places[-1]):
            parser.error(f"{recipe}: there is nothing to break in these lines")
    return places


def mutants_of(name, lines):
    """The mutants of these lines of a recipe, by line."""
    found = (mutant for mutant in mutants(file_of(name).read_text()) if mutant.line in lines)
    return sorted(found, key=lambda mutant: mutant.line)


def count(places):
    """Print how many changes each recipe has, in its lesson and in its main."""
    for name, lines in places:
        in_main = [mutant.in_main for mutant in mutants_of(name, lines)]
        print(f"{name:25} {len(in_main):4}, of them in main {sum(in_main):3}")


def prove(name, lines, pools, of_lesson, of_main):
    """Break a file in every way; yields (place and change, why it is red or None, why nothing changes or None)."""
    recipe, file = PROVED_BY.get(name, name), file_of(name)
    source = file.read_text()
    tree, text = ast.parse(source), source.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        path, changed = Path(folder) / f"{recipe}.py", Path(folder) / file.name
        for original in copied_with(path_of(recipe)):
            shutil.copy(original, folder)
        for mutant in mutants_of(name, lines):
            changed.write_text(mutant.source)
            reason, red = why_equal(recipe, mutant.change, text[mutant.line - 1]), None
            if not reason:
                of_statement = statement_lines(tree, mutant.line)
                if not any(check.lines & of_statement for check in (*of_lesson, *of_main)):
                    of_statement = None  # a process that the recipe starts may run them
                checks = of_main if mutant.in_main else of_lesson
                red = first_red(pools, path, checks, of_statement)
                red = red or (None if mutant.in_main else first_red(pools, path, of_main, of_statement))
                red = red or red_test(changed, file, recipe)
                if red is None and REPLICATED in mutant.change and name in CASES and same_moves(pools, path, name):
                    reason = "the tensor is replicated already, so nothing moves"
            yield f"{name}.py:{mutant.line}: {mutant.change}", red, reason


def same_moves(pools, path, name):
    """Whether the recipe at `path` moves what it does unchanged, in each mode, but for moves to the same layout."""
    n = proven_on(name)[0]
    for graph in modes(name):
        mode = {"graph": graph} if len(modes(name)) == 2 else {}
        moves = []
        for recipe in (path, path_of(name)):
            seen = pools(n).call(OBSERVE, path=str(recipe), names=[], **mode)
            moves.append([[move for move in result["moves"] if move[0] != move[1]] for result in seen])
        if moves[0] != moves[1]:
            return False
    return True


def judge(name, lines):
    """Check a file as it stands, and then broken in every way, as `prove` yields it. Raises BaselineFails."""
    recipe, file = PROVED_BY.get(name, name), file_of(name)
    of_lesson, of_main = list(proofs(recipe)), list(proofs_of_main(recipe))
    checks = [*of_lesson, *of_main]
    red = find_lines(file, path_of(recipe), checks) or red_test(file, file, recipe)
    if red:
        raise BaselineFails(f"the tests of {name}.py fail without a change, so mutants show nothing\n    {red}")
    with pool_cache(partial(Pool, repeat=True)) as pools:
        yield from prove(name, lines, pools, of_lesson, of_main)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh mutate", description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="recipe[:first-last]", help="default: all of them")
    parser.add_argument("--count", action="store_true", help="only count the changes")
    options = parser.parse_args(arguments)
    places = places_of(options.recipes, parser)
    if options.count:
        count(places)
        return 0
    survivors, equivalent, number, begin = [], [], 0, time.monotonic()
    for name, lines in places:
        try:
            for change, red, reason in judge(name, lines):
                number += 1
                if red is None:
                    (equivalent if reason else survivors).append(change)
                    red = f"changes nothing: {reason}" if reason else "SURVIVES"
                print(f"{change}\n    {red[:160]}", flush=True)
        except BaselineFails as error:
            print(error)
            return 1
    print(f"\n{number} mutants, {len(survivors)} survivors, {len(equivalent)} that change nothing", end="")
    print(f"; {time.monotonic() - begin:.0f} s", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    exit_at(signal.SIGTERM, signal.SIGHUP)
    sys.exit(main())
