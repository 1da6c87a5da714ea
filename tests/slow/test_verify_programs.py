"""`launch.sh verify` on a recipe of each chapter, on wrong programs, against scripts for one device, its options."""

import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oneflow_cookbook.measure.sbp import Layout
from oneflow_cookbook.start.recipe import all_paths, entry_options, path_of, world_sizes
from oneflow_cookbook.verify import command
from oneflow_cookbook.verify.cause import cause_of
from oneflow_cookbook.verify.compare import Comparison, Difference
from oneflow_cookbook.verify.values import Key, Value
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.cases.verifying import MISTAKES, PROGRAMS, RANKS, check_right, check_wrong, refusal, verified
from tests.jobs import LAUNCH, Run, wait_until

# Recipe -> why it cannot be compared
CANNOT = {
    "ring_all_reduce": "on one rank the script does something else",
    "hello_ranks": "on one rank the script does something else",
    "global_and_local": "on one rank the script does something else: AssertionError in line",
    "ddp": "no global tensor of it can be compared",
    "random_numbers": "dropout draws random numbers that another run cannot repeat; set its p to 0",
}


def runs_of_recipes():
    """(name, ranks, options) of the longest recipe of each chapter that verify can compare, and of those in CANNOT.

    They run on the fewest ranks, in eager mode and in a graph by turns.
    """
    longest = {}
    for path in all_paths():
        ranks = [n for n in (2, 3, 4) if n in (world_sizes(path) or ()) and "n" not in entry_options(path)]
        if ranks:
            chapter = path.stem if path.stem in CANNOT else path.parent.name
            longest[chapter] = max(longest.get(chapter, (0,)), (len(path.read_text()), path, ranks[0]))
    for i, (_, path, n) in enumerate(longest.values()):
        yield path.stem, n, ["--graph"] * (i % 2 and '"--graph"' in path.read_text())
    yield "train_data_parallel", 3, []  # uneven shards


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
    for path in (ROOT / "harness" / "oneflow_cookbook" / "verify").glob("*.py"):
        text = re.sub("PAGE = .*", "", path.read_text())
        text = re.sub('PAGE \\+ "|{PAGE}', "docs/silently-wrong.md#", text)
        for page, anchor in re.findall(r"(docs/[\w-]+\.md)#([^\"'\s)]+)", text):
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            Checks.that(anchor in slugs, path.name, "links to", page, anchor)


def one_difference(sbp, many, one, kind="output"):
    """What cause_of says of a value on 2 ranks, many, which is `one` on a single rank."""
    value = Value(Key(kind, "x", (), 1), 1, Layout(sbp, [0, 1]), many.shape, "float32")
    first = Difference(value.key, value, abs(many - one).max(), 1e-6, many, one)

    class Runs(dict):
        world_size, keys = 2, ()

        def blocks(self, key):
            return {0: many / 2, 1: many / 2}

    return cause_of(Comparison([], [first], [], 1, 0), Runs(), {}) or ""


def test_causes_that_no_program_has():
    rows = np.arange(8, dtype=float).reshape(4, 2) ** 2
    wrong = rows.copy()
    wrong[3, 1] += 1
    Checks.that("only the part of rank 1 is wrong" in one_difference("S(0)", wrong, rows), "a rank that is wrong")
    Checks.that("right but in the wrong places" in one_difference("S(0)", rows[::-1], rows), "another order")
    for shape, bias in (((4, 3, 2), (2,)), ((4, 3, 2, 2), (3, 1, 1))):  # of Linear on sequences, and of Conv2d
        right = np.arange(np.prod(shape), dtype=float).reshape(shape) ** 2
        off = one_difference("P", right + np.arange(1.0, 1 + bias[0]).reshape(bias), right)
        Checks.that("every row is off by the same numbers" in off, off)


def test_every_program_is_tried():
    names = re.findall(r"^def (\w+)\(wrong", Path(PROGRAMS).read_text(), re.M)
    Checks.equal(set(names), set(MISTAKES), "the programs")


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


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
BY_HAND = """
    norm = sum((p.grad.to_global(sbp=flow.sbp.broadcast).detach() ** 2).sum().item() for p in model.parameters()) ** 0.5
    for p in model.parameters():
        {}
"""
GRAPH = """
class Graph(nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = model
        clip = {"clip_grad_max_norm": 0.1, "clip_grad_norm_type": 2.0}
        self.add_optimizer(flow.optim.SGD([{"params": list(model.parameters()), **clip}], lr=0.1))
    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss
graph = Graph()
rng = np.random.default_rng(0)
for _ in range(3):
    x, y = rng.standard_normal((8, 8), dtype=np.float32), rng.integers(4, size=8)
    x, y = (flow.tensor(a, placement=ranks, sbp=flow.sbp.split(0)) for a in (x, y))
    graph(x, y).numpy()
"""
CLIPS = SINGLE.replace("super().forward(x)", "nn.Linear.forward(self, x)").replace(
    "    optimizer.step()", f"    {CLIP}\n    optimizer.step()"
)


