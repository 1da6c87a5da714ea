"""The pictures of the docs: which there are, and from which runs each is drawn."""

import ast
from functools import partial
from pathlib import Path

from harness.report import block, conversions, equation, timeline, traffic
from harness.report.runs import MEASURE_SCRIPT, TRAINING_SIZES
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


def example(pool, name):
    """What measure_script says of one step of a recipe at its own sizes, where each number of a tensor is drawn."""
    path = recipe.path_of(name)
    given = {"graph": False, **({"steps": 1} if "steps" in recipe.entry(path) else {})}
    return pool.call(MEASURE_SCRIPT, path=str(path), keywords=given)


def measured(pool, function, name, **given):
    """A function of measure/order.py, for a recipe."""
    return pool.call(f"{ORDER}:{function}", path=str(recipe.path_of(name)), **given)


def calls():
    """What is measured for the pictures besides what the atlas needs: key -> (number of ranks, function of a pool)."""
    found = {}
    for name in EQUATIONS:
        found["example", name] = (recipe.world_sizes(recipe.path_of(name))[0], partial(example, name=name))
    for name, given in TIMELINES.items():
        found["order", name] = (2, partial(measured, function="order", name=name, **TRAINING_SIZES, **given))
    for kind in ("adam", *BESIDE.values()):
        given = {"function": "order", "name": "train_data_parallel", "optimizer": kind}
        found["plain", kind] = (2, partial(measured, **given, **TRAINING_SIZES))
    for size, given in block.SIZES.items():
        run = {"function": MEASURE_SCRIPT, "path": str(recipe.path_of("gpt")), "keywords": given}
        found["block", size] = (4, lambda pool, run=run: pool.call(**run))
    found["sends", "parameter_server"] = (
        4,
        partial(measured, function="sends", name="parameter_server", steps=1, graph=False, **TRAINING_SIZES),
    )
    found["sends", "ring_all_reduce"] = (4, partial(measured, function="sends", name="ring_all_reduce", **RING))
    return found


def drawn(own, found, runs):
    """Each picture by its name. own: the results of `calls`; found: those of the atlas; runs: those of the recipes at
    large sizes."""
    drawings = {}
    for name in EQUATIONS:
        drawings[name] = equation.picture(title_of(name), own["example", name], runs[name]["eager"])
    for name, given in TIMELINES.items():
        plain = own["plain", BESIDE.get(name, "adam")]
        parts = given.get("micro_batches", 1)
        drawings[name] = timeline.picture(title_of(name), own["order", name], plain, parts)
    sent = found["conversions"][(0, 1), (0, 1), "eager"]
    drawings["sbp_conversions"] = conversions.picture(title_of("sbp_conversions"), sent)
    drawings["gpt_block"] = block.picture(*(own["block", size] for size in block.SIZES))
    both = (own["sends", name] for name in ("parameter_server", "ring_all_reduce"))
    drawings["parameter_server"] = traffic.picture(BOTH, *both)
    return drawings


def made(own, found, runs):
    """Every file of a picture: path -> text."""
    pictures = drawn(own, found, runs)
    return {
        PICTURES / f"{name}{theme}.svg": picture.svg(theme) for name, picture in pictures.items() for theme in THEMES
    }


def title_of(name):
    """The first line of a recipe's docstring."""
    return ast.get_docstring(ast.parse(recipe.path_of(name).read_text())).split("\n")[0]
