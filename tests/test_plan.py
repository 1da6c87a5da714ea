"""`./launch.sh plan`: its formulas against the papers' tables, its choices against Megatron-LM's, its properties."""

import dataclasses
import json
import random
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from oneflow_cookbook.plan import __main__ as plan
from oneflow_cookbook.plan import choosing_page, cost, devices, formulas, report
from oneflow_cookbook.plan.megatron import ROWS, first_layouts, modelled, problem_of_row
from oneflow_cookbook.plan.model import ConfigError, Model, of_config
from oneflow_cookbook.start.recipe import load, path_of
from tests.cases import ROOT
from tests.cases.ladder import MAIN
from tests.jobs import Run
from tests.markdown import blocks

GB = 1e9
A100 = devices.DEVICES["a100-80"]
SIZES = {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "seq_len": 2048, "vocab_size": 51200}
MODEL = Model(**SIZES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.billions}B")
def test_parameters_and_flops_are_those_of_the_paper(row):
    h, layers, s, v = row.hidden_size, row.num_layers, 2048, 51200
    model = dataclasses.replace(problem_of_row(row).model, tied=True)
    exact = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert formulas.parameters(model) == pytest.approx(exact + 2 * h)  # the last norm, which the paper leaves out
    assert formulas.parameters(model) / GB == pytest.approx(row.billions, abs=0.06)
    for recompute, factor, head in (("none", 72, 12), ("full", 96, 16)):
        exact = factor * row.batch_size * s * layers * h**2 * (1 + s / (6 * h) + v / (head * layers * h))
        assert formulas.flops(model, row.batch_size, recompute) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.billions}B")
def test_layout_that_megatron_chose_is_first_or_second(row):
    assert row.mesh in [plan.layout.mesh for plan in first_layouts(row)[:2]]


@pytest.mark.slow
def test_times_of_megatron_are_as_near_as_the_page_says():
    off = [round(100 * (modelled(row).seconds / row.seconds - 1)) for row in ROWS]
    assert (off[0], off[-1]) == (min(off), max(off)) == (-18, 23)


def test_weights_that_the_data_axis_shards_take_what_zero_3_takes():
    """Table 1 of arXiv:1910.02054: 16 bytes per parameter, shared by 64 ranks."""
    model = dataclasses.replace(MODEL, learned_positions=False)  # positions and norms stay whole
    layouts = [cost.ParallelLayout(64, 1, 1, 1, shard_weights=shard) for shard in (False, True)]
    whole, sharded = (state_of(cost.memory(model, layout, 64, "amp")) for layout in layouts)
    assert whole == 16 * formulas.parameters(model)
    assert sharded == pytest.approx(whole / 64, rel=0.01)


def state_of(memory):
    return sum(memory[part] for part in ("weights", "gradients", "optimizer"))


@pytest.mark.parametrize("h, a, s, b, t", [(6144, 64, 2048, 4, 8), (12288, 96, 2048, 1, 8), (25600, 160, 2048, 1, 8)])
def test_activations_of_a_layer_are_those_of_table_2_of_korthikanti(h, a, s, b, t):
    model = Model(1, h, a, s, 51200, biases=True, dropout=True)
    scores = 5 * a * s / h

    def bytes_of(tensor=t, sequence_parallel=False, recompute="none"):
        return formulas.activations(model, s * b, tensor, "amp", sequence_parallel, recompute)

    assert bytes_of(1) == pytest.approx(s * b * h * (34 + scores))
    assert bytes_of() == pytest.approx(s * b * h * (10 + 24 / t + scores / t))
    assert bytes_of(sequence_parallel=True) == pytest.approx(s * b * h / t * (34 + scores))
    assert bytes_of(sequence_parallel=True, recompute="selective") == pytest.approx(34 * s * b * h / t)
    assert bytes_of(recompute="full") == pytest.approx(2 * s * b * h)
    assert bytes_of(sequence_parallel=True, recompute="full") == pytest.approx(2 * s * b * h / t)