@pytest.mark.parametrize(
    "way", ["clip_grad_norm_", "p.grad = p.grad * (0.1 / norm)", "p.grad.mul_(0.1 / norm)", "graph"]
)
def test_against_a_script_that_clips_in_a_different_way(pools, tmp_path, way):
    """Gradients are compared as backward left them; the norm is a value, also that of a graph."""
    single, several = tmp_path / "single.py", tmp_path / "several.py"
    single.write_text(CLIPS)
    source = on_ranks(CLIPS, *([("    " + CLIP, BY_HAND.format(way))] if "norm)" in way else []))
    several.write_text(source.partition("optimizer =")[0] + GRAPH if way == "graph" else source)
    found = verified(pools, "-n", 2, "--against", single, several)
    agreeing = Counter(key.kind for key in found.comparison.agreeing)
    Checks.that(not found.differs, found.as_text())
    Checks.equal(agreeing["gradient"], 18, "gradients of 6 parameters in 3 steps")
    Checks.equal(agreeing["norm"], 0 if "norm)" in way else 3, "norms")


@pytest.mark.parametrize(
    "change, lines",
    [
        (
            ("flow.relu(self.up(x))", "flow.relu(self.up(x)).detach()"),
            "wrong: no gradient on 2 ranks, but one in single.py: "
            "up.weight, up.bias, up.adapter.weight, up.adapter.bias\n"
            "first difference: step 1, the norm of the gradients, from clip_grad_norm_, several.py:",
        ),
        ((CLIP, CLIP.replace("0.1)", "0.1, 1.0)")), "first difference: step 1, the norm of the gradients, from"),
        (
            (CLIP, f"model.up.bias.grad.mul_(2)\n    {CLIP}"),
            "first difference: step 1, the norm of the gradients, from",
        ),
    ],
)
def test_what_clipping_hides(pools, tmp_path, change, lines):
    """The first gradient that differs is named, although clipping spreads the difference to all."""
    single, several = tmp_path / "single.py", tmp_path / "several.py"
    single.write_text(CLIPS)
    several.write_text(on_ranks(CLIPS, change))
    text = verified(pools, "-n", 2, "--against", single, several).as_text()
    Checks.that(lines in text, lines, "is not in", text)


OWN_UPDATE = """
import numpy as np
import oneflow as flow
from oneflow import nn

class Own(flow.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
    @flow.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group.parameters:
                p.sub_(group["lr"] * p.grad)

class Plain:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
    def step(self):
        for p in self.parameters:
            g = p.grad if p.grad.ndim == 1 else flow.matmul(flow.matmul(p.grad, p.grad.T), p.grad)
            p.data -= self.lr * g

n, ranks, S = flow.env.get_world_size(), flow.placement.all("cpu"), flow.sbp.split
flow.manual_seed(0)
model = nn.Linear(8, 4).to_global(ranks, flow.sbp.broadcast)
one = flow.placement("cpu", [0])  # rank 1 holds nothing of w, and must count the steps too
w = flow.tensor(np.ones((8, 4), np.float32), placement=one, sbp=flow.sbp.broadcast, requires_grad=True)
own, plain = Own(model.parameters(), 0.1 * SCALE), Plain([model.weight], 0.1 * SCALE)
adam = flow.optim.Adam([model.bias], lr=0.1)
rng = np.random.default_rng(0)
for step in range(100):
    x = flow.tensor(rng.standard_normal((8, 8), dtype=np.float32), placement=ranks, sbp=S(0))
    loss = FORWARD
    loss.backward()
    with flow.no_grad():
        UPDATE
    model.zero_grad(set_to_none=True)
    w.grad = None
assert False, "verify has not stopped at its steps"
"""
IN_A_MODEL = "(model(x) ** 2).mean()"


def own_update(update, forward=IN_A_MODEL, scale="1"):
    return OWN_UPDATE.replace("UPDATE", update).replace("FORWARD", forward).replace("SCALE", scale)


