"""The plots of docs/performance-details.md, by matplotlib in the environment of the peers: plots.py FOUND.json FOLDER.

They are as wide as a phone shows a picture, for light and for dark pages.
"""

import hashlib
import json
import sys
from pathlib import Path

import formulas
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "cookbook", "font.size": 11, "axes.titlesize": 12, "axes.grid": True}
)
matplotlib.rcParams.update(
    {"grid.alpha": 0.3, "legend.fontsize": 11, "savefig.transparent": True, "legend.frameon": False}
)

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

WIDTH = 358 / 72  # inches; an SVG has 72 px an inch
# Letters and lines; our own line, then those beside it, one for each strategy or peer; what shades a part.
THEMES = {
    "": ("#1f2328", ("#2f6fd0", "#b55c06", "#1f7f45"), "#59636e"),
    "-dark": ("#e6edf3", ("#6ea8fe", "#f0943f", "#4fbf7a"), "#9198a1"),
}
MARKERS = "os^"
SIDES = {"eager": "OneFlow, eager", "ours": "OneFlow, eager", "PyTorch": "PyTorch", "gloo": "gloo"}
GRID = {"layout": "constrained", "squeeze": False}


def use(theme):
    """Take the colours of a theme for what is drawn next."""
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    matplotlib.rcParams.update(dict.fromkeys(names, THEMES[theme][0]))


def side_style(theme, own):
    """The look of our line, or of the peer's."""
    colours = THEMES[theme][1]
    return {"color": colours[0 if own else 1], "marker": MARKERS[0 if own else 1], "markersize": 5}


