"""The command that breaks recipes on purpose finds the places to break, and tells red from green."""

import ast
from functools import partial

import pytest

from benchmarks import mutate
from benchmarks.mutations import lesson, mutants
from oneflow_cookbook.pool import Pool, pool_cache
from oneflow_cookbook.start.recipe import path_of
from tests.cases import CASES, WITHOUT_CASE

# A piece of code -> how many mutants each place with it has, at least.
PLACES = {
    **dict.fromkeys(("flow.sbp.broadcast", "flow.sbp.split(", "flow.sbp.partial_sum"), 3),
    "flow.placement(": 4,
    "flow.placement.all(": 2,
    "nn.Linear(": 5,
    "flow._C.identity(": 1,
    "os.replace(": 1,
    "os.fsync(": 1,
    "os._exit(": 1,
}
# The same for what stands behind a name, such as optimizer.zero_grad(set_to_none=True).
METHODS = {".set_stage(": 5, ".set_epoch(": 1, ".zero_grad(": 1, ".kill()": 1, "set_to_none": 1, "grad_sbp": 1}


def test_every_recipe_is_broken_in_every_layout_and_every_cure_that_it_states():
    for name in (*CASES, *WITHOUT_CASE):
        source = path_of(name).read_text()
        all_mutants = list(mutants(source))
        changes = [mutant.change.split(" -> ")[0] for mutant in all_mutants]
        code = source[source.index("\nimport") :]  # without the docstring
        code = "".join(line.split("#")[0] for line in code.splitlines(keepends=True))
        for words, times in PLACES.items():
            assert sum(change.startswith(words) for change in changes) >= times * code.count(words), (name, words)
        for words, times in METHODS.items():
            assert sum(words in change for change in changes) >= times * lesson(code).count(words), (name, words)
        assert all(source != mutant.source for mutant in all_mutants)
        assert all(ast.parse(mutant.source) for mutant in all_mutants[::7])


PLANNED = """
import oneflow as flow
from oneflow import nn

class Column(nn.Linear):
    pass

class Row(nn.Linear):
    pass

PLAN = {"up": Column}

def placements(device, n):
    return flow.placement(device, [[0, 1], [2, 3]])

def train(mesh, graph=False):
    layer = nn.Linear(4, 8)
    for kind in PLAN.values():
        layer.__class__ = kind
    if graph:
        return layer

def main():
    train(flow.placement.all("cpu"), args.graph)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "old, news",
    [
        ("Column", ["Row", "nn.Linear"]),
        ("layer.__class__ = kind", ["pass"]),
        ("nn.Linear(4, 8)", ["nn.Linear(8, 4)", "nn.Linear(4, 8, bias=False)"]),
        ("graph", ["True", "False"]),
        ("flow.placement(device, [[0, 1], [2, 3]])", ["flow.placement(device, ([[0, 1], [2, 3]])[:1])"]),
    ],
)
def test_layers_their_classes_and_placements_are_changed_in_the_lesson(old, news):
    changes = [mutant.change for mutant in mutants(PLANNED) if not mutant.in_main]
    assert {f"{old} -> {new}" for new in news} <= set(changes)


def test_placements_and_options_are_changed_in_main():
    changes = [mutant.change for mutant in mutants(PLANNED) if mutant.in_main]
    world = "flow.env.get_world_size()"
    assert changes == [
        'train(flow.placement.all("cpu"), args.graph) -> train(flow.placement.all("cpu"))',
        *(f'flow.placement.all("cpu") -> flow.placement("cpu", [{rank}])' for rank in ("0", f"{world} - 1")),
        *(f"args.graph -> {value}" for value in (True, False)),
    ]


MAIN = """
def train(ranks, seed=0, steps=3):
    sampler = Sampler(ranks, seed=seed, shuffle=True)
    if steps < 1:
        raise ValueError("steps: 1 or more")

def main():
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--loss", choices=["each", "first"], default="each")
    if args.steps < 1:
        parser.error("--steps: 1 or more")
    losses = train(ranks, steps=args.steps)
    np.testing.assert_allclose(losses, alone, rtol=1e-5, err_msg="losses")
    print(f"{(n - 1) / n:.0%}")
"""
MISTAKES = {  # that people make in a main, and in what a lesson refuses or hands on
    'np.testing.assert_allclose(losses, alone, rtol=1e-5, err_msg="losses")': [
        "pass",
        'np.testing.assert_allclose(losses, losses, rtol=1e-5, err_msg="losses")',
        'np.testing.assert_allclose(alone, alone, rtol=1e-5, err_msg="losses")',
        'np.testing.assert_allclose(losses, alone, rtol=1000 * 1e-5, err_msg="losses")',
    ],
    "train(ranks, steps=args.steps)": ["train(ranks)"],
    'parser.error("--steps: 1 or more")': ["pass"],
    'raise ValueError("steps: 1 or more")': ["pass"],
    "Sampler(ranks, seed=seed, shuffle=True)": ["Sampler(ranks, shuffle=True)"],
    'parser.add_argument("--steps", type=int, default=3)': ['parser.add_argument("--steps", type=int, default=4)'],
    'parser.add_argument("--loss", choices=["each", "first"], default="each")': [
        'parser.add_argument("--loss", choices=["each", "first"], default=\'first\')'
    ],
    "(n - 1) / n": ["n - 1", "n"],
    "n - 1": ["n", "1"],
}


def test_comparisons_tolerances_arguments_defaults_refusals_and_figures_are_changed():
    changes = [mutant.change for mutant in mutants(MAIN)]
    assert sorted(changes) == sorted(f"{old} -> {new}" for old, news in MISTAKES.items() for new in news)


def test_red_and_green_are_distinguished(tmp_path):
    recipe, path = path_of("single_device"), tmp_path / "single_device.py"
    source = recipe.read_text()
    checks = [*mutate.proofs("single_device"), *mutate.proofs_of_main("single_device")]
    assert mutate.find_lines(recipe, recipe, checks) is None and checks[0].lines
    with pool_cache(partial(Pool, timeout=300, repeat=True)) as pools:
        for old, new, words in (
            ("flow", "flow", None),
            ("flow.matmul(x, self.w)", "flow.matmul(x, -self.w)", "1 ranks, eager: rank 0: out: shard differs"),
            ("rtol=1e-5", "rtol=1e-2", "main still passes when each result is off"),
        ):
            path.write_text(source.replace(old, new))
            red = mutate.first_red(pools, path, checks)
            assert red is words or words in red, red


def test_lines_of_a_recipe_are_broken_alone(capsys):
    lines = [mutant.line for mutant in mutants(path_of("row_parallel").read_text())]
    first, last = min(lines), max(lines) - 1
    assert mutate.main(["--count", f"row_parallel:{first}-{last}"]) == 0
    counted = sum(line <= last for line in lines)
    assert capsys.readouterr().out.split()[1] == f"{counted}," and 0 < counted < len(lines)


@pytest.mark.parametrize(
    "recipe, words", [("gpt:70", "as gpt:70-151"), ("gpt:2-1", "nothing to break"), ("gptt:1-2", "no such recipe")]
)
def test_lines_that_do_not_fit_are_refused(capsys, recipe, words):
    with pytest.raises(SystemExit) as stop:
        mutate.main([recipe])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_lines_of_a_statement_are_all_its_own():
    tree = ast.parse("for i in (\n    1,\n    2,\n):\n    f(\n        i,\n    )\n")
    assert [mutate.statement_lines(tree, line) for line in (2, 6)] == [{1, 2, 3, 4}, {5, 6, 7}]
