"""The cost of moving a tensor between two Layouts: the collective, and how much each rank sends.

The formulas are those of J. Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch",
arXiv:2110.15032, table 2 (the same as in OneFlow's core/framework/sbp_infer_util.cpp), for equal and for disjoint
placements. Counting the elements of each rank's block gives the same numbers, and covers uneven splits, overlapping
placements and meshes.
"""

import itertools

import numpy as np

from oneflow_cookbook.measure.sbp import Broadcast, Layout, Split, parse

COLLECTIVES = {"SB": "all-gather", "SS": "all-to-all", "PB": "all-reduce", "PS": "reduce-scatter"}
COLLECTIVES.update(BS="local slice", BP="local fill", SP="local fill")
# The legal signatures of a matmul of two matrices: SBP of x, of w -> of the product.
MATMUL = {("B", "B"): "B", ("S(0)", "B"): "S(0)", ("B", "S(1)"): "S(1)", ("S(1)", "S(0)"): "P"}
MATMUL.update({("P", "B"): "P", ("B", "P"): "P"})


class Boxing:
    """A tensor of this shape that moves from the Layout `old` to `new`. item: bytes of an element; 1 counts elements.

    collective: its name. total: bytes that all ranks together send, None where no formula is known. by_rank: {rank:
    bytes that it sends}, None where the formula does not say which rank sends.
    """

    def __init__(self, shape, old, new, item=1):
        self.shape, self.old, self.new, self.item = shape, Layout(*old), Layout(*new), item
        self.collective = collective(self.old, self.new)
        total, by_rank = elements_sent(shape, self.old.squeezed(), self.new.squeezed())
        self.total = None if total is None else item * total
        self.by_rank = by_rank and {rank: item * sent for rank, sent in by_rank.items()}

    @property
    def size(self):
        """Bytes of the tensor."""
        return self.item * int(np.prod(self.shape))

    @property
    def change(self):
        """Such as "P -> B"."""
        (old, ranks), (new, new_ranks) = self.old, self.new
        return f"{old} -> {new}" if ranks == new_ranks else f"{old} on {ranks} -> {new} on {new_ranks}"


def changed_axes(old, new):
    """The axes of the placement on which the SBP changes."""
    return [axis for axis, (before, after) in enumerate(zip(old.axes, new.axes)) if before != after]


def collective(old, new):
    """The name of the collective that moves a tensor from the Layout `old` to `new`."""
    if old.ranks != new.ranks:
        old, new = old.squeezed(), new.squeezed()
    if old.ranks != new.ranks:
        if len(old.axes) > 1 or len(new.axes) > 1:
            return "between placements"
        if old.sbp == "P" and new.sbp != "P":
            return "reduce to other ranks" if len(old.ranks) > 1 else "send"
        return "broadcast to other ranks" if new.sbp == "B" and len(new.ranks) > 1 else "send"
    names = []
    for axis in changed_axes(old, new):
        along = f" along axis {axis}" if len(old.axes) > 1 else ""
        names.append(COLLECTIVES[old.axes[axis][0] + new.axes[axis][0]] + along)
    return ", ".join(names) or "nothing"


def count(*blocks):
    """The number of elements in the intersection of these blocks."""
    lengths = [min(stop for _, stop in spans) - max(start for start, _ in spans) for spans in zip(*blocks)]
    return float(np.prod([max(0, length) for length in lengths]))


def elements_sent(shape, old, new):
    """(total, by_rank) as in Boxing, in elements."""
    if "P" not in old.axes + new.axes:
        return sent_to_copy(shape, old, new)
    if len(old.axes) == len(new.axes) == 1:
        return sent_with_partial_sums(shape, old, new)
    if old == new:
        return 0.0, dict.fromkeys(old.members, 0.0)
    moves = lines(shape, old, new)
    if not moves:
        return None, None
    total, by_rank = 0.0, {}
    for move in moves:
        total_of_line, by_rank_of_line = elements_sent(*move)
        total += total_of_line
        by_rank.update(by_rank_of_line)
    return total, by_rank


