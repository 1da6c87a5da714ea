"""How long it takes to start and end a trivial job: ./launch.sh against PyTorch's torchrun on gloo, in one run.

    .venv/bin/python benchmarks/launch_time.py [--peer .venv-peers/bin/python] [--pairs 10] [--launches 50]

The two alternate, and the median of the pairs' ratios is printed. Then launch.sh alone is started --launches times on 4
ranks, to see whether one stalls (OneFlow sleeps for 10 s when a rank looks for rank 0 too early).
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STALL = 8.0  # seconds; a stalled rank sleeps for 10


def seconds(command):
    """Wall time of a command that must succeed and print 1."""
    begin = time.perf_counter()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    elapsed = time.perf_counter() - begin
    if done.returncode or "1." not in done.stdout:
        sys.exit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return elapsed


def ours(ranks):
    return seconds([HERE.parent / "launch.sh", "-n", ranks, HERE / "trivial_oneflow.py"])


def torchrun(peer, ranks):
    options = ["--standalone", "--nproc_per_node", ranks, HERE / "trivial_torch.py"]
    return seconds([peer, "-m", "torch.distributed.run", *options])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="the Python of an environment with PyTorch; see requirements-peers.txt")
    parser.add_argument("--pairs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--launches", type=int, default=50, help="default: %(default)s")
    options = parser.parse_args()
    if options.peer and not Path(options.peer).exists():
        parser.exit(2, f"{options.peer}: no such Python; requirements-peers.txt says how to make it\n")
    if options.peer:
        for ranks in (2, 4):
            ours(ranks), torchrun(options.peer, ranks)  # warm
            pairs = [(ours(ranks), torchrun(options.peer, ranks)) for _ in range(options.pairs)]
            one, other = (statistics.median(column) for column in zip(*pairs))
            ratio = statistics.median(a / b for a, b in pairs)
            medians = f"launch.sh {one:.2f} s, torchrun {other:.2f} s"
            print(f"{ranks} ranks: {medians}, median of {len(pairs)} ratios {ratio:.2f}")
    times = sorted(ours(4) for _ in range(options.launches))
    if times:
        stalls = sum(time > STALL for time in times)
        print(
            f"{len(times)} launches on 4 ranks: median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s, "
            f"{stalls} over {STALL:g} s"
        )


if __name__ == "__main__":
    main()
