"""What `main` of a recipe prints on this rank, and what it does."""

import contextlib
import io
import sys

from harness.measure.entry import entry_of
from harness.measure.recorder import Recorder
from harness.start import recipe


def main_of(path, arguments, matmul_scale=1.0):
    """Run a recipe's main with these arguments, each matmul of its first training or run scaled by `matmul_scale`.

    What main calls after it, such as the same code on one rank, is as it should be.
    Returns (exit code, standard output, standard error) of this rank; code 1 if what main compares is not equal.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    sys.argv, before = [path, *arguments], sys.argv
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
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def recorded_main(path, arguments):
    """As main_of, by name, with all that main and what it calls multiplied, moved and read, and the graphs called."""
    recorder = Recorder(keeps_initial=False)
    with recorder.recording():
        code, out, err = main_of(path, arguments)
    events = {name: getattr(recorder, name) for name in ("matmuls", "lazy", "moves", "reads", "stages", "calls")}
    return {"code": code, "out": out, "err": err, **events}
