"""What moving a tensor between two layouts must cost: the collective, and the elements that each rank sends.

The formulas are those of J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch",
arXiv:2110.15032, table 2 (the same as in OneFlow's core/framework/sbp_infer_util.cpp), for equal and for disjoint
placements. They are counted here from the blocks that the ranks hold, which gives the same numbers, and also those of
uneven splits, of overlapping placements and of meshes.
"""

from dataclasses import dataclass
from typing import Optional

import numpy as np


@dataclass
class Boxing:
    """One move. `total` is None if no formula is known, `by_rank` where the formula does not say which rank sends."""

    collective: str
    total: Optional[float]  # elements that leave all ranks together
    by_rank: Optional[dict]  # rank -> elements that leave it


@dataclass
class Layout:
    """sbp: "S(0)", on a mesh "S(0), B"; ranks: a list, or for a mesh a list of lists, in ascending order."""

    sbp: str
    ranks: list

    def __post_init__(self):
        self.axes, self.grid = self.sbp.split(", "), np.array(self.ranks)

    @property
    def members(self):
        return self.grid.ravel().tolist()

    def block(self, shape, rank):
        """The (start, stop) of each dimension that a rank holds."""
        block = [(0, size) for size in shape]
        for sbp, n, position in zip(self.axes, self.grid.shape, np.argwhere(self.grid == rank)[0]):
            if sbp.startswith("S"):
                dim = int(sbp[2:-1])
                start, stop = block[dim]
                small, larger = divmod(stop - start, n)
                start += int(position) * small + min(int(position), larger)
                block[dim] = (start, start + small + int(position < larger))
        return block


def size(*blocks):
    """The number of elements that all of these blocks have in common."""
    lengths = [min(stop for _, stop in spans) - max(start for start, _ in spans) for spans in zip(*blocks)]
    return float(np.prod([max(0, length) for length in lengths]))


def collective(old, new):
    """The field's name for the move between two layouts."""
    if old.ranks != new.ranks:
        if len(old.axes) > 1 or len(new.axes) > 1:
            return "between placements"
        if old.sbp == "P" and new.sbp != "P":
            return "reduce to other ranks" if len(old.ranks) > 1 else "send"
        return "broadcast to other ranks" if new.sbp == "B" and len(new.ranks) > 1 else "send"
    changed = [axis for axis, (a, b) in enumerate(zip(old.axes, new.axes)) if a != b]
    along = [f" along axis {axis}" if len(old.axes) > 1 else "" for axis in changed]
    names = {("S", "B"): "all-gather", ("S", "S"): "all-to-all", ("P", "B"): "all-reduce", ("P", "S"): "reduce-scatter"}
    names.update({("B", "S"): "local slice", ("B", "P"): "local fill", ("S", "P"): "local fill"})
    moves = [names[old.axes[axis][0], new.axes[axis][0]] + where for axis, where in zip(changed, along)]
    return ", ".join(moves) or "nothing"


def boxing(shape, old, new):
    """The Boxing that takes a tensor of this shape from one Layout to another."""
    name = collective(old, new)
    if "P" not in old.axes + new.axes:
        return Boxing(name, *copy(shape, old, new))
    if len(old.axes) == len(new.axes) == 1:
        return Boxing(name, *with_partial_sums(size([(0, n) for n in shape]), shape, old, new))
    changed = [axis for axis, (a, b) in enumerate(zip(old.axes, new.axes)) if a != b]
    if old.ranks != new.ranks or len(changed) > 1:
        return Boxing(name, None, None)
    if not changed:
        return Boxing(name, 0.0, dict.fromkeys(old.members, 0.0))
    [axis] = changed
    kept = [sbp for other, sbp in enumerate(old.axes) if other != axis]
    if set(kept) & {old.axes[axis], new.axes[axis]} - {"B", "P"}:  # both axes split one dimension
        return Boxing(name, None, None)
    total, by_rank = 0.0, {}
    for line in np.moveaxis(old.grid, axis, -1).reshape(-1, old.grid.shape[axis]):  # the ranks that talk to each other
        inner = Layout(", ".join("B" if other == axis else sbp for other, sbp in enumerate(old.axes)), old.ranks)
        part = [stop - start for start, stop in inner.block(shape, line[0])]
        one = boxing(part, Layout(old.axes[axis], line.tolist()), Layout(new.axes[axis], line.tolist()))
        total += one.total
        by_rank.update(one.by_rank)
    return Boxing(name, total, by_rank)


def copy(shape, old, new):
    """Each rank gets those elements of its new block that it does not hold: (total, by rank)."""
    total, sent = 0.0, dict.fromkeys(old.members, 0.0)
    for rank in new.members:
        wanted = new.block(shape, rank)
        held = size(wanted, old.block(shape, rank)) if rank in sent else 0.0
        total += size(wanted) - held
        for sender in old.members:
            if sender != rank:
                sent[sender] += size(wanted, old.block(shape, sender))
    one_owner = "B" not in old.axes or len(old.members) == 1
    return total, sent if one_owner else dict.fromkeys(sent, 0.0) if total == 0 else None


def with_partial_sums(whole, shape, old, new):
    """Moves from or to P on one axis: (total, by rank)."""
    leaving = [rank for rank in old.members if rank not in new.members]
    if new.sbp == "P":  # what no target holds must come to one of them
        if old.sbp == "B":
            total = 0.0 if len(leaving) < len(old.members) else whole
            return total, ({rank: total for rank in old.members} if len(old.members) == 1 or not total else None)
        sent = {rank: size(old.block(shape, rank)) if rank in leaving else 0.0 for rank in old.members}
        return sum(sent.values()), sent
    p2 = len(new.members)
    sent = dict.fromkeys(old.members + new.members, 0.0)
    for rank in new.members:  # reduce-scatter: each rank's part of the sum from every other rank
        part = whole / p2 if new.sbp == "B" else size(new.block(shape, rank))
        for sender in old.members:
            sent[sender] += part if sender != rank else 0.0
        if new.sbp == "B":  # then an all-gather among the targets
            sent[rank] += whole * (p2 - 1) / p2
    return sum(sent.values()), sent
