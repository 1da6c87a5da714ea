"""What tests call on the ranks of a pool; it runs there, beside OneFlow."""

import argparse
import contextlib
import gc
import io
import os
import signal
import sys
import time

import oneflow as flow

from harness.measure.graph import FunctionGraph
from harness.measure.observe import recorded
from harness.start import recipe


def to_standard_error(parser, message, file=None):
    """What argparse itself does with a message; the wrapper of a rank hands it to the launcher instead."""
    sys.stderr.write(message)


def main_of(path, arguments, gain=1.0):
    """Run a recipe's main with these arguments, each matmul scaled by `gain`.

    Returns (exit code, standard output, standard error) of this rank; code 1 if what main compares is not equal.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    sys.argv, before = [path, *arguments], sys.argv
    message, argparse.ArgumentParser._print_message = argparse.ArgumentParser._print_message, to_standard_error
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), recorded(gain):
            module.main()
    except SystemExit as stop:
        code = stop.code
    except AssertionError as error:
        code = 1
        err.write(str(error))
    finally:
        sys.argv, argparse.ArgumentParser._print_message = before, message
    return code, out.getvalue(), err.getvalue()


def rank_of():
    """This rank, after all have met."""
    flow.comm.barrier()
    return flow.env.get_rank()


class Unreadable:
    """What the other side cannot make again."""

    def __reduce__(self):
        return exec, ("raise RuntimeError('unreadable')",)


def unreadable(rank):
    """From one rank comes what cannot be read, and from the others, later, an answer."""
    if flow.env.get_rank() == rank:
        return Unreadable()
    time.sleep(0.5)
    return "late"


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


def crash(mark, times):
    """Die of SIGSEGV as long as fewer than `times` have; each leaves a file in the folder `mark`."""
    flow.comm.barrier()
    if flow.env.get_rank() == 0 and len(os.listdir(mark)) < times:
        open(os.path.join(mark, str(os.getpid())), "w").close()
        os.kill(os.getpid(), signal.SIGSEGV)
    flow.comm.barrier()
    return "well"


def run_graph():
    """Call a graph that nothing here keeps; returns its id."""
    graph = FunctionGraph(lambda x: x * 2.0)
    graph(flow.ones(64, 64, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)))
    return id(graph)


def lives(number):
    """Whether an object with this id is a graph."""
    return any(id(one) == number and isinstance(one, flow.nn.Graph) for one in gc.get_objects())
