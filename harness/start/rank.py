"""What runs inside every rank: `python harness/start/rank.py SCRIPT [ARG ...]` runs SCRIPT as `__main__`.

`-m MODULE` in place of SCRIPT does what `python -m MODULE` does.

OneFlow 0.9.0 leaves a job hanging when one rank raises or exits with an error, so this wrapper ends such a rank at
once and reports its traceback. It also makes ranks wait for rank 0, and dies with the launcher. It imports neither
OneFlow nor anything else of the harness.
"""

import argparse
import contextlib
import ctypes
import faulthandler
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


def traceback_of(error):
    """The traceback as Python prints it, without the frames of this wrapper."""
    entry = error.__traceback__
    while entry and entry.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        entry = entry.tb_next
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
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # shows the line at which this rank is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the launcher has blocked it: it would have killed us
    report = int(os.environ.pop("HARNESS_REPORT", "-1"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    load_blas()
    sys.meta_path.insert(0, WaitForRank0())
    script, module = sys.argv[1], None
    sys.argv = sys.argv[1:]
    if script == "-m":
        module = sys.argv.pop(1)
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    code, text = run(script, module)
    if report >= 0:
        os.write(report, (json.dumps({"code": code, "text": text[-32000:], "time": time.time()}) + "\n").encode())
    elif text:
        print(text, file=sys.stderr)
    if code:
        for stream in (sys.stdout, sys.stderr):  # the script may have replaced or closed them
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
