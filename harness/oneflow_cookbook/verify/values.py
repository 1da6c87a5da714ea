"""The values of a script: written by each rank while the script runs, read and put together afterwards."""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from oneflow_cookbook.measure.sbp import Layout


class Key(NamedTuple):
    """What makes a value the same one in two runs."""

    kind: str  # such as "source", "output", "gradient"
    name: str  # of the function, the module or the parameter
    place: tuple  # (file, line) of each frame of the user's code, innermost first
    number: int  # how often these three came before


def line_of(place):
    """A place as users write it, such as "train.py:31"."""
    return f"{Path(place[0][0]).name}:{place[0][1]}" if place else "the script"


@dataclass
class Value:
    """A tensor as a rank saw it."""

    key: Key
    step: int  # number of the training step, from 1
    layout: Layout
    shape: tuple
    dtype: str
    offset: Optional[int] = None  # of this rank's block in its file; None: the rank holds nothing of it
    block_shape: tuple = ()
    facts: dict = field(default_factory=dict)


class Writer:
    """Writes the values that this rank sees to two files in a folder: their blocks, and then their list."""

    def __init__(self, folder, rank):
        self.list_path, self.values = Path(folder, f"{rank}.list"), {}
        self.blocks = open(Path(folder, f"{rank}.blocks"), "wb")  # noqa: SIM115

    def add(self, value, block):
        """Add a Value, in place of an earlier one of its key. block: this rank's array, or None."""
        earlier = self.values.pop(value.key, None)
        if block is not None:
            fits = earlier is not None and (earlier.block_shape, earlier.dtype) == (block.shape, value.dtype)
            again = fits and earlier.offset is not None
            value.offset = self.blocks.seek(earlier.offset) if again else self.blocks.seek(0, os.SEEK_END)
            value.block_shape = block.shape
            self.blocks.write(np.ascontiguousarray(block).tobytes())
        self.values[value.key] = value

    def close(self, **facts):
        """Write the list, with what else is known of the run."""
        self.blocks.close()
        self.list_path.write_bytes(pickle.dumps({"values": list(self.values.values()), **facts}))


class Run:
    """The values of a run, from the files of its ranks.

    keys: in the order of rank 0, then those that rank 0 did not see. facts: of each rank, as its Writer got them.
    """

    def __init__(self, folder, world_size):
        self.folder, self.world_size = Path(folder), world_size
        self.facts = [pickle.loads(Path(folder, f"{rank}.list").read_bytes()) for rank in range(world_size)]
        self.by_rank = [{value.key: value for value in facts.pop("values")} for facts in self.facts]
        self.keys = list(dict.fromkeys(key for values in self.by_rank for key in values))
        self.files = {}

    def __getitem__(self, key):
        """The Value of the first rank that saw it."""
        return next(values[key] for values in self.by_rank if key in values)

    def __contains__(self, key):
        return any(key in values for values in self.by_rank)

    def block(self, key, rank):
        """The array that a rank holds, None if it holds or saw nothing."""
        value = self.by_rank[rank].get(key)
        if value is None or value.offset is None:
            return None
        if rank not in self.files:
            path = self.folder / f"{rank}.blocks"
            self.files[rank] = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        dtype = np.dtype(value.dtype)
        size = dtype.itemsize * int(np.prod(value.block_shape))
        return self.files[rank][value.offset : value.offset + size].view(dtype).reshape(value.block_shape)

    def blocks(self, key):
        """{rank: its array} of the ranks of the tensor's placement."""
        blocks = {rank: self.block(key, rank) for rank in members(self[key], self.world_size)}
        return {rank: block for rank, block in blocks.items() if block is not None}

    def whole(self, key):
        """The full value; None if a rank of its placement has not seen it, or the blocks do not fit its layout.

        Of a local tensor None too if the ranks hold different values.
        """
        value, blocks = self[key], self.blocks(key)
        if set(blocks) != set(members(value, self.world_size)):
            return None
        if value.layout.sbp == "local":
            return blocks[0] if all(largest_difference(blocks[0], block) == 0 for block in blocks.values()) else None
        whole, copies = np.zeros(value.shape, np.dtype(value.dtype)), set()
        for rank, block in blocks.items():
            if copy_number(value.layout, rank) not in copies:
                copies.add(copy_number(value.layout, rank))
                part = value.layout.slices(value.shape, rank)
                if whole[part].shape != block.shape:
                    return None
                whole[part] += block.astype(whole.dtype, copy=False)
        return whole

    def apart(self, key):
        """[(first rank, other rank, largest difference)] of the copies that B says are equal."""
        value, blocks = self[key], self.blocks(key)
        if value.layout.sbp == "local":
            return []
        first = {copy_number(value.layout, rank): rank for rank in reversed(list(blocks))}
        pairs = [(first[copy_number(value.layout, rank)], rank) for rank in blocks]
        return [(a, b, largest_difference(blocks[a], blocks[b])) for a, b in pairs if a != b]


def members(value, world_size):
    """The ranks that hold a value; of a local tensor, all."""
    return list(range(world_size)) if value.layout.sbp == "local" else value.layout.members


def copy_number(layout, rank):
    """Equal for ranks that hold copies of the same block: the rank's coordinates, 0 along the axes of B."""
    return tuple(0 if axis == "B" else place for axis, place in zip(layout.axes, layout.position(rank)))


def largest_difference(a, b):
    """The largest |a - b|, 0 where both are NaN or one infinity; infinity where only one is, or if shapes differ."""
    if a.shape != b.shape:
        return np.inf
    if a.size == 0:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max())
