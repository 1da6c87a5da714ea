"""`launch.sh shell`: a prompt whose statements every rank runs."""

import linecache

SHELL = "<shell>"  # the file name of what is typed


def remember(lines):
    """Let tracebacks show these lines as those of the file SHELL."""
    text = [f"{line}\n" for line in lines]
    linecache.cache[SHELL] = sum(map(len, text)), None, text, SHELL
