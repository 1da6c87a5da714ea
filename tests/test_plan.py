"""`./launch.sh plan`: its formulas against the papers' tables, its choices against published runs, what it prints."""

import dataclasses
import json
import random
import shlex
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from oneflow_cookbook.plan import __main__ as plan
from oneflow_cookbook.plan import cost, devices, formulas
from oneflow_cookbook.plan.model import Model, of_config
from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import ROOT
from tests.jobs import Run
from tests.markdown import blocks

A100, H100 = devices.DEVICES["a100-80"], devices.DEVICES["h100"]
SIZES = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "seq_len": 2048, "vocab_size": 51200}
MODEL = Model(**SIZES)


@pytest.mark.parametrize("billions, h, layers", [(1.7, 2304, 24), (145.6, 12288, 80), (1008.0, 25600, 128)])
def test_parameters_and_flops_are_those_of_megatron(billions, h, layers):
    """Table 1 of arXiv:2104.04473, and its formulas."""
    model, s, v = Model(layers, h, h // 128, 2048, 51200, biases=True), 2048, 51200
    exact = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert formulas.parameters(model) == pytest.approx(exact + 2 * h)  # the last norm, which the paper leaves out
    assert formulas.parameters(model) / 1e9 == pytest.approx(billions, abs=0.06)
    for recompute, factor, head in ((False, 72, 12), (True, 96, 16)):
        exact = factor * s * layers * h**2 * (1 + s / (6 * h) + v / (head * layers * h))
        operations = layers * formulas.layer_flops(model, s, recompute) + formulas.head_flops(model, s)
        assert operations == pytest.approx(exact, rel=1e-9)


def test_weights_that_the_data_axis_shards_take_what_zero_3_takes():
    """Table 1 of arXiv:1910.02054: 16 bytes per parameter, shared by 64 ranks."""
    model = dataclasses.replace(MODEL, learned_positions=False)  # positions and norms stay whole
    problem = cost.Problem(model, 64, cluster_of(hosts=8))
    layouts = [cost.ParallelLayout(64, 1, 1, 1, options) for options in ((), ("shard_weights",))]
    whole, sharded = (state_of(cost.memory(problem, layout)) for layout in layouts)
    assert whole == 16 * formulas.parameters(model)
    assert sharded == pytest.approx(whole / 64, rel=0.01)


def state_of(memory):
    return sum(memory[part] for part in ("weights", "gradients", "Adam's state"))


def cluster_of(hosts=1, ranks=8, device=A100, **changes):
    return devices.Cluster(hosts, ranks, device._replace(**changes))


@pytest.mark.parametrize("h, a, s, b, t", [(6144, 64, 2048, 4, 8), (12288, 96, 2048, 1, 8), (25600, 160, 2048, 1, 8)])
def test_activations_of_a_layer_are_those_of_korthikanti(h, a, s, b, t):
    """Table 2 of arXiv:2205.05198; without the scores, as with FlashAttention, those of its selective recomputation."""
    model = Model(1, h, a, s, 51200, biases=True, dropout=True)
    scores, parallel = 5 * a * s / h, ("sequence_parallel",)

    def bytes_of(tensor=t, options=(), flash=True):
        return formulas.activations(model, s * b, tensor, options, "amp", flash)

    assert bytes_of(1, flash=False) == pytest.approx(s * b * h * (34 + scores))
    assert bytes_of(flash=False) == pytest.approx(s * b * h * (10 + 24 / t + scores / t))
    assert bytes_of(options=parallel, flash=False) == pytest.approx(s * b * h / t * (34 + scores))
    assert bytes_of(options=parallel) == pytest.approx(34 * s * b * h / t)
    assert bytes_of(options=("recompute",)) == pytest.approx(2 * s * b * h)
    assert bytes_of(options=(*parallel, "recompute")) == pytest.approx(2 * s * b * h / t)


def test_idle_share_is_that_of_gpipe():
    """(p - 1) / (m + p - 1) of a step: Y. Huang et al., arXiv:1811.06965."""
    time = cost.cost(cost.Problem(MODEL, 8, cluster_of(ranks=4)), cost.ParallelLayout(1, 1, 4, 1)).time
    assert time["idle"] / sum(time.values()) == pytest.approx(3 / 11)


@pytest.mark.parametrize("num_layers, stages", [(126, 16), (70, 12), (24, 8), (3, 2), (5, 5)])
def test_layers_of_stages_are_those_of_gpt_py(num_layers, stages):
    placed = [i * stages // num_layers for i in range(num_layers)]
    model = dataclasses.replace(MODEL, num_layers=num_layers)
    assert formulas.layers_of_stages(model, stages) == [placed.count(stage) for stage in range(stages)]


@pytest.mark.parametrize("vocab_size", [96, 200_000])
def test_largest_stage_sets_memory_and_pace(vocab_size):
    """Three layers on two stages: the pace is that of 2 layers, or of a layer and a head that is larger."""
    model = dataclasses.replace(MODEL, num_layers=3, vocab_size=vocab_size, tied=False)
    candidate = cost.cost(cost.Problem(model, 1, cluster_of(ranks=2)), cost.ParallelLayout(1, 1, 2, 1))
    layer, head = formulas.layer_flops(model, model.seq_len), formulas.head_flops(model, model.seq_len)
    slowest = {96: 2 * layer, 200_000: layer + head}[vocab_size]
    assert candidate.time["compute"] == pytest.approx(slowest / (0.55 * 312e12))
    if vocab_size == 96:
        assert state_of(candidate.memory) == 16 * sum(formulas.stages(model, 2)[0])
        assert candidate.memory["activations"] == 2 * formulas.activations(model, model.seq_len, 1)


def test_largest_stage_sets_what_is_sent():
    """Two layers, of 4 on two stages and of 3."""
    models = (dataclasses.replace(MODEL, num_layers=layers, vocab_size=96) for layers in (4, 3))
    layout = cost.ParallelLayout(2, 2, 2, 1)
    equal, unequal = (cost.cost(cost.Problem(model, 2, cluster_of()), layout) for model in models)
    for axis in ("data", "tensor"):
        assert unequal.sent[axis] == pytest.approx(equal.sent[axis], rel=0.05)
        assert unequal.time[axis] == pytest.approx(equal.time[axis], rel=0.05)


@pytest.mark.parametrize("stride, members, rate", [(1, 8, 450), (1, 16, 400), (8, 2, 50), (4, 4, 100), (2, 4, 450)])
def test_ranks_of_a_host_share_its_link(stride, members, rate):
    """On two hosts of 8: eight rings that leave the host have an eighth of its link each."""
    assert cluster_of(2, 8, H100).bandwidth(stride, members) == rate * 1e9
    assert cluster_of(2, 8, H100, inside=40).bandwidth(stride, members) == 40e9


LLAMA_405B = Model(
    126, 16384, 128, 8192, 128256, kv_heads=8, mlp_size=53248, gated=True, learned_positions=False, tied=False
)


@pytest.mark.parametrize("hosts, mesh, tflops", [(1024, (64, 8, 16), 430), (2048, (128, 8, 16), 400)])
def test_llama_of_405_billion_fits_as_it_was_trained_and_takes_about_twice_as_long(hosts, mesh, tflops):
    """arXiv:2407.21783, table 4."""
    fit, _ = cost.ranked(cost.Problem(LLAMA_405B, 2048, cluster_of(hosts, device=H100)))
    assert fit[0].layout.mesh == mesh
    tokens = 2048 * LLAMA_405B.seq_len
    operations = 126 * formulas.layer_flops(LLAMA_405B, tokens) + formulas.head_flops(LLAMA_405B, tokens)
    assert 1.7 < fit[0].seconds / (operations / (8 * hosts * tflops * 1e12)) < 2.3


def test_one_rank_moves_nothing():
    fit, too_large = cost.ranked(cost.Problem(MODEL, 8, cluster_of(ranks=1)))
    assert {candidate.layout.mesh for candidate in (*fit, *too_large)} == {(1, 1, 1)}
    assert not any(sum(candidate.sent.values()) for candidate in fit)
    assert all(candidate.time["compute"] == candidate.seconds for candidate in fit)


@pytest.mark.parametrize("inside, pipeline", [(1e20, 1), (1e-3, 8)])
def test_bandwidth_decides_whether_there_is_a_pipeline(inside, pipeline):
    untied = dataclasses.replace(MODEL, tied=False)
    fit, _ = cost.ranked(cost.Problem(untied, 8, cluster_of(inside=inside)))
    assert fit[0].layout.pipeline == pipeline


def problems(count):
    """Random models, batch sizes and clusters, from a seed."""
    rng = random.Random(0)
    for _ in range(count):
        heads = rng.choice([4, 8, 12])
        model = Model(
            num_layers=rng.choice([4, 6, 12]),
            hidden_size=64 * heads,
            num_heads=heads,
            seq_len=rng.choice([128, 512]),
            vocab_size=rng.choice([1000, 50000]),
            kv_heads=rng.choice([0, 4]),
            gated=rng.random() < 0.5,
            tied=rng.random() < 0.5,
        )
        memory, inside, between = (10 ** rng.uniform(*span) for span in ((-0.5, 1.5), (0, 2.5), (-1, 2)))
        ranks, precision = rng.choice([2, 4, 8]), rng.choice(["amp", "fp32"])
        cluster = cluster_of(rng.choice([1, 2, 3]), ranks, memory=memory, inside=inside, between=between)
        yield cost.Problem(model, rng.choice([12, 48, 96]), cluster, precision)


def test_what_fits_is_what_is_said_to_fit():
    for problem in problems(12):
        fit, too_large = cost.ranked(problem)
        assert all(min(*candidate.memory.values(), *candidate.time.values()) >= 0 for candidate in (*fit, *too_large))
        assert all(candidate.bytes <= problem.cluster.memory for candidate in fit)
        assert all(candidate.bytes > problem.cluster.memory for candidate in too_large)
        assert fit == sorted(fit, key=lambda candidate: candidate.seconds)


def test_every_layout_that_is_offered_passes_the_checks_of_gpt_py():
    gpt = load(str(path_of("gpt")))
    number = 0
    for problem in problems(12):
        model, batch_size = problem.model, problem.batch_size
        for layout in cost.layouts(problem):
            if "recompute" in layout.options:
                continue
            data, tensor, pipeline = layout.mesh
            config = gpt.Config(
                **{name: getattr(model, name) for name in ("seq_len", "num_layers", "hidden_size", "num_heads")},
                batch_size=batch_size,
                micro_batches=layout.micro_batches(batch_size),
                **dict.fromkeys(layout.options, True),
            )
            config.check([SimpleNamespace(ranks=np.zeros((data, tensor)))] * pipeline)
            assert data * tensor * pipeline == problem.cluster.ranks
            number += 1
    assert number > 100


def words(**changes):
    """The arguments of a plan for two hosts."""
    options = {**SIZES, "global_batch_size": 512, "hosts": 2, "device": "a100-40", **changes}
    options = {name: value for name, value in options.items() if value is not None}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]


TWO_OF_A_HOST = {"hosts": 1, "gpus_per_host": 2}
PRINTED = {  # arguments -> exit code, what is printed
    "two hosts": (words(), 0, ("1.32 B parameters", "amp, FlashAttention\n", " 1.32 B x 12 bytes = 15.8 GB\n")),
    "in float32": (words(precision="fp32"), 0, ("fp32\n", "19.5 TFLOP/s", "x 8 bytes =", "copies of weights")),
    "a mesh that is slower": (
        words(why="1 16 1"),
        0,
        ("1 x 16 x 1 takes ", " s longer than the first", "16 x 1 x 1\n"),
    ),
    "the first": (words(why="16 1 1"), 0, ("16 x 1 x 1 is the first:",)),
    "a mesh that does not fit": (words(memory=3, why="1 1 2", **TWO_OF_A_HOST), 1, ("1 x 1 x 2 does not fit",)),
    "nothing fits": (words(memory=3, **TWO_OF_A_HOST), 1, ("Nothing fits. Take more devices, or devices of ",)),
    "unequal stages": (words(num_layers=70, why="1 4 4"), 0, ("layers of a stage   ", " 18 or 17 ")),
    "a short step": (words(global_batch_size=16), 0, (" 108.4 ms",)),
    "numbers of a device": (
        words(memory=180, tflops=2250, bandwidth_inside=900, bandwidth_between=25),
        0,
        ("180 GB (165.6 GB usable), 2250 TFLOP/s", "900 GB/s from a device", "25 GB/s from host to host"),
    ),
}


@pytest.mark.parametrize("arguments, code, expected", PRINTED.values(), ids=PRINTED)
def test_plan_prints(capsys, arguments, code, expected):
    assert plan.main(arguments) == code
    printed = capsys.readouterr().out
    assert [text for text in expected if text not in printed] == [], printed
    assert max(map(len, printed.splitlines())) <= 100


def test_scores_are_kept_without_flash_attention(capsys):
    plan.main([*words(why="16 1 1"), "--no-flash-attention"])
    assert "tokens a step, amp\n" in capsys.readouterr().out
    with_scores, without = (
        cost.cost(cost.Problem(MODEL, 16, cluster_of(2), flash=flash), cost.ParallelLayout(16, 1, 1, 1)).memory
        for flash in (False, True)
    )
    more = with_scores["activations"] - without["activations"]
    assert more == 24 * 2 * 16 * 2048**2  # layers, bytes, heads, queries and keys


REFUSED = {  # arguments -> what the line says
    "sizes are missing": (
        words(num_heads=None, seq_len=None),
        "missing: --num-heads, --seq-len; or name a config.json",
    ),
    "heads that do not divide": (words(num_heads=7), "7 heads do not divide the hidden size, 2048"),
    "no layout": (words(global_batch_size=1, num_heads=1, num_layers=1), "D x T x P must be the 16 devices; D must"),
    "a mesh that is none": (words(why="3 1 1"), "--why 3 1 1: no such layout: D x T x P must be the 16 devices"),
    "more stages than layers": (words(num_layers=3, why="4 1 4"), "P may be at most 3, the layers"),
    "no such device": (words(device="b200"), "invalid choice: 'b200'"),
    "no device": (words(device=None), "required: --device"),
    "zero": (words(hosts=0), "0 is not above 0"),
    "no whole number": (words(hosts=1.5), "1.5 is not a whole number"),
    "a unit": (words(memory="80GB"), "80GB is not a number; write it without a unit"),
    "bytes": (words(memory=80e9), "80000000000.0 is not above 0 and at most 10000000"),
    "not a number": (words(memory="nan"), "nan is not above 0"),
    "no such file": (["--config", "/no/config.json", "--device", "h100", "--global-batch-size", "8"], "No such file"),
    "a config and sizes": ([*words(), "--config", "x"], "--config has the sizes; leave out --num-layers, --hidden"),
}


@pytest.mark.parametrize("arguments, says", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_a_line_and_exit_code_2(capsys, arguments, says):
    try:
        code = plan.main(arguments)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err


LLAMA_7B = {  # as published beside the weights of Llama 2 7B
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA3_8B = {**LLAMA_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}


GEMMA = {  # of 2 B
    "model_type": "gemma",
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
}


@pytest.mark.parametrize(
    "config, count",
    [(LLAMA_7B, 6738415616), (LLAMA3_8B, 8030261248), (GPT2, 124439808), (GEMMA, 2506172416)],
    ids=["7B", "8B", "GPT-2", "Gemma"],
)
def test_parameters_of_published_models(tmp_path, config, count):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), "utf-8-sig")  # a byte order mark is skipped
    assert formulas.parameters(of_config(path)) == count
    assert of_config(path, 512).seq_len == 512


@pytest.mark.parametrize(
    "config, says",
    [
        ({**LLAMA_7B, "model_type": "bert"}, "model_type is 'bert'; plan knows"),
        ({**LLAMA_7B, "model_type": ["llama"]}, "model_type is "),
        ({**LLAMA_7B, "num_local_experts": 8}, "a mixture of experts"),
        ({"model_type": "llama"}, "num_hidden_layers, hidden_size, num_attention_heads"),
        ({**LLAMA_7B, "intermediate_size": None}, "must be whole numbers of 1 or more, but are not: intermediate_size"),
        ({**LLAMA_7B, "vocab_size": 0, "head_dim": "128"}, "but are not: head_dim, vocab_size"),
        ({**LLAMA_7B, "num_key_value_heads": 5}, "5 key-value heads do not divide the 32 heads"),
        ([], "not a model's config.json"),
    ],
)
def test_config_of_another_kind_is_refused(tmp_path, config, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        of_config(path)


def test_link_that_points_nowhere_is_refused_as_what_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to("../../blobs/1a2b")
    with pytest.raises(ValueError, match="config.json, a link to ../../blobs/1a2b: No such file or directory"):
        of_config(path)


def test_it_runs_in_a_clone_without_environment_and_makes_none(tmp_path):
    shutil.copy(ROOT / "launch.sh", tmp_path)
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    job = Run(str(tmp_path / "launch.sh"), "plan", *words()).wait()
    assert job.code == 0 and "1.32 B parameters" in job.out, job.err
    assert not (tmp_path / ".venv").exists()


def test_it_imports_the_standard_library_alone():
    code = f"import runpy; runpy.run_path({str(ROOT / 'harness' / 'oneflow_cookbook' / 'plan')!r})"
    job = Run(sys.executable, "-ISc", code).wait()
    assert job.code == 0, job.err


def test_page_shows_what_its_commands_print(monkeypatch, tmp_path, capsys):
    """A block that ends with "..." shows the first lines. The page in Chinese has the same blocks: test_readme.py."""
    page = ROOT / "docs" / "choosing.md"
    [config] = blocks(page, "json")
    (tmp_path / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    commands = [block for block in blocks(page, "sh") if block.startswith("./launch.sh plan ")]
    outputs = blocks(page, "text")
    assert len(commands) == len(outputs)
    for command, shown in zip(commands, outputs):
        plan.main(shlex.split(command.replace("\\\n", ""))[2:])
        printed = capsys.readouterr().out
        assert printed.startswith(shown[:-4]) if shown.endswith("\n...\n") else printed == shown, command
