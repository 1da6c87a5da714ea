"""Hosts of their own on this machine: network namespaces, each with an address, joined by a bridge. Needs iproute2."""

import contextlib
import subprocess

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
    """`count` hosts, with the addresses 10.0.0.1, 10.0.0.2, ...; a context manager. Root is not needed."""

    def __init__(self, count=2):
        unshared = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
        command = [*unshared, "bash", "-euc", SET_UP, "hosts", str(count)]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.keeper.stdout.readline() != "ready\n":
            raise RuntimeError(f"no network namespaces on this machine: {self.keeper.stderr.read()}")
        self.addresses = [f"10.0.0.{k + 1}" for k in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.keeper.kill()
        self.keeper.wait()
        for stream in (self.keeper.stdout, self.keeper.stderr):
            with contextlib.suppress(OSError):
                stream.close()

    def inside(self):
        """The command that runs another one where all of the hosts are seen, as the switch between them would."""
        where = ["nsenter", "--target", str(self.keeper.pid), "--user", "--mount", "--net", "--preserve-credentials"]
        return [*where, "--"]

    def on(self, host):
        """The command that runs another one on a host."""
        return [*self.inside(), "ip", "netns", "exec", f"host{host}"]

    def link(self, host, state):
        """Pull the cable of a host, or put it back: "down" or "up"."""
        subprocess.run([*self.inside(), "ip", "link", "set", f"veth{host}", state], check=True)