def lines(shape, old, new):
    """The moves along a single axis that make up a move: [(shape, old Layout, new Layout)].

    If the SBP changes on one axis of a mesh, each line of ranks along that axis is such a move. [] where no formula is
    known.
    """
    if len(old.axes) == len(new.axes) == 1:
        return [(shape, old, new)]
    changed = changed_axes(old, new)
    if old.ranks != new.ranks or len(changed) != 1:
        return []
    [axis] = changed
    before, after = old.axes[axis], new.axes[axis]
    others = [*old.axes[:axis], *old.axes[axis + 1 :]]
    if set(others) & {before, after} - {"B", "P"}:  # both axes split the same dimension
        return []
    axes_of_line = [*old.axes[:axis], "B", *old.axes[axis + 1 :]]
    held_by_line = Layout(", ".join(axes_of_line), old.ranks)  # what the ranks of a line hold together
    moves = []
    for ranks in np.moveaxis(old.grid, axis, -1).reshape(-1, old.grid.shape[axis]).tolist():
        part = [stop - start for start, stop in held_by_line.block(shape, ranks[0])]
        moves.append((part, Layout(before, ranks), Layout(after, ranks)))
    return moves


def sent_to_copy(shape, old, new):
    """(total, by_rank) without P: each rank gets the elements of its new block that it does not hold yet."""
    total, sent = 0.0, dict.fromkeys(old.members, 0.0)
    for rank in new.members:
        block = new.block(shape, rank)
        total += count(block) - (count(block, old.block(shape, rank)) if rank in sent else 0.0)
        for sender in old.members:
            sent[sender] += count(block, old.block(shape, sender)) if sender != rank else 0.0
    if total and "B" in old.axes and len(old.members) > 1:  # any of several ranks could send
        return total, None
    return total, sent if total else dict.fromkeys(sent, 0.0)


def sent_with_partial_sums(shape, old, new):
    """(total, by_rank) from or to P, not on a mesh."""
    whole = float(np.prod(shape))
    if new.sbp == "P":  # the elements of ranks that leave must go to a new rank
        leaving = [rank for rank in old.members if rank not in new.members]
        if old.sbp == "B":
            total = whole if leaving == old.members else 0.0
            return total, None if total and len(leaving) > 1 else dict.fromkeys(old.members, total)
        sent = {rank: count(old.block(shape, rank)) if rank in leaving else 0.0 for rank in old.members}
        return sum(sent.values()), sent
    sent = dict.fromkeys(old.members + new.members, 0.0)
    for rank in new.members:  # reduce-scatter: every other rank sends it its addend
        part = whole / len(new.members) if new.sbp == "B" else count(new.block(shape, rank))
        for sender in old.members:
            sent[sender] += part if sender != rank else 0.0
        sent[rank] += whole - part if new.sbp == "B" else 0.0  # then an all-gather among the new ranks
    return sum(sent.values()), sent


def matmul_boxings(inputs, out, transposed=(False, False)):
    """What OneFlow must have moved for a matmul, from the SBP of its product: [("x" or "w", Boxing)].

    inputs, out: tensors as tensors.describe gives them. Of all moves that lead to this SBP, the cheapest. Unless
    nothing moves, it is None (not known) on a mesh with several axes of more than one rank, if x has more than two
    dimensions, or if x or w is transposed.
    """
    if "local" in (inputs[0]["sbp"], inputs[1]["sbp"]):
        return []
    x, w, out = squeezed(inputs, out)
    if x["ranks"] != w["ranks"]:
        return None
    if len(w["shape"]) != 2:
        return [] if product_of_stacks(x, w, transposed) == out["sbp"] else None
    if is_legal(x, w, transposed):
        return []
    if np.ndim(x["ranks"]) > 1 or any(transposed) or len(x["shape"]) != 2:
        return None
    return cheapest_boxings({"x": x, "w": w}, out["sbp"])


def squeezed(inputs, out):
    """x, w and the product of a matmul without the axes of a single rank."""
    tensors = (*inputs[:2], {**inputs[0], "sbp": out["sbp"]})
    return [{**tensor, **Layout(tensor["sbp"], tensor["ranks"]).squeezed()._asdict()} for tensor in tensors]


