"""The connection between the launchers of two nodes."""

import collections
import json
import time

PEER_TIMEOUT = 10.0  # seconds without a message after which a connection counts as lost


class Peer:
    """The connection to the launcher of another node. A message is a dict, sent as a line of JSON."""

    def __init__(self, connection, address):
        """connection: a socket. address: of the other node; "" if it is on this host."""
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.our_address = connection.getsockname()[0]  # as the other node sees it
        self.hello = {"node": 0, "host": address}  # how it introduced itself
        self.last_received, self.buffer, self.closed = time.monotonic(), b"", False
        self.inbox = collections.deque()

    def __str__(self):
        return f"node {self.hello['node']} ({self.hello['host']})"

    def send(self, **message):
        try:
            # a message is short: the socket's buffer has room
            self.connection.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            self.closed = True

    def receive(self):
        """The next message that has arrived, None if there is none.

        Sets `closed` if the connection is lost, or if the other side is not a launcher.
        """
        self._read()
        *lines, self.buffer = self.buffer.split(b"\n")
        try:
            self.inbox += filter(None, map(json.loads, lines))  # {} is a heartbeat
        except ValueError:
            self.closed = True
        if time.monotonic() - self.last_received > PEER_TIMEOUT:
            self.closed = True
        return self.inbox.popleft() if self.inbox else None

    def _read(self):
        while not self.closed:
            try:
                data = self.connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.buffer += data
            self.last_received, self.closed = time.monotonic(), not data
