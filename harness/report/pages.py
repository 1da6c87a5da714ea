"""`launch.sh docs`: make docs/sbp-atlas.md and the pictures of the recipes from fresh runs."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from harness.measure.steps import Tensor, tensors_and_moves
from harness.pool import Pool
from harness.report import atlas, draw, runs, tables
from harness.start import recipe

ROOT = Path(__file__).resolve().parents[2]
ATLAS, PICTURES = ROOT / "docs" / "sbp-atlas.md", ROOT / "docs" / "pictures"
PAGE = Path(__file__).with_name("atlas_template.md")  # the text, with a {name} for each table


def measured():
    """What the pages are made of, measured: a thread and a pool for each world size, as ranks mostly wait."""
    with ThreadPoolExecutor() as threads:
        found, by_recipe, steps = zip(*threads.map(measured_on, (1, 2, 3, 4)))
    by_recipe = {name: by_mode for part in by_recipe for name, by_mode in part.items()}
    steps = {run: part[run] for run in runs.training_runs() for part in steps if run in part}
    return atlas.merged(filter(None, found)), by_recipe, steps


def measured_on(n):
    """(what atlas.measured_on says, runs of the recipes by name and mode, training runs) on n ranks."""
    with Pool(n, timeout=600, repeat=True) as pool:
        found = atlas.measured_on(pool) if n in atlas.SAME else None
        paths = [path for path in recipe.all_paths() if recipe.world_sizes(path)[0] == n]
        by_recipe = {
            path.stem: {mode: runs.recipe_run(pool, path, mode) for mode in runs.measured_modes(path)} for path in paths
        }
        steps = {run: runs.training_run(pool, *run) for run in runs.training_runs() if run[1] == n}
    return found, by_recipe, steps


def made(found, by_recipe, steps):
    """Every file that is made, as path -> text."""
    files = {ATLAS: page(found, by_recipe["two_d_sbp"], steps)}
    for name, results in by_recipe.items():
        files[PICTURES / f"{name}.svg"] = draw.as_svg(drawn(next(iter(results.values()))), f"{name}.py")
    return files


def page(found, on_a_mesh, steps):
    others = [*atlas.DISJOINT.values()], [pair for pairs in atlas.OVERLAPPING.values() for pair in pairs]
    disjoint, overlapping = (
        "\n".join(f"### {a} → {b}\n\n{tables.other_ranks(found, a, b)}" for a, b in group) for group in others
    )
    same = {"same": atlas.SAME}
    return PAGE.read_text().format(
        shape=" x ".join(map(str, atlas.SHAPE)),
        megabytes=f"{4 * np.prod(atlas.SHAPE) / 1e6:.1f}",
        headline=tables.conversions(found, tables.HEADLINE, {**same, "disjoint": atlas.DISJOINT}),
        same=tables.conversions(found, atlas.PAIRS, same),
        deviations=tables.deviations(),
        disjoint=disjoint,
        overlapping=overlapping,
        signatures=tables.signatures(found),
        mesh=tables.mesh(on_a_mesh["eager"]),
        mesh_graph=tables.graph_to_formula(on_a_mesh["graph"]),
        training=tables.training_costs(steps),
    )


def drawn(results):
    """What is drawn of a recipe; of one that trains without tensors that look as the weights do."""
    repeated = re.compile(r"new w|.* exp_avg_sq$|losses$|ages$")
    items = tensors_and_moves(results)
    return [item for item in items if not (isinstance(item, Tensor) and repeated.match(item.name))]


def differs(old, new):
    """The first place where two texts differ, numbers with two decimals by more than 2 %; None if there is none."""
    number = re.compile(r"\d+\.\d\d\b")
    for line, (one, other) in enumerate(zip(old.splitlines() + [""], new.splitlines() + [""]), 1):
        pairs = list(zip(number.findall(one), number.findall(other)))
        near = all(abs(float(a) - float(b)) <= 0.02 * float(a) + 0.011 for a, b in pairs)
        if number.sub("#", one) != number.sub("#", other) or not near:
            return f"line {line}: {one!r} is now {other!r}"
    return None if old.count("\n") == new.count("\n") else "the number of lines"


def main():
    print("measuring every conversion, every matmul signature and every recipe: 2 minutes", flush=True)
    files = made(*measured())
    PICTURES.mkdir(exist_ok=True)
    for path, text in files.items():
        changed = differs(path.read_text() if path.exists() else "", text)
        if changed:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'made anew' if changed else 'as it was'}")
    return 0
