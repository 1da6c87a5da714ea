"""The chapter of data: how it is loaded, measured, normalised and drawn at random when the ranks share it."""

from pydoc_data.topics import topics

import numpy as np

from tests.case import Case
from tests.reference import Value


def letters(*shape):
    """The codes of the first letters of the help texts that come with Python."""
    text = "".join(topics.values())
    count = int(np.prod(shape))
    return np.array([ord(text[i % len(text)]) for i in range(count)], dtype=np.float64).reshape(shape)


def shards(seen, name):
    """The ranks' shards of a tensor."""
    return [tensors[name]["shard"] for tensors in seen]


def data_loading(n, seed=0, samples=24, batch=4, width=16):
    ranks, per_rank = list(range(n)), -(-samples // n)
    batches = -(-per_rank // batch)
    rows = n * (per_rank - (batches - 1) * batch)  # of the last batch
    shapes = {
        "order 0": (n * per_rank, 1),
        "order 1": (n * per_rank, 1),
        "numbers": (rows, 1),
        "letters": (rows, width),
    }
    text = letters(samples, width)
    one_reading = np.arange(samples, dtype=np.float64)[:, None]

    def every_sample_once(seen):
        for epoch in (0, 1):
            order = np.stack(
                shards(seen, f"order {epoch}"), axis=1
            ).ravel()  # as the sampler deals: one to each in turn
            again = [order[i % samples] for i in range(samples, order.size)]
            if sorted(order[:samples]) != list(range(samples)) or list(order[samples:]) != again:
                return False
        return True

    def fed_to_each(seen):
        return all(
            (tensors["mine"]["value"] == tensors["order 1"]["shard"]).all()
            and (tensors["numbers"]["shard"] == tensors["mine"]["value"][(batches - 1) * batch :]).all()
            for tensors in seen
        )

    def letters_of_numbers(seen):
        return all((t["letters"]["value"] == text[t["numbers"]["value"][:, 0].astype(int)]).all() for t in seen)

    return Case(
        {
            "text": ("local", []),
            **{name: ("S(0)", ranks) for name in shapes},
            "mine": ("local", []),
            "doubled": ("S(0)", ranks),
        },
        {
            "text": Value.known(text),
            **{name: Value.unknown(*shape) for name, shape in shapes.items()},
            "mine": Value.unknown(per_rank, 1),
            "doubled": Value.known(np.concatenate([one_reading] * n)),
        },
        moves=[(("local", []), ("S(0)", ranks))] * (2 * (2 * batches + 1) + 1),
        claims={
            "an epoch feeds every sample once, then the first ones again": every_sample_once,
            "what a rank is fed is its shard of the order, and its last batch the shard of the last batch": fed_to_each,
            "the letters are those of the samples that are numbered": letters_of_numbers,
            "another epoch has another order": lambda seen: (
                seen[0]["order 0"]["value"] != seen[0]["order 1"]["value"]
            ).any(),
        },
        drawn=(*shapes, "doubled"),
    )


CASES = {
    "data_loading": data_loading,
}
SIZES = {
    "data_loading": {
        "even": {},
        "uneven": {"samples": 25, "width": 9, "seed": 1},
        "few": {"samples": 5, "batch": 3, "seed": 4},
    },
}
GRAPH_ONLY = set()
