"""A parameter server and a ring all-reduce in one picture: who sends to whom, and how much each rank sends in all."""

import numpy as np

from harness.report.svg import WIDTH, Picture

BOX, TALL, UNIT = 62, 24, 80  # pixels: of a rank, of its bar for once the tensor


def flows(results):
    """What each rank sends to another in forward: {(rank, rank): bytes}; and by rank, in backward."""
    there, back = {}, [0] * len(results)
    for number, step in enumerate(results[0]["steps"]):
        sent = [result["steps"][number]["sent"] for result in results]
        if step["what"] == "to_global" and step["inputs"][0]["shape"]:
            [old], [new] = step["inputs"][0]["ranks"], step["outputs"][0]["ranks"]
            if old != new:
                there[old, new] = there.get((old, new), 0) + sent[old]
        elif step["what"] == "backward":
            back = sent
    return there, back


def picture(text, server, ring):
    """The Picture of both. server, ring: what `measure.order.sends` returned on each rank."""
    drawn, ranks = Picture(text), list(range(len(server)))
    there, back = flows(server)
    gradients = next(step for step in server[0]["steps"] if step["what"] == "backward")["outputs"]
    weights = sum(one["item"] * int(np.prod(one["shape"])) for one in gradients)
    drawn.lines(0, "Parameter server", size=12, fill="text", bold=True)
    drawn.down += 6
    top, under = drawn.down, drawn.down + TALL + 44
    drawn.rect(0, top, WIDTH - 1, TALL, stroke="text")
    drawn.text(WIDTH / 2, top + 16, "rank 0: keeps the weights, and updates them", anchor="middle")
    for k, rank in enumerate(ranks[1:]):
        middle = WIDTH * (2 * k + 1) / (2 * len(ranks) - 2)
        drawn.rect(middle - 50, under, 100, TALL, stroke="text")
        drawn.text(middle, under + 16, f"rank {rank}", anchor="middle")
        drawn.arrow((middle - 8, top + TALL + 2), (middle - 8, under - 2), fill="w0", width=2.4)
        drawn.arrow((middle + 8, under - 2), (middle + 8, top + TALL + 2), fill="gradient", width=2.4)
        drawn.text(middle - 16, top + TALL + 26, f"{there[0, rank] / weights:.2f}", fill="w0", anchor="end")
        drawn.text(middle + 16, top + TALL + 26, f"{back[rank] / weights:.2f}", fill="gradient")
    drawn.down = under + TALL + 4
    for x, what, colour in ((0, "weights, forward", "w0"), (130, "gradients, backward", "gradient")):
        drawn.rect(x, drawn.down + 4, 9, 9, colour)
        drawn.text(x + 14, drawn.down + 13, what, fill="quiet")
    drawn.down += 20
    out = [sum(sent for (rank, _), sent in there.items() if rank == one) + back[one] for one in ranks]
    bars(drawn, [one / weights for one in out])

    drawn.down += 16
    drawn.lines(0, "Ring all-reduce", size=12, fill="text", bold=True)
    drawn.down += 6
    [whole] = {step["inputs"][0]["item"] * int(np.prod(step["inputs"][0]["shape"])) for step in ring[0]["steps"]}
    left = [k * (WIDTH - BOX - 1) / (len(ranks) - 1) for k in ranks]
    for rank in ranks:
        drawn.rect(left[rank], drawn.down, BOX, TALL, stroke="text")
        drawn.text(left[rank] + BOX / 2, drawn.down + 16, f"rank {rank}", anchor="middle")
        [(to, sent)] = ring[rank]["to"].items()
        amount, y = f"{sent / whole:.2f}", drawn.down + TALL / 2
        if to == rank + 1:
            drawn.arrow((left[rank] + BOX + 2, y), (left[to] - 2, y), fill="gradient", width=2.4)
            drawn.text((left[rank] + BOX + left[to]) / 2, y - 6, amount, fill="gradient", anchor="middle")
        else:
            points = [(left[rank] + BOX / 2, y + TALL / 2 + 2), (left[rank] + BOX / 2, y + 30)]
            points += [(left[to] + BOX / 2, y + 30), (left[to] + BOX / 2, y + TALL / 2 + 2)]
            drawn.arrow(*points, fill="gradient", width=2.4)
            drawn.text(WIDTH / 2, y + 26, amount, fill="gradient", anchor="middle")
    drawn.down += TALL + 34
    bars(drawn, [result["outside"] / whole for result in ring])
    drawn.down += 4
    drawn.lines(
        0, "measured, in units of the weights or of their gradient; rank 0 of the server also trains on its rows"
    )
    return drawn


def bars(drawn, units):
    """What each rank sends in all, to one scale."""
    for rank, amount in enumerate(units):
        end = UNIT * amount  # with two decimals, as all that is measured
        drawn.text(0, drawn.down + 12, f"rank {rank} sends")
        drawn.rect(80, drawn.down + 2, f"{end:.2f}", 12, "move")
        drawn.text(f"{84 + end:.2f}", drawn.down + 12, f"{amount:.2f}", bold=True)
        drawn.down += 18
