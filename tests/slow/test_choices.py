"""What recipes pick, write and end with, read by other means than their own: orders, checkpoints, exit codes."""

import signal
import sys

import numpy as np
import pytest

from oneflow_cookbook.start.recipe import path_of
from tests.cases import mains
from tests.jobs import Run, steps_in

REHEARSE = f"{mains.ON_RANK}:rehearse"


def drawn(path, seed):
    """On a rank: what depends on a seed besides the inputs."""
    import oneflow as flow

    from oneflow_cookbook.start.recipe import load

    result = load(path).run(flow.placement.all("cpu"), seed=seed)
    return [part if isinstance(part, list) else part.numpy() for part in result[1:] if not isinstance(part, np.ndarray)]


@pytest.mark.parametrize("name", ["data_loading", "random_numbers"])
def test_another_seed_gives_another_order_and_the_same_seed_the_same(pools, name):
    """The samples of both epochs; the weight."""
    zero, again, one = (
        pools(2).call(f"{__file__}:drawn", path=str(path_of(name)), seed=seed)[0][0] for seed in (0, 0, 1)
    )
    assert np.array_equal(zero, again) and all((np.asarray(zero[i]) != np.asarray(one[i])).any() for i in (0, 1))


@pytest.mark.parametrize("graph", [[], ["--graph"]], ids=["eager", "graph"])
def test_elastic_training_tells_the_steps_that_it_trains(pools, tmp_path, graph):
    path, arguments = str(path_of("elastic_training")), [*graph, "--checkpoint-dir", str(tmp_path)]
    first, _ = pools(2).call(REHEARSE, path=path, arguments=[*arguments, "--steps", "2"])
    second, _ = pools(2).call(REHEARSE, path=path, arguments=[*arguments, "--steps", "4"])
    assert (first["code"], second["code"]) == (0, 0), second["err"]
    losses = second["facts"][0]["losses"]
    assert losses[:2] == first["facts"][0]["losses"] and len(losses) == 4
    assert "resumes after step 2, from its checkpoint" in second["out"].splitlines()
    assert f"loss {losses[2]:.4f} in step 3 -> {losses[3]:.4f} in step 4" in second["out"].splitlines()


def test_checkpoint_of_an_option_is_kept_and_resumed(pools, tmp_path):
    """checkpoint.py: with --checkpoint-dir the second job trains the steps that are left."""
    path, arguments = str(path_of("checkpoint")), ["--checkpoint-dir", str(tmp_path), "--save-every", "4"]
    pools(2).call(REHEARSE, path=path, arguments=[*arguments, "--steps", "6"])
    assert steps_in(tmp_path) == [3, 4, 6]  # the first half ends after step 3
    for report in pools(2).call(REHEARSE, path=path, arguments=[*arguments, "--steps", "8"]):
        assert (report["code"], len(report["facts"][1]["losses"])) == (0, 8), report["err"]
    assert steps_in(tmp_path) == [3, 4, 6, 8]


def rates(path, checkpoint_dir, steps):
    """On a rank: what gpt.py prints of each step, where every look at the clock is a second after the one before."""
    import contextlib
    import io
    import time

    from oneflow_cookbook.measure.calls import replaced
    from oneflow_cookbook.start.recipe import load

    module, seconds, out = load(path), iter(range(1000)), io.StringIO()
    config = module.Config(batch_size=8, hidden_size=16, num_heads=2, num_layers=2)
    clock = {(time, "monotonic"): lambda: next(seconds)}
    with replaced(clock), contextlib.redirect_stdout(out):
        module.train(module.placements("cpu", 2), config, steps=steps, checkpoint_dir=checkpoint_dir, log_interval=1)
    return out.getvalue().splitlines()


def test_gpt_counts_the_tokens_since_it_resumed(pools, tmp_path):
    call = {"path": str(path_of("gpt")), "checkpoint_dir": str(tmp_path)}
    pools(2).call(f"{__file__}:rates", steps=2, **call)
    lines, nothing = pools(2).call(f"{__file__}:rates", steps=4, **call)
    words = [line.split("  ") for line in lines[1:]]  # the first says that it resumes
    assert [(word[0], word[-1]) for word in words] == [(f"step {step}", f"{8 * 8} tokens/s") for step in (3, 4)]
    assert nothing == []


def test_program_of_spawn_that_is_terminated_fails(tmp_path):
    """With exit code 1 and not with 0, whatever its ranks do."""
    multiplies = "    return out.to_local().detach().numpy()"
    source = path_of("spawn").read_text()
    assert source.count(multiplies) == 1
    script = tmp_path / "spawn.py"
    script.write_text(source.replace(multiplies, "    print('multiplied', flush=True)\n    time.sleep(1000)"))
    run = Run(sys.executable, script, "--ranks", 1).until("multiplied").signal(signal.SIGTERM)
    run.wait()
    assert run.code == 1 and run.all_gone() and "Traceback" not in run.err
