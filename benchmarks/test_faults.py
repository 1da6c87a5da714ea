"""A sample of the faults of docs/faults.md, and that the page has what was found."""

import json
from dataclasses import replace

import pytest

from benchmarks import faults
from harness.jobs.hosts import NO_HOSTS, Hosts

SAMPLE = [  # (fault, number of hosts, whether in a graph); tests/slow/test_starting.py has others
    ("a rank is killed, signal 9", 2, True),
    ("the disk is full at a checkpoint", 1, True),
]


@pytest.mark.parametrize("what, count, graph", SAMPLE)
def test_fault_ends_as_promised(what, count, graph):
    """`./launch.sh faults` tries all in both modes, within limits of time."""
    with Hosts(2) as hosts:
        if not hosts.real:
            pytest.skip(NO_HOSTS)
    [fault] = [replace(fault, within=300) for fault in faults.FAULTS if fault.what == what]
    [outcome] = faults.tried([fault], tries=1, seed=count, counts=(count,), modes=(graph,))
    assert faults.good(outcome), outcome


def test_page_is_what_was_found():
    found = json.loads(faults.FOUND.read_text())
    assert faults.PAGE.read_text() == faults.page(found)
    outcomes = [faults.Outcome(**one) for one in found["outcomes"]]
    assert len(outcomes) >= 190 and all(faults.good(one) for one in outcomes)
    assert f"{len(outcomes)} faults" in faults.PAGE.with_name("clusters.md").read_text()
    kinds = {(fault.what, count, graph) for fault in faults.FAULTS for count in fault.hosts for graph in (False, True)}
    assert {(one.fault, one.hosts, one.graph) for one in outcomes} == kinds
