"""The launchers of one job on several hosts: they meet, agree on a port, and tell each other how their ranks end.

Node 0 leads: the others connect to --master_addr, --master_port and speak with it alone, in lines of JSON. OneFlow has
a port of its own, which node 0 finds free and tells. A launcher that is silent for SILENCE seconds counts as gone.
"""

import contextlib
import itertools
import json
import os
import socket
import time

HEARTBEAT, SILENCE = 1.0, 10.0  # seconds
SAYS_SO = 2.0  # seconds after which a launcher that waits says for whom
VERDICT_DELAY = 2.0  # seconds in which another node may tell a cause of which the first failure is a consequence


class MeetingFailed(Exception):
    """The nodes did not come together, in one line that says why and what to do."""


class Peer:
    """The launcher of another node, behind a socket."""

    def __init__(self, connection, address):
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.ours = connection.getsockname()[0]  # our address, as this node knows us
        self.heard, self.rest, self.gone = time.monotonic(), b"", False
        self.unread = []  # messages that have come and are for a later receive()
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
        before, self.unread = self.unread, []
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
            return before
        return before + messages


class Nodes:
    """This node among those of a job. A context manager, again and again: on leaving it, the connections are closed."""

    def __init__(self, count, number, ranks_each, address, port, same=None, remark=""):
        """count: of nodes; number: of this one; address, port: where node 0 listens.

        same: name -> words that must be the same on each node, such as the script and its arguments.
        remark: what else to say of nodes that are waited for.
        """
        self.count, self.number, self.address, self.port, self.remark = count, number, address, port, remark
        self.same = {"--nnodes": count, "--nproc_per_node": ranks_each, "--master_addr": address, **(same or {})}
        self.hello = {"node": number, "ranks": ranks_each, "host": socket.gethostname(), "same": self.same}
        self.hello["cores"] = sorted(os.sched_getaffinity(0))  # a scheduler may give each node its own of one host
        self.name = f"node {number} ({self.hello['host']})"
        self.peers, self.last_beat, self.started = [], 0.0, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in self.peers:
            peer.connection.close()
        self.peers = []

    def meet(self, deadline, say, stopped, limit="until --timeout"):
        """Wait until all nodes are there, until time.monotonic() is `deadline`, which `limit` names.

        say: takes a line; stopped: whether to give up. Raises MeetingFailed.
        """
        if self.count == 1:
            return
        steps = self._gather() if self.number == 0 else self._join()
        said = time.monotonic() + SAYS_SO
        for missing in steps:  # it ends when none is missing
            if stopped():
                return
            if time.monotonic() > deadline:
                raise MeetingFailed(f"{missing} did not come {limit}; see that launch.sh runs there and can reach us")
            if time.monotonic() > said:
                said = float("inf")
                say(f"waiting for {missing}{self.remark}")
            time.sleep(0.02)

    def _gather(self):
        """Node 0: take in the others. Yields who is missing."""
        try:
            listener = socket.create_server(("0.0.0.0", self.port))
        except OSError as error:
            reason = f"--master_port {self.port}: {os.strerror(error.errno)}; take another one, the same on each node"
            raise MeetingFailed(reason) from None
        with listener:
            listener.setblocking(False)
            yield from self._gather_from(listener)
        hosts, ranks = len({"", *(peer.address for peer in self.peers)}), self.count * self.hello["ranks"]
        if ranks % hosts:  # it would hang
            needs = f"OneFlow 0.9.0 would hang: {ranks} ranks cannot be divided by {hosts} hosts"
            for peer in self.peers:
                peer.send(refused=needs)
            raise MeetingFailed(needs)

    def _gather_from(self, listener):
        strangers = []
        while len(self.peers) < self.count - 1:
            with contextlib.suppress(BlockingIOError):
                connection, (address, _) = listener.accept()
                peer = Peer(connection, address)
                if address in (peer.ours, "127.0.0.1"):  # it shares our address
                    peer.address = ""
                strangers.append(peer)
            for one in list(strangers):
                for message in one.receive():
                    strangers.remove(one)
                    self._accept(one, message)
                    break
                if one.gone and one in strangers:
                    strangers.remove(one)
            there = {peer.hello["node"] for peer in self.peers}
            missing = [number for number in range(1, self.count) if number not in there]
            yield f"node{'s'[: len(missing) > 1]} {', '.join(map(str, missing))} of {self.count}"
            self.beat()
            for peer in self.peers:
                peer.receive()
            self.peers = [peer for peer in self.peers if not peer.gone]  # it may come again

    def _accept(self, peer, hello):
        """Take a node in, or tell it why not."""
        wrong, theirs = None, hello.get("same")
        for name, ours in self.same.items():
            there = theirs.get(name) if isinstance(theirs, dict) else None
            if there != ours and not wrong:
                wrong = f"{name} {there} here, and {ours} on node 0: type the same on each node"
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
                except socket.gaierror as error:  # in some clusters a host has its name when it has started
                    yield f"{where} ({error.strerror})"
                    continue
                except OSError:
                    yield where
                    continue
                leader = Peer(connection, self.address)
                leader.send(**self.hello)
                self.peers = [leader]
            messages = leader.receive()
            for i, message in enumerate(messages):
                if "refused" in message:
                    raise MeetingFailed(message["refused"])
                if "start" in message:
                    self.started, leader.unread = message["start"], messages[i + 1 :]
                    return
            self.peers = [] if leader.gone else [leader]
            leader = None if leader.gone else leader
            self.beat()
            yield where if leader is None else f"the other nodes, with {where}"

    def begin(self, port=0):
        """All are there; what node 0 tells each: "port" of rank 0, which is given to it; its "address" where that is
        not the one to start with; how many ranks the lower nodes have at this node's address ("local", the first
        LOCAL_RANK here) and on its cores ("before"; "beside": all nodes). "local" is None where addresses differ in
        their number of ranks or take turns: OneFlow, told of such numbers, leaves ranks without their shards.
        """
        if self.number:
            return self.started
        everyone = [(None, "", self.hello), *((peer, peer.address, peer.hello) for peer in self.peers)]
        everyone.sort(key=lambda one: one[2]["node"])
        runs = [len(list(run)) for _, run in itertools.groupby(everyone, key=lambda one: one[1])]
        even = len(set(runs)) == 1 and len(runs) == len({address for _, address, _ in everyone})
        # A host may know its own name as 127.0.1.1, and by that other hosts would look for its ranks on themselves.
        known = next((peer.ours for peer in self.peers if peer.address), None)
        told = {}
        for peer, address, hello in everyone:
            there = [other for _, where, other in everyone if where == address]
            cores = [other for other in there if other.get("cores") == hello.get("cores")]
            lower = [[other for other in some if other["node"] < hello["node"]] for some in (there, cores)]
            local, before, beside = (sum(other["ranks"] for other in some) for some in (*lower, cores))
            told[peer] = {"port": port, "local": local if even else None, "before": before, "beside": beside}
            told[peer]["address"] = None if address else known
            if peer:
                peer.send(start=told[peer])
        return told[None]

    def tell(self, **message):
        """Send a message to all peers: to the other nodes from node 0, to node 0 from them."""
        for peer in self.peers:
            peer.send(**message)

    def poll(self):
        """[(peer, message)] of what has come; of a peer that is gone {"gone": True}, once. Call it often."""
        self.beat()
        found = []
        for peer in self.peers:
            found += [(peer, message) for message in peer.receive() if message]
        found += [(peer, {"gone": True}) for peer in self.peers if peer.gone]
        self.peers = [peer for peer in self.peers if not peer.gone]
        return found

    def beat(self):
        """Say that we are alive, once in a while. Call it often."""
        if time.monotonic() - self.last_beat > HEARTBEAT:
            self.last_beat = time.monotonic()
            self.tell()
