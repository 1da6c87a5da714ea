"""What the tests of global_and_local.py call on the ranks of a pool."""

import oneflow as flow


def width_of_split_linear():
    """The outputs of a layer made for 12 on each rank: taken to S(0) at once, and by way of B."""
    ranks = flow.placement.all("cpu")
    at_once = flow.nn.Linear(8, 12, bias=False).to_global(ranks, flow.sbp.split(0))
    replicated = flow.nn.Linear(8, 12, bias=False).to_global(ranks, flow.sbp.broadcast)
    return at_once.weight.shape[0], replicated.to_global(sbp=flow.sbp.split(0)).weight.shape[0]


def read_on_rank_0(how):
    """What a script must not do: a collective on one rank only."""
    x = flow.ones(2, placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.partial_sum)
    if flow.env.get_rank() == 0:
        {"print": lambda: str(x), "numpy": x.numpy, "item": lambda: x.sum().item()}[how]()
