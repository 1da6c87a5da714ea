"""The cores that launch.sh takes, from Linux's affinity and the quota of a cgroup, whose files are imitated here."""

import math

import pytest

from oneflow_cookbook.start import cores
from oneflow_cookbook.start.cores import available, cpu_quota


def version_1(quotas):
    """The files of version 1 of cgroups, from group -> (quota, period)."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return {f"{group}/{name}": str(value) for group, pair in quotas.items() for name, value in zip(names, pair)}


QUOTAS = {  # what -> (/proc/self/cgroup, files of the cgroups by name, cores)
    "no cgroups": (None, {}, math.inf),
    "an empty file": ("", {}, math.inf),
    "no files": ("0::/a\n4:cpu:/a", {}, math.inf),
    "no quota": ("0::/", {"cpu.max": "max 100000"}, math.inf),
    "in a container": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "half a core": ("0::/", {"cpu.max": "50000 100000"}, 0.5),
    "on the host": ("0::/a.slice/b", {"a.slice/b/cpu.max": "max 100000", "a.slice/cpu.max": "300000 100000"}, 3),
    "the smallest counts": ("0::/pod/one", {"pod/one/cpu.max": "400000 100000", "pod/cpu.max": "100000 50000"}, 2),
    "the host's path": ("0::/docker/5f3a", {"cpu.max": "150000 100000"}, 1.5),
    "outside the namespace": ("0::/../other", {"cpu.max": "150000 100000"}, 1.5),
    "version 1, no quota": ("4:cpu:/", version_1({"cpu": (-1, 100000)}), math.inf),
    "version 1, in a container": (
        "7:memory:/x\n4:cpu,cpuacct:/docker/5f3a\n0::/",
        version_1({"cpu,cpuacct": (200000, 100000)}),
        2,
    ),
    "version 1, by its link": ("4:cpu,cpuacct:/", version_1({"cpu": (200000, 100000)}), 2),
    "version 1, on the host": (
        "4:cpu:/a/b\n1:name=systemd:/a",
        version_1({"cpu/a/b": (-1, 100000), "cpu/a": (250000, 50000)}),
        5,
    ),
    "version 1, of cores, not of time": ("4:cpuset:/a", version_1({"cpuset/a": (100000, 100000)}), math.inf),
}


@pytest.mark.parametrize("what", QUOTAS)
def test_quota(tmp_path, what):
    own, files, cores = QUOTAS[what]
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(f"{text}\n")
    if own is not None:
        (tmp_path / "cgroup").write_text(f"{own}\n")
    assert cpu_quota(tmp_path / "mounted", tmp_path / "cgroup")[0] == cores


@pytest.mark.parametrize(
    "allowed, quota, group, expected",
    [
        (range(64), math.inf, 0, list(range(64))),
        (range(64), 2, 32, [0, 1]),
        (range(64), 2, 33, [2, 3]),  # other containers, other cores
        (range(64), 64, 7, list(range(64))),
        (range(2), 8, 7, [0, 1]),
        ([3, 5, 8], 2, 4, [3, 8]),  # in a row, from the last to the first
        (range(8), 1.5, 1, [2, 3]),
        (range(8), 0.1, 3, [3]),
    ],
)
def test_as_many_cores_as_the_quota_keeps_busy(monkeypatch, allowed, quota, group, expected):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(cores, "cpu_quota", lambda: (quota, group))
    assert available() == expected
