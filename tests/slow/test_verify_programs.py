"""`launch.sh verify` on all recipes, on programs with a mistake, against scripts for one device, and its options."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from harness.measure.sbp import Layout
from harness.start.recipe import all_paths, entry, path_of, world_sizes
from harness.verify import command
from harness.verify.cause import cause_of
from harness.verify.compare import Comparison, Outcome
from harness.verify.values import Key, Value
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.cases.verifying import MISTAKES, PROGRAMS, RANKS, check_right, check_wrong, refusal, verified
from tests.markdown import blocks_of

LAUNCH, PAGE = str(ROOT / "launch.sh"), ROOT / "docs" / "verify.md"
# Recipe -> why it cannot be compared
CANNOT = {
    "ring_all_reduce": "on one rank the script does something else",
    "hello_ranks": "on one rank the script does something else",
    "global_and_local": "on one rank the script does something else: AssertionError in line",
    "ddp": "no global tensor of it can be compared",
    "random_numbers": "dropout draws random numbers that another run cannot repeat; set its p to 0",
}


def runs_of_recipes():
    """(name, number of ranks, options) of each recipe: on the fewest ranks, and in eager mode or a graph by turns."""
    for i, path in enumerate(all_paths()):
        ranks = [n for n in (2, 3, 4) if n in (world_sizes(path) or ()) and "n" not in entry(path)]
        if ranks:
            n = 3 if path.stem == "train_data_parallel" else ranks[0]  # uneven shards; some recipes need 4
            yield path.stem, n, ["--graph"] * (i % 2 and '"--graph"' in path.read_text())


@pytest.mark.parametrize("name, n, options", list(runs_of_recipes()))
def test_recipes(pools, name, n, options):
    if name in CANNOT:
        words = refusal(pools, "-n", n, path_of(name), *options)
        Checks.that(CANNOT[name] in words, words)
    else:
        check_right(pools, "-n", n, "--steps", 2, path_of(name), *options)  # the second begins with updated weights


@pytest.mark.parametrize("program", MISTAKES)
def test_programs(pools, program):
    check_wrong(pools, program)
    check_right(pools, "-n", RANKS.get(program, 2), PROGRAMS, program)


def test_links_lead_to_a_heading():
    for path in (ROOT / "harness" / "verify").glob("*.py"):
        text = (
            path.read_text()
            .replace('PAGE + "', '"docs/silently-wrong.md#')
            .replace('PAGE = "docs/silently-wrong.md#"', "")
        )
        for page, anchor in re.findall(r"(docs/[\w-]+\.md)#([^\"'\s)]+)", text):
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            Checks.that(anchor in slugs, path.name, "links to", page, anchor)


def one_difference(sbp, many, one, kind="output"):
    """What cause_of says of a value on 2 ranks, many, which is `one` on a single rank."""
    value = Value(Key(kind, "x", (), 1), 1, Layout(sbp, [0, 1]), many.shape, "float32")
    first = Outcome(value.key, value, abs(many - one).max(), 1e-6, many, one)

    class Runs(dict):
        world_size = 2

        def blocks(self, key):
            return {0: many / 2, 1: many / 2}

    return cause_of(Comparison([], [first], [], 1, 0), Runs(), {}) or ""


def test_causes_that_no_program_has():
    rows = np.arange(8, dtype=float).reshape(4, 2) ** 2
    wrong = rows.copy()
    wrong[3, 1] += 1
    Checks.that("only the part of rank 1 is wrong" in one_difference("S(0)", wrong, rows), "a rank that is wrong")
    for shape, bias in (((4, 3, 2), (2,)), ((4, 3, 2, 2), (3, 1, 1))):  # of Linear on sequences, and of Conv2d
        right = np.arange(np.prod(shape), dtype=float).reshape(shape) ** 2
        off = one_difference("P", right + np.arange(1.0, 1 + bias[0]).reshape(bias), right)
        Checks.that("every row is off by the same numbers" in off, off)


def test_every_program_is_tried():
    names = re.findall(r"^def (\w+)\(wrong", Path(PROGRAMS).read_text(), re.M)
    Checks.equal(set(names), set(MISTAKES), "the programs")


def test_page(tmp_path):
    """The outputs that the page shows are those of its script, with the mistake and without."""
    [script], (wrong, right) = (blocks_of(PAGE.read_text(), language) for language in ("python", "text"))
    for code, source, shown in ((1, script, wrong), (0, script.replace(" / flow.env.get_world_size()", ""), right)):
        (tmp_path / "mistake.py").write_text(source)
        done = launched("-n", 2, tmp_path / "mistake.py")
        Checks.equal((done.returncode, done.stdout, done.stderr), (code, shown, ""), "exit code and output")
    Checks.equal([path.name for path in tmp_path.iterdir()], ["mistake.py"], "the folder of the script")


SINGLE = """
import numpy as np
import oneflow as flow
from oneflow import nn

