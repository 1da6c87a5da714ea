"""The bytes that this rank sends: the growth of `wchar` in /proc/self/io, of all that the process writes.

A socket is written to like a file, so what leaves for other ranks is in it.
"""

import time

import oneflow as flow


def wchar():
    """The bytes that this process has written so far."""
    with open("/proc/self/io") as counters:
        return int(dict(line.split(": ") for line in counters)["wchar"])


def quiet_wchar():
    """The same once every rank has done all that it was told and what it sent is on its way.

    No rank goes on before all have read, for what one rank sends makes others send, whatever their scripts are doing.
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
    """Wait until this rank has its part of all tensors in `result`: a graph runs on when its call has returned."""
    for tensor in tensors_in(result):
        if not tensor.is_global or flow.env.get_rank() in tensor.placement.ranks:
            (tensor.to_local() if tensor.is_global else tensor).detach().numpy()


def tensors_in(values):
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(values, flow.Tensor):
        return [values]
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_in(value)]
