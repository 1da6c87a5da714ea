"""The tables of docs/sbp-atlas.md. `measured` is what atlas.measured_on returns."""

import re

from oneflow_cookbook.measure import theory
from oneflow_cookbook.measure.sbp import NAMES
from oneflow_cookbook.measure.steps import COMPARES, Move, tensors_and_moves
from oneflow_cookbook.report import atlas
from oneflow_cookbook.report.atlas import MATMULS, MODES, PAIRS

FIGURE = re.compile(r"\d+\.\d\d\b")


def units(number):
    """A multiple of the tensor with two decimals; 0 if only OneFlow's own messages are sent."""
    return f"{number:.2f}" if number >= 0.02 else "0"


def by_rank(sent, separator=" "):
    """A figure for each rank; a single 0 if no rank sends anything."""
    figures = [units(multiple) for multiple in sent]
    return separator.join(figures) if set(figures) != {"0"} else "0"


def table(header, rows):
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def fill(page, parts):
    """The text of a page with each of {name: text} in its place, which is between <!-- name --> and <!-- end -->."""
    for name, text in parts.items():
        text = f"\n{text.strip()}\n" if "\n" in text else text
        place = re.compile(f"(<!-- {name} -->).*?(<!-- end -->)", flags=re.DOTALL)
        assert len(place.findall(page)) == 1, name
        page = place.sub(lambda match, text=text: match[1] + text + match[2], page)
    return page


def is_off(sent, formula):
    """Whether the measured bytes differ from the formula."""
    return abs(sent - formula) > 0.02 * formula + 0.02


def bold(text, off):
    return f"**{text}**" if off else text


def near(old, new, tolerance=0.011):
    """Whether two lines have the same text, and numbers of two decimals that differ by 2 % and `tolerance` at most."""
    if FIGURE.sub("#", old) != FIGURE.sub("#", new):
        return False
    numbers = zip(FIGURE.findall(old), FIGURE.findall(new))
    return all(abs(float(a) - float(b)) <= 0.02 * float(a) + tolerance for a, b in numbers)


def folded(rows):
    """Merge rows with the same figures: [(key, cells)] -> [([keys], cells of the first)]."""
    groups = []
    for key, cells in rows:
        for keys, first in groups:
            if near(" | ".join(first), " | ".join(cells), tolerance=0.03):
                keys.append(key)
                break
        else:
            groups.append(([key], cells))
    return groups


def pairs_in_words(pairs):
    """Text such as "B → S(0), S(1)", a line for each list of targets."""
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


def same_ranks(measured, pairs=PAIRS):
    """Conversions on the same 2, 3 and 4 ranks: what each rank sends."""

    def each(pair, mode):
        figures, off = [], False
        for source, target in atlas.SAME.values():
            sent = measured["conversions", tuple(source), tuple(target), mode][pair]
            figures.append(sum(sent) / len(sent))  # all ranks send the same: see test_atlas.py
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


def other_ranks(measured, source, target):
    """Every conversion between two placements, with what each rank sends."""
    rows = []
    for pair in PAIRS:
        boxing = atlas.formula(source, target, *pair)
        sent_by_mode = [measured["conversions", tuple(source), tuple(target), mode][pair] for mode in MODES]
        formula = f"{units(boxing.total)} from any"
        if boxing.by_rank is not None:
            formula = by_rank(sent_by_rank(boxing, rank) for rank in range(len(sent_by_mode[0])))
        rows.append((pair, [formula, *(bold(by_rank(sent), ranks_differ(sent, boxing)) for sent in sent_by_mode)]))
    lines = [[pairs_in_words(group), *cells] for group, cells in folded(rows)]
    return table(["from → to", "formula", *MODES], lines)


def sent_by_rank(boxing, rank):
    return boxing.by_rank.get(rank, 0.0)


def ranks_differ(sent, boxing):
    """Whether what a rank sent differs from the formula; where that names no rank, what all ranks sent together."""
    if boxing.by_rank is None:
        return is_off(sum(sent), boxing.total)
    return any(is_off(multiple, sent_by_rank(boxing, rank)) for rank, multiple in enumerate(sent))


def deviations(which):
    """A line for each reason why OneFlow 0.9.0 differs from the formulas. which: "same" or "disjoint" ranks."""
    lines = {}
    for (mode, kind, old, new), (_, _, why) in atlas.DEVIATIONS.items():
        if kind == which:
            lines.setdefault((mode, why), []).append(f"{old} → {new}")
    return "".join(f"- **{' and '.join(pairs)}, {mode}**. {why}\n" for (mode, why), pairs in lines.items())


def moved(measured, x, w):
    """(SBP of the product of two matrices, boxings before it, which follow from that SBP)."""
    out, _ = measured["signatures", 2, "equal", "eager"][x, w]
    shapes = zip((x, w), MATMULS["equal"])
    inputs = [{"sbp": sbp, "ranks": [0, 1], "shape": shape, "item": 4} for sbp, shape in shapes]
    return out, theory.matmul_boxings(inputs, {"sbp": out})


def legal_signatures(measured):
    """The matmuls for which nothing moves, as a list."""
    products = {pair: moved(measured, *pair) for pair in PAIRS}
    lines = [f"- {' @ '.join(pair)} = {out}" for pair, (out, moves) in products.items() if not moves]
    return "\n".join(lines) + "\n"


def moves_in_words(moves):
    return ", ".join(f"{name} {boxing.change.replace('->', '→')}" for name, boxing in moves)


def signatures(measured):
    """The other matmuls: the product, what moves first, and the bytes of each of 2 ranks."""
    rows = []
    for pair in PAIRS:
        out, moves = moved(measured, *pair)
        if moves:
            [(_, boxing)] = moves
            sent = [sum(measured["signatures", 2, "equal", mode][pair][1]) / (2 * 4 * 720 * 720) for mode in MODES]
            product = f"{' @ '.join(pair)} = {out}"
            rows.append([product, f"{moves_in_words(moves)}, {boxing.collective}", *map(units, sent)])
    return table(["x @ w = out", "moves first", *MODES], rows)


def mesh(results):
    """The moves of two_d_sbp.py on its mesh; results: of its run in eager mode."""
    rows = []
    for move in (item for item in tensors_and_moves(results) if isinstance(item, Move) and item.collective != COMPARES):
        amounts = [move.by_rank or [0] * 4, move.sent]
        formula, eager = (figure_of_all(sent[rank] / move.size for rank in range(4)) for sent in amounts)
        what, change = (text.replace("->", "→") for text in (move.what, move.change))
        step = f"{what}<br>{change}" if change else what
        rows.append([step, move.collective, formula, bold(eager, eager != formula)])
    return table(["step", "collective", "formula", "eager"], rows)


def figure_of_all(sent):
    """A single figure if all ranks send the same."""
    figures = by_rank(sent).split(" ")
    return figures[0] if len(set(figures)) == 1 else " ".join(figures)


def graph_to_formula(results):
    """What the graph of a recipe sends, as a multiple of the formula."""
    [call] = [item for item in tensors_and_moves(results) if isinstance(item, Move) and item.sent and item.formula]
    return f"{sum(call.sent) / call.formula:.2f}"
