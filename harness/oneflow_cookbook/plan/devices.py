"""Devices, with the numbers of their data sheets, and a cluster of them."""

from collections import namedtuple

# memory: GB. amp, fp32: dense TFLOP/s. inside: GB/s of a device to others of its host; between: GB/s of a whole host to
# other hosts, in the maker's usual system.
Device = namedtuple("Device", "memory amp fp32 inside between")
DEVICES = {
    "v100": Device(32, 125, 15.7, 150, 50),  # NVIDIA V100 and DGX-1 data sheets
    "a100-40": Device(40, 312, 19.5, 300, 200),  # NVIDIA A100 and DGX A100 data sheets
    "a100-80": Device(80, 312, 19.5, 300, 200),
    "h100": Device(80, 989, 67, 450, 400),  # NVIDIA H100 (SXM) and DGX H100 data sheets
    "h200": Device(141, 989, 67, 450, 400),  # NVIDIA H200 (SXM) and DGX H200 data sheets
    "rtx3090": Device(24, 71, 35.6, 32, 1.25),  # NVIDIA GA102 white paper; PCIe 4.0; 10 Gbit/s Ethernet
    "rtx4090": Device(24, 165, 82.6, 32, 1.25),  # NVIDIA Ada white paper; PCIe 4.0; 10 Gbit/s Ethernet
    "a10": Device(24, 125, 31.2, 32, 3.125),  # NVIDIA A10 data sheet; PCIe 4.0; 25 Gbit/s Ethernet
}
GB, TERA = 1e9, 1e12
# The share of the peak that computation reaches while nothing waits: see docs/choosing.md.
EFFICIENCY = 0.55
RESERVED = 0.08  # of a device's memory, for CUDA's context, buffers of collectives and fragmentation


class Cluster(namedtuple("Cluster", "hosts ranks_per_host device")):
    """Hosts with equal devices; a device is a rank."""

    @property
    def ranks(self):
        return self.hosts * self.ranks_per_host

    @property
    def memory(self):
        """Bytes of a device that a layout may use."""
        return self.device.memory * GB * (1 - RESERVED)

    def flops(self, precision):
        """Operations a second that a rank reaches."""
        return getattr(self.device, precision) * TERA * EFFICIENCY

    def bandwidth(self, stride, members):
        """Bytes a second that a rank of a group sends in a ring: `members` ranks, `stride` apart.

        The rings that leave a host share its link.
        """
        if stride * members <= self.ranks_per_host or self.hosts == 1:
            return self.device.inside * GB
        on_a_host = max(1, min(members, self.ranks_per_host // stride))
        rings = self.ranks_per_host / on_a_host
        return min(self.device.inside, self.device.between / rings) * GB
