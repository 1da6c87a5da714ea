"""Run recipes on pools of ranks: record a run, and measure the cost of a training step."""

from oneflow_cookbook.start.recipe import ROOT, entry_options, path_of
from tests.cases import CASES, GRAPH_ONLY, PROOFS, proven_on
from tests.cases.ladder import Checks

MODES = ("eager", "graph")
MEMORY = "oneflow_cookbook.measure.rank_memory:memory"
MEASURE_SCRIPT = "oneflow_cookbook.measure.script:measure_script"
PER_STEP = f"{ROOT / 'tests' / 'on_rank_recipe.py'}:per_step"
# The sizes at which runs and steps are measured.
SIZES = dict(batch=480, in_features=720, hidden_size=960, out_features=1080, rows=480, columns=1080, steps=1)
MESSAGES = 20_000  # bytes of OneFlow's own in a step, at most
TRAINING_SIZES = dict(batch=384, in_features=384, hidden_size=768, out_features=384)


def modes(path):
    """The modes of a recipe: eager and graph, or "only"."""
    return MODES if "graph" in entry_options(path) else ("only",)


def with_mode(keywords, mode):
    """These keywords, with `graph` for the mode."""
    return keywords if mode == "only" else {**keywords, "graph": mode == "graph"}


def recipe_run(pool, path, mode, **sizes):
    """The results of measure_script for a recipe, by rank. sizes: they override SIZES."""
    keywords = {name: size for name, size in {**SIZES, **sizes}.items() if name in entry_options(path)}
    return pool.call(MEASURE_SCRIPT, path=str(path), keywords=with_mode(keywords, mode))


def training_sizes(name, **more):
    """The arguments with which a step of a recipe is measured: those of TRAINING_SIZES that it has, and `more`."""
    options = entry_options(path_of(name))
    sizes = {option: size for option, size in TRAINING_SIZES.items() if option in options}
    return {**sizes, **more}


def training_run(pool, name, n, mode, path=None, **more):
    """The results of per_step for a training recipe on a pool of n ranks, by rank. path: of a copy of it."""
    keywords = with_mode(training_sizes(name, **more), mode)
    return pool.call(PER_STEP, path=str(path or path_of(name)), **keywords)


def steps_of(name):
    """(number of ranks, mode, other arguments) with which the bytes of a step are measured.

    On the largest number of ranks: on fewer, the formula is the same.
    """
    n = max(proven_on(name))
    for mode in modes(path_of(name)):
        for more in [{}, *(PROOFS[name].variants if n == 4 else [])]:
            if n > 1 and (mode == "eager" or PROOFS[name].eager_only not in more):
                yield n, mode, more


def check_step(name, n, mode, more, by_rank):
    """Each rank sends in a step what the formula of the case says. by_rank: of training_run, with measured_at."""
    arguments = {**PROOFS[name].measured_at, **more, "steps": 1}  # with more steps the bounds of its values overflow
    case = CASES[name](n, mode == "graph" or name in GRAPH_ONLY, **training_sizes(name, **arguments))
    for rank, sent in enumerate(by_rank):
        Checks.sent(sent, 4 * case.sends[rank], MESSAGES, name, f"rank {rank}, in a step,")


def prove_step(pool, path, name, n, mode, more):
    """Measure a step of the recipe at `path`, and check it."""
    check_step(name, n, mode, more, training_run(pool, name, n, mode, path, **{**PROOFS[name].measured_at, **more}))
