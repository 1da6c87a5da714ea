"""The cores that launch.sh may use: those that Linux lets it run on, but no more than its quota of CPU time keeps busy.

`docker run --cpus 2`, and `limits: cpu: "2"` in Kubernetes, set a quota. All cores of the host stay in sight, but Linux
pauses the container whenever it has used 0.2 s of CPU time within 0.1 s. Ranks on 64 cores would mostly be paused.
"""

import contextlib
import math
import os
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines such as 0::/system.slice (version 2) or 4:cpu,cpuacct:/system.slice (version 1)


def available():
    """The cores for the ranks of this host, a sorted list.

    Under a quota for fewer cores than Linux allows, these are as many of them, in a row. The row depends on the cgroup:
    launchers in one container agree on it, and containers on one host mostly have different ones.
    """
    allowed = sorted(os.sched_getaffinity(0))
    quota, group = cpu_quota()
    count = math.ceil(quota) if group else len(allowed)  # half a core is a core, too
    if count >= len(allowed):
        return allowed
    first = group * count % len(allowed)
    return sorted((allowed + allowed)[first : first + count])


def cpu_quota(mounted=MOUNTED, own=OWN):
    """The smallest quota of the cgroups around this process, in cores, and that group's inode; (inf, 0) without one."""
    quotas = [(math.inf, 0)]
    for folder in _groups(mounted, own):
        with contextlib.suppress(OSError, ValueError):  # no such group, no quota ("max"), or not to be read
            quota, period = _quota_of(folder)
            if quota > 0 and period > 0:  # -1: none, in version 1
                quotas.append((quota / period, folder.stat().st_ino))
    return min(quotas)


def _groups(mounted, own):
    """The folders that may hold the quota of this process: its cgroup and all above it, in either version.

    A container often sees its own cgroup at the top, while `own` has the path that the host knows.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            tops = [mounted / controllers, mounted / "cpu"] if controllers else [mounted]
            parts = [part for part in path.split("/") if part]
            for top in tops:
                yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _quota_of(folder):
    """CPU time and the period for which it is allowed, in microseconds."""
    if (folder / "cpu.max").exists():
        return map(int, (folder / "cpu.max").read_text().split())
    return (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
