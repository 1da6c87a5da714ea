"""The bytes that each rank sent to each other: the counters of their TCP connections, on one host."""

import os
import socket
import struct
from pathlib import Path

ACKNOWLEDGED = 120  # where `struct tcp_info` of Linux has bytes_acked


def acknowledged():
    """{(port here, port there): bytes that this rank has sent and the other has received} of its connections."""
    found = {}
    for file in Path("/proc/self/fd").iterdir():
        if not file.is_socket():  # nor what was closed since
            continue
        with socket.socket(fileno=os.dup(int(file.name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                try:
                    ports = one.getsockname()[1], one.getpeername()[1]
                except OSError:  # it listens
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED + 8)
                found[ports] = struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
    return found


def between_ranks(before, after):
    """{(sender, receiver): bytes} from what `acknowledged` said on each rank at two times."""
    owner = {ports: rank for rank, found in enumerate(after) for ports in found}
    sent = {}
    for rank, found in enumerate(after):
        for (here, there), count in found.items():
            other = owner.get((there, here))
            if other not in (None, rank):
                sent[rank, other] = sent.get((rank, other), 0) + count - before[rank].get((here, there), 0)
    return sent