def test_idle_share_is_that_of_gpipe():
    """(p - 1) / (m + p - 1) of a step: Y. Huang et al., arXiv:1811.06965."""
    layout = cost.ParallelLayout(1, 1, 4, 1)
    time = cost.cost(MODEL, layout, 8, devices.Cluster(1, 4, A100, "amp", 0.5)).time
    pace = time["matmuls"] + time["weights"] + time["tensor"] + time["pipeline"]
    assert time["idle"] / (time["idle"] + pace) == pytest.approx(3 / 11)


def cluster_of(hosts=1, ranks=8, precision="amp", device=A100, **changes):
    return devices.Cluster(hosts, ranks, device._replace(**changes), precision, devices.EFFICIENCY)


@pytest.mark.parametrize("num_layers, stages", [(126, 16), (70, 12), (24, 8), (3, 2), (5, 5)])
def test_layers_of_stages_are_those_of_gpt_py(num_layers, stages):
    placed = [i * stages // num_layers for i in range(num_layers)]
    model = dataclasses.replace(MODEL, num_layers=num_layers)
    assert formulas.layers_of_stages(model, stages) == [placed.count(stage) for stage in range(stages)]


@pytest.mark.parametrize("tied, slowest", [(False, 2), (True, 2), (True, 3)])
def test_largest_stage_sets_memory_and_pace(tied, slowest):
    """Three layers on two stages: the pace is that of 2 layers, or of a layer and a head that is larger."""
    vocab_size = {2: 96, 3: 200_000}[slowest]
    model = dataclasses.replace(MODEL, num_layers=3, vocab_size=vocab_size, tied=tied)
    cluster = cluster_of(ranks=2)
    costs = cost.cost(model, cost.ParallelLayout(1, 1, 2, 1), 1, cluster)
    layer, head = formulas.layer_flops(model, model.seq_len), formulas.head_flops(model, model.seq_len)
    assert costs.layers == [2, 1]
    assert costs.time["matmuls"] == pytest.approx({2: 2 * layer, 3: layer + head}[slowest] / cluster.flops)
    weights = formulas.weights(model, 2)
    if slowest == 2:
        assert state_of(costs.memory) == 16 * sum(sum(weights[part]) for part in ("layers", "table", "positions"))
        assert costs.memory["activations"] == 2 * formulas.activations(model, model.seq_len, 1, "amp")


def test_largest_stage_sets_what_is_sent():
    """Two layers, of 4 on two stages and of 3."""
    models = (dataclasses.replace(MODEL, num_layers=layers, vocab_size=96) for layers in (4, 3))
    equal, unequal = (cost.cost(model, cost.ParallelLayout(2, 2, 2, 1), 2, cluster_of()) for model in models)
    for axis in ("data", "tensor"):
        assert unequal.sent[axis] == pytest.approx(equal.sent[axis], rel=0.05)
        assert unequal.time[axis] == pytest.approx(equal.time[axis], rel=0.05)


LLAMA_405B = Model(
    126, 16384, 128, 8192, 128256, kv_heads=8, mlp_size=53248, gated=True, learned_positions=False, tied=False
)
BLOOM = Model(70, 14336, 112, 2048, 250880, biases=True, dropout=False, learned_positions=False)


@pytest.mark.parametrize("hosts, mesh, tflops", [(1024, (64, 8, 16), 430), (2048, (128, 8, 16), 400)])
def test_llama_of_405_billion_fits_as_it_was_trained_and_takes_about_twice_as_long(hosts, mesh, tflops):
    """arXiv:2407.21783, table 4."""
    fit, _ = cost.ranked(LLAMA_405B, 2048, cluster_of(hosts, device=devices.DEVICES["h100"]))
    assert fit[0].layout.mesh == mesh and set(fit[0].layers) == {7, 8}
    published = formulas.flops(LLAMA_405B, 2048) / (8 * hosts * tflops * devices.TERA)
    assert 1.8 < fit[0].seconds / published < 2.3


@pytest.mark.slow
def test_bloom_fits_as_it_was_trained():
    """On 384 A100 of 80 GB: arXiv:2211.05100, section 3.4."""
    fit, _ = cost.ranked(BLOOM, 2048, cluster_of(48))
    assert any(plan.layout.mesh == (8, 4, 12) and set(plan.layers) == {5, 6} for plan in fit)


def test_one_rank_moves_nothing():
    fit, refused = cost.ranked(MODEL, 8, cluster_of(ranks=1))
    assert {plan.layout.mesh for plan in (*fit, *refused)} == {(1, 1, 1)}
    assert not any(sum(plan.sent.values()) for plan in fit)
    assert not any(plan.time[part] for plan in fit for part in ("tensor", "pipeline", "data", "idle"))


@pytest.mark.parametrize("memory, plain", [(80 * GB, True), (4 * GB, False)])
def test_bandwidth_without_end_leaves_memory_alone(memory, plain):
    """Then data parallelism is as fast as any, and the first where it fits."""
    fit, _ = cost.ranked(MODEL, 64, cluster_of(inside=1e30, between=1e30, memory=memory), ("none",))
    best = report.best_of_each_mesh(fit)[0]
    assert best.layout.pipeline == 1
    assert any(plan.layout.mesh == (8, 1, 1) and not plan.layout.shard_weights for plan in fit) == plain


def test_hardly_any_bandwidth_leaves_a_pipeline():
    untied = dataclasses.replace(MODEL, tied=False)
    fit, _ = cost.ranked(untied, 8, cluster_of(inside=1e6), ("none",))
    assert fit[0].layout.pipeline == 8


@pytest.mark.slow
def test_slow_links_between_hosts_make_tensor_parallel_over_them_slow():
    """175 billion parameters on 128 hosts."""
    model = dataclasses.replace(MODEL, num_layers=96, hidden_size=12288, num_heads=96)
    slower = {}
    for between in (200, 25):
        fit, _ = cost.ranked(model, 1536, cluster_of(128, 8, between=between * GB), ("selective",))
        times = {plan.layout.mesh: plan.seconds for plan in report.best_of_each_mesh(fit)}
        assert fit[0].layout.mesh == (16, 8, 8)
        slower[between] = times[16, 16, 4] / times[16, 8, 8]
    assert 1.03 < slower[200] < 1.05 and 1.8 < slower[25] < 2


def cases(count):
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
        memory, inside, between = (10 ** rng.uniform(*span) for span in ((8.5, 10.5), (9, 11.5), (8, 11)))
        ranks, precision = rng.choice([2, 4, 8]), rng.choice(["amp", "fp32"])
        cluster = cluster_of(rng.choice([1, 2, 3]), ranks, precision, memory=memory, inside=inside, between=between)
        yield model, rng.choice([12, 48, 96]), cluster


def test_parts_add_up_and_what_fits_is_what_is_said_to_fit():
    for case in cases(12):
        fit, refused = cost.ranked(*case)
        for candidate in (*fit, *refused):
            for total, parts in ((candidate.seconds, candidate.time), (candidate.bytes, candidate.memory)):
                assert total == pytest.approx(sum(parts.values())) and min(parts.values()) >= 0
        assert all(candidate.bytes <= case[2].memory for candidate in fit)
        assert all(candidate.bytes > case[2].memory for candidate in refused)


def test_every_layout_that_is_offered_passes_the_checks_of_gpt_py():
    gpt = load(str(path_of("gpt")))
    number = 0
    for model, batch, cluster in cases(12):
        for layout in set(cost.layouts(model, batch, cluster.ranks, ("none",))):
            data, tensor, pipeline = layout.mesh
            names = ("seq_len", "num_layers", "hidden_size", "num_heads")
            config = gpt.Config(
                **{name: getattr(model, name) for name in names},
                batch_size=batch,
                micro_batches=layout.micro_batches(batch),
                sequence_parallel=layout.sequence_parallel,
                shard_weights=layout.shard_weights,
            )
            config.check([SimpleNamespace(ranks=np.zeros((data, tensor)))] * pipeline)
            assert data * tensor * pipeline == cluster.ranks
            number += 1
    assert number > 100


@pytest.mark.slow
def test_printed_command_runs_gpt_py(pools):
    """With fewer steps, as many ranks as it says."""
    options = ["--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "8", "--vocab-size", "96"]
    options += ["--global-batch-size", "4", "--gpus-per-host", "2", "--device", "cpu"]
    *_, command = plan.answer(plan.parser().parse_args(options))[0]
    front, arguments = command.replace("\\\n", "").split(" gpt ")
    assert front.split() == ["./launch.sh", "-n", "2"]
    short = ["--steps", "1"]
    for code, _, err in pools(2).call(MAIN, path=str(path_of("gpt")), arguments=[*arguments.split(), *short]):
        assert code == 0, err


def words(**changes):
    """The arguments of a plan for two hosts."""
    options = {**SIZES, "global_batch_size": 512, "hosts": 2, "gpus_per_host": 8, "device": "a100-40", **changes}
    options = {name: value for name, value in options.items() if value is not None}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]


TWO_HOSTS = (
    "1.32 B parameters",
    "memory of the fullest rank",
    "The second, ",
    "No recipe runs this plan: gpt.py has no mixed precision.",
)
TOO_LARGE = words(num_layers=96, hidden_size=12288, num_heads=96)
ONE_HOST_OF_TWO = ["--hosts", "1", "--gpus-per-host", "2"]
NO_CODE = "No command: OneFlow 0.9.0 has no code for these GPUs, of compute capability 9.0.\n"
PRINTED = {  # arguments -> exit code, what is printed
    "two hosts": (words(), 0, TWO_HOSTS),
    "two hosts in float32": (
        words(precision="fp32", recompute="none"),
        0,
        ("gpt.py, which has a small vocabulary", "number for K:\n", "--nnodes 2 --node_rank K", "-n 8 gpt"),
    ),
    "a mesh that is slower": ([*words(), "--why", "1", "16", "1"], 0, ("This one, 1 x 16 x 1",)),
    "a mesh that does not fit": (
        [*words(memory=3), "--why", "1", "1", "2", *ONE_HOST_OF_TWO],
        1,
        ("1 x 1 x 2 does not fit",),
    ),
    "nothing fits": (TOO_LARGE, 1, ("Nothing fits", "So would 16 hosts of 8", "Devices of ")),
    "nothing fits, as JSON": ([*TOO_LARGE, "--json"], 1, ()),
    "unequal stages": ([*words(num_layers=70), "--why", "1", "4", "4"], 0, ("a stage has 18 or 17 layers",)),
    "a stage of one layer": (words(num_layers=3, global_batch_size=1, gpus_per_host=1), 0, ("2 or 1 layer ",)),
    "h100": (words(device="h100"), 0, (NO_CODE,)),
}


@pytest.mark.parametrize("what", PRINTED)
def test_plan_prints(capsys, what):
    arguments, code, expected = PRINTED[what]
    assert plan.main(arguments) == code
    printed = capsys.readouterr().out
    assert [text for text in expected if text not in printed] == [], printed


def test_bandwidth_of_memory_given_by_numbers_is_used(capsys):
    by_numbers = {"memory": 40, "tflops": 312, "bandwidth_inside": 300, "bandwidth_between": 200}
    said = []
    for rates in ({"device": "a100-40"}, {"device": None, **by_numbers, "bandwidth_memory": 1555}):
        assert plan.main(words(**rates)) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_clock_of_a_cpu_that_linux_does_not_tell_must_be_given(capsys, monkeypatch):
    unknown = devices.this_machine()[1]._replace(flops={})
    monkeypatch.setattr(devices, "this_machine", lambda ranks: (2, unknown))
    assert plan.main(words(device="cpu")) == 2
    assert "does not say how fast its clock is; give --tflops too" in capsys.readouterr().err
    assert plan.main(words(device="cpu", tflops=1, memory=80)) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_on_a_cpu_share_its_memory_and_its_cores(monkeypatch, ranks):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: range(4))
    cores, core = devices.this_machine()
    count, device = devices.this_machine(ranks)
    assert (cores, count) == (4, ranks)
    assert device.memory * ranks == pytest.approx(4 * core.memory)
    cores_of_rank = {1: 4, 2: 2, 3: 1, 8: 0.5}[ranks]  # each rank is bound to as many cores; the fourth core is idle
    assert device.flops["fp32"] == pytest.approx(cores_of_rank * core.flops["fp32"])


