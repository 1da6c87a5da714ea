"""The cores that launch.sh may use: those that Linux allows, but no more than its quota of CPU time pays for.

`docker run --cpus 2`, and `limits: cpu: "2"` in Kubernetes, set a quota. The container still sees all cores of the
host, but Linux pauses it whenever it has used 0.2 s of CPU time within 0.1 s. Ranks on 64 cores would mostly be paused.
"""

import contextlib
import math
import os
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines: 0::/system.slice (version 2) or 4:cpu,cpuacct:/system.slice (version 1)


def cores_of(rank, world_size, cores=None):
    """The cores that a rank is bound to, as a list; with more ranks than cores, ranks share cores.

    OneFlow's scheduling thread never sleeps while work is under way. Unbound, it takes time from the computing threads
    of other ranks: a step of data parallel on two ranks and two cores took 1.8 times as long.
    """
    cores = available() if cores is None else cores
    each = max(1, len(cores) // world_size)
    return [cores[(rank * each + i) % len(cores)] for i in range(each)]


def cores_of_ranks(count, task=None):
    """The cores of each of a launcher's `count` ranks. task: the schedulers.Task that the launcher is, or None.

    A scheduler binds each task to its own cores, or to none: then together the tasks of a host would have more cores
    than there are, and the ranks of all of them divide the cores.
    """
    cores, first, ranks = available(), 0, count
    if task:
        usable = min(os.cpu_count(), cpu_quota()[0], task.cores_on_host)
        if len(cores) * task.count_on_host > usable:
            first, ranks = count * task.number_on_host, count * task.count_on_host
    return [cores_of(first + i, ranks, cores) for i in range(count)]


def available():
    """The cores for the ranks of this host, a sorted list.

    Under a quota for fewer cores than Linux allows, these are consecutive cores, as many as the quota pays for. Which
    core is the first depends on the cgroup: launchers in the same container agree, containers on a host mostly differ.
    """
    allowed = sorted(os.sched_getaffinity(0))
    quota, group = cpu_quota()
    count = math.ceil(quota) if group else len(allowed)  # for half a core too, a rank needs a core
    if count >= len(allowed):
        return allowed
    first = group * count % len(allowed)
    return sorted((allowed + allowed)[first : first + count])


def cpu_quota(mounted=MOUNTED, own=OWN):
    """(cores, inode of the cgroup): the smallest quota of the cgroups around this process; (inf, 0) if none is set."""
    quotas = [(math.inf, 0)]
    for folder in _groups(mounted, own):
        with contextlib.suppress(OSError, ValueError):  # no such group, no quota ("max"), or not readable
            quota, period = _quota_of(folder)
            if quota > 0 and period > 0:  # version 1 writes -1 for no quota
                quotas.append((quota / period, folder.stat().st_ino))
    return min(quotas)


def _groups(mounted, own):
    """Yield the folders that may hold the quota of this process: its cgroup and all above it, in either version.

    In a container, the mounted tree often begins at the container's cgroup, while `own` has the path on the host.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            tops = [mounted / controllers, mounted / "cpu"] if controllers else [mounted]
            parts = [part for part in path.split("/") if part]
            for top in tops:
                yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _quota_of(folder):
    """(CPU time, period) in microseconds: the group may use so much CPU time in each period."""
    if (folder / "cpu.max").exists():
        return map(int, (folder / "cpu.max").read_text("utf-8").split())
    return (int((folder / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period"))
