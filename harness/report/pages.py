"""`launch.sh docs`: make docs/sbp-atlas.md and the pictures from fresh runs."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.measure import picture, theory
from harness.pool import Pool
from harness.report import atlas, draw
from harness.report.atlas import MATMULS, MODES, PAIRS
from harness.start import recipe

ROOT = Path(__file__).resolve().parents[2]
ATLAS, PICTURES = ROOT / "docs" / "sbp-atlas.md", ROOT / "docs" / "pictures"
LEDGER = str(recipe.HARNESS / "measure" / "ledger.py") + ":measure"
PER_STEP = str(recipe.HARNESS / "measure" / "ledger.py") + ":per_step"
TRAINING_COLUMNS = ["recipe", "sends, eager", "sends, graph", "keeps weights", "gradients", "optimizer state"]
HEADLINE = [  # each kind of conversion once: S(0) and S(1) differ only where both stand here
    ("B", "B"),
    ("B", "S(0)"),
    ("B", "P"),
    ("S(0)", "S(0)"),
    ("S(0)", "S(1)"),
    ("S(0)", "B"),
    ("S(1)", "B"),
    ("S(0)", "P"),
    ("P", "P"),
    ("P", "S(0)"),
    ("P", "S(1)"),
    ("P", "B"),
]
COLUMNS = ["from → to", "collective", "same p ranks", "eager", "graph", "p1 → p2 other ranks", "eager", "graph"]
SIZES = {  # of what is drawn
    **{"batch": 480, "in_features": 720, "hidden": 960, "out_features": 1080, "rows": 480, "columns": 1080},
    "steps": 1,
}
TRAINING_SIZES = {"batch": 384, "in_features": 384, "hidden": 768, "out_features": 384}  # of what is measured by step
TRAINED_ON = (2, 4)  # ranks
TRANSFORMER_SIZES = {  # of what is drawn, and of what is measured by step
    "transformer_block": {"samples": 8, "sequence": 192, "heads": 12, "head_size": 16},
    "sequence_parallel": {"samples": 8, "sequence": 192, "heads": 12, "head_size": 16},
    "context_parallel": {"sequence": 480, "heads": 12, "head_size": 64},
    "mixture_of_experts": {"tokens": 2048, "features": 64, "hidden_features": 96, "capacity": 1024},
    "vocab_parallel": {"tokens": 9600, "vocabulary": 500, "features": 32},
}
OTHER_SIZES = {
    "auto_parallel": {"batch": 96},  # at more it chooses otherwise
    **TRANSFORMER_SIZES,
    "elastic_training": {"every": 4},  # no checkpoint in 3 steps: what goes to disk would count as sent
}
TWICE = ("checkpoint", "elastic_training")  # they save in between, and so have no step that is like the others


def units(number):
    """A measured multiple of the tensor, two decimals; 0 means control traffic at most."""
    return f"{number:.2f}" if number >= 0.02 else "0"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def mark(text, deviates):
    return f"**{text}**" if deviates else text


def totals(found, placements, mode, pair):
    """What a conversion sent on 2, 3 and 4 ranks; bold where it is not what theory says."""
    cells = []
    for source, target in placements.values():
        sent = sum(found["conversions"][tuple(source), tuple(target), mode][pair])
        cells.append(mark(units(sent), atlas.deviation(mode, source, target, *pair)))
    return " · ".join(cells)


def headline(found):
    """The paper's table of boxing costs with a measured column for each mode beside each formula."""
    rows = []
    for old, new in HEADLINE:
        collective = theory.collective(theory.Layout(old, [0, 1]), theory.Layout(new, [0, 1]))
        row = [f"{old} → {new}", collective]
        for which, placements in (("same", atlas.SAME), ("disjoint", atlas.DISJOINT)):
            row += [atlas.formula_in_words(which, old, new)]
            row += [totals(found, placements, mode, (old, new)) for mode in MODES]
        rows.append(row)
    return table(COLUMNS, rows)


def training_runs(pools):
    """What a step of each training recipe sends and keeps: (name, number of ranks, mode) -> by rank."""
    return {run: training_run(pools(run[1]), *run) for run in trained()}


