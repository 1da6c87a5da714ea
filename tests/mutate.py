"""Break every recipe on purpose, one place at a time, and see whether the proof ladder notices.

    ./launch.sh mutate [recipe ...]

Each SBP, placement, move, stage and matmul of a recipe's lesson is changed in every way listed in `replacements`; each
changed recipe is run like any other. Prints a line for each and then the survivors; exit code 1 if one has no reason.
"""

import argparse
import ast
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.pool import Pool, PoolError  # noqa: E402
from harness.recipe import path_of, world_sizes  # noqa: E402
from tests.cases import CASES, PROVEN, modes, sizes_of  # noqa: E402
from tests.ladder import climb  # noqa: E402

END = "# The lesson ends here."
WORLD = "flow.env.get_world_size()"
SBPS = ("flow.sbp.broadcast", "flow.sbp.split(0)", "flow.sbp.split(1)", "flow.sbp.partial_sum")
STATEMENTS = ("zero_grad", "backward", "step", "add_optimizer", "retain_grad", "set_gradient_accumulation_steps")
BY_NUMPY = "the same dict with the outputs computed by numpy"
# What a recipe's name and the changed text end in -> why nothing changes; a survivor with a reason is no failure.
EQUIVALENT = {
    f"[(r + 1) % {WORLD} for r in list(range({WORLD}))])": "OneFlow sorts the ranks of a placement",
    f"[{WORLD} - 1 - r for r in list(range({WORLD}))])": "OneFlow sorts the ranks of a placement",
    "out.to_global(placement=self.rank)": "out is B already, and to_global keeps an SBP that it is not told to change",
    "to_global(placement=self.ranks, grad_sbp=flow.sbp.partial_sum)": "the weight is B already",
    "ddp.py: update.zero_grad(set_to_none=True) -> pass": "it clears nothing: that is the trap which the recipe shows",
    "spawn.py: flow.matmul(x, self.w) -> (flow.matmul(x, self.w) + flow.matmul(x, self.w)) * 0.5": (
        "no number of matmuls comes back from the ranks that it starts"
    ),
    "spawn.py: flow.matmul(x, self.w) -> flow.matmul(x, self.w.to_global(sbp=flow.sbp.broadcast))": (
        "the weight is B already"
    ),
    "[::-1].copy(), device=device)": "it has one row",
    **{f"([{rank}])[:1])": "the first of one rank is that rank" for rank in ("rank", "0", "k")},
    **{f"([{rank}])[-1:])": "the last of one rank is that rank" for rank in ("rank", "0", "k")},
    **{
        f"{moved})": "it is B already, and to_global keeps an SBP that it is not told to change"
        for moved in (
            "-> w.to_global(placement=worker",
            "-> part.to_global(placement=self.server",
            "-> w.to_global(placement=x.placement",
            "-> gradient.to_global(placement=server",
            "-> part.to_global(placement=server",
        )
    },
}


