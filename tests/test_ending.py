"""Which rank failed first, and what counts as silence: decided here without any process."""

import os
import signal

import pytest

from oneflow_cookbook.start.ending import exit_code, first_failure
from oneflow_cookbook.start.output import RankOutput, Report
from oneflow_cookbook.start.silence import Silence

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
    output = RankOutput(1, lambda rank: b"", [])
    begin = output.printed = -1.0
    for piece in pieces:
        os.write(output.writing[stream][0], piece)
        output.read(1)
    output.close_writing()
    output.close()
    assert (output.printed != begin) == ends