def test_json_has_every_layout(capsys):
    assert plan.main([*words(), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert len(plans) > 100 and {"memory", "sent", "time", "bytes", "seconds", "fits"} <= set(plans[0])
    seconds = [plan["seconds"] for plan in plans if plan["fits"]]
    assert seconds == sorted(seconds)


REFUSED = {  # arguments -> what the line says
    "a size is missing": (words(num_heads=None), "--num-heads is missing"),
    "heads that do not divide": (words(num_heads=7), "--num-heads 7 does not divide --hidden-size 2048"),
    "no layout": (words(global_batch_size=1, num_heads=1, num_layers=1), "data x tensor x pipeline must be 16"),
    "a mesh that is none": ([*words(), "--why", "3", "1", "1"], "3 x 1 x 1 is 3, and there are 16 devices"),
    "no such device": (words(device="b200"), "invalid choice: 'b200'"),
    "no device": (words(device=None), "name a --device, or give --memory, --tflops, --bandwidth-memory, --bandwidth-i"),
    "no bandwidth of memory": (
        words(device=None, memory=80, tflops=989, bandwidth_inside=450, bandwidth_between=400),
        "name a --device, or give --bandwidth-memory too",
    ),
    "more stages than layers": ([*words(num_layers=3), "--why", "4", "1", "4"], "4 stages are more than the 3 layers"),
    "zero": (words(hosts=0), "0 is not a whole number"),
    "no memory": (words(memory="-3"), "-3 is not above 0 and at most 10000"),
    "mixed precision on a CPU": ([*words(device="cpu"), "--precision", "amp"], "--device cpu has no amp"),
    "no such file": (["--config", "/no/config.json", "--global-batch-size", "8"], "No such file"),
    "a config and sizes": ([*words(), "--config", "x"], "--config has the sizes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_a_line_and_exit_code_2(capsys, what):
    arguments, says = REFUSED[what]
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


@pytest.mark.parametrize(
    "config, count", [(LLAMA_7B, 6738415616), (LLAMA3_8B, 8030261248), (GPT2, 124439808)], ids=["7B", "8B", "GPT-2"]
)
def test_parameters_of_published_models(tmp_path, config, count):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert formulas.parameters(of_config(path)) == count


@pytest.mark.parametrize(
    "config, says",
    [
        ({**LLAMA_7B, "model_type": "bert"}, "model_type is 'bert'; plan knows"),
        ({**LLAMA_7B, "num_local_experts": 8}, "a mixture of experts"),
        ({"model_type": "llama"}, "num_hidden_layers, hidden_size, num_attention_heads"),
        ({**LLAMA_7B, "intermediate_size": None}, "must be whole numbers, but are not: intermediate_size"),
        ([], "not a model's config.json"),
    ],
)
def test_config_of_another_kind_is_refused(tmp_path, config, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        of_config(path)


def test_link_that_points_nowhere_is_refused_as_what_it_is(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to("../../blobs/1a2b")
    with pytest.raises(ConfigError, match="config.json is a link to ../../blobs/1a2b, which is not there"):
        of_config(path)


def test_byte_order_mark_of_a_config_is_skipped(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_7B), "utf-8-sig")
    assert formulas.parameters(of_config(path)) == 6738415616


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


@pytest.mark.slow
@pytest.mark.parametrize("path", choosing_page.PAGES, ids=lambda path: path.name)
def test_page_shows_what_its_commands_print(path, monkeypatch, tmp_path):
    text = path.read_text()
    [config] = blocks(path, "json")
    (tmp_path / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    assert len(choosing_page.COMMAND.findall(text)) == text.count("\n./launch.sh plan ") == 3
    assert choosing_page.filled(text) == text, "python3 harness/oneflow_cookbook/plan/choosing_page.py makes it anew"
    alone = choosing_page.printed("--config config.json --global-batch-size 128 --gpus-per-host 1 --device h100")
    assert f"`{' '.join(alone.splitlines()[-2:])}`" in text
