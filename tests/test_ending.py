"""How a job ends, decided from the outcomes of its nodes and the time, without any process."""

import json
import signal
from dataclasses import asdict

import pytest

from harness.start.ending import (
    VERDICT_DELAY,
    Cause,
    Outcome,
    Received,
    decide,
    exit_code,
    first_failure,
    outcome_from,
    with_restart,
)
from harness.start.output import Report

LEADER_OF_1 = {"nodes": 1, "is_leader": True, "connected": 0}
LEADER_OF_2 = {"nodes": 2, "is_leader": True, "connected": 1}
OTHER_OF_2 = {"nodes": 2, "is_leader": False, "connected": 1}
ALONE_OF_2 = {"nodes": 2, "is_leader": True, "connected": 0}  # the other launcher is gone
OTHER_ALONE = {"nodes": 2, "is_leader": False, "connected": 0}

DONE_0, DONE_1 = (Outcome(0, Cause.DONE, node, time=50) for node in (0, 1))
FAILED_0, FAILED_1 = (Outcome(1, Cause.RANK, node, time=50 + node) for node in (0, 1))  # node 0's rank was the first
ABORTED_0, ABORTED_1 = (Outcome(134, Cause.RANK, node, time=40 + node, consequence=True) for node in (0, 1))
STOPPED_1 = Outcome(130, Cause.SIGNAL, 1, time=50)
LOST_0, LOST_1 = (Outcome(1, Cause.NODE, node, time=60) for node in (0, 1))

LATER = 100 + VERDICT_DELAY
DECISIONS = {  # what happens -> (outcome, when it was received) of each, the time now, the launcher; the decision
    "nothing yet": ([], 100, LEADER_OF_1, None),
    "one node is done": ([(DONE_0, 100)], 100, LEADER_OF_1, DONE_0),
    "one of two nodes is done": ([(DONE_0, 100)], 9999, LEADER_OF_2, None),
    "both nodes are done": ([(DONE_0, 100), (DONE_1, 101)], 101, LEADER_OF_2, DONE_0),
    "a rank failed": ([(FAILED_0, 100)], 100, LEADER_OF_1, FAILED_0),
    "a rank of the other node failed": ([(FAILED_1, 100)], 100, LEADER_OF_2, FAILED_1),
    "a rank failed, the other node is done": ([(DONE_1, 99), (FAILED_0, 100)], 100, LEADER_OF_2, FAILED_0),
    "a signal on the other node": ([(STOPPED_1, 100)], 100, LEADER_OF_2, STOPPED_1),
    "only node 0 decides": ([(FAILED_1, 100)], 9999, OTHER_OF_2, None),
    "only node 0 says that all is done": ([(DONE_1, 100)], 9999, OTHER_OF_2, None),
    "node 0 is gone": ([(LOST_0, 100)], 100, OTHER_ALONE, LOST_0),
    "node 0 is gone, when this node is done": ([(DONE_1, 99), (LOST_0, 100)], 100, OTHER_ALONE, LOST_0),
    "node 0 is gone, and a rank of this node had failed": (
        [(FAILED_1, 99), (LOST_0, 100)],
        100,
        OTHER_ALONE,
        FAILED_1,
    ),
    "an abort on the only node": ([(ABORTED_0, 100)], 100, LEADER_OF_1, ABORTED_0),
    "an abort, whose cause may come": ([(ABORTED_0, 100)], LATER - 0.1, LEADER_OF_2, None),
    "an abort, whose cause never comes": ([(ABORTED_0, 100)], LATER, LEADER_OF_2, ABORTED_0),
    "an abort on each node": ([(ABORTED_1, 100), (ABORTED_0, 101)], LATER, LEADER_OF_2, ABORTED_0),
    "an abort, and its cause meanwhile": ([(ABORTED_0, 100), (FAILED_1, 101)], LATER, LEADER_OF_2, FAILED_1),
    "an abort and its cause at once": ([(ABORTED_0, 100), (FAILED_1, 100)], 100, LEADER_OF_2, FAILED_1),
    "an abort, and the other node is gone": ([(ABORTED_0, 100), (LOST_1, 101)], 101, ALONE_OF_2, LOST_1),
    "of two failures the first": ([(FAILED_1, 100), (FAILED_0, 100)], 100, LEADER_OF_2, FAILED_0),
}


@pytest.mark.parametrize("what", DECISIONS)
def test_decision(what):
    received, now, launcher, decision = DECISIONS[what]
    assert decide([Received(*item) for item in received], now, **launcher) == decision


@pytest.mark.parametrize("cause", Cause)
def test_only_a_failed_rank_is_started_again(cause):
    outcome = Outcome(1, cause, 0)
    assert with_restart(outcome, attempt=1, max_restarts=3).restart == (2 if cause is Cause.RANK else 0)
    assert with_restart(outcome, attempt=3, max_restarts=3).restart == 0


ABORT, KILL = -signal.SIGABRT, -signal.SIGKILL
FIRST = {  # exit codes by rank, the times of the reports by rank -> the rank that failed first
    "none has ended": ({}, {}, None),
    "all ended well": ({0: 0, 1: 0}, {0: 5.0, 1: 6.0}, None),
    "one failed": ({0: 0, 1: 3}, {0: 5.0, 1: 6.0}, 1),
    "the first report counts": ({0: 1, 1: 1}, {0: 6.0, 1: 5.0}, 1),
    "one that reports comes before one that was killed": ({0: KILL, 1: 1}, {1: 5.0}, 1),
    "an abort follows from a kill": ({0: ABORT, 1: KILL}, {}, 1),
    "an abort alone": ({0: ABORT}, {}, 0),
}


@pytest.mark.parametrize("what", FIRST)
def test_first_failure(what):
    codes, times, rank = FIRST[what]
    assert first_failure(codes, [Report(time=times.get(k, float("inf"))) for k in range(2)]) == rank


@pytest.mark.parametrize("code, shell_code", [(0, 0), (3, 3), (KILL, 137), (ABORT, 134)])
def test_exit_code_for_the_shell(code, shell_code):
    assert exit_code(code) == shell_code


def test_outcome_arrives_at_another_node_as_it_was_sent():
    assert outcome_from(json.loads(json.dumps(asdict(ABORTED_1)))) == ABORTED_1
