"""What a step of training sends, measured at sizes where OneFlow's own messages do not show, against the formula."""

import pytest

from harness.recipe import HARNESS, entry, world_sizes
from tests.cases import CASES, PROVEN, RECIPES, TRAINED, modes
from tests.ladder import Checks

PER_STEP = f"{HARNESS / 'ledger.py'}:per_step"
LARGE = {"batch": 768, "in_features": 384, "hidden": 768, "out_features": 384}
VARIANTS = {  # what else than the default sends something else
    "train_model_parallel": [{"input_gradient": "no"}],
    "train_hybrid": [{"second": "pipeline"}, {"hidden": 8}],  # little weight: what is left runs along axis 1
    "train_pipeline": [{"micro_batches": 8}],
}
RUNS = [
    (name, n, graph, more)
    for name in TRAINED
    for n in PROVEN
    if n in world_sizes(RECIPES / f"{name}.py")
    for graph in modes(name)
    for more in [{}, *VARIANTS.get(name, [])]
]


def run_id(run):
    name, n, graph, more = run
    return "-".join([name, str(n), "graph" if graph else "eager", *(f"{key}={value}" for key, value in more.items())])


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_bytes_of_a_step(pools, run):
    name, n, graph, more = run
    path = RECIPES / f"{name}.py"
    given = {**{option: size for option, size in LARGE.items() if option in entry(path)}, **more}
    case = CASES[name](n, **given)
    mode = {"graph": graph} if len(modes(name)) == 2 else {}
    sent = pools(n).call(PER_STEP, path=str(path), **mode, **given)
    wanted = (graph and case.sends_in_graph) or case.sends
    for rank in range(n):
        bytes_wanted = 4 * wanted[rank]
        near = abs(sent[rank] - bytes_wanted) <= 0.02 * bytes_wanted + 20_000  # and OneFlow's own messages
        Checks.that(near, name, f"rank {rank} sends", sent[rank], "bytes a step and must send", bytes_wanted)
