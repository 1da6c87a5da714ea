"""A training step as a picture: for each rank what it does in order, and below it what it keeps between two steps."""

from dataclasses import dataclass
from typing import Optional

import numpy as np

from harness.measure import theory
from harness.measure.sbp import Layout
from harness.report.svg import Picture

CONTROL = 10_000  # bytes below which an event sent nothing but OneFlow's own messages
LEFT, COLUMN = 46, 18  # pixels: of a rank's name, of a collective or the update
WIDE, NARROW = {"forward": 42, "backward": 54}, {"forward": 24, "backward": 34}
OVERLAP = (
    "order and bytes: of an eager run; drawn with the overlap of a graph: a block begins when its rank is free and its "
    "input is there"
)
KINDS = {"weights": "w0", "gradients": "gradient", "state": "state"}
UNIT = 74  # pixels of all weights, among what a rank keeps


@dataclass
class Block:
    """A part of a step. sent: what each rank sends in it, in units of what moves."""

    what: str  # "forward", "backward", "update" or the name of a collective
    layer: Optional[int]
    part: Optional[int]
    ranks: list
    colour: str
    sent: Optional[list] = None
    to: Optional[list] = None  # the ranks that a send goes to


def blocks_of(results):
    """The Blocks of a step in order, from what `order.order` returned on each rank."""
    blocks, waiting, of = [], [], {}  # of: the number of a move -> the layer and the part of the matmul that it is for
    events = results[0]["events"]
    for number, event in enumerate(events):
        sent = [result["events"][number]["sent"] for result in results]
        if event["what"] == "move":
            if max(sent) >= CONTROL:
                following = next(one for one in events[number:] if one["what"] == "forward")
                of[event["number"]] = following["weight"], following["part"]
                blocks.append(move(event, sent, *of[event["number"]], backward=False))
            continue
        if max(sent) >= CONTROL:
            one, layer, part = waiting.pop(0)
            blocks.append(move(one, sent, layer, part, backward=True))
        if event["what"] == "ready":
            layer, part = of.get(event["number"], (None, 0)) if "number" in event else (event["weight"], event["part"])
            if event["shape"] and (layer, part) not in [tuple(own) for _, *own in waiting] and layer is not None:
                waiting.append((event, layer, part))
        elif event["what"] == "update":
            ranks = sorted({rank for ranks in event["of"] for rank in ranks})
            blocks += [Block("update", None, None, [rank], "state") for rank in ranks]
        else:
            colour = "out" if event["what"] == "forward" else "gradient"
            blocks.append(Block(event["what"], event["weight"], event["part"], event["ranks"], colour))
    assert not waiting, f"gradients that never went on: {waiting}"
    return blocks


def move(event, sent, layer, part, backward):
    old, new = Layout(*event["old"]), Layout(*event["new"])
    units = [one / (4 * np.prod(event["shape"])) for one in sent]
    if old.ranks == new.ranks:
        colour = "gradient" if backward else f"w{layer}"
        return Block(theory.collective(old, new), layer, part, old.members, colour, units)
    return Block("send", layer, part, old.members, "gradient" if backward else "out", units, new.members)


def needs(block):
    """The (kind, layer, part) of the block that makes the input of another."""
    if block.what == "send":
        return (
            ("forward", block.layer - 1, block.part) if block.colour == "out" else ("backward", block.layer, block.part)
        )
    return (block.what, (block.layer or 0) + {"forward": -1}.get(block.what, 1), block.part)


def placed(blocks, width):
    """Where each block begins, when its ranks are free and its input is there, and ends. width: of a block."""
    free, ends, places = {}, {}, []
    for block in blocks:
        start = max([ends.get(needs(block), 0), *(free.get(rank, 0) for rank in block.ranks if block.what != "send")])
        if block.what == "update":  # optimizer.step() comes when all gradients are there
            start = max(end for one, (_, end) in zip(blocks, places) if one.what != "update")
        places.append((start, start + width(block)))
        ends[block.what, block.layer, block.part] = places[-1][1]
        free.update(dict.fromkeys(block.ranks if block.what != "send" else [], places[-1][1]))
    return places


def idle(blocks, places, rank):
    """The times at which a rank waits: [(start, end)]."""
    own = [place for block, place in zip(blocks, places) if rank in block.ranks and block.what != "send"]
    return [(stop, start) for (_, stop), (start, _) in zip([(0, 0), *own], own) if start > stop]


def picture(text, results, plain, parts=1):
    """The Picture of a step. plain: the results of data parallelism with the same optimizer; parts: micro-batches."""
    drawn, blocks, n = Picture(text), blocks_of(results), len(results)
    rows(drawn, blocks, n, parts)
    drawn.text(LEFT, drawn.down, "time →", fill="quiet")
    drawn.down += 6
    if parts > 1:
        for x, what, colour in ((110, "forward", "out"), (180, "backward", "gradient")):
            tinted(drawn, x, drawn.down - 15, 9, 9, colour)
            drawn.text(x + 13, drawn.down - 6, what, fill="quiet")
        drawn.lines(0, f"0 to {parts - 1}: the micro-batch; arrows: sends")
        share = (n - 1) / (parts + n - 1)
        drawn.lines(0, f"idle: (n-1)/(m+n-1) = {share:.0%} with n = {n}, m = {parts}")
        drawn.down += 4
    for line in sent_in_words(blocks):
        drawn.lines(0, line, fill="move")
    keeps(drawn, results, plain)
    drawn.down += 4
    drawn.lines(0, "order and bytes: of a run; widths: not to scale" if parts == 1 else OVERLAP)
    return drawn


