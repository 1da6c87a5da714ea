"""Break every recipe on purpose, one place at a time, and see whether the tests notice.

    ./launch.sh mutate [recipe ...]

Each SBP, placement, move, stage and matmul of a recipe's lesson is changed in every way listed in `replacements`, and
each cure of a trap is taken out. The changed recipe is checked on the proof ladder, and by its `TESTS` if it has any.
Prints a line for each change and then the survivors; exit code 1 if one has no reason in `EQUIVALENT`.
"""

import argparse
import ast
import contextlib
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.pool import Pool, PoolError  # noqa: E402
from harness.start.recipe import path_of  # noqa: E402
from tests.cases import CASES, ROOT, WITHOUT_CASE, gpt, runs  # noqa: E402
from tests.cases.ladder import check_recipe  # noqa: E402

WHOLE = "(lambda t: t.to_global(sbp=[flow.sbp.broadcast] * len(t.sbp)))"
WORLD = "flow.env.get_world_size()"
SBPS = ("flow.sbp.broadcast", "flow.sbp.split(0)", "flow.sbp.split(1)", "flow.sbp.partial_sum")
SHORT = ("B", "S(0)", "S(1)")  # where a recipe has B, S = flow.sbp.broadcast, flow.sbp.split
OPTIONS = ("lr", "momentum", "weight_decay")  # of an optimizer
STATEMENTS = (  # what a recipe must not leave out
    *("zero_grad", "backward", "step", "add_optimizer", "retain_grad", "set_gradient_accumulation_steps"),
    *("set_epoch", "barrier", "flush", "fsync", "rmtree", "remove", "_exit", "close", "kill", "terminate"),
    *("manual_seed", "all_reduce", "broadcast", "load_state_dict"),
)
# Recipes whose cures do not show in values -> pytest's arguments for what looks at them.
TESTS = {
    "global_and_local": ["tests/slow/test_global_and_local.py"],
    "random_numbers": ["tests/slow/test_data.py", "-k", "manual_seed"],
    "rendezvous": ["tests/test_cures.py", "-k", "meet"],
    "spawn": ["tests/test_cures.py", "-k", "spawn"],
    "checkpoint": ["tests/test_cures.py", "tests/slow/test_state.py", "-k", "checkpoint"],
    "gpt": ["tests/test_gpt.py", "tests/slow/test_gpt.py", "-k", "not of_the_page and not with_all and not trains_as"],
    "elastic_training": ["tests/test_cures.py", "tests/slow/test_starting.py", "-k", "on_disk or damaged or death"],
}
EVERY = {"sequence_parallel": True, "shard_weights": True, "micro_batches": 2, "clip_grad": 0.5}
GPT = [  # what proves gpt.py: the runs of the default suite, and meshes on which each axis of a layout shows
    *gpt.RUNS,
    *(((2, 2, 1), {**EVERY, "graph": graph}) for graph in (False, True)),
    ((2, 2, 1), {}),
    ((1, 2, 2), {"graph": True}),
]
BY_NUMPY = "the product, in eager mode, computed by numpy"
COPIED = "copied file by file"
MESHES = "|".join(map(re.escape, ("[[0, 1], [2, 3]]", "[[0, 3], [1, 2]]", "np.arange(n).reshape(-1, tensor).tolist()")))
ALL = rf"(list\(range\((n|world_size|{re.escape(WORLD)})\)\)|{MESHES})"
SORTED = "OneFlow sorts the ranks of a placement"
SAME = "it is B already, and to_global keeps an SBP that it is not told to change"
# What is found in a recipe's name and the change -> why nothing changes; a survivor with a reason is no failure.
EQUIVALENT = {
    rf"\(\(np.array\({ALL}\) \+ 1\) % {re.escape(WORLD)}\).tolist\(\)\)$": SORTED,
    rf"\({re.escape(WORLD)} - 1 - np.array\({ALL}\)\).tolist\(\)\)$": SORTED,
    rf"list\(range\((n|world_size)\)\)\) -> flow.placement\(device, {ALL}\)$": "it is the world size",
    r"\(\[\[?[^,\]]+\]\]?\)\[(:1|-1:)\]\)$": "the first and the last of one rank are that rank",
    r"flow\.tensor\(\[\[.*\]\]\[::-1\]\.copy\(\)": "one row in reverse order is that row",
    r"gpt.py: flow\.tensor\(ids.*\[::-1\]\.copy\(\)": "the loss is the mean of the rows, in any order",
    r", sbp=flow.sbp.broadcast((?:, grad_sbp=\S+)?)\) -> \w+\.to_global\(placement=[\w.[\]]+\1\)$": SAME,
    r"to_global\(sbp=x.sbp, grad_sbp=x.sbp\) -> .*\.to_global\(grad_sbp=x.sbp\)$": "it keeps its SBP either way",
    rf"spawn.py: .* -> flow.matmul\(x, {re.escape(WHOLE)}\(self.w\)\)$": "the weight is B already",
    rf"spawn.py: .* -> (\(\(flow.matmul.* \* 0.5\)|{BY_NUMPY})$": "its ranks tell nobody how they multiply",
    r"spawn.py: rank == 0 -> (True|False)$": "it only says how long a rank waits for rank 0",
    r"elastic_training.py: .* - 1 -> True$": "the job ends when one rank dies, and when all do",
    r"ddp.py: update.zero_grad\(set_to_none=True\) -> pass$": "it clears nothing: that is the trap it shows",
    r"checkpoint.py: flow.comm.barrier\(\) -> pass$": "rank 0, which alone writes the checkpoint, alone reads it",
    r"os.close\(\w+\) -> pass$": "a few files stay open until the end",
    r"\.zero_grad\(set_to_none=True\) -> \w+\.zero_grad\(\)$": "set_to_none is faster, and the values are the same",
    rf"(zero_optimizer|auto_parallel).py: .* -> {BY_NUMPY}": "it has no eager mode",
}


