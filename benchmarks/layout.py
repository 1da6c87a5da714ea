"""Tables and words that the pages of bench share."""

import re
import textwrap

from harness.report.tables import table

SIDES = ("eager", "graph", "PyTorch", "JAX")


def ms(seconds):
    """Seconds in milliseconds, three digits."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def percent(share):
    return f"{100 * share:.0f} %"


def filled(text):
    """The same text with its paragraphs filled, so that numbers of any length fit in."""
    blocks = re.split(r"\n{2,}", text.strip())
    return "\n\n".join(
        block if block[0] in "|!#<-" else textwrap.fill(block, 120, break_on_hyphens=False) for block in blocks
    )


def name_of(cpu):
    """A CPU's name without what only lawyers read."""
    return re.sub(r"\(R\)|\(TM\)| Processor", "", cpu)


def by_cpu(header, records, rows, keys=1):
    """A table of what `rows` makes of each CPU's data. Rows with the same first `keys` cells stand together.

    A column names the CPU, if there are several.
    """
    tables = {cpu: {tuple(row[:keys]): row[keys:] for row in rows(record["data"])} for cpu, record in records.items()}
    if len(tables) == 1:
        [only] = tables.values()
        return table(header, [[*key, *rest] for key, rest in only.items()])
    every = dict.fromkeys(key for found in tables.values() for key in found)
    lines = [[*key, name_of(cpu), *found[key]] for key in every for cpu, found in tables.items() if key in found]
    return table([*header[:keys], "CPU", *header[keys:]], lines)


def each(records, sentence):
    """A sentence for each CPU, in which {cpu} is its name."""
    return "\n\n".join(sentence(record["data"], name_of(cpu)) for cpu, record in records.items())


def with_ranks(row):
    return f"{row['strategy']}, {row['ranks']} ranks" if row["ranks"] > 1 else row["strategy"]


def ratios_to_peers(records):
    """The table of the faster mode's time over each peer's."""

    def rows(data):
        for row in data:
            ratios = [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "–" for peer in SIDES[2:]]
            yield [with_ranks(row), *ratios, row["best"]]

    return by_cpu(["strategy", "/ PyTorch", "/ JAX", "faster mode"], records, rows)


def times(records):
    """The table of steps in milliseconds."""

    def rows(data):
        for row in data:
            yield [with_ranks(row), *(ms(row["seconds"][side]) if side in row["seconds"] else "–" for side in SIDES)]

    return by_cpu(["strategy", *SIDES], records, rows)


def plot(name, words):
    """A plot, light or dark as the page is."""
    path = f"pictures/performance-{name}"
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
    return f'<picture>\n{dark}\n<img align="top" alt="{words}" src="{path}.svg">\n</picture>'


def left_out(parts):
    """What a page says of parts without figures."""
    commands = ", ".join(f"`./launch.sh bench {name}`" for name in parts)
    return f"The code has changed since these parts were measured, so the page leaves them out: {commands}."


def when(found):
    """The table of what was measured when, on which CPU."""
    lines = [
        [f"`./launch.sh bench {name}`", record["date"], name_of(cpu), record["commit"], record["minutes"]]
        for name, records in found.items()
        for cpu, record in records.items()
    ]
    return table(["part", "date", "CPU", "commit", "minutes"], lines)
