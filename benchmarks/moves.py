"""Collectives: `to_global` in eager mode beside gloo's, and beside a copy in memory. Seconds, as JSON takes it."""

from benchmarks.peers import Peer
from benchmarks.steps import OURS, compared, slowest, timed
from harness.pool import Pool

COLLECTIVES = {
    "all-reduce": ("P", "B"),
    "all-gather": ("S(0)", "B"),
    "reduce-scatter": ("P", "S(0)"),
    "all-to-all": ("S(0)", "S(1)"),
}
SHARES = {  # of the tensor, that each of n ranks sends
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n**2,
}
SIZES = [2**k for k in (10, 12, 14, 16, 18, 20, 22, 24, 26)]  # bytes, 1 KB to 64 MB


def collectives(turns, say, sizes=SIZES):
    """{"moves": [{"collective", "sbp", "ranks", "bytes": of the whole tensor, "sends": bytes of each rank, "seconds":
    by side, "ratio": ours / gloo}], "copies": [{"bytes", "seconds": of a copy in memory}]}"""
    rows, copies = [], []
    for n in (2, 4):
        with Peer("torch", n) as torch, Pool(n, timeout=300) as pool:
            for (name, (old, new)), size in ((one, size) for one in COLLECTIVES.items() for size in sizes):
                given = {"elements": size // 4, "steps": 6 if size > 2**20 else 30}
                ours = timed(pool.call, f"{OURS}:move_times", old=old, new=new, **given)
                pair = {"ours": ours, "gloo": timed(torch.step_times, kind="collective", name=name, **given)}
                row = {"collective": name, "sbp": f"{old} → {new}", "ranks": n, "bytes": size}
                rows.append({**row, "sends": SHARES[name](n) * size, **compared(turns, pair)})
                if size == sizes[-1]:
                    say(name, n, rows[-1]["seconds"])
            if n == 2:
                for size in sizes:
                    times = torch.step_times(kind="copy", elements=size // 4, steps=50)
                    copies.append({"bytes": size, "seconds": slowest(times)})
    return {"moves": rows, "copies": copies}