@pytest.mark.parametrize(
    "update, forward, name",
    [
        ("own.step()", IN_A_MODEL, "weight"),
        ("plain.step()", IN_A_MODEL, "weight"),
        ("plain.step(); adam.step()", IN_A_MODEL, "weight"),
        ("for p in model.parameters(): p.sub_(0.1 * SCALE * p.grad)", IN_A_MODEL, "weight"),
        ("for p in model.parameters(): p.copy_(p - 0.1 * SCALE * p.grad)", IN_A_MODEL, "weight"),
        ("w.sub_(0.1 * SCALE * w.grad)", "(flow.matmul(x.to_global(one, w.sbp), w) ** 2).mean()", "w"),
    ],
)
def test_update_without_an_optimizer_of_oneflow(pools, tmp_path, update, forward, name):
    """Its steps are counted, and gradients and updates compared."""
    script = tmp_path / "script.py"
    script.write_text(own_update(update, forward))
    found = verified(pools, "-n", 2, script)
    agreeing = Counter(key.kind for key in found.comparison.agreeing if key.name == name)
    Checks.that(not found.differs, found.as_text())
    Checks.equal((agreeing["gradient"], agreeing["parameter"], found.comparison.steps), (3, 3, 3), found.as_text())
    script.write_text(own_update(update, forward, "n"))
    text = verified(pools, "-n", 2, script).as_text()
    Checks.that(re.search(rf"first difference: step 1, {name} after the update .*, script.py:", text), text)


def test_difference_of_nearly_equal_numbers_is_rounding(pools, tmp_path):
    """Its digits are those that rounding leaves: other ones on n ranks, and after a change of a last bit."""
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nimport oneflow as flow\nranks, S = flow.placement.all('cpu'), flow.sbp.split\n"
        "rng = np.random.default_rng(0)\nx, w = (rng.standard_normal(s, np.float32) for s in ((8, 256), (256, 8)))\n"
        "exact = flow.tensor((x.astype(np.float64) @ w).astype(np.float32), placement=ranks, sbp=flow.sbp.broadcast)\n"
        "out = flow.tensor(x, placement=ranks, sbp=S(1)) @ flow.tensor(w, placement=ranks, sbp=S(0))\n"
        "(out.to_global(sbp=flow.sbp.broadcast) - exact).numpy()\n"
    )
    found = verified(pools, "-n", 2, script)
    Checks.that(not found.differs, found.as_text())


NOTES = [
    (  # a new tensor in each step
        "no training step was seen, so no updates are compared and --steps ends nothing: no parameter of a module or "
        "variable has changed between backward and the next forward",
        "w = flow.ones(4, placement=ranks, sbp=B, requires_grad=True)\nfor _ in range(4):\n"
        "    (w * w).sum().backward()\n    w = (w - 0.1 * w.grad).detach().requires_grad_()",
    ),
    (  # fixed numbers, as the labels of real and generated rows
        "look at script.py:9: each rank passes the same (2,) to S(0), so the tensor (4,) has it 2 times "
        "(docs/silently-wrong.md#every-rank-reads-every-sample)",
        "flow.tensor([0.0, 1.0] * (2 // n)).to_global(placement=ranks, sbp=flow.sbp.split(0)).numpy()",
    ),
    (
        "rounding: 2 of 2 runs with changed last bits raised an exception (AssertionError: exact); of these only the "
        "values before it are used",
        "x = flow.tensor(np.full(4, 0.1, np.float32), placement=ranks, sbp=B)\nvalue = x.numpy()[0]\n"
        "assert value == np.float32(0.1), 'exact'",
    ),
]


WRONG = [
    (
        "wrong: script.py:10: each rank passes the same (2,) to S(0), so the tensor (4,) has it 2 times "
        "(docs/silently-wrong.md#every-rank-reads-every-sample); "
        "on one rank the script makes fewer rows than the rest of the batch has",
        "x = flow.tensor(np.eye(4, dtype=np.float32), placement=ranks, sbp=flow.sbp.split(0))\n"
        "labels = flow.arange(2).to_global(placement=ranks, sbp=flow.sbp.split(0))\n"
        "nn.functional.cross_entropy(x, labels).numpy()",
    ),
    (
        "wrong: no gradient on 2 ranks, but one on one rank: up.weight, up.bias",
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 2)\n"
        "    def forward(self, x):\n        x = self.up(x)\n        return self.down(x if n == 1 else x.detach())\n"
        "model = Model().to_global(ranks, B)\nmodel(flow.ones(2, 4, placement=ranks, sbp=B)).sum().backward()",
    ),
]