class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Linear(*sizes)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Adapted(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(flow.relu(self.up(x)))

model = Model()
# LAY OUT
optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
rng = np.random.default_rng(0)
for _ in range(3):
    x, y = rng.standard_normal((8, 8), dtype=np.float32), rng.integers(4, size=8)
    x, y = flow.tensor(x), flow.tensor(y)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ON_RANKS = (
    ("# LAY OUT", "ranks = flow.placement.all('cpu')\nmodel.to_global(ranks, flow.sbp.broadcast)"),
    ("flow.tensor(x), flow.tensor(y)", "(flow.tensor(a, placement=ranks, sbp=flow.sbp.split(0)) for a in (x, y))"),
)


def on_ranks(source, *changes):
    for old, new in (*ON_RANKS, *changes):
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize(
    "change, words",
    [
        (("import numpy", "import numpy"), "all values agree"),
        (("model.to_global", "model.up.__class__ = nn.Linear\nmodel.to_global"), "the output of up "),
        (("flow.relu", "flow.tanh"), "the output of down"),
        (
            ("self.down = Adapted(8, 16), nn", "self.last = Adapted(8, 16), nn"),
            "lacks parameters .*: last.bias, last.weight",
        ),
        (("default_rng(0)", "default_rng(1)"), "the input of Model, argument 0"),
    ],
)
def test_against_a_script_for_one_device(pools, tmp_path, change, words):
    """An adapter that the layout drops is dropped on one rank too: only the untouched script shows it."""
    single, several = tmp_path / "single.py", tmp_path / "several.py"
    single.write_text(SINGLE)
    source = on_ranks(SINGLE, change)
    several.write_text(source.replace("self.down(", "self.last(") if "last" in change[1] else source)
    found = verified(pools, "-n", 2, "--against", single, several)
    Checks.equal(found.differs, words != "all values agree", found.as_text())
    Checks.that(re.search(words, found.as_text()), words, "is not in", found.as_text())


def launched(*arguments):
    return subprocess.run([LAUNCH, "verify", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_json(pools, monkeypatch, capsys):
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    arguments = ["--json", "-n", "2", PROGRAMS, "bias_in_p", "--wrong"]
    monkeypatch.setattr(command, "findings", lambda options: verified(pools, *arguments))
    Checks.equal(command.main(arguments), 1, "exit code")
    first = json.loads(capsys.readouterr().out)["first_difference"]
    Checks.equal((first["what"], first["sbp"], first["shape"]), ("down.bias after the update", "P", [4]), "as JSON")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-n", "1", "single_device"], "verify compares several ranks with one"),
        (["--steps", "0", "data_parallel"], "--steps must be 1 or more, got 0"),
        (["--against", "no.py", "data_parallel"], "--against no.py: there is no such file"),
        (["--against", "'no.py", "data_parallel"], "No closing quotation"),
        (["--nnodes", "2", "--master_addr", "h", "--master_port", "2000", "data_parallel"], "verify runs on one host"),
        (["no.py"], "no.py: no such file"),
    ],
)
def test_command_lines_that_are_refused(arguments, words):
    done = launched(*arguments)
    Checks.equal((done.returncode, done.stdout), (2, ""), "exit code and output")
    Checks.that(words in done.stderr and done.stderr.count("\n") == 1, done.stderr)


def test_a_script_that_fails_on_all_ranks(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import oneflow as flow\nraise ValueError('mine')\n")
    done = launched("-n", 2, script)
    Checks.equal(done.returncode, 2, "exit code")
    Checks.that("ValueError: mine" in done.stderr and "line 2" in done.stderr, done.stderr)
