"""The pictures of the docs: which there are, and from which runs each is drawn."""

import ast
from functools import partial
from pathlib import Path

from harness.report import block, conversions, equation, timeline, traffic
from harness.report.runs import MEASURE_SCRIPT, TRAINING_SIZES, measured_modes, recipe_run
from harness.report.svg import THEMES
from harness.start import recipe

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
ORDER = str(recipe.HARNESS / "measure" / "order.py")
EQUATIONS = ("data_parallel", "model_parallel", "row_parallel", "pipeline_parallel", "hybrid_parallel", "two_d_sbp")
EQUATIONS += ("train_model_parallel",)
TIMELINES = {"train_data_parallel": {}, "train_pipeline": {"micro_batches": 4}, "fully_sharded": {}}  # with arguments
BESIDE = {"train_pipeline": "momentum"}  # the optimizer of the data parallelism beside it, where it is not Adam
BOTH = "Parameter server and ring: the same sum of gradients, through one rank or from neighbour to neighbour."
NAMES = (*EQUATIONS, *TIMELINES, "sbp_conversions", "parameter_server", "gpt_block")
RING = {"in_features": 720, "out_features": 1080}  # of the tensor that goes round the ring


def calls():
    """What the pictures are drawn from besides the conversions: key -> (number of ranks, function of a pool)."""
    found = {}
    for path in map(recipe.path_of, EQUATIONS):
        n = recipe.world_sizes(path)[0]
        own_sizes = {"graph": False, **({"steps": 1} if "steps" in recipe.entry(path) else {})}
        found["example", path.stem] = (n, calling(MEASURE_SCRIPT, path.stem, keywords=own_sizes))
        for mode in measured_modes(path):  # at large sizes
            found["run", path.stem, n, mode] = (n, partial(recipe_run, path=path, mode=mode))
    for name, given in TIMELINES.items():
        found["order", name] = (2, calling(f"{ORDER}:order", name, **TRAINING_SIZES, **given))
    for kind in ("adam", *BESIDE.values()):
        data_parallel = {"name": "train_data_parallel", "optimizer": kind, **TRAINING_SIZES}
        found["plain", kind] = (2, calling(f"{ORDER}:order", **data_parallel))
    step = {"graph": False, "steps": 1, **TRAINING_SIZES}
    for name, given in {"parameter_server": step, "ring_all_reduce": RING}.items():
        found["sends", name] = (4, calling(f"{ORDER}:sends", name, **given))
    for size, given in block.SIZES.items():
        found["block", size] = (4, calling(MEASURE_SCRIPT, "gpt", keywords=given))
    return found


def calling(function, name, **given):
    """A function of a pool, which calls one of harness/measure for a recipe."""
    return lambda pool: pool.call(function, path=str(recipe.path_of(name)), **given)


def made(results):
    """Every file of a picture: path -> text; results: of pages.calls."""
    drawn = {}
    for name in EQUATIONS:
        n = recipe.world_sizes(recipe.path_of(name))[0]
        drawn[name] = equation.picture(title_of(name), results["example", name], results["run", name, n, "eager"])
    for name, given in TIMELINES.items():
        plain, parts = results["plain", BESIDE.get(name, "adam")], given.get("micro_batches", 1)
        drawn[name] = timeline.picture(title_of(name), results["order", name], plain, parts)
    sent = results["atlas", 2]["conversions", (0, 1), (0, 1), "eager"]
    drawn["sbp_conversions"] = conversions.picture(title_of("sbp_conversions"), sent)
    drawn["gpt_block"] = block.picture(*(results["block", size] for size in block.SIZES))
    both = (results["sends", name] for name in ("parameter_server", "ring_all_reduce"))
    drawn["parameter_server"] = traffic.picture(BOTH, *both)
    return {PICTURES / f"{name}{theme}.svg": one.svg(theme) for name, one in drawn.items() for theme in THEMES}


def title_of(name):
    """The first line of a recipe's docstring."""
    return ast.get_docstring(ast.parse(recipe.path_of(name).read_text())).split("\n")[0]
