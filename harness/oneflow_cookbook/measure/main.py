"""Run the `main` of a recipe on this rank, and record what it prints and does."""

import contextlib
import io
import sys
import traceback

from oneflow_cookbook.start import recipe


def main_of(path, arguments):
    """Run a recipe's main with these arguments.

    Returns (exit code, standard output, standard error) of this rank; the code is 1 if main's comparison fails.
    """
    module, out, err = recipe.load(path), io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = [path, *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.main()
    except SystemExit as stop:
        code = stop.code
    except AssertionError:
        code = 1
        err.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()
