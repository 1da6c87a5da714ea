"""What tests call on the ranks of a pool; it runs there, beside OneFlow."""

import gc
import os
import signal
import time
import weakref

import oneflow as flow


def rank_of():
    """This rank, after all have met."""
    flow.comm.barrier()
    return flow.env.get_rank()


def fail(rank, how):
    """On one rank raise, exit, die or hang; the others wait for it in a collective."""
    if flow.env.get_rank() == rank:
        if how == "raise":
            raise ValueError("boom")
        if how == "die":
            os._exit(7)
        time.sleep(1000)
    flow.ones(2, placement=flow.placement.all("cpu"), sbp=flow.sbp.partial_sum).numpy()


def width_of_split_linear():
    """The outputs of a layer made for 12 on each rank: taken to S(0) at once, and by way of B."""
    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    at_once = flow.nn.Linear(8, 12, bias=False).to_global(ranks, flow.sbp.split(0))
    by_way_of_b = (
        flow.nn.Linear(8, 12, bias=False).to_global(ranks, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    )
    return at_once.weight.shape[0], by_way_of_b.weight.shape[0]


def read_on_rank_0(how):
    """What a script must not do: a collective on one rank only."""
    x = flow.ones(2, placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.partial_sum)
    if flow.env.get_rank() == 0:
        {"print": lambda: str(x), "numpy": x.numpy, "item": lambda: x.sum().item()}[how]()


def crash(mark):
    """Die of SIGSEGV in the first call, which leaves the file `died` in the folder `mark`."""
    flow.comm.barrier()
    died = os.path.join(mark, "died")
    if flow.env.get_rank() == 0 and not os.path.exists(died):
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    flow.comm.barrier()
    return "well"


def graph_lives_on():
    """Whether a graph that was called is kept when nothing of ours refers to it."""

    class Doubled(flow.nn.Graph):
        def build(self, x):
            return 2 * x

    graph = Doubled()
    graph(flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)))
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    return seen() is not None
