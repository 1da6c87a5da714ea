"""The launchers of a job on several nodes: they agree on OneFlow's port, and exchange how their ranks ended.

Node 0 leads. The others connect to it at --master_addr, --master_port and send messages to it alone.
"""

import itertools
import socket
import time

from oneflow_cookbook.start.cores import available
from oneflow_cookbook.start.errors import UsageError
from oneflow_cookbook.start.meeting import Gathering, Joining, wait_for
from oneflow_cookbook.start.ranks import cores_of

HEARTBEAT = 1.0  # seconds between messages that show that a launcher is alive


class Nodes:
    """This node among those of a job; a context manager that closes the connections."""

    def __init__(self, nnodes, node_rank, nproc_per_node, address, port, same):
        """nnodes, node_rank, nproc_per_node: the options of these names. address, port: where node 0 listens.

        same: {name: value} that must be equal on all nodes, such as the script and its arguments.
        """
        self.nnodes, self.node_rank, self.address, self.port = nnodes, node_rank, address, port
        self.nproc_per_node, self.same = nproc_per_node, same
        cores = available()  # of two nodes on a host, a scheduler may give each its own cores
        self.hello = {"node": node_rank, "host": socket.gethostname(), "cores": cores, "same": same}
        self.name = f"node {node_rank} ({self.hello['host']})"
        self.is_leader = node_rank == 0
        self.peers, self.last_heartbeat = [], 0.0
        self.start = None  # what `begin` returned last
        self.gathering = None  # on node 0: listens as long as the job runs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for peer in self.peers:
            peer.connection.close()
        if self.gathering:
            self.gathering.close()

    def send(self, **message):
        """Send a message to all peers: from node 0 to the other nodes, from these to node 0."""
        for peer in self.peers:
            peer.send(**message)

    def receive(self):
        """The next message that has arrived, {"lost": name, "node": number} for a lost peer, or None.

        Call it often: it sends heartbeats.
        """
        if time.monotonic() - self.last_heartbeat > HEARTBEAT:
            self.last_heartbeat = time.monotonic()
            self.send()
            if self.gathering and self.start:
                self.gathering.turn_away()
        for peer in self.peers:
            message = peer.receive()
            if message:
                return message
            if peer.closed:
                self.peers.remove(peer)
                return {"lost": str(peer), "node": peer.hello["node"]}
        return None

    def begin(self, port, deadline, silent, stopped):
        """Begin an attempt together with all nodes; returns arguments of RankAssignment, or None if stopped.

        port: of rank 0, on node 0. deadline, silent, stopped: of the wait for other nodes, as in wait_for. Raises
        UsageError.
        """
        if not self.is_leader:
            return self.start if wait_for(Joining(self), deadline, silent, stopped) else None
        if self.nnodes > 1 and self.start is None:
            self.gathering = Gathering(self)
            if not wait_for(self.gathering, deadline, silent, stopped):
                return None
            self._check_hosts()
        self._send_start(port)
        return self.start

    def _check_hosts(self):
        """Raises UsageError, here and on all other nodes, if OneFlow 0.9.0 does not run on so many hosts."""
        hosts = len({"", *(peer.address for peer in self.peers)})
        ranks = self.nnodes * self.nproc_per_node
        if ranks % hosts:
            refusal = f"OneFlow 0.9.0 would hang: {ranks} ranks cannot be divided by {hosts} hosts"
            self.send(refused=refusal)
            raise UsageError(refusal)

    def _send_start(self, port):
        """Node 0: tell each node where to start its ranks."""
        members = [("", self.hello), *((peer.address, peer.hello) for peer in self.peers)]
        members.sort(key=lambda member: member[1]["node"])
        shares = shares_of(members, self.nproc_per_node)
        # A host may know its own name as 127.0.1.1, where other hosts cannot reach it.
        reachable = next((peer.our_address for peer in self.peers if peer.address), self.address)
        self.start = {"port": port, "address": reachable, **shares[0]}
        for peer in self.peers:
            address = self.address if peer.address else reachable
            peer.send(start={"port": port, "address": address, **shares[peer.hello["node"]]})


def shares_of(members, nproc_per_node):
    """The local_rank and the cores of each node's RankAssignment, by node. members: (address, hello) of each node.

    Several nodes may be on the same host: their local ranks are numbered together, and nodes with the same cores
    divide them among their ranks. local_rank is None unless `has_local_ranks`.
    """
    addresses = [address for address, _ in members]
    shares = []
    for node, (address, hello) in enumerate(members):
        on_host = [other for other, other_address in enumerate(addresses) if other_address == address]
        on_cores = [other for other in on_host if members[other][1]["cores"] == hello["cores"]]
        first_rank, rank_count = nproc_per_node * on_cores.index(node), nproc_per_node * len(on_cores)
        cores = [cores_of(first_rank + i, rank_count, hello["cores"]) for i in range(nproc_per_node)]
        local_rank = nproc_per_node * on_host.index(node) if has_local_ranks(addresses) else None
        shares.append({"local_rank": local_rank, "cores": cores})
    return shares


def has_local_ranks(addresses):
    """Whether hosts have equally many, consecutive nodes; else OneFlow 0.9.0 leaves ranks without shards."""
    nodes_in_turn = [len(list(nodes)) for _, nodes in itertools.groupby(addresses)]
    return len(set(nodes_in_turn)) == 1 and len(nodes_in_turn) == len(set(addresses))
