"""The tables of docs/sbp-atlas.md, from what was measured: "found" is what atlas.measured_on returns."""

import itertools
import re

from harness.measure import theory
from harness.measure.sbp import NAMES
from harness.measure.steps import Move, tensors_and_moves
from harness.report import atlas
from harness.report.atlas import MATMULS, MODES, PAIRS
from harness.report.runs import TRAINED_ON, compared

FIGURE = re.compile(r"\d+\.\d\d\b")


def units(number):
    """A measured multiple of the tensor, two decimals; 0 means OneFlow's own messages at most."""
    return f"{number:.2f}" if number >= 0.02 else "0"


def by_rank(sent, separator=" "):
    """A figure for each rank; one 0 if no rank sends anything."""
    figures = [units(one) for one in sent]
    return separator.join(figures) if set(figures) != {"0"} else "0"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def is_off(sent, formula):
    """Whether what was sent is not what the formula says."""
    return abs(sent - formula) > 0.02 * formula + 0.02


def bold(text, off):
    return f"**{text}**" if off else text


def alike(one, other, apart=0.011):
    """Whether two lines are the same text, with numbers of two decimals that differ by 2 % and `apart` at most."""
    if FIGURE.sub("#", one) != FIGURE.sub("#", other):
        return False
    numbers = zip(FIGURE.findall(one), FIGURE.findall(other))
    return all(abs(float(a) - float(b)) <= 0.02 * float(a) + apart for a, b in numbers)


def folded(rows):
    """Rows with the same figures as one: [(key, cells)] -> [([keys], cells of the first)]."""
    groups = []
    for key, cells in rows:
        for keys, first in groups:
            if alike(" | ".join(first), " | ".join(cells), apart=0.03):
                keys.append(key)
                break
        else:
            groups.append(([key], cells))
    return groups


def pairs_in_words(pairs):
    """Such as "B → S(0), S(1)", a line for each list of targets."""
    if len(pairs) > 1 and all(old == new for old, new in pairs):
        return f"{sbps_in_words([old for old, _ in pairs])} → the same"
    if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
        return " ↔ ".join(pairs[0])
    targets, lines = {}, {}
    for old, new in pairs:
        targets.setdefault(old, []).append(new)
    for old, news in targets.items():
        lines.setdefault(sbps_in_words(news), []).append(old)
    return "<br>".join(f"{sbps_in_words(olds)} → {news}" for news, olds in lines.items())


def sbps_in_words(sbps):
    return "any" if len(sbps) == len(NAMES) else ", ".join(sbps)


def same_ranks(found, pairs=PAIRS):
    """Conversions on the same 2, 3 and 4 ranks: what each of them sends."""

    def each(pair, mode):
        figures, off = [], False
        for source, target in atlas.SAME.values():
            sent = found["conversions", tuple(source), tuple(target), mode][pair]
            figures.append(sum(sent) / len(sent))  # all ranks send as much: see test_atlas.py
            off = off or is_off(sum(sent), atlas.formula(source, target, *pair).total)
        return bold(by_rank(figures, " · "), off)

    rows = []
    for pair in pairs:
        collective, formula = atlas.formula([0, 1], [0, 1], *pair).collective, atlas.sent_by_each(*pair)
        words = collective if formula == "0" else f"{collective}<br>{formula}"
        rows.append((pair, [words, *(each(pair, mode) for mode in MODES)]))
    lines = [[pairs_in_words(group), *cells] for group, cells in folded(rows)]
    return table(["from → to", "collective, formula", *MODES], lines)


def formulas_of_other_ranks():
    """What each old and each new rank sends by the formula, for the kinds of conversions."""
    rows = [(pair, list(atlas.sent_to_others(*pair))) for pair in PAIRS]
    lines = [[pairs_in_words(group), *cells] for group, cells in folded(rows)]
    return table(["from → to", "each old rank", "each new rank"], lines)


def other_ranks(found, source, target):
    """Every conversion for one pair of placements, by rank."""
    rows = []
    for pair in PAIRS:
        one = atlas.formula(source, target, *pair)
        measured = [found["conversions", tuple(source), tuple(target), mode][pair] for mode in MODES]
        formula = f"{units(one.total)} from any"
        if one.by_rank is not None:
            formula = by_rank(of_each(one, rank) for rank in range(len(measured[0])))
        rows.append((pair, [formula, *(bold(by_rank(sent), ranks_differ(sent, one)) for sent in measured)]))
    lines = [[pairs_in_words(group), *cells] for group, cells in folded(rows)]
    return table(["from → to", "formula", *MODES], lines)


def of_each(boxing, rank):
    return boxing.by_rank.get(rank, 0.0)


def ranks_differ(sent, boxing):
    """Whether ranks did not send what the formula says; where it names no sender, whether all together did not."""
    if boxing.by_rank is None:
        return is_off(sum(sent), boxing.total)
    return any(is_off(one, of_each(boxing, rank)) for rank, one in enumerate(sent))


