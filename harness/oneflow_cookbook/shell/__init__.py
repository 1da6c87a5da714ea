"""`launch.sh shell`: a prompt whose statements every rank runs."""

import linecache

SHELL = "<shell>"  # the file name of typed statements


def remember(lines):
    """Let tracebacks show these lines as the source of SHELL."""
    text = [f"{line}\n" for line in lines]
    linecache.cache[SHELL] = sum(map(len, text)), None, text, SHELL
