"""docs/choosing.md: what its commands print, and its table, come from `plan` itself.

    python3 harness/plan/page.py

writes them anew. Behind each ```sh block with one plan command stands a ```text block with what it prints; the table is
between two comments.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from harness.plan import __main__ as plan  # noqa: E402
from harness.plan import megatron  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "choosing.md"
COMMAND = re.compile(r"(```sh\n\./launch\.sh plan (.*?)\n```\n\n```text\n)(.*?)(```\n)", re.DOTALL)
TABLE = re.compile(r"(<!-- Megatron-LM -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def printed(arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert plan.main(shlex.split(arguments.replace("\\\n", " "))) == 0, arguments
    return out.getvalue()


def filled(text):
    """The page with what its commands print now."""
    text = COMMAND.sub(lambda found: found[1] + printed(found[2]) + found[4], text)
    return TABLE.sub(lambda found: found[1] + "\n".join(megatron.table()) + "\n" + found[3], text)


def main():
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
        os.chdir(folder)  # where the page says that config.json is
        PAGE.write_text(filled(text))
        os.chdir("/")


if __name__ == "__main__":
    main()
