"""What runs inside every rank: `python rank.py SCRIPT [ARG ...]` runs SCRIPT as `__main__`.

`-m MODULE` in place of SCRIPT does what `python -m MODULE` does.

OneFlow 0.9.0 leaves a job hanging when a rank raises or exits with an error, so this wrapper ends such a rank at once
and reports its traceback. It also makes ranks wait for rank 0, and dies with the launcher.
It imports neither OneFlow nor the rest of the harness.
"""

import argparse
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback

REFUSED = 2  # argparse's exit code
NO_TERMINAL = "ranks share no terminal: debug one rank, with ./launch.sh -n 1, or type statements in ./launch.sh shell"
DEBUGGER = [os.path.join(os.path.dirname(runpy.__file__), file) for file in ("bdb.py", "pdb.py")]
ERRORS = []  # keeps tracebacks and the graphs in their frames alive: freeing a graph would wait for the other ranks


def die_with_parent():
    """Ask Linux to kill this process when the launcher dies."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("HARNESS_PARENT", os.getppid())):
        os._exit(1)


def load_blas():
    """Give OneFlow's matmuls a current OpenBLAS: loaded globally and first, it gets OneFlow's calls."""
    library = os.path.join(sys.prefix, "lib", "libopenblas.so")
    if os.environ.get("COOKBOOK_BLAS") != "builtin":
        try:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        except OSError as error:
            if os.environ["RANK"] == "0":
                print(f"OneFlow computes with its own, older OpenBLAS: {error}", file=sys.stderr)


class WaitForRank0:
    """An import hook that makes `import oneflow` wait until rank 0 listens on MASTER_ADDR:MASTER_PORT.

    A rank that connects earlier would sleep for 10 s inside OneFlow. The hook waits at the module that OneFlow 0.9.0
    imports just before it connects. Then OneFlow waits for all ranks, and holds Python's lock: only the launcher, which
    gets a line whenever the rank begins to wait for something, can tell the user.
    """

    def __init__(self, report):
        """report: the file descriptor for the launcher; 0: there is none."""
        self.report = report

    def find_spec(self, name, path=None, target=None):
        if name == "oneflow.framework.env_util":
            sys.meta_path.remove(self)
            if os.environ.get("RANK") != "0":  # the script may have changed RANK
                self.wait(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self.tell(f"more ranks, as fewer than {os.environ['WORLD_SIZE']} have come")
        return None

    def wait(self, address, port):
        reason = None
        while True:
            try:
                socket.create_connection((address, port), timeout=1).close()
                return
            except OSError as error:  # it has not started yet; some clusters do not even resolve its name before
                if str(error) != reason:
                    reason = str(error)
                    self.tell(f"rank 0 at {address}:{port} ({error.args[-1]})")
                time.sleep(0.01)

    def tell(self, waits_for):
        """Tell the launcher what this rank waits for; "": for nothing any more."""
        if self.report:
            send(self.report, waits_for=waits_for)


class AfterImport:
    """An import hook: calls a function with a module once it has been imported."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_call(module):
                execute(module)
                self.function(module)

            spec.loader.exec_module = execute_and_call
        return spec


def no_input(*_):
    """In place of `input` on a rank that has no standard input."""
    raise EOFError(NO_TERMINAL)


def no_debugger(pdb):
    """Let pdb raise where it would read commands from the standard input that a rank does not have."""
    interaction = pdb.Pdb.interaction

    def interact(debugger, *arguments):
        if debugger.stdin is sys.stdin:
            raise EOFError(NO_TERMINAL)
        interaction(debugger, *arguments)

    pdb.Pdb.interaction = interact


def traceback_of(error):
    """The traceback as Python prints it, without the frames of this wrapper."""
    first = error.__traceback__
    while first and first.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        first = first.tb_next
    last = first
    while last and last.tb_next:  # remove the frames of no_debugger further down
        if last.tb_next.tb_frame.f_code.co_filename in (__file__, *DEBUGGER):
            last.tb_next = last.tb_next.tb_next
        else:
            last = last.tb_next
    return "".join(traceback.format_exception(type(error), error, first)).rstrip()


