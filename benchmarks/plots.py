"""The plots of docs/performance.md, by matplotlib in the environment of the peers: plots.py FOUND.json FOLDER.

One axis below the other, as wide as a phone shows a picture, for light and for dark pages.
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

WIDTH, HEIGHT = 358 / 72, 2.9  # inches; an SVG has 72 px an inch
THEMES = {"": ("#1f2328", "C0"), "-dark": ("#e6edf3", "#79b8ff")}  # letters and lines; our own line
STYLES = {
    "eager": {"color": "C0", "marker": "o", "label": "OneFlow, eager"},
    "ours": {"color": "C0", "marker": "o", "label": "OneFlow, eager"},
    "PyTorch": {"color": "C1", "marker": "s", "label": "PyTorch"},
    "gloo": {"color": "C1", "marker": "s", "label": "gloo"},
    "formula": {"color": "black", "linestyle": "--", "label": "formula"},
    "ideal": {"color": "black", "linestyle": "--", "label": "ideal"},
    "copy": {"color": "black", "linestyle": ":", "label": "copy in memory"},
}


def scaling(rows, cores):
    ways = formulas.grouped(rows, "kind", "strategy")
    figure, axes = stacked(ways)
    for axis, ((kind, strategy), own) in zip(axes, ways.items()):
        ranks = [row["ranks"] for row in own]
        draw_times(axis, ranks, own)
        first = 1e3 * own[0]["seconds"]["eager"]
        ideal = [first * (1 / min(n, cores) if kind == "strong" else max(1, n / cores)) for n in ranks]
        axis.plot(ranks, ideal, **{**STYLES["ideal"], "label": f"ideal on {cores} cores"})
        axis.set(title=f"{kind}: {strategy}", xlabel="ranks, each on one core", xticks=ranks, ylim=(0, None))
    axes[0].legend()
    return figure


def sizes(data, cores):
    ways = formulas.grouped(data["steps"], "strategy", "ranks")
    figure, axes = stacked(ways)
    crossed = formulas.crossings(data, cores)
    for axis, ((strategy, ranks), rows) in zip(axes, ways.items()):
        hidden = [row["hidden"] for row in rows]
        draw_times(axis, hidden, rows)
        times = [1e3 * formulas.step_time(strategy, ranks, one, data["per_rank"], cores) for one in formulas.FINE]
        axis.plot(formulas.FINE, times, **STYLES["formula"])
        for where in (where for *both, where in crossed if strategy in both):
            for kind in (kind for kind in ("formula", "eager") if where[kind]):
                axis.axvline(where[kind], color=STYLES[kind]["color"], linewidth=0.8, linestyle=":")
        axis.set(title=f"{strategy}, {ranks} ranks", xlabel="hidden size", xscale="log", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(hidden, [str(one) for one in hidden])
        axis.minorticks_off()
    axes[0].legend()
    return figure


def collectives(data, _):
    ways = formulas.grouped(data["moves"], "collective", "ranks")
    figure, axes = stacked(ways)
    for axis, ((name, ranks), rows) in zip(axes, ways.items()):
        for side in ("ours", "gloo"):
            rates = [row["sends"] / row["seconds"][side] / 1e9 for row in rows]
            axis.plot([row["bytes"] for row in rows], rates, **STYLES[side])
        copies = [(row["bytes"], row["bytes"] / row["seconds"] / 1e9) for row in data["copies"]]
        axis.plot(*zip(*copies), **STYLES["copy"])
        axis.set(title=f"{name}, {ranks} ranks", xscale="log", yscale="log", xlabel="bytes of the tensor")
        axis.set_ylabel("GB/s that a rank sends")
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    axes[0].legend()
    return figure


def stacked(ways):
    """A figure and its axes, one below the other."""
    return plt.subplots(len(ways), 1, figsize=(WIDTH, HEIGHT * len(ways)), layout="constrained")


def draw_times(axis, xs, rows):
    for side in ("eager", "PyTorch"):
        axis.plot(xs, [1e3 * row["seconds"][side] for row in rows], **STYLES[side])
    axis.set_ylabel("ms a step")


def use(theme):
    """Take the colours of a theme for what is drawn next."""
    letters, own = THEMES[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    matplotlib.rcParams.update(dict.fromkeys(names, letters))
    for name in ("eager", "ours"):
        STYLES[name]["color"] = own
    for name in ("formula", "ideal", "copy"):
        STYLES[name]["color"] = letters


def main():
    found, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for plot in (scaling, sizes, collectives):
        part = found.get(plot.__name__)
        for theme in THEMES if part else ():
            use(theme)
            figure = plot(part["data"], part["machine"]["cores"])
            mark = hashlib.sha256(json.dumps(part["data"], sort_keys=True).encode()).hexdigest()
            metadata = {"Description": mark, "Date": None, "Creator": None}
            figure.savefig(folder / f"performance-{plot.__name__}{theme}.svg", metadata=metadata)
            plt.close(figure)


if __name__ == "__main__":
    main()