def trained():
    """(name, number of ranks, mode) of every run of a recipe that trains these two layers."""
    for path in recipe.all_paths():
        if {"steps", "hidden"} <= set(recipe.entry(path)):
            for n in (n for n in TRAINED_ON if n in recipe.world_sizes(path)):
                yield from ((path.stem, n, mode) for mode in modes(path))


def training_sizes(name):
    """The sizes at which a step of a recipe is measured: those of its options that it has."""
    sizes = {**TRAINING_SIZES, **OTHER_SIZES.get(name, {})}
    return {option: size for option, size in sizes.items() if option in recipe.entry(recipe.path_of(name))}


def training_run(pool, name, n, mode, **given):
    """The same for one run, with its default options where none are given."""
    path = recipe.path_of(name)
    given = {**training_sizes(name), **given}
    if mode != "only":
        given["graph"] = mode == "graph"
    return pool.call(PER_STEP, path=str(path), **given)


def training_costs(steps):
    """What the rank that sends most sends in a step, and the one that keeps most keeps, in units of all weights."""

    def cell(name, mode, number):
        of = [max(map(number, steps[name, n, mode])) if (name, n, mode) in steps else None for n in TRAINED_ON]
        return " · ".join("–" if one is None else units(one) for one in of)

    rows = []
    for name in dict.fromkeys(run[0] for run in steps if steps[run][0]["weights"] and run[0] not in TWICE):
        own = [mode for run, _, mode in steps if run == name]
        row = [f"{name}.py"]
        if own[0] == "only":  # which of the two that is, the run says
            [in_graph, *_] = [found[0]["graph"] for run, found in steps.items() if run[0] == name]
            columns = ["", "only"] if in_graph else ["only", ""]
        else:
            columns = MODES
        row += [cell(name, mode, lambda one: one["sent"] / one["weights"]) for mode in columns]
        first = "eager" if "eager" in own else "only"
        for kind in ("weights", "gradients", "state"):
            held = cell(name, first, lambda one, kind=kind: one["held"][kind] / one["weights"])
            row.append(held if re.search("[1-9]", held) else "n/a")
        rows.append(row)
    return table(TRAINING_COLUMNS, rows)


def by_rank(sent):
    return " ".join(units(one) for one in sent)


def same_ranks(found):
    rows = []
    for old, new in PAIRS:
        one = theory.collective(theory.Layout(old, [0, 1]), theory.Layout(new, [0, 1]))
        row = [f"{old} → {new}", one, atlas.formula_in_words("same", old, new)]
        rows.append(row + [totals(found, atlas.SAME, mode, (old, new)) for mode in MODES])
    return table(["from → to", "collective", "formula", "eager, p = 2 · 3 · 4", "graph, p = 2 · 3 · 4"], rows)


def other_ranks(found, source, target):
    """Each rank's bytes for one pair of placements."""
    rows = []
    for old, new in PAIRS:
        one = atlas.formula(source, target, old, new)
        total = "0" if not one.total else f"{one.total:.3g}"
        row = [f"{old} → {new}", one.collective, total]
        for mode in MODES:
            sent = found["conversions"][tuple(source), tuple(target), mode][old, new]
            off = abs(sum(sent) - one.total) > 0.02 * one.total + 0.02
            row += [mark(by_rank(sent), off)]
        rows.append(row)
    return table(["from → to", "kind", "formula, in all", "eager, by rank", "graph, by rank"], rows)


def deviations():
    """What OneFlow 0.9.0 does besides the formulas, one line for each reason."""
    lines = {}
    for (mode, which, old, new), (_, formula, why) in atlas.DEVIATIONS.items():
        lines.setdefault((mode, which, formula, why), []).append(f"{old} → {new}")
    where = {"same": "on the same ranks", "disjoint": "to other ranks"}
    words = [
        f"- {' and '.join(pairs)}, {mode}, {where[which]}: {formula}. The bytes fit this: {why}."
        for (mode, which, formula, why), pairs in lines.items()
    ]
    return "\n".join(words) + "\n"


