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
        what, sent = event["what"], [result["events"][number]["sent"] for result in results]
        if what == "move":
            if max(sent) >= CONTROL:
                following = next(one for one in events[number:] if one["what"] == "forward")
                of[event["number"]] = following["weight"], following["part"]
                blocks.append(move(event, sent, *of[event["number"]], backward=False))
            continue
        if max(sent) >= CONTROL:
            blocks.append(move(waiting[0][0], sent, *waiting.pop(0)[1], backward=True))
        if what == "ready":
            place = of.get(event["number"]) if "number" in event else (event["weight"], event["part"])
            if event["shape"] and place and place not in [known for _, known in waiting]:
                waiting.append((event, place))
        elif what == "update":
            ranks = sorted({rank for ranks in event["of"] for rank in ranks})
            blocks += [Block("update", None, None, [rank], "state") for rank in ranks]
        else:
            colour = "out" if what == "forward" else "gradient"
            blocks.append(Block(what, event["weight"], event["part"], event["ranks"], colour))
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
    if block.what == "forward" or (block.what == "send" and block.colour == "out"):
        return ("forward", block.layer - 1, block.part)
    layer = (block.layer or 0) + (block.what != "send")
    return ("backward" if block.what == "send" else block.what, layer, block.part)


def placed(blocks, width):
    """Where each block begins, when its ranks are free and its input is there, and ends. width: of a block."""
    free, ends, places = {}, {}, []
    for block in blocks:
        busy = block.ranks if block.what != "send" else []
        start = max([ends.get(needs(block), 0), *(free.get(rank, 0) for rank in busy)])
        if block.what == "update":  # optimizer.step() comes when all gradients are there
            start = max(end for one, (_, end) in zip(blocks, places) if one.what != "update")
        places.append((start, start + width(block)))
        ends[block.what, block.layer, block.part] = places[-1][1]
        free.update(dict.fromkeys(busy, places[-1][1]))
    return places


def idle(blocks, places, rank):
    """The times at which a rank waits: [(start, end)]."""
    own = [place for block, place in zip(blocks, places) if rank in block.ranks and block.what != "send"]
    return [(stop, start) for (_, stop), (start, _) in zip([(0, 0), *own], own) if start > stop]


def picture(text, results, plain, parts=1):
    """The Picture of a step. plain: the results of data parallelism with the same optimizer; parts: micro-batches."""
    drawn, blocks, n = Picture(text), blocks_of(results), len(results)
    rows(drawn, blocks, n, parts)
    drawn.text(LEFT, drawn.down + 13, "time →", fill="quiet")
    drawn.legend(*[(110, "out", "forward"), (180, "gradient", "backward")] * (parts > 1))
    if parts > 1:
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
            drawn.dashed(LEFT + start, row[rank], end - start - 2, tall)
            middle = LEFT + (start + end) / 2 - 1
            drawn.text(middle, row[rank] + tall / 2 + 4, "idle", fill="quiet", anchor="middle")
    for block, (start, end) in zip(blocks, places):
        top, bottom = row[block.ranks[0]], row[block.ranks[-1]] + tall
        x, width = LEFT + start, end - start - 2
        if block.what == "send":
            ends = (bottom, row[block.to[0]]) if block.to[0] > block.ranks[0] else (top, row[block.to[0]] + tall)
            drawn.arrow(*[(x - 3, y) for y in ends], fill=block.colour)
            continue
        for y, height in [(row[rank], tall) for rank in block.ranks] if block.what in wide else [(top, bottom - top)]:
            drawn.tinted(x, y, width, height, block.colour)
            named(drawn, block, x + width / 2, y + height / 2, parts)
    drawn.down = row[-1] + tall + 1


def named(drawn, block, x, y, parts):
    """What stands in a block."""
    if block.what not in WIDE:
        words = block.what if block.layer is None else f"{block.what} w{block.layer}"
        drawn.text(x + 4, y, words, anchor="middle", turned=True)
    elif parts > 1:
        drawn.text(x, y + 4, str(block.part), anchor="middle")
    else:
        drawn.text(x, y - 3, block.what, anchor="middle")
        drawn.text(x, y + 11, f"w{block.layer}", fill="quiet", anchor="middle")


def sent_in_words(blocks):
    """One line for each kind of move: how much a rank sends for each tensor."""
    lines, of = [], {"out": "output", "gradient": "gradient"}
    for what in dict.fromkeys(block.what for block in blocks if block.sent):
        own = [block for block in blocks if block.what == what]
        each = " and ".join(dict.fromkeys(f"each {of.get(block.colour, 'weight')}" for block in own))
        who = "each rank sends " if what != "send" else ""
        lines.append(f"{what}: {who}{max(max(block.sent) for block in own):.2f} × {each}")
    return lines


def keeps(drawn, results, plain):
    """What each rank keeps between two steps, to scale beside what data parallelism keeps."""
    drawn.down += 10
    drawn.heading("kept between two steps, in units of all weights")
    top, left = drawn.down + 14, LEFT
    for kind, colour in KINDS.items():
        drawn.text(left, top, "optimizer state" if kind == "state" else kind, fill=colour)
        for rank, (result, whole) in enumerate(zip(results, plain)):
            own, full = (one["kept"][kind] / one["weights"] for one in (result, whole))
            y = top + 6 + 26 * rank
            if own < full:
                drawn.dashed(left, y, UNIT * full, 20)
            drawn.tinted(left, y, UNIT * own, 20, colour)
            drawn.text(left + 4, y + 14, f"{own:.2f}")
        left += UNIT * plain[0]["kept"][kind] / plain[0]["weights"] + 6
    for rank in range(len(results)):
        drawn.text(0, top + 20 + 26 * rank, f"rank {rank}")
    drawn.down = top + 6 + 26 * len(results)
    if any(result["kept"] != whole["kept"] for result, whole in zip(results, plain)):
        drawn.lines(0, "dashed: what data parallelism keeps")
