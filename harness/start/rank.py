"""What runs inside every rank: `python harness/start/rank.py SCRIPT [ARG ...]` runs SCRIPT as `__main__`.

`-m MODULE` in place of SCRIPT does what `python -m MODULE` does.

OneFlow 0.9.0 leaves a job hanging when one rank raises or exits with an error, so this wrapper ends such a rank at
once and reports its traceback. It also makes ranks wait for rank 0, counts calls of flow.comm, and dies with the
launcher. It imports neither OneFlow nor anything else of the harness.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback

ERRORS = []  # keeps tracebacks, and the graphs in their frames, alive: freeing a graph would wait for the other ranks


def die_with_parent():
    """Ask Linux to kill this process when the launcher dies."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("HARNESS_PARENT", os.getppid())):
        os._exit(1)


def load_blas():
    """Give OneFlow's matmuls a current OpenBLAS: its calls bind to the functions that were loaded for all before it."""
    library = os.path.join(sys.prefix, "lib", "libopenblas.so")
    if os.environ.get("COOKBOOK_BLAS") != "builtin":
        try:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        except OSError as error:
            if os.environ["RANK"] == "0":
                print(f"OneFlow computes with its own, older OpenBLAS: {error}", file=sys.stderr)


class WaitForRank0:
    """An import hook: `import oneflow` waits until rank 0 listens on MASTER_ADDR:MASTER_PORT.

    A rank that connects earlier would sleep for 10 s inside OneFlow. The hook waits at the module that OneFlow 0.9.0
    imports just before it connects.
    """

    def find_spec(self, name, path=None, target=None):
        if name == "oneflow.framework.env_util" and os.environ.get("RANK") != "0":  # the script may have changed RANK
            sys.meta_path.remove(self)
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            while True:
                try:
                    socket.create_connection(address, timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.01)
        return None


class CountCalls:
    """An import hook: counts the calls of each function of flow.comm on this rank, by the line that calls it."""

    def __init__(self):
        self.counts = {}  # (function, other rank of send and recv, file, line) -> number of calls that returned

    def report(self):
        """[[function, other rank, "file.py:line", number of calls], ...]"""
        counts = self.counts.items()
        return [[*call, f"{os.path.basename(file)}:{line}", times] for (*call, file, line), times in counts]

    def find_spec(self, name, path=None, target=None):
        if name != "oneflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), self.wrap(module))
        return spec

    def wrap(self, oneflow):
        comm = getattr(oneflow, "comm", None)
        for name, function in list(vars(comm).items()) if comm else ():
            if callable(function):
                setattr(comm, name, self.counting(function, name, os.path.dirname(oneflow.__file__)))

    def counting(self, function, name, package):
        """A function that calls this one, and counts. package: the folder of OneFlow."""
        place, keyword = {"send": (1, "dst"), "recv": (0, "src")}.get(name, (0, None))

        @functools.wraps(function)
        def call(*arguments, **keywords):
            result = function(*arguments, **keywords)
            frame, other = sys._getframe(1), None
            if frame.f_globals.get("__name__") == "oneflow.comm.comm_ops":  # there scatter calls send and recv
                return result
            while frame.f_back and frame.f_code.co_filename.startswith(package):  # SyncBatchNorm calls all_reduce
                frame = frame.f_back
            if keyword:
                other = int(arguments[place] if len(arguments) > place else keywords[keyword])
            key = name, other, frame.f_code.co_filename, frame.f_lineno
            self.counts[key] = self.counts.get(key, 0) + 1
            return result

        return call


def traceback_of(error):
    """The traceback as Python prints it, without the frames of this wrapper."""
    entry = error.__traceback__
    while entry and entry.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        entry = entry.tb_next
    last = entry
    while last and last.tb_next:  # in the middle are those of CountCalls
        if last.tb_next.tb_frame.f_code.co_filename == __file__:
            last.tb_next = last.tb_next.tb_next
        else:
            last = last.tb_next
    return "".join(traceback.format_exception(type(error), error, entry)).rstrip()


def keep_messages():
    """Returns a list that gets what argparse would print to standard output or error, such as a help or an error.

    All ranks print the same, and the launcher prints it once. What goes elsewhere, such as to a file, goes there.
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

    Returns its exit code and its traceback or argparse's message, if any.
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
            return 1, str(stop.code)
        code = stop.code or 0
        return code, "".join(messages[-1:] if code else messages).rstrip()  # the error without the usage above it
    except BaseException as error:
        ERRORS.append(error)
        return 1, traceback_of(error)
    return 0, "".join(messages).rstrip()


def main():
    die_with_parent()
    # These show the line at which this rank is. The launcher sends SIGUSR1 only if it gets one itself: the script may
    # have a handler of its own, such as one that saves a checkpoint and exits.
    for signum in (signal.SIGUSR1, signal.SIGRTMAX):
        faulthandler.register(signum, all_threads=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})  # the launcher has blocked it: it would have killed us
    report = int(os.environ.pop("HARNESS_REPORT", "-1"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    load_blas()
    count = CountCalls()
    sys.meta_path[:0] = [WaitForRank0(), count] if report >= 0 else [WaitForRank0()]
    script, module = sys.argv[1], None
    sys.argv = sys.argv[1:]
    if script == "-m":
        module = sys.argv.pop(1)
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    code, text = run(script, module)
    if report >= 0:

        def send_report():
            said = {"code": code, "text": text[-32000:], "time": time.time(), "calls": count.report()}
            os.write(report, (json.dumps(said) + "\n").encode())

        # A script that ends well has run to its end when its threads have; OneFlow's own handler comes after this one.
        send_report() if code else atexit.register(send_report)
    elif text:
        print(text, file=sys.stderr)
    if code:
        for stream in (sys.stdout, sys.stderr):  # the script may have replaced or closed them
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