def mutants(source):
    """Yields (line, what was done, changed source) for every way in which the lesson can be broken."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, tree = source.encode(), ast.parse(source)

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return raw[slice(*span(node))].decode()

    end = len(lesson(source).encode())
    endings = {part for node in ast.walk(tree) for one in getattr(node, "finalbody", ()) for part in ast.walk(one)}
    for node in ast.walk(tree):
        if not hasattr(node, "lineno") or span(node)[0] >= end:
            continue
        for new in ["pass"] if isinstance(node, ast.Expr) and node in endings else replacements(node, text):
            first, last = span(node)
            if new == text(node):
                continue
            change = f"{' '.join(text(node).split())} -> {shown(new)}"
            yield node.lineno, change, (raw[:first] + new.encode() + raw[last:]).decode()


def lesson(source):
    """What of a recipe is not its main."""
    return source[: source.index("\ndef main(")]


def shown(new):
    """The changed text as the list of mutants has it."""
    long = {"(lambda product": BY_NUMPY, "__import__": COPIED}
    return next((words for beginning, words in long.items() if new.startswith(beginning)), " ".join(new.split()))


def replacements(node, text):
    """The texts by which one node of the syntax tree is replaced."""
    old = text(node)
    if old in SBPS or (isinstance(node, ast.Call) and text(node.func) == "flow.sbp.split"):
        return [sbp for sbp in SBPS if sbp != old]
    if old in SHORT and not isinstance(getattr(node, "ctx", None), ast.Store):
        return [sbp for sbp in SHORT if sbp != old]
    if isinstance(node, ast.IfExp) and text(node.test) == "graph":
        return [text(node.body), text(node.orelse)]
    if isinstance(node, ast.Compare) and "rank" in old.lower():
        return ["True", "False"]
    if isinstance(node, ast.Subscript) and old in ("ranks[0]", "ranks[1]"):
        return [{"ranks[0]": "ranks[1]", "ranks[1]": "ranks[0]"}[old]]
    if isinstance(node, ast.Dict):
        named = {key.value: value for key, value in zip(node.keys, node.values) if isinstance(key, ast.Constant)}
        numbers = [text(named[key]) for key in OPTIONS if isinstance(named.get(key), ast.Constant)]
        return [old.replace(number, f"{number} * 1.5") for number in numbers]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = text(node.value.func).split(".")[-1]
        return ["pass"] if called in STATEMENTS else []
    if not isinstance(node, ast.Call):
        return []
    function = text(node.func)
    arguments = [text(argument) for argument in node.args]
    if function == "flow._C.identity":
        return arguments
    if function.endswith(".zero_grad") and node.keywords:
        return [f"{function}()"]
    if function == "os.replace":
        copy = 'cp -r "$0" "$1" && rm -r "$0"'  # not in one go, as a crash in between would show
        return [f"__import__('subprocess').run(['sh', '-c', {copy!r}, {', '.join(arguments)}], check=True)"]
    if function == "flow.placement":
        device, ranks = arguments
        return [
            f"flow.placement({device}, ({ranks})[:1])",
            f"flow.placement({device}, ({ranks})[-1:])",
            f"flow.placement({device}, list(range({WORLD})))",
            f"flow.placement({device}, ((np.array({ranks}) + 1) % {WORLD}).tolist())",
            f"flow.placement({device}, ({WORLD} - 1 - np.array({ranks})).tolist())",
        ]
    if function == "flow.tensor" and node.keywords:
        array, rest = arguments[0], "".join(f", {one.arg}={text(one.value)}" for one in node.keywords) + ")"
        return [
            f"flow.tensor({new}{rest}" for new in (f"-{array}", f"{array}[::-1].copy()", f"{array}[:, ::-1].copy()")
        ]
    if function.endswith(".to_global"):
        moved = function[: -len(".to_global")]
        without = [moved] if node.keywords else []
        for keyword in node.keywords:
            others = [f"{other.arg}={text(other.value)}" for other in node.keywords if other is not keyword]
            if others:
                without.append(f"{function}({', '.join(others)})")
        return without
    if function.endswith(".set_stage"):
        number, placement = arguments
        return [
            "None",
            f"{function}({number} + 1, {placement})",
            f'{function}({number}, flow.placement("cpu", [0]))',
            f'{function}({number}, flow.placement("cpu", [{WORLD} - 1]))',
            f"{function}({number})",
        ]
    if function.startswith("flow.optim."):
        return [
            old.replace(f"{one.arg}={text(one.value)}", f"{one.arg}={text(one.value)} * 1.5")
            for one in node.keywords
            if isinstance(one.value, ast.Constant)
        ]
    if function in ("flow.relu", "flow.nn.functional.mse_loss"):
        return [f"(({old}) * 1.001)", arguments[0] if function == "flow.relu" else f"(({old}) + 0.001)"]
    if function == "flow.comm.send":
        tensor, rank = arguments
        return [f"flow.comm.send({tensor} * 1.00001, {rank})", f"flow.comm.send(-{tensor}, {rank})"]
    if function == "flow.matmul":
        x, w = arguments
        by_numpy = f"flow.tensor({x}.detach().numpy() @ {w}.detach().numpy()"
        same_layout = "**({'placement': product.placement, 'sbp': product.sbp} if product.is_global else {})"
        return [
            f"flow.matmul({WHOLE}({x}), {w})",
            f"flow.matmul({x}, {WHOLE}({w}))",
            f"{WHOLE}(flow.matmul({x}, {w}))",
            f"flow.matmul({x}, -{w})",
            f"flow.matmul({x} * 1.00001, {w})",
            f"flow.matmul({x}, {w}.transpose(0, 1))",
            f"((flow.matmul({x}, {w}) + flow.matmul({x}, {w})) * 0.5)",
            f"(lambda product: product if product.is_lazy else {by_numpy}, {same_layout}))(flow.matmul({x}, {w}))",
        ]
    return []


def proofs(name):
    """Yields (number of ranks, graph, function of a pool and a path) for each run that proves a recipe."""
    for mesh, more in GPT if name == "gpt" else ():
        yield math.prod(mesh), more.get("graph", False), partial(gpt.prove, mesh=mesh, **more)
    for _, n, graph, sizes in (run for run in runs() if run[0] == name):
        yield n, graph, partial(check_recipe, name=name, graph=graph, sizes=sizes)


def first_red(pools, path, name):
    """Where the changed recipe fails when it is proven, in one line, or None if it does not."""
    for n, graph, proof in proofs(name):
        try:
            proof(pools(n), path=path)
        except (AssertionError, PoolError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if isinstance(error, AssertionError) else f"{lines[0].split(':')[-1]} {lines[-1]}"
            return f"{n} ranks, {'graph' if graph else 'eager'}: {reason.strip()}"
    return None


def red_test(path, name):
    """The first of the recipe's TESTS that fails in a copy of the cookbook which has the changed recipe, or None."""
    if name not in TESTS:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (copy / ".venv").symlink_to(ROOT / ".venv")
        shutil.copy(path, copy / path_of(name).relative_to(ROOT))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS[name]]
        done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return " ".join([*lines, f"pytest ended with {done.returncode}"][:1])


