"""The counter of bytes: what a process has written to its TCP connections to others, and to no file or pipe."""

import os
import socket

from oneflow_cookbook.measure.sent import between_ranks, connections, growth


def test_bytes_written_to_another_process_are_counted(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        open_files, before = os.listdir("/proc/self/fd"), connections()
        sender.sendall(bytes(1234))  # it waits in the server's queue: it need not be acknowledged
        (tmp_path / "file").write_bytes(bytes(99))
        assert (sender.getsockname(), sender.getpeername()) in before and growth(before, connections()) == 1234
        assert os.listdir("/proc/self/fd") == open_files
        receiver, _ = server.accept()  # now this process has both ends
        with receiver:
            ends = sender.getsockname(), receiver.getsockname()
            assert not {ends, ends[::-1]} & set(connections())


def test_bytes_between_ranks_are_those_of_their_connections():
    a, b, c, other = (("127.0.0.1", port) for port in (10, 20, 30, 9))
    before = [{(a, b): 5}, {(b, a): 1, (c, other): 7}]
    after = [{(a, b): 9}, {(b, a): 4, (c, other): 8, (b, other): 3}]  # `other` is no rank's
    assert between_ranks(before, after) == {(0, 1): 4, (1, 0): 3}
