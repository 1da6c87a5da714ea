"""SBPs, their names "B", "P", "S(0)", "S(1)", ..., and which block of a tensor each rank holds. Needs no OneFlow."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NAMES = ("B", "S(0)", "S(1)", "P")  # all that a matrix can have
KINDS = {"B": "broadcast", "S": "split", "P": "partial_sum"}  # as OneFlow calls them
LETTERS = {kind: letter for letter, kind in KINDS.items()}


@dataclass(frozen=True)
class Broadcast:
    """Each rank holds the whole tensor."""

    def __str__(self):
        return "B"


@dataclass(frozen=True)
class Partial:
    """Each rank holds an addend of the same shape; the tensor is their sum."""

    def __str__(self):
        return "P"


@dataclass(frozen=True)
class Split:
    """Each rank holds a block of this dimension."""

    dim: int

    def __str__(self):
        return f"S({self.dim})"


def parse(names):
    """The SBPs of a name such as "S(0), B", as a list with an SBP for each axis of the placement."""
    simple = {"B": Broadcast(), "P": Partial()}
    return [simple[name] if name in simple else Split(int(name[2:-1])) for name in names.split(", ")]


def split_dim(name):
    """The dimension that an SBP splits, None for B and P."""
    [sbp] = parse(name)
    return sbp.dim if isinstance(sbp, Split) else None


def sbp_of(name):
    """The object of flow.sbp that has this name."""
    import oneflow

    sbp = getattr(oneflow.sbp, KINDS[name[0]])
    return sbp(split_dim(name)) if name.startswith("S") else sbp


def _name(kind, dim):
    return f"S({dim})" if kind == "split" else LETTERS[kind]


def label(sbps):
    """The name of an object of flow.sbp; of a list, with an SBP for each axis of a mesh, such as "S(0), B"."""
    texts = map(str, sbps if isinstance(sbps, (list, tuple)) else [sbps])  # such as "oneflow.sbp.split(dim=0)"
    return ", ".join(_name(*re.fullmatch(r"oneflow\.sbp\.(\w+)(?:\(dim=(\d+)\))?", text).groups()) for text in texts)


def label_of_proto(nd_sbp):
    """The same for the protobuf message NdSbp of a compiled graph."""
    kinds = [(proto.WhichOneof("parallel_type")[: -len("_parallel")], proto) for proto in nd_sbp.sbp_parallel]
    return ", ".join(_name(kind, proto.split_parallel.axis) for kind, proto in kinds)


class Layout(NamedTuple):
    """SBP and ranks of a tensor: "S(0)" on [0, 1], or on a mesh "S(0), B" on [[0, 1], [2, 3]]; "local" on []."""

    sbp: str
    ranks: list

    @property
    def axes(self):
        return self.sbp.split(", ")

    @property
    def grid(self):
        return np.array(self.ranks)

    @property
    def members(self):
        return self.grid.ravel().tolist()

    def squeezed(self):
        """The same without axes of a single rank, on which all SBPs are the same."""
        axes = [axis for axis, n in enumerate(self.grid.shape) if n > 1] or [0]
        if self.sbp == "local" or len(axes) == len(self.axes):
            return self
        ranks = self.grid.reshape([self.grid.shape[axis] for axis in axes]).tolist()
        return Layout(", ".join(self.axes[axis] for axis in axes), ranks)

    def position(self, rank):
        """The place of a rank along each axis of the placement."""
        return np.argwhere(self.grid == rank)[0].tolist()

    def block(self, shape, rank):
        """[(start, stop)] of each dimension that a rank holds; None if the rank is outside the placement."""
        block = [(0, size) for size in shape]
        if self.sbp == "local":
            return block
        if rank not in self.members:
            return None
        for sbp, n, position in zip(parse(self.sbp), self.grid.shape, self.position(rank)):
            if isinstance(sbp, Split):  # if n does not divide the size, the first ranks hold one extra row
                start, stop = block[sbp.dim]
                size, larger = divmod(stop - start, n)
                start += position * size + min(position, larger)
                block[sbp.dim] = (start, start + size + (position < larger))
        return block

    def slices(self, shape, rank):
        """The block of a rank of the placement, to index an array with."""
        return tuple(slice(*span) for span in self.block(shape, rank))

    def size(self, shape, rank):
        """The number of elements that a rank holds."""
        block = self.block(shape, rank)
        return 0 if block is None else int(np.prod([stop - start for start, stop in block]))
