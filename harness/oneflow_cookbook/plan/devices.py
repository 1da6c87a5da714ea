"""Devices, with the numbers of their data sheets, and a cluster of them."""

import os
from collections import namedtuple

# memory: bytes. flops: {precision: dense operations a second}. Bandwidths in bytes a second: inside: of a device to
# others of its host; between: of a whole host to other hosts, in the maker's usual system; hbm: of the device's own
# memory. capability: the compute capability of a GPU, None where it is not known.
Device = namedtuple("Device", "memory flops inside between hbm source capability", defaults=(None,))
GB, TERA = 1e9, 1e12
NEWEST_CAPABILITY = 8.9  # that OneFlow 0.9.0 has code for


def gpu(memory, amp, fp32, inside, between, hbm, capability, source):
    """A Device; sizes in GB, rates in TFLOP/s and GB/s."""
    flops = {"amp": amp * TERA, "fp32": fp32 * TERA}
    return Device(memory * GB, flops, inside * GB, between * GB, hbm * GB, source, capability)


DEVICES = {
    "v100": gpu(32, 125, 15.7, 150, 50, 900, 7.0, "NVIDIA V100 and DGX-1 data sheets"),
    "a100-40": gpu(40, 312, 19.5, 300, 200, 1555, 8.0, "NVIDIA A100 and DGX A100 data sheets"),
    "a100-80": gpu(80, 312, 19.5, 300, 200, 2039, 8.0, "NVIDIA A100 and DGX A100 data sheets"),
    "h100": gpu(80, 989, 67, 450, 400, 3350, 9.0, "NVIDIA H100 (SXM) and DGX H100 data sheets"),
    "h200": gpu(141, 989, 67, 450, 400, 4800, 9.0, "NVIDIA H200 (SXM) and DGX H200 data sheets"),
    "rtx3090": gpu(24, 71, 35.6, 32, 1.25, 936, 8.6, "NVIDIA GA102 white paper; PCIe 4.0; 10 Gbit/s Ethernet"),
    "rtx4090": gpu(24, 165, 82.6, 32, 1.25, 1008, 8.9, "NVIDIA Ada white paper; PCIe 4.0; 10 Gbit/s Ethernet"),
    "a10": gpu(24, 125, 31.2, 32, 3.125, 600, 8.6, "NVIDIA A10 data sheet; PCIe 4.0; 25 Gbit/s Ethernet"),
}
# The share of the peak that computation reaches while nothing waits: see docs/choosing.md.
EFFICIENCY = 0.55
CPU_BANDWIDTHS = (10, 4, 1.25)  # memory, inside, between, in GB/s: assumed, as Linux does not report them
RESERVED = 0.08  # of a device's memory, for CUDA's context, buffers of collectives and fragmentation


class Cluster(namedtuple("Cluster", "hosts ranks_per_host device precision efficiency")):
    """Hosts with equal devices; a device is a rank. precision: a key of Device.flops; efficiency: as EFFICIENCY."""

    @property
    def ranks(self):
        return self.hosts * self.ranks_per_host

    @property
    def flops(self):
        """Operations a second that a rank reaches."""
        return self.device.flops[self.precision] * self.efficiency

    @property
    def memory(self):
        """Bytes of a device that a layout may use."""
        return self.device.memory * (1 - RESERVED)

    def bandwidth(self, stride, members):
        """(bytes a second that a rank of a group sends in a ring, whether the ring leaves the host).

        The group has `members` ranks, `stride` apart. The rings that leave a host share its link.
        """
        if stride * members <= self.ranks_per_host or self.hosts == 1:
            return self.device.inside, False
        on_a_host = max(1, min(members, self.ranks_per_host // stride))
        rings = self.ranks_per_host / on_a_host
        return min(self.device.inside, self.device.between / rings), True


def this_machine(ranks=None):
    """(number of ranks, a Device of each rank) on the CPU of this machine, as Linux describes it.

    ranks: on this host, by default one for each core. They share the memory and the cores evenly, as under launch.sh.
    Each core does two multiply-adds of a vector at a time.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = ranks or cores
    cores_of_rank = cores // ranks or cores / ranks  # ranks share cores if there are more ranks
    facts = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory = int(file.readline().split()[1]) * 1024
    numbers = 16 if "avx512f" in facts.get("flags", "") else 8  # float32 in a vector
    flops = {}
    if "cpu MHz" in facts:
        flops["fp32"] = float(facts["cpu MHz"]) * 1e6 * numbers * 2 * 2 * cores_of_rank
    hbm, inside, between = (rate * GB for rate in CPU_BANDWIDTHS)
    return ranks, Device(memory / ranks, flops, inside, between, hbm, "/proc/cpuinfo, /proc/meminfo")
