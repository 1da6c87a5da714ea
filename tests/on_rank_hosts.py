"""What test_hosts.py calls on the ranks of a pool on two hosts."""

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time

import oneflow as flow

from harness.measure.graph import FunctionGraph
from harness.measure.sbp import sbp_of
from harness.measure.sent import wait_for

BYTES_ACKED = 120  # where it is in the kernel's struct tcp_info
LONG = 60  # seconds


def sockets_to_other_hosts():
    """The TCP sockets of this process whose other end is not on this host."""
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed meanwhile, or nobody is at its other end
            if os.readlink(entry.path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family != socket.AF_UNIX and one.getsockname()[0] != one.getpeername()[0]:
                        yield one


def sent_to_other_hosts():
    """The bytes that this rank has written to those sockets, once all have arrived. Collective.

    TCP counts each byte of the payload once, when its receipt is acknowledged: no header, and nothing twice that was
    sent again. So the number does not depend on how the link cuts the stream into segments.
    """
    flow._oneflow_internal.eager.Sync()
    flow.comm.barrier()
    deadline = time.monotonic() + LONG
    while any(unacknowledged(one) for one in sockets_to_other_hosts()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was sent to other hosts did not arrive in {LONG} s")
        time.sleep(0.01)
    infos = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in sockets_to_other_hosts()]
    flow.comm.barrier()
    return sum(struct.unpack_from("Q", info, BYTES_ACKED)[0] for info in infos)


def unacknowledged(one):
    """The bytes that were written to a socket and have not arrived, as far as is known."""
    return struct.unpack("i", fcntl.ioctl(one, termios.TIOCOUTQ, bytes(4)))[0]


def between_hosts(source, target, old, new, rows, columns, graph):
    """The bytes that this rank sends to other hosts for one to_global of a tensor in float32. Collective."""
    x = flow.ones(rows, columns, placement=flow.placement("cpu", source), sbp=sbp_of(old))
    there = flow.placement("cpu", target)

    def function(x):
        return x.to_global(placement=there, sbp=sbp_of(new))

    if graph:
        function = FunctionGraph(function)
        function._compile(x)
    wait_for(function(x))  # once beforehand: connections are made
    before = sent_to_other_hosts()
    wait_for(function(x))
    return sent_to_other_hosts() - before
