"""The tables of docs/sbp-atlas.md, from what was measured: "found" is what atlas.measured_on returns."""

import re

from harness.measure import theory
from harness.measure.sbp import Layout
from harness.measure.steps import Move, tensors_and_moves
from harness.report import atlas
from harness.report.atlas import MATMULS, MODES, PAIRS
from harness.report.runs import SAVING, TRAINED_ON

# Each kind of conversion once: S(0) and S(1) differ only where both are here.
HEADLINE = [pair for pair in PAIRS if pair == ("S(1)", "B") or pair[0] != "S(1)" and pair != ("B", "S(1)")]


def units(number):
    """A measured multiple of the tensor, two decimals; 0 means OneFlow's own messages at most."""
    return f"{number:.2f}" if number >= 0.02 else "0"


def by_rank(sent):
    return " ".join(map(units, sent))


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def bold(text, sent, formula):
    """Bold where what all ranks sent is not what the formula says."""
    return text if abs(sent - formula) <= 0.02 * formula + 0.02 else f"**{text}**"


def conversions(found, pairs, placements):
    """Conversions between these pairs of SBPs; placements: {"same" or "disjoint": those of 2, 3 and 4 ranks}."""
    rows, columns = [], {"same": "same p ranks", "disjoint": "p1 → p2 other ranks"}
    for old, new in pairs:
        row = [f"{old} → {new}", theory.collective(Layout(old, [0, 1]), Layout(new, [0, 1]))]
        for which in placements:
            row.append(atlas.formula_in_words(which, old, new))
            row += [totals(found, placements[which], mode, (old, new)) for mode in MODES]
        rows.append(row)
    return table(
        ["from → to", "collective", *(name for which in placements for name in (columns[which], *MODES))], rows
    )


def totals(found, placements, mode, pair):
    """What a conversion sent on 2, 3 and 4 ranks."""
    cells = []
    for source, target in placements.values():
        sent = sum(found["conversions"][tuple(source), tuple(target), mode][pair])
        cells.append(bold(units(sent), sent, atlas.formula(source, target, *pair).total))
    return " · ".join(cells)


def other_ranks(found, source, target):
    """Every conversion for one pair of placements, by rank."""
    rows = []
    for pair in PAIRS:
        one = atlas.formula(source, target, *pair)
        row = [" → ".join(pair), one.collective, f"{one.total:.3g}"]
        for mode in MODES:
            sent = found["conversions"][tuple(source), tuple(target), mode][pair]
            row.append(bold(by_rank(sent), sum(sent), one.total))
        rows.append(row)
    return table(["from → to", "kind", "formula, in all", "eager, by rank", "graph, by rank"], rows)


def deviations():
    """Where OneFlow 0.9.0 does not keep to the formulas, one line for each reason."""
    lines = {}
    for (mode, which, old, new), (_, formula, why) in atlas.DEVIATIONS.items():
        where = {"same": "on the same ranks", "disjoint": "to other ranks"}[which]
        lines.setdefault(f"{mode}, {where}: {formula}. The bytes fit this: {why}.", []).append(f"{old} → {new}")
    return "".join(f"- {' and '.join(pairs)}, {words}\n" for words, pairs in lines.items())


def signatures(found):
    """Every matmul: its product, what was moved for it, what that sent, and the same for larger x or w."""

    def moved(which):
        """The SBP of the product, and what was moved, which follows from it."""
        out = found["signatures"][2, which, "eager"][x, w][0]
        shapes = zip((x, w), MATMULS[which])
        inputs = [{"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4} for sbp, shape in shapes]
        words = theory.boxings_in_words(theory.matmul_boxings(inputs, {"sbp": out}))
        return out, words.replace("->", "→")

    rows = []
    for x, w in PAIRS:
        sent = [sum(found["signatures"][2, "equal", mode][x, w][1]) / (4 * 720 * 720) for mode in MODES]
        larger = ["; ".join(moved(which)) for which in ("large x", "large w")]
        rows.append([f"{x} @ {w}", *moved("equal"), *map(units, sent), *larger])
    header = ["x @ w", "out", "what OneFlow moves", *MODES, "x 3 times as large", "w 3 times as large"]
    return table(header, rows)


def mesh(results):
    """The moves of two_d_sbp.py on its mesh; results: of its run in eager mode."""
    rows = []
    for move in (item for item in tensors_and_moves(results) if isinstance(item, Move)):
        formula, sent = (
            [amounts[rank] / move.size for rank in range(4)] for amounts in (move.by_rank or [0] * 4, move.sent)
        )
        rows.append([move.what, move.change, move.collective, by_rank(formula), by_rank(sent)])
    return table(["step", "from → to", "collective", "formula, by rank", "eager, by rank"], rows)


def graph_to_formula(results):
    """What the graph of a recipe sent, as a multiple of the formula."""
    [call] = [item for item in tensors_and_moves(results) if isinstance(item, Move) and item.sent]
    return f"{sum(call.sent) / call.formula:.2f}"


def training_costs(steps):
    """What the rank that sends most sends in a step, and the one that keeps most keeps, in units of all weights.

    steps: what runs.training_run returned, by its (name, number of ranks, mode).
    """

    def cell(name, mode, amount):
        runs = [steps.get((name, n, mode)) for n in TRAINED_ON]
        return " · ".join(
            "–" if run is None else units(max(amount(one) / one["weights"] for one in run)) for run in runs
        )

    rows = []
    for name in dict.fromkeys(name for name, _, _ in steps):
        runs = {mode: by_rank[0] for (other, _, mode), by_rank in steps.items() if other == name}
        first, run = next(iter(runs.items()))
        if name in SAVING or not run["weights"]:
            continue
        columns = MODES if first != "only" else ["", "only"] if run["graph"] else ["only", ""]
        row = [f"{name}.py", *(cell(name, mode, lambda one: one["sent"]) for mode in columns)]
        for kind in ("weights", "gradients", "state"):
            kept = cell(name, first, lambda one, kind=kind: one["kept"][kind])
            row.append(kept if re.search("[1-9]", kept) else "n/a")
        rows.append(row)
    header = ["recipe", "sends, eager", "sends, graph", "keeps weights", "gradients", "optimizer state"]
    return table(header, rows)
