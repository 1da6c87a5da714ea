"""Several hosts on this machine: network namespaces, each with an address, joined by a bridge. Needs iproute2."""

import itertools
import subprocess
from dataclasses import dataclass

from oneflow_cookbook.start.ranks import RankAssignment
from oneflow_cookbook.start.recipe import ROOT

NO_HOSTS = "no network namespaces here: run it where `unshare --user --map-root-user --mount --net ip link` works"
SET_UP = """
mount -t tmpfs none /run && mkdir /run/netns
ip link add bridge type bridge && ip link set bridge up
for k in $(seq 0 $(($1 - 1))); do
    ip netns add host$k
    ip link add veth$k type veth peer name eth0 netns host$k
    ip link set veth$k master bridge up
    ip -n host$k address add 10.0.0.$((k + 1))/24 dev eth0
    ip -n host$k link set eth0 up
    ip -n host$k link set lo up
done
echo ready
exec sleep infinity
"""


class Hosts:
    """`count` hosts, with the addresses 10.0.0.1, 10.0.0.2, ...; a context manager. Root is not needed.

    `real` is False where Linux does not allow it, as in most containers: then all of them are this host.
    """

    def __init__(self, count=2, as_root=False):
        """as_root: whether root makes them without a user namespace, in which sshd cannot set the groups of a user."""
        for user in [[]] if as_root else (["--user", "--map-root-user"], []):
            self.user = user[:1]
            command = ["unshare", *user, "--mount", "--net", "bash", "-euc", SET_UP, "hosts", str(count)]
            self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.real = self.keeper.stdout.readline() == "ready\n"
            if self.real:
                break
            self.__exit__()
        self.addresses = [f"10.0.0.{k + 1}" if self.real else "127.0.0.1" for k in range(count)]
        self.ports = itertools.count(20000)  # nothing else uses ports of these hosts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdout.close()

    def inside(self):
        """The beginning of a command that runs at the switch between the hosts, from where all can be reached."""
        where = ["nsenter", "--target", str(self.keeper.pid), *self.user, "--mount", "--net"]
        return [*where, *(["--preserve-credentials"] if self.user else []), f"--wd={ROOT}", "--"]

    def on(self, host):
        """The beginning of a command that runs on a host."""
        return [*self.inside(), "ip", "netns", "exec", f"host{host}"] if self.real else []

    def link(self, host, state):
        """Pull the cable of a host, or plug it in: "down" or "up"."""
        self._run("ip", "link", "set", f"veth{host}", state)

    def loopback(self, host, state):
        """Turn the loopback interface of a host "down" or "up"."""
        self._run("ip", "-n", f"host{host}", "link", "set", "lo", state)

    def mend(self):
        """Undo all changes of links."""
        for host in range(len(self.addresses)):
            self.link(host, "up")
            self.loopback(host, "up")

    def _run(self, *words):
        subprocess.run([*self.inside(), *words], check=True)

    def place(self, world_size, port):
        """The `place` of a Pool whose ranks run on these hosts, equally many on each."""
        port = next(self.ports) if self.real else port
        return OnHosts(world_size, port, local_rank=None, address=self.addresses[0], hosts=self)


@dataclass
class OnHosts(RankAssignment):
    """Ranks that run on several hosts, equally many on each."""

    hosts: Hosts = None

    def command(self, i, script):
        host = i * len(self.hosts.addresses) // self.world_size
        return [*self.hosts.on(host), *super().command(i, script)]