def rows(drawn, blocks, n, parts):
    """A row of blocks for each of n ranks; a collective is one block of all of them."""
    wide, tall, gap = (WIDE, 56, 8) if parts == 1 else (NARROW, 44, 22)
    places = placed(blocks, lambda block: 0 if block.what == "send" else wide.get(block.what, COLUMN))
    row = [drawn.down + 4 + rank * (tall + gap) for rank in range(n)]
    for rank in range(n):
        drawn.text(0, row[rank] + tall / 2 + 4, f"rank {rank}")
        for start, end in idle(blocks, places, rank):
            drawn.rect(LEFT + start, row[rank], end - start - 2, tall, stroke="quiet", stroke_dasharray="2 2")
            middle = LEFT + (start + end) / 2 - 1
            drawn.text(middle, row[rank] + tall / 2 + 4, "idle", fill="quiet", anchor="middle")
    for block, (start, end) in zip(blocks, places):
        top, bottom = row[block.ranks[0]], row[block.ranks[-1]] + tall
        x, width, middle = LEFT + start, end - start - 2, LEFT + (start + end) / 2 - 1
        if block.what == "send":
            ends = (bottom, row[block.to[0]]) if block.to[0] > block.ranks[0] else (top, row[block.to[0]] + tall)
            drawn.arrow(*[(x - 3, y) for y in ends], fill=block.colour)
        elif block.what in wide or block.what == "update":
            for rank in block.ranks:
                tinted(drawn, x, row[rank], width, tall, block.colour)
                named(drawn, block, middle, row[rank] + tall / 2, parts)
        else:
            tinted(drawn, x, top, width, bottom - top, block.colour)
            words = f"{block.what} w{block.layer}"
            drawn.text(middle + 4, (top + bottom) / 2, words, anchor="middle", turned=True)
    drawn.down = row[-1] + tall + 14


def named(drawn, block, x, y, parts):
    """What stands in a block of one rank."""
    if block.what == "update":
        drawn.text(x + 4, y, block.what, anchor="middle", turned=True)
    elif parts > 1:
        drawn.text(x, y + 4, str(block.part), anchor="middle")
    else:
        drawn.text(x, y - 3, block.what, anchor="middle")
        drawn.text(x, y + 11, f"w{block.layer}", fill="quiet", anchor="middle")


def tinted(drawn, x, y, width, height, colour):
    drawn.rect(x, y, width, height, colour, fill_opacity="0.3", stroke=colour)


def sent_in_words(blocks):
    """One line for each kind of move: how much a rank sends for each tensor."""
    lines = []
    for what in dict.fromkeys(block.what for block in blocks if block.sent):
        own = [block for block in blocks if block.what == what]
        of = {"out": "output", "gradient": "gradient"}
        each = " and ".join(dict.fromkeys(f"each {of.get(block.colour, 'weight')}" for block in own))
        amount = f"{max(max(block.sent) for block in own):.2f}"
        lines.append(f"{what}: {'each rank sends ' if what != 'send' else ''}{amount} × {each}")
    return lines


def keeps(drawn, results, plain):
    """What each rank keeps between two steps, to scale beside what data parallelism keeps."""
    drawn.down += 10
    drawn.lines(0, "kept between two steps, in units of all weights", size=12, fill="text", bold=True)
    whole = [one["kept"] for one in plain]
    left = {}
    x = LEFT
    for kind in KINDS:
        left[kind] = x
        x += UNIT * whole[0][kind] / plain[0]["weights"] + 6
    drawn.down += 14
    for kind in KINDS:
        words = {"state": "optimizer state"}.get(kind, kind)
        drawn.text(left[kind], drawn.down, words, fill=KINDS[kind])
    drawn.down += 6
    for rank, result in enumerate(results):
        drawn.text(0, drawn.down + 14, f"rank {rank}")
        for kind, colour in KINDS.items():
            own, full = result["kept"][kind] / result["weights"], whole[rank][kind] / plain[0]["weights"]
            if own < full:
                drawn.rect(left[kind], drawn.down, UNIT * full, 20, stroke="quiet", stroke_dasharray="2 2")
            tinted(drawn, left[kind], drawn.down, UNIT * own, 20, colour)
            drawn.text(left[kind] + 4, drawn.down + 14, f"{own:.2f}")
        drawn.down += 26
    if any(result["kept"] != whole[rank] for rank, result in enumerate(results)):
        drawn.lines(0, "dashed: what data parallelism keeps")
