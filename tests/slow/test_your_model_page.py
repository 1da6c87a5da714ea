"""docs/your-model.md: each diff applies to the script, and each layout trains as the script does on one device."""

import re
import shutil
from functools import lru_cache

import numpy as np
import pytest

from oneflow_cookbook.report.drawing import bytes_in_words
from oneflow_cookbook.start.recipe import copied_with, path_of
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.jobs import LAUNCH, Run
from tests.markdown import blocks_of

PAGE, CHECK = ROOT / "docs" / "your-model.md", ROOT / "docs" / "check-your-model.md"
SECTIONS = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
LAYOUTS = {  # heading -> the sections whose diffs are applied, in order; how many ranks
    "Data parallel": (["Data parallel"], 2),
    "Tensor parallel": (["Tensor parallel"], 2),
    "Data x tensor": (["Tensor parallel", "Data x tensor"], 4),
    "Fully sharded": (["Fully sharded"], 2),
    "Pipeline": (["Pipeline"], 2),
}
PRINTED, MEMORY_OF = (f"{ROOT / 'tests' / 'on_rank_your_model.py'}:{name}" for name in ("printed", "memory_of"))
COPIED = ("tensor_parallel_module", "fully_sharded_module", "pipeline_module", "pytorch_weights")
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
    """{name: text} of train.py after the diffs of these sections, and of the recipes that are copied beside it."""
    script = SCRIPT
    for name in sections:
        script = applied(script, blocks_of(SECTIONS[name], "diff")[0])
    return {
        "train.py": script,
        **{path.name: path.read_text() for name in COPIED for path in copied_with(path_of(name))},
    }


