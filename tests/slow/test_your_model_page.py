"""docs/your-model.md: each diff applies to the script, and each layout trains as the script does on one device."""

import inspect
import re
import shutil
from functools import lru_cache

import numpy as np
import oneflow as flow
import pytest

from harness.start.recipe import load, path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.jobs import LAUNCH, Run
from tests.markdown import blocks_of

PAGE = ROOT / "docs" / "your-model.md"
SECTIONS = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
LAYOUTS = {  # heading -> the sections whose diffs are applied, in order; how many ranks
    "Data parallel": (["Data parallel"], 2),
    "Tensor parallel": (["Tensor parallel"], 2),
    "Data x tensor": (["Tensor parallel", "Data x tensor"], 4),
    "Fully sharded": (["Fully sharded"], 2),
    "Pipeline": (["Pipeline"], 2),
}
IN_A_GRAPH = [name for name in LAYOUTS if name != "Pipeline"]
PASTED = {"tensor": "tensor_parallel_module", "sharded": "fully_sharded_module", "stages": "pipeline_module"}
[SCRIPT] = blocks_of(SECTIONS["The script"], "python")


def applied(script, diff):
    """The script with a diff of the page: each hunk must fit in one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        assert script.count(old) == 1, hunk
        script = script.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
    return script


def files_of(sections):
    """{name: text} of train.py and of what is pasted beside it, after the diffs of these sections."""
    files = {"train.py": SCRIPT}
    for name in sections:
        files["train.py"] = applied(files["train.py"], blocks_of(SECTIONS[name], "diff")[0])
    for name in PASTED:
        [text] = [block for part in SECTIONS.values() for block in pasted(part, name)]
        files[f"{name}.py"] = text
    return files


def pasted(section, name):
    return re.findall(rf"`{name}\.py`:\n\n```python\n(.*?)```", section, flags=re.DOTALL)


def write(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


def losses(folder, n):
    job = Run(LAUNCH, "-n", n, "train.py", cwd=folder).wait()
    assert job.code == 0 and not job.err, job.err
    found = re.findall(r"step (\d+)  loss (\S+)", job.out)
    assert [int(step) for step, _ in found] == [5, 10, 15, 20], job.out  # by rank 0 alone
    return np.array([float(loss) for _, loss in found])


def commands(section):
    """What the commands of a section print, but for the runs themselves."""
    lines = [line for block in blocks_of(section, "bash") for line in block.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("./launch.sh show")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of the script on one device, which the page shows."""
    folder = tmp_path_factory.mktemp("alone")
    write(folder, {"train.py": SCRIPT})
    found = losses(folder, 1)
    shown = blocks_of(PAGE.read_text(), "text")[0]
    assert [f"{loss:.4f}" for loss in found] == re.findall(r"loss (\S+)", shown)
    return found


def test_script_runs_with_the_name_torch(tmp_path, alone):
    script = SCRIPT.replace("import oneflow as flow", "import oneflow as torch").replace("flow.", "torch.")
    assert "flow." not in script.replace("oneflow", "")
    write(tmp_path, {"train.py": script})
    check_losses(losses(tmp_path, 1), alone, "with the name torch")


def test_oneflow_lacks_what_the_page_says():
    sentence = re.search(r"OneFlow 0\.9\.0 lacks ([^:]*?), for example", PAGE.read_text())[1]
    names = [name.split(".") for name in re.findall(r"`([^`]+)`", sentence)]
    assert len(names) == 3
    modules = {"nn": flow.nn, "F": flow.nn.functional, "torch": flow}
    assert [name for module, name in names if hasattr(modules[module], name)] == []


def test_lines_to_add_are_as_few_as_the_page_says():
    added = {}
    for name in LAYOUTS:
        diff = blocks_of(SECTIONS[name], "diff")[0]  # the second and third of tensor parallel are of attention
        added[name] = sum(line.startswith("+") for line in diff.splitlines())
    assert added.pop("Pipeline") == 25
    assert max(added.values()) <= 10


