"""How the launchers of a job meet: node 0 listens, the others connect to it.

Node 0 has a Gathering, each other node a Joining. Both have two methods: `step` does what can be done now and returns
whether all nodes are there; `missing` names those that are not.
"""

import contextlib
import os
import socket
import time

from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.output import say
from oneflow_cookbook.start.peer import Peer
from oneflow_cookbook.start.silence import HOW_TO_END

NOTICE_DELAY = 2.0  # seconds after which a launcher names the nodes that it waits for
PAUSE = 0.02  # seconds between two steps


def wait_for(meeting, deadline, silent, stopped):
    """Wait until all nodes are there; returns False if `stopped()` becomes true first.

    meeting: a Gathering or a Joining. deadline: by time.monotonic(). silent: seconds after which to name the missing
    nodes once more, with what to check; 0: never. Raises UsageError after the deadline.
    """
    begin = time.monotonic()
    check = "check that launch.sh runs there and can reach this host"
    later = silent or float("inf")
    notices = [(NOTICE_DELAY, "waiting for {}"), (later, f"still waiting for {{}}; {check}; {HOW_TO_END}")]
    while not meeting.step():
        if stopped():
            return False
        if time.monotonic() > deadline:
            raise UsageError(f"{meeting.missing()} did not come within --timeout; {check}")
        if notices and time.monotonic() > begin + notices[0][0]:
            say(notices.pop(0)[1].format(meeting.missing()))
        time.sleep(PAUSE)
    return True


class Gathering:
    """Node 0: accepts the launchers of the other nodes as they come, and refuses those that come too late."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.newcomers = []  # connections that have sent no message yet
        try:
            self.listener = socket.create_server(("0.0.0.0", nodes.port))
        except OSError as error:
            reason = f"--master_port {nodes.port}: {os.strerror(error.errno)}"
            raise UsageError(f"{reason}; choose a different one, the same on each node") from None
        self.listener.setblocking(False)

    def close(self):
        self.listener.close()

    def missing(self):
        joined = self._joined()
        numbers = [str(number) for number in range(1, self.nodes.nnodes) if number not in joined]
        return f"node{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} of {self.nodes.nnodes}"

    def step(self):
        for peer, hello in self._hellos():
            self._answer(peer, hello, self._refusal(hello))
        for _ in iter(self.nodes.receive, None):  # this drops lost nodes, which may come again
            pass
        return len(self.nodes.peers) == self.nodes.nnodes - 1

    def turn_away(self):
        """While the job runs, refuse further launchers: one that was started twice would wait forever."""
        for peer, hello in self._hellos():
            self._answer(peer, hello, self._refusal(hello) or "the job at this port runs already")

    def _hellos(self):
        """Yield (Peer, its hello) of each newcomer that has sent one."""
        with contextlib.suppress(BlockingIOError):
            self._connect(*self.listener.accept())
        for peer in list(self.newcomers):
            hello = peer.receive()
            if hello or peer.closed:
                self.newcomers.remove(peer)
            if hello:
                yield peer, hello

    def _joined(self):
        return {peer.hello["node"] for peer in self.nodes.peers}

    def _connect(self, connection, where):
        address, _ = where
        same_host = address in (connection.getsockname()[0], "127.0.0.1")
        self.newcomers.append(Peer(connection, "" if same_host else address))

    def _answer(self, peer, hello, refusal):
        """Add a newcomer to the nodes, or, if there is a refusal, send it that."""
        if refusal:
            peer.send(refused=refusal)
            peer.connection.close()
        else:
            peer.hello = hello
            self.nodes.peers.append(peer)

    def _refusal(self, hello):
        """Why a launcher with this hello does not belong to the job; None if it does."""
        ours, theirs = self.nodes.same, hello.get("same", {})
        for name, value in ours.items():
            if theirs.get(name) != value:
                return f"{name} {theirs.get(name)} here, and {value} on node 0: type the same on each node"
        if hello["node"] in self._joined() | {0}:
            last = self.nodes.nnodes - 1
            return f"--node_rank {hello['node']} is taken: number the nodes from 0 to {last}, each once"
        return None


class Joining:
    """Each other node: connects to node 0, and waits for its message where to start the ranks."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.where = f"node 0 at {nodes.address}:{nodes.port}"
        self.may_connect = nodes.start is None  # at a restart, the connection must still be there
        self.error = ""  # why node 0 cannot be reached

    def missing(self):
        if self.nodes.peers:
            return f"the other nodes, with {self.where}"
        return f"{self.where} ({self.error})" if self.error else self.where

    def step(self):
        if not self.nodes.peers and not self._connect():
            return False
        for message in iter(self.nodes.receive, None):
            if "refused" in message:
                raise UsageError(message["refused"])
            if "start" in message:
                self.nodes.start = message["start"]
                return True
        return False

    def _connect(self):
        """Connect to node 0; returns whether it can be reached now."""
        if not self.may_connect:
            raise UsageError(f"{self.where} is gone")
        address = (self.nodes.address, self.nodes.port)
        try:
            connection = socket.create_connection(address, timeout=1)
        except OSError as error:  # not started yet; some clusters do not even resolve its name before
            self.error = str(error.args[-1])
            return False
        self.error = ""
        self.nodes.peers = [Peer(connection, self.nodes.address)]
        self.nodes.send(**self.nodes.hello)
        return True
