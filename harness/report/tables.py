"""The tables of docs/sbp-atlas.md, from what was measured: "found" is what atlas.measured_on returns."""

import itertools

from harness.measure import theory
from harness.measure.steps import Move, tensors_and_moves
from harness.report import atlas
from harness.report.atlas import MATMULS, MODES, PAIRS
from harness.report.runs import STRATEGIES, TRAINED_ON

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


def conversions(found, pairs, *kinds):
    """Conversions between these pairs of SBPs, on 2, 3 and 4 ranks; kinds: of placements, "same" or "disjoint"."""
    placements = {"same": atlas.SAME, "disjoint": atlas.DISJOINT}

    def totals(old, new, kind, mode):
        cells = []
        for source, target in placements[kind].values():
            sent = sum(found["conversions", tuple(source), tuple(target), mode][old, new])
            cells.append(bold(units(sent), sent, atlas.formula(source, target, old, new).total))
        return " · ".join(cells)

    rows, columns = [], {"same": "same p ranks", "disjoint": "p1 → p2 other ranks"}
    for pair in pairs:
        row = [" → ".join(pair), atlas.formula([0, 1], [0, 1], *pair).collective]
        for kind in kinds:
            row += [atlas.formula_in_words(kind, *pair), *(totals(*pair, kind, mode) for mode in MODES)]
        rows.append(row)
    header = [name for kind in kinds for name in (columns[kind], *MODES)]
    return table(["from → to", "collective", *header], rows)


def other_ranks(found, source, target):
    """Every conversion for one pair of placements, by rank."""
    rows = []
    for pair in PAIRS:
        one = atlas.formula(source, target, *pair)
        sent = [found["conversions", tuple(source), tuple(target), mode][pair] for mode in MODES]
        cells = [bold(by_rank(ranks), sum(ranks), one.total) for ranks in sent]
        rows.append([" → ".join(pair), one.collective, f"{one.total:.3g}", *cells])
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

    def moved(x, w, which):
        """The SBP of the product, and what was moved, which follows from it."""
        out, _ = found["signatures", 2, which, "eager"][x, w]
        shapes = zip((x, w), MATMULS[which])
        inputs = [{"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4} for sbp, shape in shapes]
        words = theory.boxings_in_words(theory.matmul_boxings(inputs, {"sbp": out}), {"x": "x", "w": "w"})
        return out, words.replace("->", "→")

    rows = []
    for pair in PAIRS:
        sent = [sum(found["signatures", 2, "equal", mode][pair][1]) / (4 * 720 * 720) for mode in MODES]
        larger = ["; ".join(moved(*pair, which)) for which in ("large x", "large w")]
        rows.append([" @ ".join(pair), *moved(*pair, "equal"), *map(units, sent), *larger])
    header = ["x @ w", "out", "what OneFlow moves", *MODES, "x 3 times as large", "w 3 times as large"]
    return table(header, rows)


def mesh(results):
    """The moves of two_d_sbp.py on its mesh; results: of its run in eager mode."""
    rows = []
    for move in (item for item in tensors_and_moves(results) if isinstance(item, Move)):
        amounts = [move.by_rank or [0] * 4, move.sent]
        cells = [by_rank(sent[rank] / move.size for rank in range(4)) for sent in amounts]
        rows.append([move.what, move.change, move.collective, *cells])
    return table(["step", "from → to", "collective", "formula, by rank", "eager, by rank"], rows)


def graph_to_formula(results):
    """What the graph of a recipe sent, as a multiple of the formula."""
    [call] = [item for item in tensors_and_moves(results) if isinstance(item, Move) and item.sent]
    return f"{sum(call.sent) / call.formula:.2f}"


KEPT = {  # heading -> bytes that a rank keeps between two steps; Adam's two moments lie as the weight does
    "keeps weights": lambda kept: kept["weights"],
    "gradients": lambda kept: kept["gradients"],
    "Adam's moments": lambda kept: 2 * kept["weights"],
}


def training_costs(results):
    """What the rank that sends most sends in a step, and the one that keeps most keeps, in units of all weights.

    results: what runs.training_run returned on each rank, by its ("step", name, number of ranks, mode).
    """
    rows = []
    for strategy, name in sorted((strategy, name) for strategy, names in STRATEGIES.items() for name in names):
        runs = {}  # (mode, number of ranks) -> by rank
        for mode, n in itertools.product((*MODES, "only"), TRAINED_ON):
            if ("step", name, n, mode) in results:
                ranks = results["step", name, n, mode]
                runs["graph" if ranks[0]["graph"] else "eager", n] = ranks
        first = min(mode for mode, _ in runs)

        def cell(mode, amount, runs=runs):
            most = [max(map(amount, runs[mode, n])) if (mode, n) in runs else None for n in TRAINED_ON]
            return " · ".join("–" if one is None else units(one) if one else "n/a" for one in most)

        sent = [cell(mode, lambda one: one["sent"] / one["weights"]) for mode in MODES]
        kept = [cell(first, lambda one, of=of: of(one["kept"]) / one["weights"]) for of in KEPT.values()]
        rows.append([strategy, f"{name}.py", *sent, *kept])
    return table(["strategy", "recipe", *(f"sends, {mode}" for mode in MODES), *KEPT], rows)
