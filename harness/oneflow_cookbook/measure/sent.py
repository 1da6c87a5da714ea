"""Count the bytes that this rank has sent to other ranks: those written to its TCP connections over IPv4.

OneFlow sends tensors over these; its remote calls, such as the barriers here, use gRPC over IPv6. TCP counts each byte
of content once, without headers and retransmissions. Files, pipes, Unix sockets and connections of a rank to itself are
not counted. Only `quiet` and `wait_for` import OneFlow.
"""

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time

from oneflow_cookbook.measure.tensors import tensors_in

BYTES_ACKED = 120  # offset in Linux' struct tcp_info
QUIET = 3  # equal counts in a row after which all has been sent


def connections():
    """{((address, port) here, (address, port) there): bytes written} of this rank's TCP connections to others."""
    counts = {}
    for descriptor in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or a listening socket
            if os.readlink(descriptor.path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        counts[connection.getsockname(), connection.getpeername()] = written(connection)
    return {(here, there): count for (here, there), count in counts.items() if (there, here) not in counts}


def written(connection):
    """The bytes written to a connection, acknowledged or not."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
    [acknowledged] = struct.unpack_from("Q", info, BYTES_ACKED)
    [unacknowledged] = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return acknowledged + unacknowledged


def quiet():
    """Wait until every rank has finished its work and sent everything; returns `connections()`. Collective.

    No rank continues before all have counted, because what a rank sends can make others send.
    """
    import oneflow as flow

    flow._oneflow_internal.eager.Sync()
    flow.comm.barrier()
    counts = connections()
    times = 1  # that these counts were seen in a row
    while times < QUIET:
        time.sleep(0.005)
        before, counts = counts, connections()
        times = times + 1 if counts == before else 1
    flow.comm.barrier()
    return counts


def growth(before, after):
    """The bytes sent between two results of `connections` or `quiet`."""
    return sum(count - before.get(ends, 0) for ends, count in after.items())


def sent_by(function):
    """(function(), bytes that this rank sent for it). Collective: every rank makes the same call."""
    before = quiet()
    result = function()
    wait_for(result)
    return result, growth(before, quiet())


def between_ranks(before, after):
    """{(sender, receiver): bytes}. before, after: the results of `quiet` of all ranks, by rank."""
    owner = {ends: rank for rank, counts in enumerate(after) for ends in counts}
    sent = {}
    for rank, counts in enumerate(after):
        for (here, there), count in counts.items():
            other = owner.get((there, here))
            if other is not None:
                sent[rank, other] = sent.get((rank, other), 0) + count - before[rank].get((here, there), 0)
    return sent


def wait_for(result):
    """Wait until this rank has its shard of every tensor in `result`: a graph's call returns before it has run."""
    import oneflow as flow

    for tensor in tensors_in(result):
        if not tensor.is_global:
            tensor.detach().numpy()
        elif flow.env.get_rank() in tensor.placement.ranks:
            tensor.to_local().detach().numpy()
