"""Training over a slow link: seconds of a step of three strategies on two hosts of one rank each, 80 Mbit/s apart.

    .venv/bin/python benchmarks/slow_link.py

The hosts are network namespaces of this machine. Prints, for a small batch and a large one, what a step sends over the
link, how long that takes at its rate, and how long a step takes, eager and in a graph.
"""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.steps import MODES, of_script, slowest  # noqa: E402
from harness.jobs.hosts import NO_HOSTS, Hosts  # noqa: E402
from harness.pool import Pool  # noqa: E402

WIDTH, HIDDEN, BATCHES, RATE = 1024, 256, (64, 512), 80_000_000
SENDS = {  # bytes that a step sends over the link in one direction, or in one after the other
    "train_pipeline": lambda batch: 4 * 2 * batch * HIDDEN,
    "train_model_parallel": lambda batch: 4 * 2 * batch * WIDTH,
    "train_data_parallel": lambda batch: 4 * 2 * WIDTH * HIDDEN,
}


def limit(hosts):
    """Let each host send at RATE at most."""
    shape = ["tbf", "rate", f"{RATE}bit", "burst", "64kb", "latency", "2s"]
    for host in range(len(hosts.addresses)):
        subprocess.run([*hosts.on(host), "tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def step_time(pool, name, batch, mode):
    """Seconds of a step: the median of as many as keep the link busy for 2 seconds, at least 8."""
    sizes = {"batch": batch, "in_features": WIDTH, "hidden_size": HIDDEN, "out_features": WIDTH}
    steps = max(8, round(2 * RATE / 8 / SENDS[name](batch)))
    return slowest(of_script(pool, "step_times", name, graph=mode == "graph", steps=steps, **sizes))


def main():
    with Hosts(2) as hosts:
        if not hosts.real:
            sys.exit(NO_HOSTS)
        limit(hosts)
        with Pool(2, timeout=300, repeat=True, place=hosts.place) as pool:
            print(f"{'batch':<7}{'strategy':<22}{'KB sent':>8}{'link, s':>10}{'eager, s':>10}{'graph, s':>10}")
            for batch in BATCHES:
                for name in sorted(SENDS, key=lambda name: SENDS[name](batch)):
                    sent = SENDS[name](batch)
                    times = [sent / (RATE / 8), *(step_time(pool, name, batch, mode) for mode in MODES)]
                    cells = "".join(f"{seconds:>10.3f}" for seconds in times)
                    print(f"{batch:<7}{name:<22}{sent // 1024:>8}{cells}", flush=True)


if __name__ == "__main__":
    main()
