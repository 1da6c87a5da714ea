"""The launchers of one job on several nodes: they meet, agree on OneFlow's port, and exchange how their ranks ended.

Node 0 leads. The others connect to it at --master_addr, --master_port and exchange messages with it alone.
"""

import collections
import contextlib
import itertools
import json
import os
import socket
import time

from harness.start.options import BadInput
from harness.start.output import say
from harness.start.ranks import cores_of

HEARTBEAT = 1.0  # seconds between messages that only say that a launcher is alive
PEER_TIMEOUT = 10.0  # seconds without a message after which a connection counts as lost
NOTICE_DELAY = 2.0  # seconds after which a launcher says for which nodes it waits


class Peer:
    """The connection to the launcher of another node. A message is a dict, sent as a line of JSON."""

    def __init__(self, connection, address):
        """address: of the other node, "" if it has ours."""
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.our_address = connection.getsockname()[0]  # as the other node sees it
        self.hello = {"node": 0, "host": address}  # what it said of itself
        self.last_received, self.buffer, self.closed = time.monotonic(), b"", False
        self.inbox = collections.deque()

    def __str__(self):
        return f"node {self.hello['node']} ({self.hello['host']})"

    def send(self, **message):
        try:
            self.connection.sendall((json.dumps(message) + "\n").encode())  # it is short: the socket's buffer has room
        except OSError:
            self.closed = True

    def receive(self):
        """Yield the messages that have arrived; sets `closed` if the connection is lost, or not that of a launcher."""
        while not self.closed:
            try:
                data = self.connection.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.buffer += data
            self.last_received, self.closed = time.monotonic(), not data
        *lines, self.buffer = self.buffer.split(b"\n")
        try:
            self.inbox += filter(None, map(json.loads, lines))  # {} is a heartbeat
        except ValueError:
            self.closed = True
        if time.monotonic() - self.last_received > PEER_TIMEOUT:
            self.closed = True
        while self.inbox:
            yield self.inbox.popleft()