def check_losses(found, alone, *what):
    Checks.that(abs(found - alone).max() <= 1.01e-4, *what, "losses", found, "on one device", alone)  # of 4 digits


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_device_and_shows_what_the_page_says(tmp_path, alone, name):
    sections, n = LAYOUTS[name]
    write(tmp_path, files_of(sections))
    check_losses(losses(tmp_path, n), alone, name)
    for command in commands(SECTIONS[name]):
        about = re.compile(r"about \d+ kB")  # with OneFlow's own messages
        out = about.sub("", Run(LAUNCH, *command, cwd=tmp_path).wait().out)
        shown = about.sub("", blocks_of(SECTIONS[name], "text")[0])
        missing = [line for line in shown.splitlines() if line.rstrip() not in out]
        assert not missing, (missing, out)


@pytest.fixture(scope="module")
def with_attention(tmp_path_factory):
    """A function of (mesh or None for one device, number of ranks) to a folder and the losses of the model there."""
    section = SECTIONS["Tensor parallel"]
    _, add, split = blocks_of(section, "diff")
    [attention] = pasted(section, "attention")

    @lru_cache(maxsize=None)
    def train(mesh, n):
        files = files_of(["Tensor parallel"] if mesh else [])
        script = applied(applied(files["train.py"], add), split) if mesh else applied(files["train.py"], add)
        files["train.py"] = script.replace("[[0, 1]]", mesh) if mesh else script
        folder = tmp_path_factory.mktemp("attention")
        write(folder, {**files, "attention.py": attention})
        return folder, losses(folder, n)

    return train


@pytest.mark.parametrize("mesh, n", [("[[0, 1]]", 2), ("[[0, 1, 2, 3]]", 4), ("[[0, 1], [2, 3]]", 4)])
def test_attention_trains_as_on_one_device(with_attention, mesh, n):
    assert n == 2 or f"`{mesh}`" in SECTIONS["Tensor parallel"]
    folder, found = with_attention(mesh, n)
    _, alone = with_attention(None, 1)
    check_losses(found, alone, "attention on", mesh)
    if n == 2:
        out = Run(LAUNCH, "show", "-n", 2, "train.py", cwd=folder).wait().out
        missing = [line for line in blocks_of(SECTIONS["Tensor parallel"], "text")[2].splitlines() if line not in out]
        assert not missing, (missing, out)
        rows = re.findall(r"backward of blocks\.0\.(\S+): about (\d+) kB", out)  # 263 kB: an all-reduce of x's gradient
        assert [(name, round(int(kB) / 263)) for name, kB in rows] == [
            *(("up", 1), ("attention.value", 1), ("attention.key", 2))
        ]


def test_layer_that_the_plan_forgets_is_told_by_bytes(tmp_path, with_attention):
    folder, found = with_attention("[[0, 1]]", 2)
    script = (folder / "train.py").read_text()
    forgotten = re.sub(r".*attention\\\.output.*\n", "", script)
    assert forgotten != script
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write(tmp_path, {"train.py": forgotten})
    check_losses(losses(tmp_path, 2), found, "with a layer less")
    out = Run(LAUNCH, "bytes", "-n", 2, "train.py", cwd=tmp_path).wait().out
    assert "inside blocks.0" in out or "not known" in out, out


