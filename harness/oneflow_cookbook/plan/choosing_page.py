"""Write the outputs in docs/choosing.md and its translation, from `plan` itself.

    python3 harness/oneflow_cookbook/plan/choosing_page.py

A ```sh block with a plan command is followed by a ```text block with what it prints. A block that
ends with `...` keeps its number of lines.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oneflow_cookbook.plan import __main__ as plan  # noqa: E402

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = (DOCS / "choosing.md", DOCS / "choosing.zh-CN.md")
COMMAND = re.compile(r"(```sh\n\./launch\.sh plan (.*?)\n```\n\n```text\n)(.*?)(```\n)", re.DOTALL)
MORE = "...\n"


def printed(arguments):
    """The output of `launch.sh plan` with these arguments, as typed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert plan.main(shlex.split(arguments.replace("\\\n", " "))) != plan.BAD_INPUT, arguments
    return out.getvalue()


def shown(output, before):
    """The output, or as many of its first lines as the page showed before."""
    if not before.endswith(MORE):
        return output
    lines = output.splitlines(keepends=True)
    return "".join(lines[: before.count("\n") - 1]) + MORE


def filled(text):
    """The page with what its commands print now."""
    return COMMAND.sub(lambda match: match[1] + shown(printed(match[2]), match[3]) + match[4], text)


def fill(page):
    """Regenerate a page."""
    text = page.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1], "utf-8")
        os.chdir(folder)  # where the page says that config.json is
        page.write_text(filled(text), "utf-8")
        os.chdir("/")


def main():
    for page in PAGES:
        fill(page)


if __name__ == "__main__":
    main()