def deviations(which):
    """Where OneFlow 0.9.0 does not keep to the formulas, one line for each reason; which: "same" or "disjoint"."""
    lines = {}
    for (mode, kind, old, new), (_, _, why) in atlas.DEVIATIONS.items():
        if kind == which:
            lines.setdefault((mode, why), []).append(f"{old} → {new}")
    return "".join(f"- **{' and '.join(pairs)}, {mode}**. {why}\n" for (mode, why), pairs in lines.items())


def moved(found, x, w, which):
    """The SBP of the product of two matrices, and what was moved for it, which follows from that SBP."""
    out, _ = found["signatures", 2, which, "eager"][x, w]
    shapes = zip((x, w), MATMULS[which])
    inputs = [{"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4} for sbp, shape in shapes]
    return out, theory.matmul_boxings(inputs, {"sbp": out})


def legal_signatures(found):
    """The matmuls for which nothing moves, as a list."""
    products = {pair: moved(found, *pair, "equal") for pair in PAIRS}
    lines = [f"- {' @ '.join(pair)} = {out}" for pair, (out, moves) in products.items() if not moves]
    return "\n".join(lines) + "\n"


def moves_in_words(moves):
    return ", ".join(f"{name} {one.change.replace('->', '→')}" for name, one in moves)


def signatures(found):
    """The other matmuls: what was moved first, the product, and what each of 2 ranks sent for it."""
    rows = []
    for pair in PAIRS:
        out, moves = moved(found, *pair, "equal")
        if moves:
            [(_, one)] = moves
            sent = [sum(found["signatures", 2, "equal", mode][pair][1]) / (2 * 4 * 720 * 720) for mode in MODES]
            product = f"{' @ '.join(pair)} = {out}"
            rows.append([product, f"{moves_in_words(moves)}, {one.collective}", *map(units, sent)])
    return table(["x @ w = out", "moves first", *MODES], rows)


def larger_signatures(found):
    """The matmuls for which something else moves when x or w is larger."""
    rows = []
    for pair in PAIRS:
        equal, *larger = (moved(found, *pair, which) for which in MATMULS)
        cells = [f"{moves_in_words(moves)}, out {out}" for out, moves in (equal, *larger)]
        if len(set(cells)) > 1:
            rows.append([" @ ".join(pair), *cells[1:]])
    return table(["x @ w", "x is 3 times as large", "w is 3 times as large"], rows)


def mesh(results):
    """The moves of two_d_sbp.py on its mesh; results: of its run in eager mode."""
    rows = []
    for move in (item for item in tensors_and_moves(results) if isinstance(item, Move)):
        amounts = [move.by_rank or [0] * 4, move.sent]
        formula, eager = (figure_of_all(sent[rank] / move.size for rank in range(4)) for sent in amounts)
        what, change = (text.replace("->", "→") for text in (move.what, move.change))
        step = f"{what}<br>{change}" if change else what
        rows.append([step, move.collective, formula, bold(eager, eager != formula)])
    return table(["step", "collective", "formula", "eager"], rows)


def figure_of_all(sent):
    """One figure if all ranks send as much."""
    figures = by_rank(sent).split(" ")
    return figures[0] if len(set(figures)) == 1 else " ".join(figures)


def graph_to_formula(results):
    """What the graph of a recipe sent, as a multiple of the formula."""
    [call] = [item for item in tensors_and_moves(results) if isinstance(item, Move) and item.sent]
    return f"{sum(call.sent) / call.formula:.2f}"


KEPT = ("weights", "gradients")


def runs_of(results, name):
    """{(mode, number of ranks): what runs.training_run returned on each rank} of a recipe."""
    runs = {}
    for mode, n in itertools.product((*MODES, "only"), TRAINED_ON):
        if ("step", name, n, mode) in results:
            ranks = results["step", name, n, mode]
            runs["graph" if ranks[0]["graph"] else "eager", n] = ranks
    return runs


def on_two_and_four(runs, mode, amount):
    """The figure of the rank that has most, on 2 and on 4 ranks; a dash where the recipe does not run so."""
    figures = [units(max(map(amount, runs[mode, n]))) if (mode, n) in runs else "–" for n in TRAINED_ON]
    return " · ".join(figures) if set(figures) != {"–"} else "–"


def training_sends(results):
    """What the rank that sends most sends in a step, in units of all weights; results: of `pages.calls`."""
    rows = []
    for path in compared():
        runs = runs_of(results, path.stem)
        sent = [on_two_and_four(runs, mode, lambda one: one["sent"] / one["weights"]) for mode in MODES]
        rows.append([path.name, *sent])
    return table(["recipe", *MODES], rows)


def training_keeps(results):
    """What the rank that keeps most keeps from one step to the next, in units of all weights."""
    rows = []
    for path in compared():
        runs = runs_of(results, path.stem)
        first = min(mode for mode, _ in runs)
        cells = [on_two_and_four(runs, first, lambda one, of=of: one["kept"][of] / one["weights"]) for of in KEPT]
        rows.append((path.name, cells))
    lines = [["<br>".join(names), *cells] for names, cells in folded(rows)]
    return table(["recipe", *KEPT], lines)