def why_equal(name, change):
    """Why nothing changes, or None."""
    return next((why for what, why in EQUIVALENT.items() if re.search(what, f"{name}.py: {change}")), None)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh mutate", description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="recipe", help="default: all of them")
    known = [*CASES, *WITHOUT_CASE]
    names = [Path(recipe).stem for recipe in parser.parse_args(arguments).recipes] or known
    for name in names:
        if name not in known:
            parser.error(f"{name}: no such recipe; there are {', '.join(known)}")
    started, survivors, equivalent, count, begin = {}, [], [], 0, time.monotonic()

    def pools(n):
        return started.setdefault(n, Pool(n, timeout=30, repeat=True))

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(lambda: [pool.close() for pool in started.values()])
        for name in names:
            red = first_red(pools, path_of(name), name) or red_test(path_of(name), name)
            if red:
                print(f"{name}.py is red as it stands, so its mutants would say nothing\n    {red}")
                return 1
            for line, change, source in mutants(path_of(name).read_text()):
                path = Path(folder) / f"{name}.py"
                path.write_text(source)
                reason = why_equal(name, change)
                red = first_red(pools, path, name) or (None if reason else red_test(path, name))
                count += 1
                if red is None:
                    (equivalent if reason else survivors).append(f"{name}.py:{line}: {change}")
                    red = f"survives: {reason}" if reason else "SURVIVES"
                print(f"{name}.py:{line}: {change}\n    {red[:160]}", flush=True)
    print(f"\n{count} mutants, {len(survivors)} survivors, {len(equivalent)} that change nothing", end="")
    print(f"; {time.monotonic() - begin:.0f} s", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