class Nodes:
    """This node among those of a job; a context manager that closes the connections."""

    def __init__(self, count, number, ranks_each, address, port, same):
        """count: of nodes; number: of this one; address, port: where node 0 listens.

        same: name -> value that must be equal on all nodes, such as the script and its arguments.
        """
        self.count, self.number, self.address, self.port = count, number, address, port
        self.ranks_each, self.same = ranks_each, same
        cores = sorted(os.sched_getaffinity(0))  # a scheduler may give each node cores of its own on one host
        self.hello = {"node": number, "host": socket.gethostname(), "cores": cores, "same": same}
        self.name = f"node {number} ({self.hello['host']})"
        self.is_leader = number == 0
        self.peers, self.last_heartbeat = [], 0.0
        self.start = None  # what `begin` returned last

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in self.peers:
            peer.connection.close()

    def send(self, **message):
        """Send a message to all peers: from node 0 to the other nodes, from these to node 0."""
        for peer in self.peers:
            peer.send(**message)

    def receive(self):
        """Yield the messages that have arrived, {"lost": name} for a lost peer; call it often, it sends heartbeats."""
        if time.monotonic() - self.last_heartbeat > HEARTBEAT:
            self.last_heartbeat = time.monotonic()
            self.send()
        for peer in list(self.peers):
            yield from peer.receive()
            if peer.closed:
                self.peers.remove(peer)
                yield {"lost": str(peer), "node": peer.hello["node"]}

    def begin(self, port, deadline, stopped):
        """Begin an attempt together with all nodes; returns arguments of NodeRanks, None if `stopped()` is true before.

        port: of rank 0, on node 0. deadline: of the wait for other nodes, by time.monotonic(). Raises BadInput.
        """
        if self.is_leader and self.start is None and self.count > 1:
            steps = self._accept_all()
        else:
            steps = iter(()) if self.is_leader else self._wait_for_start()
        notice = time.monotonic() + NOTICE_DELAY
        for missing in steps:
            if stopped():
                return None
            if time.monotonic() > deadline:
                check = "see that launch.sh runs there and can reach us"
                raise BadInput(f"{missing} did not come until --timeout; {check}")
            if time.monotonic() > notice:
                notice = float("inf")
                say(f"waiting for {missing}")
            time.sleep(0.02)
        if self.is_leader:
            self._send_start(port)
        return self.start

    def _accept_all(self):
        """Node 0: accept the other nodes. Yields which ones are missing."""
        try:
            listener = socket.create_server(("0.0.0.0", self.port))
        except OSError as error:
            reason = f"--master_port {self.port}: {os.strerror(error.errno)}; take another one, the same on each node"
            raise BadInput(reason) from None
        new = []  # connections without a message so far
        with listener:
            listener.setblocking(False)
            while len(self.peers) < self.count - 1:
                joined = {peer.hello["node"] for peer in self.peers}
                missing = [str(number) for number in range(1, self.count) if number not in joined]
                yield f"node{'s'[: len(missing) > 1]} {', '.join(missing)} of {self.count}"
                with contextlib.suppress(BlockingIOError):
                    connection, (address, _) = listener.accept()
                    same_host = address in (connection.getsockname()[0], "127.0.0.1")
                    new.append(Peer(connection, "" if same_host else address))
                for peer in list(new):
                    hello = next(peer.receive(), None)
                    if hello:
                        self._accept(peer, hello)
                    if hello or peer.closed:
                        new.remove(peer)
                for _ in self.receive():  # drops a node that is lost: it may come again
                    pass
        hosts, ranks = len({"", *(peer.address for peer in self.peers)}), self.count * self.ranks_each
        if ranks % hosts:
            refusal = f"OneFlow 0.9.0 would hang: {ranks} ranks cannot be divided by {hosts} hosts"
            self.send(refused=refusal)
            raise BadInput(refusal)

    def _accept(self, peer, hello):
        """Take a node in, or tell it why not."""
        theirs, taken = hello.get("same", {}), {one.hello["node"] for one in self.peers}
        differing = [name for name in self.same if theirs.get(name) != self.same[name]]
        refusal = None
        if differing:
            name = differing[0]
            refusal = f"{name} {theirs.get(name)} here, and {self.same[name]} on node 0: type the same on each node"
        elif hello["node"] in taken | {0}:
            refusal = f"--node_rank {hello['node']} is taken: number the nodes from 0 to {self.count - 1}, each once"
        if refusal:
            peer.send(refused=refusal)
            peer.connection.close()
        else:
            peer.hello = hello
            self.peers.append(peer)

    def _wait_for_start(self):
        """Another node: connect to node 0 and wait until it has all. Yields which nodes are missing."""
        where, first = f"node 0 at {self.address}:{self.port}", self.start is None
        while True:
            if not self.peers:
                if not first:
                    raise BadInput(f"{where} is gone")
                try:
                    connection = socket.create_connection((self.address, self.port), timeout=1)
                except OSError as error:  # it has not started; in some clusters its name is not known before, either
                    yield f"{where} ({error.args[-1]})"
                    continue
                self.peers = [Peer(connection, self.address)]
                self.send(**self.hello)
            for message in self.receive():
                if "refused" in message:
                    raise BadInput(message["refused"])
                if "start" in message:
                    self.start = message["start"]
                    return
            yield f"the other nodes, with {where}" if self.peers else where

    def _send_start(self, port):
        """Node 0: tell each node where to start its ranks."""
        members = [("", self.hello), *((peer.address, peer.hello) for peer in self.peers)]
        members.sort(key=lambda member: member[1]["node"])
        shares = shared(members, self.ranks_each)
        # A host may know its own name as 127.0.1.1, where other hosts cannot reach it.
        known = next((peer.our_address for peer in self.peers if peer.address), self.address)
        self.start = {"port": port, "address": known, **shares[0]}
        for peer in self.peers:
            address = self.address if peer.address else known
            peer.send(start={"port": port, "address": address, **shares[peer.hello["node"]]})


def shared(members, ranks_each):
    """How nodes share addresses and cores; members: (address, hello) of each node. Returns arguments of NodeRanks.

    local_rank is None where addresses differ in their number of ranks or take turns: with such LOCAL_RANKs, OneFlow
    0.9.0 leaves ranks without their shards.
    """
    addresses = [address for address, _ in members]
    runs = [len(list(run)) for _, run in itertools.groupby(addresses)]
    even = len(set(runs)) == 1 and len(runs) == len(set(addresses))
    found = []
    for node, (address, hello) in enumerate(members):
        same_address = [other for other, where in enumerate(addresses) if where == address]
        same_cores = [other for other in same_address if members[other][1]["cores"] == hello["cores"]]
        local_rank, first = (ranks_each * some.index(node) for some in (same_address, same_cores))
        sharing = ranks_each * len(same_cores)
        cores = [cores_of(first + i, sharing, hello["cores"]) for i in range(ranks_each)]
        found.append({"local_rank": local_rank if even else None, "cores": cores})
    return found
