"""Draw a real step under 1F1B and under zero bubble, by the clock of each rank: docs/pictures/pipeline_schedules.svg.

    ./launch.sh bench schedules

Called by bench.py. The lesson is in recipes/pipelines/pipeline_schedules.py; each rank needs a core of its own.
"""

import statistics
from pathlib import Path

from benchmarks import svg
from harness.pool import Pool
from harness.start.recipe import path_of

HERE = Path(__file__).resolve().parent
PICTURES = HERE.parent / "docs" / "pictures"
CLOCKS = f"{HERE / 'ours.py'}:clocks"
RANKS, MICRO_BATCHES, ROWS, FEATURES = 2, 6, 256, 1024
TURNS = 9
NAMES = {"1f1b": "1F1B", "zero_bubble": "zero bubble"}
COLOURS = {"F": "x", "B": "w", "I": "w", "W": "out"}
ROW, LEFT = 26, 46  # pixels: height of a row, width of its name
TITLE = "Pipeline schedules: one step on {ranks} ranks, measured."
LEGEND = {
    "F": "forward",
    "B": "backward (zero bubble: gradient of the input)",
    "W": "gradient of the weights (zero bubble only)",
}


def measured():
    """{schedule: [[(operation, micro-batch, begin, end)] of each rank]}: of several steps the one of median length."""
    calls = {}
    with Pool(RANKS, timeout=300) as pool:
        for schedule in NAMES:
            sizes = {"rows": ROWS, "features": FEATURES, "micro_batches": MICRO_BATCHES, "steps": TURNS}
            by_rank = pool.call(CLOCKS, path=str(path_of("pipeline_schedules")), schedule=schedule, **sizes)
            steps = list(zip(*by_rank))
            middle = statistics.median_low([length(step) for step in steps])
            calls[schedule] = next(step for step in steps if length(step) == middle)
    return calls


def length(step):
    return max(end for calls in step for *_, end in calls)


def idle(step):
    """The share of the step in which ranks do not compute."""
    busy = sum(end - begin for calls in step for *_, begin, end in calls)
    return 1 - busy / len(step) / length(step)


def picture(steps):
    drawn = svg.Picture(TITLE.format(ranks=RANKS))
    scale = (svg.WIDTH - LEFT - 2) / max(map(length, steps.values()))
    for schedule, step in steps.items():
        words = f"{NAMES[schedule]}: {1000 * length(step):.0f} ms, idle {idle(step):.0%}"
        drawn.lines(0, words, size=12, fill="text", bold=True)
        drawn.down += 4
        for rank, calls in enumerate(step):
            drawn.text(0, drawn.down + 17, f"rank {rank}")
            for op, micro_batch, begin, end in calls:
                x, width = LEFT + scale * begin, scale * (end - begin)
                drawn.rect(x, drawn.down, width, ROW - 4, stroke=COLOURS[op], stroke_width=1.4)
                if width >= 8:
                    drawn.text(x + width / 2, drawn.down + 15, str(micro_batch), fill=COLOURS[op], anchor="middle")
            drawn.down += ROW
        drawn.down += 8
    for op, words in LEGEND.items():
        drawn.lines(0, words, fill=COLOURS[op])
    drawn.lines(0, "numbers: micro-batches; in a gap a rank waits or sends")
    return drawn


def write():
    drawn = picture(measured())
    for theme in svg.THEMES:
        (PICTURES / f"pipeline_schedules{theme}.svg").write_text(drawn.svg(theme))
