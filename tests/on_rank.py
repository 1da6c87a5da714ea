"""What tests call on the ranks of a pool; it runs there, beside OneFlow."""

import argparse
import contextlib
import gc
import io
import os
import signal
import sys
import time
import weakref

import oneflow as flow

from harness.measure.entry import entry_of
from harness.measure.recorder import Recorder
from harness.start import recipe


def to_standard_error(parser, message, file=None):
    """What argparse itself does with a message; the wrapper of a rank hands it to the launcher instead."""
    sys.stderr.write(message)


def main_of(path, arguments, matmul_scale=1.0):
    """Run a recipe's main with these arguments, each matmul of its first training or run scaled by `matmul_scale`.

    What main calls after it, such as the same code on one rank, is as it should be.
    Returns (exit code, standard output, standard error) of this rank; code 1 if what main compares is not equal.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    sys.argv, before = [path, *arguments], sys.argv
    message, argparse.ArgumentParser._print_message = argparse.ArgumentParser._print_message, to_standard_error
    code, entry = 0, entry_of(module)

    def first_entry(*given, **named):
        setattr(module, entry.__name__, entry)
        with Recorder(matmul_scale).recording():
            return entry(*given, **named)

    if matmul_scale != 1.0:
        setattr(module, entry.__name__, first_entry)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.main()
    except SystemExit as stop:
        code = stop.code
    except AssertionError as error:
        code = 1
        err.write(str(error))
    finally:
        sys.argv, argparse.ArgumentParser._print_message = before, message
    return code, out.getvalue(), err.getvalue()


def recorded_main(path, arguments):
    """As main_of, by name, with all that main and what it calls multiplied, moved and read, and the graphs called."""
    recorder = Recorder(keeps_initial=False)
    with recorder.recording():
        code, out, err = main_of(path, arguments)
    events = {name: getattr(recorder, name) for name in ("matmuls", "lazy", "moves", "reads", "stages", "calls")}
    return {"code": code, "out": out, "err": err, **events}


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