def mutants(source):
    """Yields (line, what was done, changed source) for every way in which the lesson can be broken."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw, end = source.encode(), len(source[: source.index(END)].encode())

    def text(node):
        return raw[slice(*span(node))].decode()

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    tree = ast.parse(source)
    inside = {part for node in tree.body if getattr(node, "name", "") == "run" for part in ast.walk(node)}
    [reference] = [span(node) for node in tree.body if getattr(node, "name", "") == "single_device"]
    for node in ast.walk(tree):
        if not hasattr(node, "lineno") or span(node)[0] >= end or reference[0] <= span(node)[0] < reference[1]:
            continue
        if isinstance(node, ast.Return) and node not in inside:
            continue
        for new in replacements(node, text):
            first, last = span(node)
            if new == text(node):
                continue
            shown = " ".join(text(node).split())
            new_shown = BY_NUMPY if "single_device(" in new else new
            yield node.lineno, f"{shown} -> {new_shown}", (raw[:first] + new.encode() + raw[last:]).decode()


def replacements(node, text):
    """The texts by which one node of the syntax tree is replaced."""
    old = text(node)
    if old in SBPS:
        return [sbp for sbp in SBPS if sbp != old]
    if isinstance(node, ast.IfExp) and text(node.test) == "graph":
        return [text(node.body), text(node.orelse)]
    if isinstance(node, ast.Subscript) and old in ("ranks[0]", "ranks[1]"):
        return [{"ranks[0]": "ranks[1]", "ranks[1]": "ranks[0]"}[old]]
    if isinstance(node, ast.Return) and isinstance(node.value, (ast.Dict, ast.Name)):
        values = (
            "single_device({k: t.numpy() for k, t in tensors.items()}, argparse.Namespace("
            "**{k: p.default for k, p in inspect.signature(run).parameters.items()}))"
        )
        same_layout = "placement=tensors[n].placement, sbp=tensors[n].sbp"
        return [  # the layout stays as it is, and so does the value, but numpy has computed it
            f"tensors = {text(node.value)}; return {{n: flow.tensor({values}[n].astype(np.float32), {same_layout}) "
            f"if n in {values} else t for n, t in tensors.items()}}"
        ]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = text(node.value.func).split(".")[-1]
        return ["pass"] if called in STATEMENTS else []
    if not isinstance(node, ast.Call):
        return []
    function = text(node.func)
    arguments = [text(argument) for argument in node.args]
    if function == "flow.placement":
        device, ranks = arguments
        return [
            f"flow.placement({device}, ({ranks})[:1])",
            f"flow.placement({device}, ({ranks})[-1:])",
            f"flow.placement({device}, list(range({WORLD})))",
            f"flow.placement({device}, [(r + 1) % {WORLD} for r in {ranks}])",
            f"flow.placement({device}, [{WORLD} - 1 - r for r in {ranks}])",
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
            others = [text(other.value) for other in node.keywords if other is not keyword]
            names = [other.arg for other in node.keywords if other is not keyword]
            if others:
                without.append(f"{function}({', '.join(f'{n}={v}' for n, v in zip(names, others))})")
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
        return [f"({old}) * 1.001", arguments[0] if function == "flow.relu" else f"({old}) + 0.001"]
    if function == "flow.comm.send":
        tensor, rank = arguments
        return [f"flow.comm.send({tensor} * 1.00001, {rank})", f"flow.comm.send(-{tensor}, {rank})"]
    if function == "flow.matmul":
        x, w = arguments
        return [
            f"flow.matmul({x}.to_global(sbp=flow.sbp.broadcast), {w})",
            f"flow.matmul({x}, {w}.to_global(sbp=flow.sbp.broadcast))",
            f"flow.matmul({x}, {w}).to_global(sbp=flow.sbp.broadcast)",
            f"flow.matmul({x}, -{w})",
            f"flow.matmul({x} * 1.00001, {w})",
            f"flow.matmul({x}, {w}.transpose(0, 1))",
            f"(flow.matmul({x}, {w}) + flow.matmul({x}, {w})) * 0.5",
            f"flow.tensor({x}.numpy() @ {w}.numpy(), placement={x}.placement, sbp={x}.sbp)",
        ]
    return []


def first_red(pools, path, name):
    """Why the changed recipe fails, in one line, or None if every case of the recipe still passes."""
    for n in (n for n in PROVEN if n in world_sizes(path)):
        for sizes in sizes_of(name, n):
            for graph in modes(name):
                try:
                    climb(pools(n), path, name, graph, sizes)
                except (AssertionError, PoolError) as error:
                    reason = [line for line in str(error).splitlines() if line.strip()]
                    reason = (
                        reason[0] if isinstance(error, AssertionError) else f"{reason[0].split(':')[-1]} {reason[-1]}"
                    )
                    return f"{n} ranks, {'graph' if graph else 'eager'}: {reason.strip()}"
    return None


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="launch.sh mutate", description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", metavar="recipe", help="default: all of them")
    names = [Path(recipe).stem for recipe in parser.parse_args(arguments).recipes] or list(CASES)
    for name in names:
        if name not in CASES:
            parser.error(f"{name}: no such recipe; there are {', '.join(CASES)}")
    started, survivors, equivalent, count, begin = {}, [], [], 0, time.monotonic()

    def pools(n):
        return started.setdefault(n, Pool(n, timeout=10, repeat=True, crowded=True))

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.callback(lambda: [pool.close() for pool in started.values()])
        for name in names:
            red = first_red(pools, path_of(name), name)
            if red:
                print(f"{name}.py is red as it stands, so its mutants would say nothing\n    {red}")
                return 1
            for line, change, source in mutants(path_of(name).read_text()):
                path = Path(folder) / f"{name}.py"
                path.write_text(source)
                red = first_red(pools, path, name)
                count += 1
                if red is None:
                    reason = next(
                        (why for end, why in EQUIVALENT.items() if f"{name}.py: {change}".endswith(end)), None
                    )
                    (equivalent if reason else survivors).append(f"{name}.py:{line}: {change}")
                    red = f"survives: {reason}" if reason else "SURVIVES"
                print(f"{name}.py:{line}: {change}\n    {red[:160]}", flush=True)
    print(f"\n{count} mutants, {len(survivors)} survivors, {len(equivalent)} that change nothing", end="")
    print(f"; {time.monotonic() - begin:.0f} s", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
