"""The bytes that this rank has sent to other ranks: what it has written to its TCP connections over IPv4.

By these OneFlow sends tensors; its remote calls, such as the barriers here, go by gRPC over IPv6. TCP counts each byte
of the content once: no header, and nothing twice that was sent again. Files, pipes and Unix sockets are not counted,
nor a connection of a rank to itself. Only `quiet` and `wait_for` need OneFlow, so they import it.
"""

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time

from harness.measure.tensors import tensors_in

BYTES_ACKED = 120  # where it is in Linux' struct tcp_info
QUIET = 3  # times that the count must be the same in a row


def connections():
    """{((address, port) here, (address, port) there): bytes written to it} of this rank's TCP connections to others."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or it has no other end: it listens
            if os.readlink(entry.path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        found[connection.getsockname(), connection.getpeername()] = written(connection)
    return {(here, there): count for (here, there), count in found.items() if (there, here) not in found}


def written(connection):
    """What the other end has acknowledged, and what it has not yet: acknowledgements may come late."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
    [acknowledged] = struct.unpack_from("Q", info, BYTES_ACKED)
    [on_the_way] = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return acknowledged + on_the_way


def quiet():
    """What `connections` says once every rank has finished its work and sent everything. Collective.

    No rank continues before all have read it, since what one rank sends makes others send.
    """
    import oneflow as flow

    flow._oneflow_internal.eager.Sync()
    flow.comm.barrier()
    before, same = connections(), 1
    while same < QUIET:
        time.sleep(0.005)
        now = connections()
        before, same = now, same + 1 if now == before else 1
    flow.comm.barrier()
    return now


def growth(before, after):
    """The bytes by which what `quiet` says has grown."""
    return sum(count - before.get(ends, 0) for ends, count in after.items())


def sent_by(function):
    """What a call returns, and the bytes that this rank sent for it. Collective: every rank makes the same call."""
    before = quiet()
    result = function()
    wait_for(result)
    return result, growth(before, quiet())


def between_ranks(before, after):
    """{(sender, receiver): bytes} from what `quiet` said on each rank at two times."""
    owner = {ends: rank for rank, found in enumerate(after) for ends in found}
    sent = {}
    for rank, found in enumerate(after):
        for (here, there), count in found.items():
            other = owner.get((there, here))
            if other is not None:
                sent[rank, other] = sent.get((rank, other), 0) + count - before[rank].get((here, there), 0)
    return sent


def wait_for(result):
    """Wait until this rank has its shard of every tensor in `result`: a graph still runs when its call returns."""
    import oneflow as flow

    for tensor in tensors_in(result):
        if not tensor.is_global or flow.env.get_rank() in tensor.placement.ranks:
            (tensor.to_local() if tensor.is_global else tensor).detach().numpy()
