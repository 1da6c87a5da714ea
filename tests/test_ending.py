"""How a job ends, what counts as silence, and which calls were never answered: decided here without any process."""

import json
import os
import signal
from dataclasses import asdict

import pytest

from oneflow_cookbook.start import unanswered
from oneflow_cookbook.start.ending import (
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
from oneflow_cookbook.start.output import Output, Report
from oneflow_cookbook.start.silence import Silence

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


def test_each_silence_that_is_shown_is_shown_once_and_twice_as_long_as_the_last():
    silence = Silence(300)
    times = [(0, 299), (0, 300), (0, 9999), (10000, 10599), (10000, 10600), (20000, 21199)]  # of the last line, and now
    assert [silence.to_show(printed, now) for printed, now in times] == [None, 300, None, None, 600, None]
    assert Silence(0).to_show(0, 1e9) is None


STACK = [b"Stack (most recent call first):\n", b'  File "mine.py", line 5 in <module>\n', b"  <no Python frame>\n"]
WRITES = {  # what a rank writes -> (the pieces, whether they end the silence)
    "a line": ([b"step 1\n"], True),
    "part of a line": ([b"."], True),
    "a progress bar": ([b"1 of 2\r"], True),
    "a traceback of Python": ([b"Traceback (most recent call last):\n", *STACK[1:2]], True),
    "a stack that launch.sh asked for": (STACK, False),
    "the same in pieces": ([b"Stack (most recent call first):\n  File ", b'"mine.py"', b", line 5 in f\n"], False),
}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("what", WRITES)
def test_stacks_that_the_launcher_asks_for_do_not_end_a_silence(what, stream):
    pieces, ends = WRITES[what]
    output = Output(1, lambda rank: b"", [])
    begin = output.printed = -1.0
    for piece in pieces:
        os.write(output.writing[stream][0], piece)
        output.read(1)
    output.close_writing()
    output.close()
    assert (output.printed != begin) == ends


CALLS = {  # what -> (the calls of each rank, the lines about them)
    "nothing": ({0: [], 1: []}, []),
    "all are answered": ({0: [["barrier", None, "a.py:3", 2]], 1: [["barrier", None, "a.py:3", 2]]}, []),
    "answered in another line": ({0: [["barrier", None, "a.py:3", 2]], 1: [["barrier", None, "a.py:5", 2]]}, []),
    "one rank leaves a loop earlier": (
        {rank: [["all_reduce", None, "a.py:7", 9 + (rank != 3)], ["barrier", None, "a.py:9", 1]] for rank in range(4)},
        ["flow.comm.all_reduce at a.py:7 was called 10 times by ranks 0, 1, 2; 9 times by rank 3"],
    ),
    "one line of two": (
        {4: [["reduce", None, "a.py:3", 1], ["reduce", None, "a.py:5", 2]], 5: [["reduce", None, "a.py:5", 2]]},
        ["flow.comm.reduce at a.py:3 was called 1 time by rank 4; 0 times by rank 5"],
    ),
    "sends and receives": ({0: [["send", 1, "a.py:3", 2]], 1: [["recv", 0, "a.py:5", 2]]}, []),
    "a rank of another node": ({0: [["send", 2, "a.py:3", 2]], 1: []}, []),
    "a send without a receive": (
        {0: [["send", 1, "a.py:3", 2]], 1: [["recv", 0, "a.py:5", 1]]},
        ["flow.comm.send to rank 1 was called 2 times at a.py:3 by rank 0; "
         "flow.comm.recv from rank 0 1 time at a.py:5 by rank 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_were_never_answered(what):
    calls, lines = CALLS[what]
    assert list(unanswered.lines(calls)) == lines
