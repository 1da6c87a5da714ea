"""The bytes that this rank sends: the growth of `wchar` in /proc/self/io, which counts what goes to sockets as well."""

import time

import oneflow as flow

from harness.measure.tensors import tensors_in


def wchar():
    """The bytes that this process has written so far."""
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["wchar"])


def quiet_wchar():
    """`wchar` once every rank has finished its work and sent everything. Collective.

    No rank goes on before all have read it, since what one rank sends makes others send.
    """
    flow._oneflow_internal.eager.Sync()
    flow.comm.barrier()
    before, same = wchar(), 0
    while same < 2:
        time.sleep(0.005)
        now = wchar()
        before, same = now, same + 1 if now == before else 0
    flow.comm.barrier()
    return now


def sent_by(function):
    """What a call returns, and the bytes that this rank sent for it. Collective: every rank makes the same call."""
    before = quiet_wchar()
    result = function()
    wait_for(result)
    return result, quiet_wchar() - before


def wait_for(result):
    """Wait until this rank has its shard of every tensor in `result`: a graph still runs when its call returns."""
    for tensor in tensors_in(result):
        if not tensor.is_global or flow.env.get_rank() in tensor.placement.ranks:
            (tensor.to_local() if tensor.is_global else tensor).detach().numpy()
