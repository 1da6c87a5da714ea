"""The cores that launch.sh takes, from Linux's affinity and the quota of a cgroup, whose files are imitated here."""

import math

import pytest

from harness.start import cores
from harness.start.cores import available, cpu_quota

VERSION_2 = {
    "no quota": ("0::/", {"cpu.max": "max 100000"}, math.inf),
    "in a container": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "half a core": ("0::/", {"cpu.max": "50000 100000"}, 0.5),
    "on the host": ("0::/a.slice/b", {"a.slice/b/cpu.max": "max 100000", "a.slice/cpu.max": "300000 100000"}, 3),
    "the smallest counts": ("0::/pod/one", {"pod/one/cpu.max": "400000 100000", "pod/cpu.max": "100000 50000"}, 2),
    "the host's path": ("0::/docker/5f3a", {"cpu.max": "150000 100000"}, 1.5),
    "outside the namespace": ("0::/../other", {"cpu.max": "150000 100000"}, 1.5),
}
VERSION_1 = {
    "no quota": ("4:cpu:/", {"cpu": (-1, 100000)}, math.inf),
    "in a container": ("7:memory:/x\n4:cpu,cpuacct:/docker/5f3a\n0::/", {"cpu,cpuacct": (200000, 100000)}, 2),
    "by its link": ("4:cpu,cpuacct:/", {"cpu": (200000, 100000)}, 2),
    "on the host": ("4:cpu:/a/b\n1:name=systemd:/a", {"cpu/a/b": (-1, 100000), "cpu/a": (250000, 50000)}, 5),
    "of cores, not of time": ("4:cpuset:/a", {"cpuset/a": (100000, 100000)}, math.inf),
}
NOTHING = {"no cgroups": None, "an empty file": "", "no files": "0::/a\n4:cpu:/a"}


@pytest.fixture
def quota_of(tmp_path):
    """A function from /proc/self/cgroup and other files to the quota that is read from them."""

    def read(own, files):
        for name, text in files.items():
            (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mounted" / name).write_text(f"{text}\n")
        if own is not None:
            (tmp_path / "cgroup").write_text(f"{own}\n")
        return cpu_quota(tmp_path / "mounted", tmp_path / "cgroup")[0]

    return read


@pytest.mark.parametrize("case", VERSION_2)
def test_quota_of_version_2(quota_of, case):
    own, files, wanted = VERSION_2[case]
    assert quota_of(own, files) == wanted


@pytest.mark.parametrize("case", VERSION_1)
def test_quota_of_version_1(quota_of, case):
    own, groups, wanted = VERSION_1[case]
    numbers = {group: dict(zip(("quota", "period"), pair)) for group, pair in groups.items()}
    files = {f"{group}/cpu.cfs_{name}_us": n for group, pair in numbers.items() for name, n in pair.items()}
    assert quota_of(own, files) == wanted


@pytest.mark.parametrize("case", NOTHING)
def test_where_nothing_can_be_read_there_is_no_quota(quota_of, case):
    assert quota_of(NOTHING[case], {}) == math.inf


@pytest.mark.parametrize(
    "allowed, quota, group, wanted",
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
def test_as_many_cores_as_the_quota_keeps_busy(monkeypatch, allowed, quota, group, wanted):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(cores, "cpu_quota", lambda: (quota, group))
    assert available() == wanted
