"""The chapter of starting: how ranks are started and find each other, and how a job goes on when one dies."""

import ipaddress

import numpy as np

from tests.cases import reference
from tests.cases.recipe_case import UNEVEN, Case, Main, case_of_recipe, reduced, shares
from tests.cases.reference import Value


@case_of_recipe(
    {},
    whole_job=True,
    tests=["tests/test_rare_failures.py"],
    main=Main(
        prints=[
            "[0] rank 0 of 2: local rank 0 on host 0 (vm, 127.0.0.1), cpu:0, started by process 15903",
            "[0] all 2 ranks are there, once each; number of hosts: 1",
            "[1] rank 1 of 2: local rank 1 on host 0 (vm, 127.0.0.1), cpu:1, started by process 15903",
        ],
    ),
)
def hello_ranks(n, graph=False, nodes=1):
    """A row of (rank, local rank, address as a number) from each; all nodes have the same number of ranks."""
    ranks, each = list(range(n)), n // nodes
    first = ipaddress.ip_address("127.0.0.1" if nodes == 1 else "10.0.0.1")  # as tests/hosts.py gives them
    rows = Value([[rank, rank % each, int(first + rank // each)] for rank in ranks], dtype="int64")
    return Case({"mine": rows, "everyone": rows})


@case_of_recipe(
    {},
    whole_job=True,
    tests=["tests/test_rare_failures.py", "tests/slow/test_starting.py"],
    main=Main(
        comparisons=2,
        prints=[
            "[0] 2 ranks met by env://; rank 0 is at 127.0.0.1:60833",
            "[0] the sum over ranks is 1, as in numpy: 0 1",
        ],
        other_lines=[],
        elsewhere=("init_method",),
        refused=["--init-method here"],
        refused_elsewhere=("or use a launcher",),
    ),
)
def rendezvous(n, graph=False):
    ranks = list(range(n))
    numbers, total = Value([[rank] for rank in ranks]), Value([[sum(ranks)]])
    return Case(
        {"number": numbers, "partial": total, "total": total},
        parts={"partial": [Value([[rank]]) for rank in ranks]},
    )


@case_of_recipe(
    {"uneven": UNEVEN, "three ranks": {**UNEVEN, "ranks": 3}},
    whole_job=True,
    refused=dict.fromkeys(("--ranks 0", "--ranks 5"), "1 to 4, a row of x for each rank"),
    tests=[
        *("tests/test_spawn.py", "tests/test_recipes.py", "tests/slow/test_starting.py"),
        "tests/slow/test_choices.py",
    ],
    equivalent={
        r"-> flow.matmul\(x, .*to_global\(sbp=\[flow.sbp.broadcast\].*\(self.w\)\)$": "the weight is B already",
        r"^rank == 0 -> (True|False)$": "it only says how long a rank waits for rank 0",
        r"theirs.close\(\) -> pass$": "CPython closes it when start_rank returns",
    },
    main=Main(
        prints=[
            "[0] rank 0 of 2 returned (2, 8) of (4, 8)",
            "[0] rank 1 of 2 returned (2, 8) of (4, 8)",
            "[0] out equals x @ w on a single device",
        ],
        refused_elsewhere=("raise RuntimeError(",),
    ),
)
def spawn(n, graph=False, ranks=2, **sizes):
    """The arrays of the program that starts the ranks; tests/test_spawn.py checks what the ranks do."""
    values = reference.one_layer(**sizes)
    return Case(values, passes=0, sends=[0])


@case_of_recipe(
    {"uneven": {"batch": 7, "features": 9, "seed": 1}},
    whole_job=True,
    refused={
        "--steps 0": "1 or more",
        "--save-every 0": "1 or more",
        "--keep -1": "0 or more",
    },
    tests=["tests/test_checkpoints.py", "tests/slow/test_starting.py", "tests/slow/test_choices.py"],
    equivalent={r" - 1 -> True$": "the job ends when one rank dies, and when all do"},
    main=Main(
        prints=[
            "[0] starts with step 1: no checkpoint",
            "[0] loss 77.5263 in step 1 -> 59.1777 in step 4",
            "[0] all losses equal those of a single device that was not disturbed",
        ],
        alone={"checkpoint_dir": [None], "save_every": [2], "keep": [2], "steps": [1, 4]},
        other_lines=["--graph --steps 5 --save-every 3 --checkpoint-dir FOLDER --keep 3", "--die 1"],
        elsewhere=("die",),
        refused=["--checkpoint-dir="],
        refused_elsewhere=("raise CheckpointError(", "# on all ranks"),
    ),
)
def elastic_training(n, graph=False, seed=0, steps=4, batch=8, features=64, matmul_scale=1.0, ranks=None):
    """Data parallel; each step draws its own batch, from the seed and the number of the step."""
    ranks, w = ranks or list(range(n)), reference.drawn(np.random.default_rng(seed), features, features)
    weights, losses, optimizer = {"w": w}, [], reference.Optimizer("momentum", 0.01)
    for step in range(1, steps + 1):
        rng = np.random.default_rng([seed, step])
        x, y = (reference.drawn(rng, batch, features) for _ in "xy")
        loss = reference.mse(reference.mlp(x, weights, matmul_scale), y)
        last = reference.gradients(loss, weights)
        weights = optimizer.step(weights, last)
        losses.append(loss.exact.item())
    values = {"x": x, "y": y, "w": w, "w grad": last["w"], **optimizer.state, "new w": weights["w"]}
    values["losses"] = Value(losses, rounded=True)
    return Case(
        values,
        [*shares(len(ranks), batch, 2 * w.exact.size), *[0] * (n - len(ranks))],
        ranks=ranks,
        sends=[reduced(n, w.exact.size)] * n,
    )