def legend_above(figure, axis, columns):
    """One legend for all axes, above them; axis: the one that has the lines."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=columns, columnspacing=1)


def scaling(record, theme):
    """Strong above weak scaling, a column for each strategy; where ranks share cores is shaded."""
    data, cores, letters = record["data"], record["machine"]["cores"], THEMES[theme][0]
    groups = formulas.grouped(data, "kind", "strategy")
    kinds, strategies = (list(dict.fromkeys(key[k] for key in groups)) for k in (0, 1))
    figure, axes = plt.subplots(len(kinds), len(strategies), figsize=(WIDTH, 5.8), sharex=True, sharey="row", **GRID)
    for (kind, strategy), rows in groups.items():
        axis, ranks = axes[kinds.index(kind)][strategies.index(strategy)], [row["ranks"] for row in rows]
        for side in ("eager", "PyTorch"):
            times = [1e3 * row["seconds"][side] for row in rows]
            axis.plot(ranks, times, **side_style(theme, side == "eager"), label=SIDES[side])
        first = 1e3 * rows[0]["seconds"]["eager"]
        ideal = [first * (1 / min(n, cores) if kind == "strong" else max(1, n / cores)) for n in ranks]
        axis.plot(ranks, ideal, "--", color=letters, label=f"ideal on {cores} cores")
        axis.set(title=f"{kind}: {strategy}", xscale="log", xlim=(0.85, 4.7))
        axis.set_xticks(ranks, [str(n) for n in ranks])
        axis.minorticks_off()
        axis.axvspan(cores * 1.2, 4.7, color=THEMES[theme][2], alpha=0.22, linewidth=0)
    for row in axes:
        row[0].set(ylim=(0, 1.1 * row[0].get_ylim()[1]), ylabel="ms a step")
    for axis in axes[-1]:
        axis.set_xlabel("ranks")
    legend_above(figure, axes[0][0], 3)
    figure.supxlabel(f"shaded: more ranks than the {cores} cores, so ranks share them", fontsize=11)
    return figure


def sizes(record, theme):
    """The strategies that cross in one axis, for each way to know the time; of all the time for 1,000 hidden units."""
    data, cores, colours = record["data"], record["machine"]["cores"], THEMES[theme][1]
    names = list(dict.fromkeys(name for *both, _ in formulas.crossings(data, cores) for name in both))
    titles = {"eager": "OneFlow, eager", "PyTorch": "PyTorch", "formula": "formula"}
    figure, axes = plt.subplots(len(titles), 1, figsize=(WIDTH, 7.4), sharex=True, sharey=True, **GRID)
    for axis, (kind, title) in zip(axes[:, 0], titles.items()):
        for k, name in enumerate(names):
            xs, times = times_of(data, name, kind, cores)
            look = {"color": colours[k], "marker": MARKERS[k], "markersize": 5, "markevery": len(xs) // 4}
            axis.plot(xs, [1e6 * time / x for x, time in zip(xs, times)], **look, label=name)
        mark_crossings(axis, [(*both, where[kind]) for *both, where in formulas.crossings(data, cores)], kind, theme)
        axis.set(title=f"{title}, 2 ranks", xscale="log", ylim=(0, None))
        axis.set_xticks(formulas.HIDDEN, [str(one) for one in formulas.HIDDEN])
        axis.minorticks_off()
    axes[1][0].set_ylabel("ms a step for each 1,000 hidden units")
    axes[-1][0].set_xlabel("hidden size")
    legend_above(figure, axes[0][0], 3)
    return figure


def times_of(data, strategy, kind, cores):
    """(hidden sizes, seconds of a step at each)."""
    if kind == "formula":
        xs = formulas.FINE
        return xs, [formulas.step_time(strategy, 2, x, data["per_rank"], cores) for x in xs]
    return formulas.HIDDEN, [row["seconds"][kind] for row in data["steps"] if row["strategy"] == strategy]


def mark_crossings(axis, crossings, kind, theme):
    """Where two strategies cross: of measured times, the sizes between which they do."""
    for one, other, where in ((one, other, where) for one, other, where in crossings if where):
        if kind == "formula":
            axis.axvline(where, color=THEMES[theme][0], linewidth=1, linestyle=":")
            place, words = {"x": 0.98, "y": 0.93, "ha": "right", "va": "top"}, f"at {where:.0f}"
        else:
            below, above = max(x for x in formulas.HIDDEN if x <= where), min(x for x in formulas.HIDDEN if x > where)
            axis.axvspan(below, above, color=THEMES[theme][2], alpha=0.22, linewidth=0)
            place, words = {"x": 0.02, "y": 0.05}, f"between {below} and {above}"
        axis.text(s=f"{one} and {other} cross\n{words}", transform=axis.transAxes, **place)


def collectives(record, theme):
    """A row for each collective, a column for each number of ranks."""
    data, letters = record["data"], THEMES[theme][0]
    groups = formulas.grouped(data["moves"], "collective", "ranks")
    kinds, ranks = (list(dict.fromkeys(key[k] for key in groups)) for k in (0, 1))
    figure, axes = plt.subplots(len(kinds), len(ranks), figsize=(WIDTH, 9.2), sharex=True, sharey=True, **GRID)
    copies = [(row["bytes"], row["bytes"] / row["seconds"] / 1e9) for row in data["copies"]]
    for (kind, n), rows in groups.items():
        axis = axes[kinds.index(kind)][ranks.index(n)]
        for side in ("ours", "gloo"):
            rates = [row["sends"] / row["seconds"][side] / 1e9 for row in rows]
            look = {**side_style(theme, side == "ours"), "markersize": 4}
            axis.plot([row["bytes"] for row in rows], rates, **look, label=SIDES[side])
        axis.plot(*zip(*copies), ":", color=letters, label="copy in memory")
        axis.set(title=f"{kind}, {n} ranks", xscale="log", yscale="log")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    figure.supxlabel("bytes of the tensor", fontsize=11)
    figure.supylabel("GB/s that a rank sends", fontsize=11)
    legend_above(figure, axes[0][0], 3)
    return figure


def timeline(record, theme):
    """Lanes of the stages: when they work by the formula, and when the threads that compute did."""
    data = record["data"]
    lanes, step = formulas.gpipe(data["micro_batches"]), 1e3 * data["step"]
    length = max(end for lane in lanes for _, end in lane)
    busy = [[(1e3 * begin, 1e3 * end) for begin, end in lane] for lane in data["busy"]]
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 2.6), layout="constrained", sharex=True)
    scaled = [[(begin * step / length, end * step / length) for begin, end in lane] for lane in lanes]
    for axis, title, found in zip(axes, ("by the formula, to the same length", "measured"), (scaled, busy)):
        for stage, lane in enumerate(found):
            bars = [(begin, end - begin) for begin, end in lane]
            axis.broken_barh(
                bars, (0.7 - stage, 0.6), color=THEMES[theme][1][0], edgecolor=THEMES[theme][0], linewidth=0.4
            )
        axis.set(title=title, yticks=[1, 0], yticklabels=["rank 0", "rank 1"], xlim=(0, step), ylim=(-0.5, 1.5))
        axis.grid(visible=False)
    axes[-1].set_xlabel("ms of a step")
    return figure


def newest(by_cpu):
    """The record that was measured last, of all CPUs; None if there is none."""
    return max(by_cpu.values(), key=lambda record: record["date"], default=None)


def save(figure, data, path):
    """Write a figure, marked with the digest of the data that it shows."""
    mark = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    figure.savefig(path, metadata={"Description": mark, "Date": None, "Creator": None})
    plt.close(figure)


def main():
    found, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for draw in (scaling, sizes, collectives, timeline):
        part = newest(found.get(draw.__name__, {}))
        for theme in THEMES if part else ():
            use(theme)
            save(draw(part, theme), part["data"], folder / f"performance-{draw.__name__}{theme}.svg")


if __name__ == "__main__":
    main()
