"""The plots of docs/performance-details.md, by matplotlib in the environment of the peers: plots.py FOUND.json FOLDER.

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


def scaling(axis, rows, data, cores):
    kind, strategy, ranks = rows[0]["kind"], rows[0]["strategy"], [row["ranks"] for row in rows]
    draw_times(axis, ranks, rows)
    first = 1e3 * rows[0]["seconds"]["eager"]
    ideal = [first * (1 / min(n, cores) if kind == "strong" else max(1, n / cores)) for n in ranks]
    axis.plot(ranks, ideal, **{**STYLES["ideal"], "label": f"ideal on {cores} cores"})
    axis.set(title=f"{kind}: {strategy}", xlabel="ranks, each on one core", xticks=ranks, ylim=(0, None))


def sizes(axis, rows, data, cores):
    strategy, ranks, hidden_sizes = rows[0]["strategy"], rows[0]["ranks"], [row["hidden_size"] for row in rows]
    draw_times(axis, hidden_sizes, rows)
    times = [1e3 * formulas.step_time(strategy, ranks, one, data["per_rank"], cores) for one in formulas.FINE]
    axis.plot(formulas.FINE, times, **STYLES["formula"])
    for where in (where for *both, where in formulas.crossings(data, cores) if strategy in both):
        for kind in (kind for kind in ("formula", "eager") if where[kind]):
            axis.axvline(where[kind], color=STYLES[kind]["color"], linewidth=0.8, linestyle=":")
    axis.set(title=f"{strategy}, {ranks} ranks", xlabel="hidden size", xscale="log", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(hidden_sizes, [str(one) for one in hidden_sizes])
    axis.minorticks_off()


def collectives(axis, rows, data, cores):
    for side in ("ours", "gloo"):
        rates = [row["sends"] / row["seconds"][side] / 1e9 for row in rows]
        axis.plot([row["bytes"] for row in rows], rates, **STYLES[side])
    copies = [(row["bytes"], row["bytes"] / row["seconds"] / 1e9) for row in data["copies"]]
    axis.plot(*zip(*copies), **STYLES["copy"])
    title = f"{rows[0]['collective']}, {rows[0]['ranks']} ranks"
    axis.set(title=title, xscale="log", yscale="log", xlabel="bytes of the tensor", ylabel="GB/s that a rank sends")
    axis.xaxis.set_major_formatter(EngFormatter())
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def draw_times(axis, xs, rows):
    for side in ("eager", "PyTorch"):
        axis.plot(xs, [1e3 * row["seconds"][side] for row in rows], **STYLES[side])
    axis.set_ylabel("ms a step")


# What draws an axis -> which of the part's rows it takes, and what the rows of one axis have in common.
PLOTS = {
    scaling: (lambda data: data, ("kind", "strategy")),
    sizes: (lambda data: data["steps"], ("strategy", "ranks")),
    collectives: (lambda data: data["moves"], ("collective", "ranks")),
}


def use(theme):
    """Take the colours of a theme for what is drawn next."""
    letters, own = THEMES[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    matplotlib.rcParams.update(dict.fromkeys(names, letters))
    for name in ("eager", "ours"):
        STYLES[name]["color"] = own
    for name in ("formula", "ideal", "copy"):
        STYLES[name]["color"] = letters


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
                bars, (0.7 - stage, 0.6), color=THEMES[theme][1], edgecolor=THEMES[theme][0], linewidth=0.4
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
    for draw, (rows, names) in PLOTS.items():
        part = newest(found.get(draw.__name__, {}))
        for theme in THEMES if part else ():
            use(theme)
            groups = formulas.grouped(rows(part["data"]), *names).values()
            size = (WIDTH, HEIGHT * len(groups))
            figure, axes = plt.subplots(len(groups), 1, figsize=size, layout="constrained")  # one below the other
            for axis, group in zip(axes, groups):
                draw(axis, group, part["data"], part["machine"]["cores"])
            axes[0].legend()
            save(figure, part["data"], folder / f"performance-{draw.__name__}{theme}.svg")
    part = newest(found.get("timeline", {}))
    for theme in THEMES if part else ():
        use(theme)
        save(timeline(part, theme), part["data"], folder / f"performance-timeline{theme}.svg")


if __name__ == "__main__":
    main()
