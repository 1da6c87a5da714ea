"""Run recipes on pools of ranks: record a run, and measure the cost of a training step."""

from oneflow_cookbook.start.recipe import ROOT, entry_options, path_of

MODES = ("eager", "graph")
MEMORY = "oneflow_cookbook.measure.rank_memory:memory"
MEASURE_SCRIPT = "oneflow_cookbook.measure.script:measure_script"
PER_STEP = f"{ROOT / 'tests' / 'on_rank_recipe.py'}:per_step"
# The sizes at which runs and steps are measured.
SIZES = dict(batch=480, in_features=720, hidden_size=960, out_features=1080, rows=480, columns=1080, steps=1)
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


def training_run(pool, name, n, mode, **more):
    """The results of per_step for a training recipe on a pool of n ranks, by rank."""
    keywords = with_mode(training_sizes(name, **more), mode)
    return pool.call(PER_STEP, path=str(path_of(name)), **keywords)