def write(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


def printed_by(*command, folder):
    """What launch.sh with these arguments prints."""
    job = Run(LAUNCH, *command, cwd=folder).wait()
    assert (job.code, job.err) == (0, "")
    return job.out


def shown_of_three_steps(command, folder):
    """What show or bytes print of a script that trains three steps, where the page's trains 20."""
    script = (folder / "train.py").read_text()
    assert script.count("batches(20)") == 1
    (folder / "short.py").write_text(script.replace("batches(20)", "batches(3)"))
    return printed_by(command, "-n", 2, "short.py", folder=folder).replace("(3 times each)", "(20 times each)")


def losses(pool, folder):
    """The losses that train.py prints on the ranks of a pool: it starts faster than a job."""
    first, *others = pool.call(PRINTED, path=str(folder / "train.py"))
    assert not any(others)
    return losses_in(first)


def losses_in(printed):
    steps = re.findall(r"step (\d+)  loss (\S+)", printed)
    assert [int(step) for step, _ in steps] == [5, 10, 15, 20], printed
    return np.array([float(loss) for _, loss in steps])


def assert_shows(printed, shown):
    """Each line that the page shows is printed; "about N kB" includes OneFlow's own messages."""
    about = re.compile(r"about \d+ kB")
    printed = about.sub("", printed)
    assert [line for line in about.sub("", shown).splitlines() if line.rstrip() not in printed] == [], printed


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """The losses of the script on one device, which the page shows."""
    folder = tmp_path_factory.mktemp("alone")
    write(folder, {"train.py": SCRIPT})
    values = losses(pools(1), folder)
    shown = blocks_of(PAGE.read_text(), "text")[0]
    assert [f"{loss:.4f}" for loss in values] == re.findall(r"loss (\S+)", shown)
    return values


def test_script_runs_with_the_name_torch(pools, tmp_path, alone):
    script = SCRIPT.replace("import oneflow as flow", "import oneflow as torch").replace("flow.", "torch.")
    assert "flow." not in script.replace("oneflow", "")
    write(tmp_path, {"train.py": script})
    check_losses(losses(pools(1), tmp_path), alone, "with the name torch")


def check_losses(values, alone, *what):
    Checks.that(abs(values - alone).max() <= 1.01e-4, *what, "losses", values, "on one device", alone)  # of 4 digits


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_device_and_shows_what_the_page_says(pools, tmp_path, alone, name):
    sections, n = LAYOUTS[name]
    write(tmp_path, files_of(sections))
    check_losses(losses(pools(n), tmp_path), alone, name)
    if name == "Data parallel":  # also by the page's command
        check_losses(losses_in(printed_by("-n", n, "train.py", folder=tmp_path)), alone, name)
    if "./launch.sh show -n 2 train.py\n" in SECTIONS[name]:
        assert_shows(shown_of_three_steps("show", tmp_path), blocks_of(SECTIONS[name], "text")[0])


def test_batch_of_own_rows_trains_as_the_whole_one(pools, tmp_path, alone):
    files = files_of(["Data parallel"])
    own_rows = applied(files["train.py"], blocks_of(SECTIONS["Data parallel"], "diff")[1])
    write(tmp_path, {**files, "train.py": own_rows})
    check_losses(losses(pools(2), tmp_path), alone, "own rows")


@pytest.fixture(scope="module")
def with_attention(pools, tmp_path_factory):
    """A function of (mesh or None for one device, number of ranks) to a folder and the losses of the model there."""
    _, add, split = blocks_of(SECTIONS["Tensor parallel"], "diff")
    [attention] = blocks_of(SECTIONS["Tensor parallel"], "python")

    @lru_cache(maxsize=None)
    def train(mesh, n):
        files = files_of(["Tensor parallel"] + ["Data x tensor"] * (mesh == "[[0, 1], [2, 3]]") if mesh else [])
        script = applied(files["train.py"], add)
        files["train.py"] = applied(script, split).replace("[0, 1])", f"{mesh})") if mesh else script
        folder = tmp_path_factory.mktemp("attention")
        write(folder, {**files, "attention.py": attention})
        return folder, losses(pools(n), folder)

    return train


@pytest.mark.parametrize("mesh, n", [("[0, 1]", 2), ("[0, 1, 2, 3]", 4), ("[[0, 1], [2, 3]]", 4)])
def test_attention_trains_as_on_one_device(with_attention, mesh, n):
    assert mesh in SECTIONS["Tensor parallel"] + SECTIONS["Data x tensor"]
    folder, values = with_attention(mesh, n)
    check_losses(values, with_attention(None, 1)[1], "attention on", mesh)
    shown = re.findall(r"0\.\d{4}", SECTIONS["Tensor parallel"])
    assert shown == [f"{loss:.4f}" for loss in with_attention(None, 1)[1]]
    if n == 2:
        shown = shown_of_three_steps("show", folder)
        assert_shows(shown, blocks_of(SECTIONS["Tensor parallel"], "text")[1])
        all_reduce = r"backward of blocks\.0-1\.(\S+): .*, all-reduce, 262 kB from each rank by the formula"
        assert re.findall(all_reduce, shown) == ["up", "attention.value", "attention.query", "attention.key"]


def test_bytes_shows_a_layer_that_the_plan_forgets(pools, tmp_path, with_attention):
    folder, values = with_attention("[0, 1]", 2)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    script = (folder / "train.py").read_text()
    forgotten = re.sub(r".*attention\\\.output.*\n", "", script)
    assert forgotten != script
    write(tmp_path, {"train.py": forgotten})
    check_losses(losses(pools(2), tmp_path), values, "with a layer less")
    shown = shown_of_three_steps("bytes", tmp_path)
    assert "inside blocks.0" in shown or "probably" in shown, shown
    assert re.search(r"OneFlow adds \d+ more \(blocks\.0", shown.splitlines()[-1]), shown


def shares(layout):
    """{name: elements that a rank of 2 holds} of the classifier's parameters, by the shapes."""
    shapes = {"embedding.weight": (50, 64), "head.weight": (2, 64), "head.bias": (2,)}
    for block in ("blocks.0", "blocks.1"):
        shapes.update({f"{block}.norm.weight": (64,), f"{block}.norm.bias": (64,)})
        shapes.update({f"{block}.up.weight": (256, 64), f"{block}.up.bias": (256,)})
        shapes.update({f"{block}.down.weight": (64, 256), f"{block}.down.bias": (64,)})
    split = {
        "Data parallel": r"none",
        "Tensor parallel": r"blocks\.\d\.(up\..*|down\.weight)",
        "Fully sharded": r".*",
    }[layout]
    return {name: np.prod(shape) // (2 if re.fullmatch(split, name) else 1) for name, shape in shapes.items()}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("layout", ["Data parallel", "Tensor parallel", "Fully sharded"])
def test_memory_by_kind_is_that_of_the_shards(tmp_path, pools, layout, mode):
    sections = LAYOUTS[layout][0] + ["In a graph"] * (mode == "graph")
    files = files_of(sections)
    adam = "flow.optim.Adam(model.parameters(), lr=0.005)"
    momentum, plain = (f"flow.optim.SGD(model.parameters(), lr=0.01{more})" for more in (", momentum=0.9", ""))
    whole = 4 * sum(shares(layout).values())
    others = [(momentum, 1), (plain, 0)] if (layout, mode) == ("Data parallel", "eager") else []
    for optimizer, moments in [(adam, 2), *others]:
        files["train.py"] = files_of(sections)["train.py"].replace(adam, optimizer).replace("batches(20)", "batches(2)")
        write(tmp_path, files)
        for held in pools(2).call(MEMORY_OF, path=str(tmp_path / "train.py")):
            kinds = [held[kind] for kind in ("weights", "gradients", "state")]
            Checks.equal(kinds, [whole, whole, moments * whole], layout, mode, optimizer)
    words = " | ".join(map(bytes_in_words, (whole, whole, 2 * whole)))
    assert f"| {layout.lower()} | {words} |" in SECTIONS["Memory of each rank"]


@pytest.mark.parametrize("name", ["Data parallel", "Tensor parallel", "Fully sharded"])
def test_layout_in_a_graph(pools, tmp_path, alone, name):
    sections, n = LAYOUTS[name]
    write(tmp_path, files_of([*sections, "In a graph"]))
    check_losses(losses(pools(n), tmp_path), alone, name, "in a graph")


def test_padded_targets_need_a_weight_in_micro_batches(pools, tmp_path):
    """Each target counts as on one device with the weight of the page, and not without it."""
    [diff] = blocks_of(CHECK.read_text(), "diff")
    weighted = applied(files_of(["Pipeline"])["train.py"], diff)
    seen = {}
    for name, script, n in [
        ("one device", SCRIPT, 1),
        ("weighted", weighted, 2),
        ("without a weight", files_of(["Pipeline"])["train.py"], 2),
    ]:
        for old, new in [
            ("(ids < 25).sum(1) > seq_len // 2", "np.where(ids.sum(1) % 3, ids[:, 0] < 25, -100)"),
            ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(ignore_index=-100)"),
        ]:
            assert script.count(old) == 1
            script = script.replace(old, new)
        write(tmp_path, {**files_of(["Pipeline"]), "train.py": script})
        seen[name] = losses(pools(n), tmp_path)
    check_losses(seen["weighted"], seen["one device"], "padded targets")
    assert abs(seen["without a weight"] - seen["one device"]).max() > 1e-3


def without_classes(recipe):
    """The text of tensor_parallel_module.py without the line of lay_out that sets __class__."""
    assert len(re.findall(r"^        layer\.__class__ = .*\n", recipe, flags=re.MULTILINE)) == 1
    return re.sub(r"^        layer\.__class__ = .*\n", "", recipe, flags=re.MULTILINE)


def test_bytes_shows_that_split_weights_alone_are_too_little(tmp_path):
    files = files_of(["Tensor parallel"])
    write(tmp_path, {**files, "tensor_parallel_module.py": without_classes(files["tensor_parallel_module.py"])})
    shown = shown_of_three_steps("bytes", tmp_path)
    assert "inside blocks.0-1 (B -> B)" in shown, shown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the weights that the script draws, in model.safetensors."""
    folder = tmp_path_factory.mktemp("checkpoint")
    before, rest = SCRIPT.split("    loss_function = ", 1)
    saves = (
        '    model.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)\n'
        '    save_safetensors(model, "model.safetensors")\n    return\n'
    )
    write(
        folder, {"save.py": f"from pytorch_weights import save_safetensors\n{before}{saves}    loss_function = {rest}"}
    )
    shutil.copy(path_of("pytorch_weights"), folder / "pytorch_weights.py")
    printed_by("-n", 1, "save.py", folder=folder)
    return folder


@pytest.mark.parametrize("name", ["Tensor parallel", "Fully sharded", "Pipeline"])
def test_pytorch_checkpoint_under_each_layout(pools, tmp_path, checkpoint, alone, name):
    """The losses are the same, although the script draws other weights before it loads these."""
    sections, n = LAYOUTS[name]
    files = files_of([*sections, "From a PyTorch checkpoint"])
    files["train.py"] = files["train.py"].replace("flow.manual_seed(0)", "flow.manual_seed(1)")
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    write(tmp_path, files)
    check_losses(losses(pools(n), tmp_path), alone, name, "from a checkpoint")


def test_page_copies_each_recipe_that_its_scripts_import():
    commands = [line for block in blocks_of(PAGE.read_text(), "bash") for line in block.splitlines()]
    copies = [command.split()[1:-1] for command in commands if command.startswith("cp ")]
    assert copies == [[str(path.relative_to(ROOT)) for path in copied_with(path_of(name))] for name in COPIED]


@pytest.mark.parametrize("layout, against", [("Data parallel", False), ("Pipeline", True)])
def test_verify_finds_no_difference(tmp_path, layout, against):
    sections, n = LAYOUTS[layout]
    write(tmp_path, {**files_of(sections), "single.py": SCRIPT})
    options = ["--against", "single.py"] * against
    found = printed_by("verify", "-n", n, *options, "train.py", folder=tmp_path)
    # single.py has no graph whose output could be compared
    Checks.that(("all other values agree" if against else "all values agree") in found, found)
