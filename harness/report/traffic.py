"""A parameter server and a ring all-reduce in one picture: who sends to whom, and how much each rank sends in all."""

from harness.measure.steps import bytes_of
from harness.report.svg import WIDTH, Picture

BOX, TALL, UNIT = 62, 24, 80  # pixels: of a rank, of its bar for once the tensor


def picture(text, server, ring):
    """The Picture of both. server, ring: what `measure.order.sends` returned on each rank."""
    drawn = Picture(text)
    drawn.heading("Parameter server")
    draw_server(drawn, server)
    drawn.down += 16
    drawn.heading("Ring all-reduce")
    draw_ring(drawn, ring)
    drawn.down += 4
    drawn.lines(
        0, "measured, in units of the weights or of their gradient; rank 0 of the server also trains on its rows"
    )
    return drawn


def draw_server(drawn, results):
    there, back, gradients = {}, [], []  # (rank, rank) -> bytes in forward; bytes in backward by rank
    for number, step in enumerate(results[0]["steps"]):
        sent = [result["steps"][number]["sent"] for result in results]
        if step["what"] == "backward":
            back, gradients = sent, step["outputs"]
        elif step["what"] == "to_global" and step["inputs"][0]["shape"]:
            [old], [new] = step["inputs"][0]["ranks"], step["outputs"][0]["ranks"]
            if old != new:
                there[old, new] = there.get((old, new), 0) + sent[old]
    weights = sum(map(bytes_of, gradients))
    top, under = drawn.down + 6, drawn.down + 6 + TALL + 44
    box(drawn, 0, top, WIDTH - 1, "rank 0: keeps the weights, and updates them")
    for k, rank in enumerate(range(1, len(results))):
        middle = WIDTH * (2 * k + 1) / (2 * len(results) - 2)
        box(drawn, middle - 50, under, 100, f"rank {rank}")
        drawn.arrow((middle - 8, top + TALL + 2), (middle - 8, under - 2), fill="w0", width=2.4)
        drawn.arrow((middle + 8, under - 2), (middle + 8, top + TALL + 2), fill="gradient", width=2.4)
        drawn.text(middle - 16, top + TALL + 26, f"{there[0, rank] / weights:.2f}", fill="w0", anchor="end")
        drawn.text(middle + 16, top + TALL + 26, f"{back[rank] / weights:.2f}", fill="gradient")
    drawn.down = under + TALL + 4
    drawn.legend((0, "w0", "weights, forward"), (130, "gradient", "gradients, backward"))
    for rank, sent in enumerate(back):
        bar(drawn, rank, (sent + sum(there.get((rank, to), 0) for to in range(len(results)))) / weights)


def draw_ring(drawn, results):
    [whole] = {bytes_of(step["inputs"][0]) for step in results[0]["steps"]}
    left = [rank * (WIDTH - BOX - 1) / (len(results) - 1) for rank in range(len(results))]
    top = drawn.down + 6
    for rank, result in enumerate(results):
        box(drawn, left[rank], top, BOX, f"rank {rank}")
        [(to, sent)] = result["to"].items()
        if to == rank + 1:
            y, x = top + TALL / 2, (left[rank] + BOX + left[to]) / 2
            points = [(left[rank] + BOX + 2, y), (left[to] - 2, y)]
        else:
            start, end, y, x = left[rank] + BOX / 2, left[to] + BOX / 2, top + TALL + 18, WIDTH / 2
            points = [(start, top + TALL + 2), (start, y), (end, y), (end, top + TALL + 2)]
        drawn.arrow(*points, fill="gradient", width=2.4)
        drawn.text(x, y - 5, f"{sent / whole:.2f}", fill="gradient", anchor="middle")
    drawn.down = top + TALL + 34
    for rank, result in enumerate(results):
        bar(drawn, rank, result["outside"] / whole)


def box(drawn, x, y, width, words):
    drawn.rect(x, y, width, TALL, stroke="text")
    drawn.text(x + width / 2, y + 16, words, anchor="middle")


def bar(drawn, rank, amount):
    """What a rank sends in all, to one scale, with two decimals as all that is measured."""
    end = UNIT * amount
    drawn.text(0, drawn.down + 12, f"rank {rank} sends")
    drawn.rect(80, drawn.down + 2, f"{end:.2f}", 12, "move")
    drawn.text(f"{84 + end:.2f}", drawn.down + 12, f"{amount:.2f}", bold=True)
    drawn.down += 18
