"""Run the `main` of a recipe on this rank, and record what it prints and does."""

import contextlib
import io
import sys

from harness.measure.entry import entry_of
from harness.measure.recorder import Recorder
from harness.start import recipe


def main_of(path, arguments, matmul_scale=1.0):
    """Run a recipe's main with these arguments.

    matmul_scale: factor of each matmul in main's first call of `train` or `run`; a second call, such as the same code
    on a single device, is not scaled. Returns (exit code, standard output, standard error) of this rank; the code is 1
    if main's comparison fails.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = [path, *arguments]
    code, entry = 0, entry_of(module)

    def scaled_entry(*arguments, **keywords):
        setattr(module, entry.__name__, entry)
        with Recorder(matmul_scale).recording():
            return entry(*arguments, **keywords)

    if matmul_scale != 1.0:
        setattr(module, entry.__name__, scaled_entry)
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