def signatures(found):
    rows = []
    for x, w in PAIRS:
        row = [f"{x} @ {w}", found["signatures"][2, "equal", "eager"][x, w][0]]
        row.append(moved(found, "equal", x, w))
        for mode in MODES:
            row.append(units(sum(found["signatures"][2, "equal", mode][x, w][1]) / (4 * 720 * 720)))
        for which in ("large x", "large w"):
            row.append(f"{found['signatures'][2, which, 'eager'][x, w][0]}; {moved(found, which, x, w)}")
        rows.append(row)
    header = ["x @ w", "out", "what OneFlow moves", "eager", "graph"]
    return table([*header, "x 3 times as large", "w 3 times as large"], rows)


def moved(found, which, x, w):
    """What was moved for a matmul, told from the SBP of its result."""
    out = found["signatures"][2, which, "eager"][x, w][0]
    inputs = [{"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4} for sbp, shape in zip((x, w), MATMULS[which])]
    return picture.in_words(picture.rebox(inputs, {"sbp": out})).replace("->", "→")


def mesh(results):
    """The moves of two_d_sbp.py on its mesh, measured."""
    rows = []
    for item in picture.drawing(results["eager"]):
        if isinstance(item, picture.Move):
            theirs = by_rank([item.by_rank[rank] / item.size for rank in range(4)]) if item.by_rank else "0 0 0 0"
            rows.append(
                [item.what, item.change or "", item.collective, theirs, by_rank([s / item.size for s in item.sent])]
            )
    return table(["step", "from → to", "collective", "formula, by rank", "eager, by rank"], rows)


def graph_total(results):
    """One line on what the graph of a recipe sent, against the formula."""
    [call] = [item for item in picture.drawing(results["graph"]) if isinstance(item, picture.Move) and item.sent]
    return f"{sum(call.sent) / call.formula:.2f}"


PAGE = """# SBP atlas

[README](../README.md) · next: [performance](performance.md)

What happens between two layouts of a tensor: which collective runs and how many bytes leave the ranks, in theory and
measured. `./launch.sh docs` makes this page from runs on CPU ranks of one machine, and a test makes it again and fails
if it differs by more than 2 %. All numbers are multiples of the tensor's size T, of a float32 tensor of {shape}
(T = {megabytes} MB); 0 means at most OneFlow's own messages, some kilobytes. **Bold** is what differs from theory.

Theory is table 2 of J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch",
arXiv:2110.15032, the same as in OneFlow's `core/framework/sbp_infer_util.cpp`;
[theory.py](../harness/measure/theory.py) counts
it from the blocks that the ranks hold. To measure a layout of yours: `./launch.sh bytes mine.py`.

## At a glance

Each kind of conversion once. Same ranks: p = 2 · 3 · 4. Other ranks: from 1 to 1 · from 1 to 2 · from 2 to 2.

{headline}
## The same ranks

p ranks hold the tensor before and after; each of them sends 1/p of what the table says. What each holds, on 2 ranks:

![sbp_conversions.py](pictures/sbp_conversions.svg)

{same}
What differs from theory on OneFlow 0.9.0:

{deviations}
Of a P that came from B the first rank holds the whole and the others zeros; of one that came from S, in eager mode each
rank its own block with zeros around it, and in a graph the same as from B.

## Other ranks

The p1 ranks that hold the tensor before are none of the p2 ranks that hold it after.

![cross_placement.py](pictures/cross_placement.svg)

{disjoint}
## Overlapping ranks

The paper has no formula for placements that share some ranks. The column counts what it would take if each rank got
just what it lacks of its new block, and a P were reduce-scattered among the new ranks first.

{overlapping}
## Matmul signatures

A matmul has six legal signatures of x, w and out. For the other ten pairs OneFlow moves an input first, without a word:
the bytes show it. Which one depends on the sizes, so the last two columns name out, and the move, for a larger x or w.
Numbers are multiples of x where x and w are of one size, 720 x 720; both of 2 ranks together.

![matmul_signatures.py](pictures/matmul_signatures.svg)

{signatures}
Where eager is more than graph, what moves comes from or goes to S(1), at the price of one more all-to-all, as above.
S(1) @ B and B @ S(0) could run as S(1) @ S(0) with a local slice and no byte; OneFlow 0.9.0 pays an all-to-all instead.

## A mesh of 2 x 2 ranks

On a mesh a tensor has one SBP for each axis, and a collective runs along one axis, between the ranks of each line.

![two_d_sbp.py](pictures/two_d_sbp.svg)

{mesh}
In a graph these moves together send {mesh_graph} of what the formulas say: there S(1) costs no all-to-all.

## What a training step costs

Each cell has the figure for 2 ranks · that for 4, in units of all weights of the recipe together. *Sends*: the rank
that sends most in a step. *Keeps*: the rank that keeps most from one step to the next, in eager mode if there is one.
A dash: the recipe does not run on so many ranks, or has no such mode. n/a: the recipe keeps none, or does not return
it. 384 rows (auto_parallel.py: 96), 384 features in and out, 768 hidden; a pipeline has a layer for each rank. State
is that of the recipe's own optimizer: Adam has two moments for each weight, momentum one, SGD none.

{training}"""


def page(found, runs, steps):
    whole = 4 * atlas.SHAPE[0] * atlas.SHAPE[1] / 1e6
    others = [*atlas.DISJOINT.values()], [pair for pairs in atlas.OVERLAPPING.values() for pair in pairs]
    tables = ["".join(f"### {a} → {b}\n\n{other_ranks(found, a, b)}\n" for a, b in group) for group in others]
    return PAGE.format(
        headline=headline(found),
        training=training_costs(steps),
        shape=" x ".join(map(str, atlas.SHAPE)),
        megabytes=f"{whole:.1f}",
        same=same_ranks(found),
        deviations=deviations(),
        disjoint=tables[0],
        overlapping=tables[1],
        signatures=signatures(found),
        mesh=mesh(runs["two_d_sbp"]),
        mesh_graph=graph_total(runs["two_d_sbp"]),
    )


def measured():
    """All that the pages need, measured on pools of its own, part by part at once: the ranks mostly wait."""
    with ThreadPoolExecutor() as threads:
        return tuple(threads.map(on_own_pools, (atlas.measured, recipe_runs, training_runs)))


def on_own_pools(part):
    """Call a function of pools, `part`, with a function from a world size to a pool; ends the pools."""
    pools = {}
    try:
        return part(lambda n: pools.setdefault(n, Pool(n, repeat=True)))
    finally:
        for one in pools.values():
            one.close()


def recipe_runs(pools):
    """The ledger of every recipe on its own number of ranks, by name and mode."""
    sizes = {path: recipe.world_sizes(path)[0] for path in recipe.all_paths()}
    return {
        path.stem: {mode: recipe_run(pools(n), path, mode) for mode in drawn_modes(path)} for path, n in sizes.items()
    }


def modes(path):
    """The modes of a recipe: eager and graph, or only the one that it has."""
    return MODES if "graph" in recipe.entry(path) else ("only",)


def drawn_modes(path):
    """The modes that its picture and the atlas need: one, if it trains."""
    return modes(path)[:1] if "steps" in recipe.entry(path) else modes(path)


def recipe_run(pool, path, mode):
    """The ledger of one recipe at sizes that are worth measuring, by rank."""
    given = {name: SIZES[name] for name in recipe.entry(path) if name in SIZES}
    given.update(TRANSFORMER_SIZES.get(path.stem, {}))
    if path.stem == "matmul_signatures":
        given = dict.fromkeys(given, SIZES["in_features"])  # x and w of one size
    if mode != "only":
        given["graph"] = mode == "graph"
    return pool.call(LEDGER, path=str(path), **given)


def made(found, runs, steps):
    """Every file that is made, as path -> text."""
    files = {ATLAS: page(found, runs, steps)}
    for name, results in runs.items():
        files[PICTURES / f"{name}.svg"] = draw.as_svg(drawn(results), f"{name}.py")
    return files


def drawn(results):
    """What is drawn of a recipe; of one that trains without what looks as the weights do."""
    items = picture.drawing(next(iter(results.values())))
    again = re.compile(r"new (w|norm|table|head|router)|.* exp_avg_sq$|losses$|ages$")
    return [item for item in items if not (isinstance(item, picture.Tensor) and again.match(item.name))]


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
        old = path.read_text() if path.exists() else ""
        if differs(old, text):
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'made anew' if differs(old, text) else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
