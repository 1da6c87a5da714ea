"""What test_hosts.py calls on the ranks of a pool on two hosts."""

import time

import oneflow as flow

from harness.measure.graph import FunctionGraph
from harness.measure.sbp import sbp_of
from harness.measure.sent import quiet_wchar, wait_for
from harness.start import recipe


def sent_by_host():
    """The bytes that have left this rank's host by its network device, headers included."""
    with open("/proc/self/net/dev") as devices:
        [line] = [line for line in devices if line.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


def quiet_sent_by_host():
    """The same when nothing is on its way any more: what a rank has written may wait in a socket. Collective."""
    quiet_wchar()
    before, same = sent_by_host(), 0
    while same < 3:
        time.sleep(0.02)
        now = sent_by_host()
        before, same = now, same + 1 if now - before < 2000 else 0  # heartbeats go on
    flow.comm.barrier()
    return now


def between_hosts(source, target, old, new, rows, columns, graph):
    """The bytes that leave this rank's host for one to_global of a tensor in float32. Collective."""
    x = flow.ones(rows, columns, placement=flow.placement("cpu", source), sbp=sbp_of(old))
    there = flow.placement("cpu", target)

    def function(x):
        return x.to_global(placement=there, sbp=sbp_of(new))

    if graph:
        function = FunctionGraph(function)
        function._compile(x)
    wait_for(function(x))  # once beforehand: connections are made
    before = quiet_sent_by_host()
    wait_for(function(x))
    return quiet_sent_by_host() - before


def times_of_training(path, more, graph=False, **arguments):
    """Seconds that a run of one step of training takes, and one with so many more. Collective."""
    module = recipe.load(path)
    times = []
    for steps in (1, 1 + more):
        flow.comm.barrier()
        begin = time.monotonic()
        wait_for(module.run(graph=graph, steps=steps, **arguments))
        flow.comm.barrier()
        times.append(time.monotonic() - begin)
    return times
