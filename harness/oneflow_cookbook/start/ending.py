"""How a job ends: the exit codes, the causes, and which rank failed first."""

import enum
import signal
from dataclasses import dataclass
from typing import Optional

from oneflow_cookbook.start.ranks import is_consequence

BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
BROKEN_PIPE = 128 + signal.SIGPIPE
REFUSAL_DELAY = 5.0  # seconds in which the other ranks refuse their arguments too, if all refuse alike


class Cause(enum.Enum):
    """Why the ranks of a launcher have ended, or must end."""

    DONE = "all ranks succeeded"
    RANK = "a rank failed"
    ARGUMENTS = "all ranks refused their arguments"
    SIGNAL = "the launcher received a signal"
    TIME_LIMIT = "the time limit was reached"
    READER = "nobody reads the output"


@dataclass(frozen=True)
class JobOutcome:
    """How the ranks of a launcher have ended."""

    code: int  # exit code for the shell
    cause: Cause
    text: str = ""  # the message for the user
    rank: Optional[int] = None  # the local rank that failed


def first_failure(codes, reports):
    """The local rank that failed first, None if no rank failed.

    codes: {local rank: exit code} of the ranks that have ended; reports: the Report of each rank. A rank that was
    killed sends no report, so its time is infinite; among several of these, a consequence comes last.
    """
    failed = [rank for rank, code in codes.items() if code]
    return min(failed, key=lambda rank: (reports[rank].time, is_consequence(codes[rank])), default=None)


def exit_code(code):
    """A process's exit code as a shell reports it: 128 + N after signal N, for which Python has -N."""
    return code if code >= 0 else 128 - code
