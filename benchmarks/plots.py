"""The plots of docs/performance.md, by matplotlib in the environment of the peers: plots.py FOUND.json FOLDER."""

import hashlib
import json
import sys
from pathlib import Path

import formulas
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "cookbook", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
)

import matplotlib.pyplot as plt  # noqa: E402

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
    ways = list(dict.fromkeys((row["kind"], row["strategy"]) for row in rows))
    figure, axes = plt.subplots(1, len(ways), figsize=(3 * len(ways), 3), layout="constrained")
    for axis, (kind, strategy) in zip(axes, ways):
        own = [row for row in rows if (row["kind"], row["strategy"]) == (kind, strategy)]
        ranks = [row["ranks"] for row in own]
        for side in ("eager", "PyTorch"):
            axis.plot(ranks, [1e3 * row["seconds"][side] for row in own], **STYLES[side])
        first = 1e3 * own[0]["seconds"]["eager"]
        ideal = [first * (1 / min(n, cores) if kind == "strong" else max(1, n / cores)) for n in ranks]
        axis.plot(ranks, ideal, **{**STYLES["ideal"], "label": f"ideal on {cores} cores"})
        axis.set(title=f"{kind}: {strategy}", xlabel="ranks, each on one core", xticks=ranks, ylim=(0, None))
    axes[0].set_ylabel("ms a step")
    axes[0].legend()
    return figure


def sizes(data, cores):
    strategies = list(dict.fromkeys((row["strategy"], row["ranks"]) for row in data["steps"]))
    figure, axes = plt.subplots(
        1, len(strategies), figsize=(3 * len(strategies), 3.2), layout="constrained", sharey=True
    )
    crossed = formulas.crossings(data, cores)
    for axis, (strategy, ranks) in zip(axes, strategies):
        rows = [row for row in data["steps"] if row["strategy"] == strategy]
        hidden = [row["hidden"] for row in rows]
        for side in ("eager", "PyTorch"):
            axis.plot(hidden, [1e3 * row["seconds"][side] for row in rows], **STYLES[side])
        fine = formulas.fine()
        times = [1e3 * formulas.step_time(strategy, ranks, one, data["per_rank"], cores) for one in fine]
        axis.plot(fine, times, **STYLES["formula"])
        for one, other, where in crossed:
            for kind, height in (("formula", 0.5), ("eager", 0.02)):
                if strategy in (one, other) and where[kind]:
                    axis.axvline(where[kind], color=STYLES[kind]["color"], linewidth=0.8, linestyle=":")
                    words = f" = {other if strategy == one else one} ({kind})"
                    place = {"rotation": 90, "fontsize": 6, "transform": axis.get_xaxis_transform()}
                    axis.text(where[kind], height, words, **place)
        axis.set(title=f"{strategy}, {ranks} ranks", xlabel="hidden size", xscale="log", yscale="log")
        axis.set_xticks(hidden, [str(one) for one in hidden])
        axis.minorticks_off()
    axes[0].set_ylabel("ms a step")
    axes[0].legend()
    return figure


def collectives(data, _):
    names, all_ranks = (list(dict.fromkeys(row[key] for row in data["moves"])) for key in ("collective", "ranks"))
    shape = (len(all_ranks), len(names))
    figure, axes = plt.subplots(
        *shape, figsize=(3 * shape[1], 2.6 * shape[0]), layout="constrained", sharex=True, sharey=True
    )
    for line, ranks in zip(axes, all_ranks):
        for axis, name in zip(line, names):
            rows = [row for row in data["moves"] if (row["collective"], row["ranks"]) == (name, ranks)]
            for side in ("ours", "gloo"):
                rates = [row["sends"] / row["seconds"][side] / 1e9 for row in rows]
                axis.plot([row["bytes"] for row in rows], rates, **STYLES[side])
            copies = [(row["bytes"], row["bytes"] / row["seconds"] / 1e9) for row in data["copies"]]
            axis.plot(*zip(*copies), **STYLES["copy"])
            axis.set(title=f"{name}, {ranks} ranks", xscale="log", yscale="log")
            axis.minorticks_off()
        line[0].set_ylabel("GB/s that a rank sends")
    for axis in axes[-1]:
        axis.set_xlabel("bytes of the tensor")
    axes[0][0].legend()
    return figure


def main():
    found, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for plot in (scaling, sizes, collectives):
        part = found.get(plot.__name__)
        if part:
            figure = plot(part["data"], part["machine"]["cores"])
            mark = hashlib.sha256(json.dumps(part["data"], sort_keys=True).encode()).hexdigest()
            metadata = {"Description": mark, "Date": None, "Creator": None}
            figure.savefig(folder / f"performance-{plot.__name__}.svg", metadata=metadata)


if __name__ == "__main__":
    main()