def keep_messages():
    """Returns a list that collects what argparse would print to standard output or error: a help or an error.

    All ranks would print the same; the launcher prints it once. What argparse prints to a file goes to the file.
    """
    messages, print_message = [], argparse.ArgumentParser._print_message

    def keep_message(parser, message, file=None):
        file = sys.stderr if file is None else file
        if file in (sys.__stdout__, sys.__stderr__):
            messages.append(message)
        else:
            print_message(parser, message, file)

    argparse.ArgumentParser._print_message = keep_message
    return messages


def run(script, module=None):
    """Run a script as `python script` would, or a module as `python -m module`.

    Returns its exit code, its traceback or argparse's message, if any, and whether it refused its arguments.
    """
    messages = keep_messages()
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(script), run_name="__main__")
    except SystemExit as stop:
        ERRORS.append(stop)
        if stop.code and not isinstance(stop.code, int):
            return 1, str(stop.code), False
        code = stop.code or 0
        text = "".join(messages[-1:] if code else messages).rstrip()  # the error without the usage above it
        return code, text, code == REFUSED and raised_by_argparse(stop)
    except BaseException as error:
        ERRORS.append(error)
        return 1, traceback_of(error), False
    return 0, "".join(messages).rstrip(), False


def raised_by_argparse(error):
    """Whether a method of an argument parser, perhaps of the script's own class, is among the calls that raised it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names, method = frame.f_code.co_varnames, frame.f_code.co_name
        parser = frame.f_locals.get(names[0]) if names else None
        if isinstance(parser, argparse.ArgumentParser) and hasattr(type(parser), method):
            return True
    return False


def main():
    die_with_parent()
    # At these signals, the rank shows its current line. The launcher sends SIGUSR1 only if it receives SIGUSR1 itself:
    # the script may have its own handler, such as one that saves a checkpoint and exits.
    for signum in (signal.SIGUSR1, signal.SIGRTMAX):
        faulthandler.register(signum, all_threads=False)
        # the launcher had blocked it: until now the signal would have ended this rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    faulthandler.enable()  # OneFlow aborts without a Python traceback: show the line where the rank was
    report = int(os.environ.pop("HARNESS_REPORT", 0))  # a file descriptor; 0 in a pool, which has none
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    load_blas()
    wait_for_rank_0 = WaitForRank0(report)
    sys.meta_path.insert(0, wait_for_rank_0)
    if report:
        sys.meta_path.insert(0, AfterImport("oneflow", lambda oneflow: wait_for_rank_0.tell("")))
    if not report or os.environ["WORLD_SIZE"] != "1":
        builtins.input = no_input
        sys.meta_path.insert(0, AfterImport("pdb", no_debugger))
    script, module = sys.argv[1], None
    sys.argv = sys.argv[1:]
    if script == "-m":
        module = sys.argv.pop(1)
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    code, text, refused = run(script, module)
    if not report:
        if text:
            print(text, file=sys.stderr)
    elif code:
        send_report(report, code, text, refused)
    else:  # the script has ended when its threads have; OneFlow's own exit handler runs after this
        atexit.register(send_report, report, code, text)
    if code:
        exit_at_once(code)


def send(descriptor, **message):
    """Write a line that output.RankOutput reads."""
    os.write(descriptor, (json.dumps(message) + "\n").encode())


def send_report(descriptor, code, text, refused=False):
    send(descriptor, code=code, text=text[-32000:], refused=refused, time=time.time())


def exit_at_once(code):
    """Exit without OneFlow's exit handler, which would wait for the other ranks."""
    for stream in (sys.stdout, sys.stderr):  # the script may have replaced or closed them
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
