"""One try of each fault of docs/faults.md, and that the page has what was found."""

import json
from dataclasses import replace

import pytest

from tests import faults
from tests.hosts import NO_HOSTS
from tests.markdown import CLUSTERS


@pytest.mark.parametrize("what", [fault.what for fault in faults.FAULTS])
def test_fault_ends_as_promised(hosts, what):
    """In one of the modes, on one of the numbers of hosts; `./launch.sh faults` tries all, within limits of time."""
    if not hosts.real:
        pytest.skip(NO_HOSTS)
    number = [fault.what for fault in faults.FAULTS].index(what)
    fault, graph = faults.FAULTS[number], bool(number % 2)
    count = fault.hosts[number // 2 % len(fault.hosts)]
    fault = replace(fault, within=300, timeout=60 if fault.timeout == faults.SILENCE else fault.timeout)
    [outcome] = faults.tried([fault], tries=1, seed=number, counts=(count,), modes=(graph,))
    assert faults.good(outcome), outcome


def test_page_is_what_was_found():
    found = json.loads(faults.FOUND.read_text())
    assert faults.PAGE.read_text() == faults.page(found)
    outcomes = [faults.Outcome(**one) for one in found["outcomes"]]
    assert len(outcomes) >= 200 and all(faults.good(one) for one in outcomes)
    assert f"what came of {len(outcomes)} faults" in CLUSTERS.read_text()
    kinds = {(fault.what, count, graph) for fault in faults.FAULTS for count in fault.hosts for graph in (False, True)}
    assert {(one.fault, one.hosts, one.graph) for one in outcomes} == kinds