TIED = """
import numpy as np
import oneflow as flow
import sharded
import tensor
from oneflow import nn

S0, B = flow.sbp.split(0), flow.sbp.broadcast
ids, weight = np.arange(8).reshape(4, 2), np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
ranks, mesh = flow.placement.all("cpu"), flow.placement("cpu", [[0, 1]])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.embedding.weight = self.head.weight = nn.Parameter(flow.tensor(weight))

    def forward(self, ids):
        return self.head(self.embedding(ids))


def train(model, ids, tie=False):
    if tie:
        model.head.weight = model.embedding.weight
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
    return model.head.weight is model.embedding.weight, loss.item()


layouts = {
    "shard": (lambda: sharded.shard(Tied(), ranks), flow.tensor(ids, placement=ranks, sbp=S0)),
    "plan": (lambda: tensor.lay_out(Tied(), mesh, {"head": tensor.Column}), None),
    "no plan": (lambda: tensor.lay_out(Tied(), mesh, {}), None),
}
_, alone = train(Tied(), flow.tensor(ids))
for name, (make, batch) in layouts.items():
    batch = flow.tensor(ids, placement=mesh, sbp=(S0, B)) if batch is None else batch
    (tied, loss), (_, again) = train(make(), batch), train(make(), batch, tie=True)
    print(f"{name}: {tied} {abs(loss - alone) < 1e-5} {abs(again - alone) < 1e-5}")
"""


def test_tied_weights_come_apart_and_can_be_tied_again(tmp_path):
    assert "`model.head.weight = model.embedding.weight`" in SECTIONS["The rules, and why"]
    write(tmp_path, {**files_of([]), "tied.py": TIED})
    out = Run(LAUNCH, "-n", 2, "tied.py", cwd=tmp_path).wait().out
    for line in ("shard: False False True", "plan: False False True", "no plan: True True True"):
        assert out.count(line) == 2, out


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_layout_in_a_graph(tmp_path, alone, name):
    sections, n = LAYOUTS[name]
    write(tmp_path, files_of([*sections, "In a graph"]))
    check_losses(losses(tmp_path, n), alone, name, "in a graph")


def test_split_weights_alone_are_told(tmp_path):
    files = files_of(["Tensor parallel"])
    files["tensor.py"] = files["tensor.py"].replace("            layer.__class__ = kind\n", "")
    write(tmp_path, files)
    out = Run(LAUNCH, "bytes", "-n", 2, "train.py", cwd=tmp_path).wait().out
    for line in blocks_of(SECTIONS["Tensor parallel"], "text")[1].splitlines():
        assert line in out, out


@pytest.mark.parametrize("name", LAYOUTS)
def test_pytorch_checkpoint_under_each_layout(tmp_path, alone, name):
    """The weights that the script draws, as a file: so the losses are the same."""
    sections, n = LAYOUTS[name]
    files = files_of([*sections, "From a PyTorch checkpoint"])
    files["train.py"] = files["train.py"].replace(
        "flow.manual_seed(0)", "flow.manual_seed(1)"
    )  # what it draws is not used
    write(tmp_path, files)
    shutil.copy(path_of("pytorch_weights"), tmp_path / "weights.py")
    save = SCRIPT.replace(
        "    loss_function = nn.", '    weights.save_safetensors(model, "model.safetensors")\n    return\n    #'
    )
    save = "import weights\n" + save.replace("    loss_function", "    # loss_function", 1)
    save = save.replace(
        "    weights.save",
        '    model.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)\n    weights.save',
    )
    (tmp_path / "save.py").write_text(save)
    job = Run(LAUNCH, "-n", 1, "save.py", cwd=tmp_path).wait()
    assert job.code == 0, job.err
    check_losses(losses(tmp_path, n), alone, name, "from a checkpoint")


@pytest.mark.parametrize("name", PASTED)
def test_what_is_pasted_is_the_recipe_s(tmp_path, name):
    [text] = [block for section in SECTIONS.values() for block in pasted(section, name)]
    (tmp_path / f"pasted_{name}.py").write_text(text)
    page, recipe = load(tmp_path / f"pasted_{name}.py"), load(path_of(PASTED[name]))
    own = [key for key, value in vars(page).items() if getattr(value, "__module__", None) == page.__name__]
    assert own
    for key in own:
        assert inspect.getsource(getattr(page, key)) == inspect.getsource(getattr(recipe, key)), key
