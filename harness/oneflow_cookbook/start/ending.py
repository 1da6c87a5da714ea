"""How a job ends: from the outcome of each node's ranks, node 0 decides the outcome of the job."""

import enum
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Optional

from oneflow_cookbook.start.ranks import is_consequence

BAD_INPUT = 2
TIME_LIMIT_REACHED = 124
BROKEN_PIPE = 128 + signal.SIGPIPE
VERDICT_DELAY = 2.0  # seconds to wait for the cause of a failure that looks like a consequence
REFUSAL_DELAY = 5.0  # seconds in which the other ranks refuse their arguments too, if all refuse alike


class Cause(str, enum.Enum):
    """Why the ranks of a node have ended, or must end. A str, so that launchers can send it as JSON."""

    DONE = "all ranks succeeded"
    RANK = "a rank failed"
    ARGUMENTS = "all ranks refused their arguments"
    SIGNAL = "the launcher received a signal"
    TIME_LIMIT = "the time limit was reached"
    NODE = "another launcher is gone"
    READER = "nobody reads the output"


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a node, or of the whole job, have ended; launchers send it to each other."""

    code: int  # exit code for the shell
    cause: Cause
    node: int  # where it happened
    text: str = ""  # the message for the user
    rank: Optional[int] = None  # the local rank that failed
    time: float = field(default_factory=time.time)
    consequence: bool = False  # whether it looks like OneFlow's reaction to the death of another rank
    restart: int = 0  # number of the restart that follows; 0: none


@dataclass(frozen=True)
class Received:
    """An outcome, and when this launcher learned of it, by time.monotonic()."""

    outcome: Outcome
    at: float


def outcome_from(message):
    """The Outcome that another launcher sent as a dict."""
    return Outcome(**{**message, "cause": Cause(message["cause"])})


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


def decide(received, now, nodes, is_leader, connected):
    """The Outcome of the job; None while it is undecided.

    received: the outcomes that this launcher knows, in order of arrival. now: time.monotonic(). nodes: number of nodes
    of the job. is_leader: whether this is node 0. connected: number of other launchers that are connected to this one.

    Node 0 decides for all; a launcher without a connection decides alone. The job succeeds when all nodes have ended
    well. A failure ends it at once, unless it looks like a consequence, such as the abort of ranks that have lost a
    peer: then the other nodes have VERDICT_DELAY to report the cause. Of several failures the first cause counts.
    """
    if connected and not is_leader:
        return None
    failures = [item for item in received if item.outcome.code]
    if not failures:
        ended_well = is_leader and len(received) == nodes
        return received[0].outcome if ended_well else None
    only_consequences = all(item.outcome.consequence for item in failures)
    first = min(item.at for item in failures)
    if connected and only_consequences and now < first + VERDICT_DELAY:
        return None
    return min((item.outcome for item in failures), key=lambda outcome: (outcome.consequence, outcome.time))


def with_restart(outcome, attempt, max_restarts):
    """The Outcome with the number of the restart that follows, if a restart follows: only after a rank has failed."""
    if outcome.cause is Cause.RANK and attempt < max_restarts:
        return replace(outcome, restart=attempt + 1)
    return outcome
