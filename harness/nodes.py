"""The launchers of one job on several hosts: they meet, agree on a port, and tell each other how their ranks end.

Node 0 leads: the others connect to --master_addr, --master_port and speak with it alone, in lines of JSON. OneFlow has
a port of its own, which node 0 finds free and tells. A launcher that is silent for SILENCE seconds counts as gone.
"""

import contextlib
import json
import socket
import time

HEARTBEAT, SILENCE = 1.0, 10.0  # seconds
SAYS_SO = 2.0  # seconds after which a launcher that waits says for whom
SECOND_OPINION = 2.0  # seconds in which another node may tell a cause of which the first failure is a consequence


class Apart(Exception):
    """The nodes did not come together, in one line that says why and what to do."""


class Peer:
    """The launcher of another node, behind a socket."""

    def __init__(self, connection, address):
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.heard, self.rest, self.gone = time.monotonic(), b"", False
        self.hello = {"node": 0, "host": address}

    @property
    def number(self):
        return self.hello["node"]

    def __str__(self):
        return f"node {self.number} ({self.hello['host']})"

    def send(self, **message):
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:  # a message is short, so that it fits into the socket's buffer
                data = data[self.connection.send(data) :]
        except OSError:
            self.gone = True

    def receive(self):
        """The messages that have come; sets `gone` at the end of the connection, or after a long silence."""
        try:
            while True:
                data = self.connection.recv(65536)
                if not data:
                    self.gone = True
                    break
                self.heard, self.rest = time.monotonic(), self.rest + data
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        if time.monotonic() - self.heard > SILENCE:
            self.gone = True
        *lines, self.rest = self.rest.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):  # no launcher of ours
            self.gone = True
            return []
        return messages


class Nodes:
    """This node among those of a job. A context manager, again and again: on leaving it, the connections are closed."""

    def __init__(self, count, number, ranks_each, address, port):
        """count: of nodes; number: of this one; address, port: where node 0 listens."""
        self.count, self.number, self.address, self.port = count, number, address, port
        self.hello = {"node": number, "nodes": count, "ranks": ranks_each, "host": socket.gethostname()}
        self.name = f"node {number} ({self.hello['host']})"
        self.peers, self.beat, self.started = [], 0.0, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in self.peers:
            peer.connection.close()
        self.peers = []

    def meet(self, deadline, say, stopped):
        """Wait until all nodes are there, until time.monotonic() is `deadline`.

        say: takes a line; stopped: whether to give up. Raises Apart.
        """
        if self.count == 1:
            return
        steps = self._gather() if self.number == 0 else self._join()
        said = time.monotonic() + SAYS_SO
        for missing in steps:  # it ends when none is missing
            if stopped():
                return
            if time.monotonic() > deadline:
                raise Apart(f"{missing} did not come until --timeout; see that launch.sh runs there and can reach us")
            if time.monotonic() > said:
                said = float("inf")
                say(f"waiting for {missing}")
            time.sleep(0.02)

    def _gather(self):
        """Node 0: take in the others. Yields who is missing."""
        try:
            listener = socket.create_server(("0.0.0.0", self.port))
        except OSError as error:
            reason = f"--master_port {self.port}: {error.strerror}; take another one, the same on each node"
            raise Apart(reason) from None
        with listener:
            listener.setblocking(False)
            yield from self._gather_from(listener)

    def _gather_from(self, listener):
        strangers = []
        while len(self.peers) < self.count - 1:
            with contextlib.suppress(BlockingIOError):
                connection, (address, _) = listener.accept()
                here = connection.getsockname()[0]  # who comes from our own address shares it with us
                strangers.append(Peer(connection, "" if address in (here, "127.0.0.1") else address))
            for one in list(strangers):
                for message in one.receive():
                    strangers.remove(one)
                    self._judge(one, message)
                    break
                if one.gone and one in strangers:
                    strangers.remove(one)
            there = {peer.hello["node"] for peer in self.peers}
            missing = [number for number in range(1, self.count) if number not in there]
            yield f"node{'s'[: len(missing) > 1]} {', '.join(map(str, missing))} of {self.count}"
            self._beat()
            for peer in self.peers:
                peer.receive()
            self.peers = [peer for peer in self.peers if not peer.gone]  # it may come again

    def _judge(self, peer, hello):
        """Take a node in, or tell it why not."""
        wrong = None
        for name, option in (("nodes", "--nnodes"), ("ranks", "--nproc_per_node")):
            if hello.get(name) != self.hello[name]:
                wrong = f"{option} {hello.get(name)} here, and {self.hello[name]} on node 0: type the same on each node"
        if not wrong and hello.get("node") not in set(range(1, self.count)) - {one.number for one in self.peers}:
            wrong = f"--node_rank {hello.get('node')} is taken: number the nodes from 0 to {self.count - 1}, each once"
        peer.hello = hello
        if wrong:
            peer.send(refused=wrong)
            peer.connection.close()
        else:
            self.peers.append(peer)

    def _join(self):
        """Another node: connect to node 0 and wait until it has all. Yields who is missing."""
        where = f"node 0 at {self.address}:{self.port}"
        leader = None
        while True:
            if leader is None:
                try:
                    connection = socket.create_connection((self.address, self.port), timeout=1)
                except socket.gaierror as error:
                    reason = f"--master_addr {self.address}: {error.strerror}: type node 0's name or address"
                    raise Apart(reason) from None
                except OSError:
                    yield where
                    continue
                leader = Peer(connection, self.address)
                leader.send(**self.hello)
            for message in leader.receive():
                if "refused" in message:
                    raise Apart(message["refused"])
                if "start" in message:
                    self.started = message["start"]
                    return
            self.peers = [] if leader.gone else [leader]
            leader = None if leader.gone else leader
            self._beat()
            yield where if leader is None else f"the other nodes, with {where}"

    def begin(self, port=0):
        """All are there: {"port": of rank 0, which node 0 gives, "local": LOCAL_RANK of the first rank here}."""
        if self.count == 1:
            return {"port": port, "local": 0}
        if self.number == 0:
            before = {"": self.hello["ranks"]}  # address -> ranks there on lower nodes; "" is ours
            for peer in sorted(self.peers, key=lambda peer: peer.hello["node"]):
                peer.send(start={"port": port, "local": before.get(peer.address, 0)})
                before[peer.address] = before.get(peer.address, 0) + self.hello["ranks"]
            return {"port": port, "local": 0}
        return self.started

    def tell(self, **message):
        """Send a message to all peers: to the other nodes from node 0, to node 0 from them."""
        for peer in self.peers:
            peer.send(**message)

    def poll(self):
        """[(peer, message)] of what has come; of a peer that is gone {"gone": True}, once. Call it often."""
        self._beat()
        found = []
        for peer in self.peers:
            found += [(peer, message) for message in peer.receive() if message]
        found += [(peer, {"gone": True}) for peer in self.peers if peer.gone]
        self.peers = [peer for peer in self.peers if not peer.gone]
        return found

    def _beat(self):
        """Say that we are alive, once in a while."""
        if time.monotonic() - self.beat > HEARTBEAT:
            self.beat = time.monotonic()
            self.tell()
