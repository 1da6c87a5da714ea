"""What launch.sh says where the machine lacks what a job needs."""

import pytest

from tests.jobs import LAUNCH, Run

NO_NAMESPACE = 77  # exit code


@pytest.mark.parametrize(
    "kind, first, text",
    [
        ("--net", ":", "launch.sh: ranks cannot meet at 127.0.0.1: Network is unreachable; is the loopback "),
        ("--mount", "mount -t tmpfs tmpfs /proc", "launch.sh: /proc is not mounted, and OneFlow needs it\n"),
        ("--mount", "ulimit -v 3000000", "launch.sh: ulimit -v allows 3000 MB of addresses, and a rank needs 5000: "),
    ],
    ids=["no loopback", "no /proc", "few addresses"],
)
def test_it_names_what_is_missing(kind, first, text):
    unshare = f"unshare --map-root-user {kind}"
    inside = f"{first} && exec {LAUNCH} -n 2 data_parallel"
    job = Run("bash", "-c", f"{unshare} true || exit {NO_NAMESPACE}; exec {unshare} bash -c '{inside}'").wait()
    if job.code == NO_NAMESPACE:
        pytest.skip("it takes a namespace, which this machine does not give")
    assert (job.code, job.out) == (2, "") and job.err.startswith(text) and job.err.count("\n") == 1, job.err