@pytest.mark.parametrize(
    "line, code, differs", [(*note, False) for note in NOTES] + [(*wrong, True) for wrong in WRONG]
)
def test_lines_on_a_script(pools, tmp_path, line, code, differs):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nimport oneflow as flow\nfrom oneflow import nn\n"
        "ranks, B, n = flow.placement.all('cpu'), flow.sbp.broadcast, flow.env.get_world_size()\n"
        "flow.manual_seed(0)\n\n\n\n" + code
    )
    found = verified(pools, "-n", 2, script)
    Checks.equal(found.differs, differs, found.as_text())
    Checks.that(line in found.as_text().splitlines(), line, "is not in", found.as_text())


LOCAL = """
import numpy as np
import oneflow as flow
from oneflow import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(flow.ones(1)), nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x) * self.scale

flow.manual_seed(0)
model = Model()
optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
rng = np.random.default_rng(0)
for _ in range(3):
    x = flow.tensor(rng.standard_normal((8, 8), dtype=np.float32))
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    # CLIP
    optimizer.step()
"""
LOCAL_ON_RANKS = (
    (
        "model = Model()",
        "model, ranks, B = Model(), flow.placement.all('cpu'), flow.sbp.broadcast\nmodel.layer.to_global(ranks, B)",
    ),
    ("* self.scale", "* self.scale.to_global(ranks, B)"),
    ("dtype=np.float32))", "dtype=np.float32), placement=ranks, sbp=flow.sbp.split(0))"),
)


def local_scripts(folder, clip=""):
    """(a script for one device, one for several ranks on which a parameter is local)"""
    single, several, source = folder / "single.py", folder / "several.py", LOCAL.replace("# CLIP", clip)
    single.write_text(source)
    for old, new in LOCAL_ON_RANKS:
        assert old in source
        source = source.replace(old, new)
    several.write_text(source)
    return single, several


@pytest.mark.parametrize("against", [False, True])
def test_parameter_that_is_local(pools, tmp_path, against):
    single, several = local_scripts(tmp_path)
    found = verified(pools, "-n", 2, *(["--against", single] if against else []), several)
    Checks.equal(
        found.wrong,
        [
            "wrong: scale is local, not global, so its gradient is not reduced, and the copies of the ranks differ "
            "after an update (docs/silently-wrong.md#from-local-to-b-the-values-of-the-other-ranks-are-lost)"
        ],
        found.as_text(),
    )
    Checks.that("normalized" not in found.as_text(), found.as_text())


@pytest.mark.parametrize("parameters", ["model.parameters()", "list(model.parameters())[::-1]"])
def test_clipping_of_local_and_global_parameters_is_refused(pools, tmp_path, parameters):
    _, several = local_scripts(tmp_path, f"nn.utils.clip_grad_norm_({parameters}, 1.0)")
    Checks.equal(
        refusal(pools, "-n", 2, several),
        "several.py:23: OneFlow cannot clip local and global parameters together; make these global with "
        "to_global: scale (docs/errors-tensors.md#all-parameters-must-be-global-tensor-from-clip_grad_norm_)",
        "the refusal",
    )


WAITS_WITH_OTHER_ROUNDING = """
import os, time
from pathlib import Path
import numpy as np
import oneflow as flow

x = flow.tensor(np.ones(4, np.float32), placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
alone = Path(__file__).with_name("alone")
if flow.env.get_world_size() == 1 and alone.exists():
    alone.with_name(f"waits {os.getpid()}").touch()
    time.sleep(10000)
if flow.env.get_world_size() == 1:
    alone.touch()
x.numpy()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_runs_with_other_rounding(tmp_path, number):
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    temporary.mkdir()
    script.write_text(WAITS_WITH_OTHER_ROUNDING)
    job = Run(LAUNCH, "verify", "-n", 2, "--timeout", 0, script, TMPDIR=str(temporary))
    wait_until(lambda: len(list(tmp_path.glob("waits *"))) == 2, "both runs")
    job.signal(number).wait(timeout=60)
    Checks.equal((job.code, job.out), (128 + number, ""), job.err)
    Checks.that(job.all_gone(), "ranks are left")
    Checks.equal(list(temporary.iterdir()), [], "temporary files")


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
    Checks.equal(list(tmp_path.iterdir()), [script], "the folder of the script")