def probable_boxings(inputs, out, transposed, sent):
    """Where matmul_boxings does not know: the only moves that lead to this SBP and may send these bytes.

    sent: by all ranks together, None if that says nothing. Returns None unless exactly one choice remains.
    """
    x, w, out = squeezed(inputs, out)
    if x["ranks"] != w["ranks"] or len(w["shape"]) not in (2, len(x["shape"])):
        return None
    dims = len(x["shape"]), len(w["shape"])
    pairs = list(itertools.product(*([*map(Split, range(n)), *parse("B, P")] for n in dims)))
    axes = [[pair for pair in pairs if product_on_axis(*pair, *dims, transposed) == sbp] for sbp in parse(out["sbp"])]
    choices = []
    for signature in itertools.product(*axes):
        sbps = [", ".join(map(str, sbps)) for sbps in zip(*signature)]
        operands = zip("xw", (x, w), sbps)
        choices.append([(name, boxing_to(t, sbp, t["ranks"])) for name, t, sbp in operands if t["sbp"] != sbp])
    fitting = [boxings for boxings in choices if sent is None or may_send(sent, boxings)]
    return fitting[0] if len(fitting) == 1 else None


def may_send(sent, boxings):
    """Whether these moves may have sent these bytes in eager mode, where some send half more than by the formula."""
    totals = [boxing.total for _, boxing in boxings]
    return None in totals or sum(totals) <= 1.02 * sent <= 1.6 * sum(totals)


def is_legal(x, w, transposed):
    """Whether OneFlow multiplies x and the matrix w without moving them. All dimensions of x but the last are rows."""
    x_axes = [matrix_sbp(sbp, len(x["shape"]) - 2, transposed[0], stack_is_rows=True) for sbp in parse(x["sbp"])]
    w_axes = [matrix_sbp(sbp, 0, transposed[1]) for sbp in parse(w["sbp"])]
    return all(pair in MATMUL for pair in zip(x_axes, w_axes))


def product_of_stacks(x, w, transposed):
    """The SBP of x @ w, two stacks of matrices, if OneFlow multiplies them without moving either; else None."""
    if len(x["shape"]) != len(w["shape"]):
        return None
    axes = zip(parse(x["sbp"]), parse(w["sbp"]))
    dims = len(x["shape"]), len(w["shape"])
    products = [product_on_axis(x_sbp, w_sbp, *dims, transposed) for x_sbp, w_sbp in axes]
    return None if None in products else ", ".join(map(str, products))


def product_on_axis(x_sbp, w_sbp, x_dims, w_dims, transposed):
    """The SBP of x @ w, a matrix or a stack with these dimensions, on an axis; None if something must move."""
    same = x_sbp if w_dims == x_dims else Broadcast()  # of w, where each rank has some of the matrices of x
    if isinstance(x_sbp, Split) and x_sbp.dim < x_dims - 2 and w_sbp == same:
        return x_sbp
    matrices = matrix_sbp(x_sbp, x_dims - 2, transposed[0]), matrix_sbp(w_sbp, w_dims - 2, transposed[1])
    if matrices not in MATMUL:
        return None
    [product] = parse(MATMUL[matrices])
    return Split(product.dim + x_dims - 2) if isinstance(product, Split) else product


def matrix_sbp(sbp, stack_dims, transposed, stack_is_rows=False):
    """The name of the SBP that the matrices of a stack have in the product: S(0) splits rows, S(1) columns.

    stack_is_rows: whether the stack is multiplied as a single matrix with all its rows.
    """
    if not isinstance(sbp, Split):
        return str(sbp)
    dim = sbp.dim - stack_dims
    if stack_is_rows:
        dim = max(dim, 0)
    return str(Split(1 - dim if transposed else dim))


def cheapest_boxings(operands, product):
    """[("x" or "w", Boxing)] that send least of those after which x @ w, two matrices, has the SBP `product`."""
    choices = []
    for signature, out in MATMUL.items():
        if out == product:
            boxings = []
            for (name, tensor), sbp in zip(operands.items(), signature):
                if tensor["sbp"] != sbp:
                    boxings.append((name, boxing_to(tensor, sbp, tensor["ranks"])))
            choices.append(boxings)
    return min(choices, key=lambda boxings: (sum(boxing.total for _, boxing in boxings), len(boxings)))


def boxing_to(tensor, sbp, ranks):
    """The Boxing of a tensor, as tensors.describe gives it, to this SBP on these ranks."""
    return Boxing(tensor["shape"], (tensor["sbp"], tensor["ranks"]), (sbp, ranks), tensor["item"])


def boxings_in_words(boxings, operands):
    """The result of `matmul_boxings` as text, "w S(0) -> B: all-gather"; operands: {"x" and "w": their names}."""
    if boxings is None:
        return "not known"
    moves = [f"{operands[name]} {boxing.change}: {boxing.collective}" for name, boxing in boxings]
    return ", ".join(moves) or "nothing"
