"""What the main of every recipe must do: notice a wrong result, hand on its options, and print correct figures."""

import ast
import math
import re
import tempfile
from pathlib import Path

from harness.start.recipe import entry, path_of, world_sizes
from tests.cases import CASES, PROOFS, ROOT, WITHOUT_CASE, gpt_meshes, modes, proven_on  # noqa: F401  (gpt's Proof)
from tests.cases.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_main.py")
SMALL_GPT = ["--batch-size", "8", "--hidden-size", "16", "--num-heads", "2", "--num-layers", "2"]
ARGUMENTS = {"gpt": [*SMALL_GPT, "--steps", "3", "--check"]}  # with which main runs; gpt.py's own train for minutes
VALUES = {  # recipe -> {option: values for it}, where they cannot be made from its kind
    "pytorch_weights": {"weights": [str(ROOT / "tests" / "data" / "pytorch_float32.safetensors")]},
    "rendezvous": {"init_method": []},
}

INPUT, DERIVED = "an input: what is computed from it is compared", "what is made of it is compared"
# Recipe -> {part of a result, or a call and the part: why main does not compare it}
NOT_COMPARED = {
    "async_update": {
        "staleness": "a count that is printed: see FIGURES",
        "1 losses": "those without a slow worker are printed beside the others",
    },
    "data_loading": {"data": "the last batch has some of the rows", "numbers": DERIVED},
    "metrics": {"y": "its classes alone count"},
    "random_numbers": {
        "weight": "it is drawn, and nothing else draws it",
        "repeated": "which numbers are kept is compared",
    },
    "pipeline_parallel": {"x": INPUT},
    "hybrid_parallel": {"x0": INPUT},
    "sbp_conversions": {"x": INPUT},
    "matmul_signatures": {"x": INPUT, "w": INPUT},
    "global_and_local": {"total": DERIVED},
    "activation_checkpointing": {f"{call} losses": "this call is for count_saved" for call in (3, 4)},
    "hello_ranks": {"mine": DERIVED},
    "spawn": {"shards": "out is their concatenation"},
    "checkpoint": {"0 losses": "the second call returns them too"},
    "sequence_parallel": {"out": "its size alone is printed"},
    "gpt": {"model": "of its outputs the largest alone count"},
}
# Recipe -> the arguments that the call on a single device does not share with the one on all ranks
OTHER_ALONE = {
    "gradient_accumulation": {"micro_batches": 1},
    "zero_optimizer": {"shard_min_size": 1},
    "ddp": {"distributed": False},
    "checkpoint": {"checkpoint_dir": None, "save_every": 2, "weights": "rows", "steps": 4},
    "elastic_training": {"checkpoint_dir": None, "save_every": 2, "steps": 4},
    "gpt": {"checkpoint_dir": "", "save_every": 100, "steps": 3, "log_interval": 0},
}
# Recipe -> arguments of a further call on all ranks
FURTHER = {
    "async_update": {"sync_every": 1},
    "activation_checkpointing": {"checkpointing": False},
    "checkpoint": {"weights": "whole", "steps": 2},
}
# Option of a recipe -> why it reaches no argument of its name
ELSEWHERE = {
    "gpt check": "it decides whether main compares at all",
    "elastic_training die": "the step up to which a first call trains: see check_die",
    "rendezvous init_method": "it is read before OneFlow is imported",
}
OTHER_DEFAULTS = {"gpt steps": (400, 3), "gpt checkpoint_dir": ("", "")}  # of main and of train


def check_die(n, reports):
    """elastic_training.py trains up to that step first, and then the last rank alone is killed."""
    for rank, report in enumerate(reports):
        [(step, code, calls)] = report["options"]["die"]
        Checks.equal(code, 137 if rank == n - 1 else 0, f"rank {rank}: exit code with --die")
        Checks.equal(computing({"calls": calls})[0]["steps"], step, "the step up to which --die trains")


def computing(report):
    """The calls of train or run: [{argument: value}]."""
    return [arguments for name, arguments in report["calls"] if name in ("train", "run")]


def ranks_of(arguments):
    """The ranks on which a call computes, from its placements."""
    found = [place for value in arguments.values() for place in (value if isinstance(value, list) else [value])]
    ranks = [place["ranks"] for place in found if isinstance(place, dict) and "ranks" in place]
    return {rank for one in ranks for row in one for rank in (row if isinstance(row, list) else [row])}


def devices_of(arguments):
    found = [place for value in arguments.values() for place in (value if isinstance(value, list) else [value])]
    return {place["device"] for place in found if isinstance(place, dict)} or {arguments.get("device")}


def options_of(arguments):
    """The arguments of a call that are no placements."""
    return {key: value for key, value in arguments.items() if not isinstance(value, (dict, list))}


def check_comparisons(name, n, report, graph):
    """Main fails if a part of a result is off, and compares with the same code on a single device."""
    changing = [line for line in report["changing"] if "tensors for backward" not in line]  # of a call not made again
    Checks.that(not changing, "main prints something else the second time:", *changing)
    reasons = NOT_COMPARED.get(name, {})
    for number, part, how in report["unnoticed"]:
        known = {part.split(".")[0], f"{number} {part.split('.')[0]}"} & set(reasons)
        is_noticed_otherwise = name == "random_numbers" and how == "zeros"
        Checks.that(known and not is_noticed_otherwise, f"main does not notice that {part} of call {number} is off")
    calls = computing(report)
    Checks.that(calls, "main does not compute")
    for number, call in enumerate(calls):
        Checks.equal(call.get("graph", graph), graph, f"call {number} of main: graph")
        Checks.equal(devices_of(call) - {None}, {"cpu"}, f"call {number} of main: device")
    of_all = next((call for call in calls if ranks_of(call) == set(range(n))), calls[0])
    if ranks_of(of_all):
        Checks.equal(ranks_of(of_all), set(range(n)), "the ranks of main's call")
    if "losses" not in report["facts"][0] and name not in ("pipeline_parallel", "hybrid_parallel"):
        return
    alone = calls[2] if name in FURTHER else calls[1]
    Checks.that(ranks_of(alone) in ({0}, set()), "main does not compare with a single device")
    Checks.equal(
        options_of(alone), {**options_of(of_all), **OTHER_ALONE.get(name, {})}, "on a single device main computes with"
    )
    for key, value in FURTHER.get(name, {}).items():
        further = calls[0] if name == "checkpoint" else calls[1]
        Checks.equal(further[key], value, f"{key} of main's further call")


def check_options(name, report):
    """Each option reaches train, run or placements, in each call that computes; its default is the signature's."""
    defaults = entry(path_of(name))
    for option, default in report["defaults"].items():
        if option in defaults:
            wanted = OTHER_DEFAULTS.get(f"{name} {option}", (defaults[option], defaults[option]))
            Checks.equal((default, defaults[option]), wanted, f"the defaults of --{option} and of the function")
        stated = re.search(r"\(default: (\S+)\)", report["helps"][option])
        Checks.that(not stated or stated.group(1) == str(default), f"--{option}: help states another default")
        tried = report["options"][option]
        Checks.that(tried or option in ("init_method",), f"--{option}: no other value was tried")
        for value, code, calls in tried:
            Checks.that(code != 2, f"--{option} {value} is refused")
            check_option(name, option, value, calls, report)


def check_option(name, option, value, calls, report):
    if f"{name} {option}" in ELSEWHERE:
        return
    computing_calls = [arguments for function, arguments in calls if function in ("train", "run")]
    others = [arguments for function, arguments in calls if function == "placements"]
    if option == "device":
        found = [devices_of(call) for call in computing_calls]
        Checks.equal(found, [{value}] * len(computing(report)), f"--device {value} reaches placements on")
        return
    receiving = [call for call in computing_calls if option in call and not isinstance(call[option], dict)]
    if not receiving:
        Checks.that(any(call.get(option) == value for call in others), f"--{option} {value} reaches no call")
        return
    own = OTHER_ALONE.get(name, {}), FURTHER.get(name, {})
    for i, call in enumerate(receiving):
        usual = computing(report)[i][option] if i < len(computing(report)) else None
        exempt = any(option in words for words in own) and call[option] in [words.get(option) for words in own] + [
            usual
        ]
        exempt = exempt or (name == "checkpoint" and option == "steps" and call[option] == value // 2)
        Checks.that(call[option] == value or exempt, f"--{option} {value}: call {i} has {call[option]}")
    Checks.that(any(call[option] == value for call in receiving), f"--{option} {value} reaches no call")


def check_print(name, n, reports, arguments=()):
    """What each rank printed is correct: shapes, sums, shares, losses, and the figures of the recipe."""
    for rank, report in enumerate(reports):
        Checks.equal((report["code"], report["err"]), (0, ""), f"rank {rank}: code and errors")
        facts, lines = report["facts"], report["out"].splitlines()
        for line in lines:
            check_shapes(line, facts, rank)
            check_sums(line, facts, rank)
            check_losses(name, line, facts, rank)
            alike = [other for other in reports if line in other["out"].splitlines()]
            Checks.that(OF_ALL.search(line) or len(alike) == 1, f"several ranks print {line!r}")
        graph = "--graph" in arguments or modes(name) == (True,)
        closing = [line for line in lines if CLOSING.search(line)]
        Checks.that(rank or closing, "rank 0 does not say that it is equal, but", *lines)
        for line in FIGURES.get(name, lambda *_: [])(n, rank, facts, graph, report):
            begins = line.endswith("...") and any(other.startswith(line[:-3]) for other in lines)
            Checks.that(line in lines or begins, f"rank {rank} does not print {line!r} but", *lines)


CLOSING = re.compile(r"on a single device|in numpy|of a single rank|of a single device|once|that of rank 0")
IN_PROGRAM = "returned"  # spawn.py's shards are arrays: FIGURES has their line
SHAPE = r"(\([\d, ]*\))"
OF_ALL = re.compile(  # what each rank prints of its own, and may be the same on several
    rf"{SHAPE} of |its sum after training|^epoch |^column 0|^nn.Dropout keeps \[|^last row|^local |^rows |"
    r"tensors for backward|weights$|numbers of the parameters$"
)


def check_shapes(line, facts, rank):
    """Each "NAME (shape here) of (shape)" is that of a tensor of this name."""
    for word, here, whole, share in re.findall(rf"(\S+) {SHAPE} of {SHAPE}(?:: (\d+)%)?", line):
        known = [
            (str(local), str(shape))
            for call in facts
            for name, local, shape, _ in call["tensors"]
            if name == word or name.endswith(f".{word}") or re.fullmatch(r"w\d*", word)
        ]
        Checks.that((here, whole) in known or word == IN_PROGRAM, f"rank {rank}: no tensor is as in {line!r}")
        if share:
            sizes = [math.prod(int(size) for size in re.findall(r"\d+", shape)) for shape in (here, whole)]
            Checks.equal(share, f"{sizes[0] / sizes[1] * 100:.0f}", f"rank {rank}: the share in {line!r}")


def check_sums(line, facts, rank):
    """Each "NAME ..., its sum after training X" is that of the parameter on this rank."""
    told = re.match(r"(\S+) .*its sum after training (-?[\d.]+)", line)
    if told:
        sums = [f"{total:.4f}" for name, _, _, total in facts[0]["tensors"] if name == told.group(1)]
        Checks.that(told.group(2) in sums, f"rank {rank}: the sum in {line!r} is {sums}")


def check_losses(name, line, facts, rank):
    """In "loss FIRST -> LAST in K steps" they are those of the call on all ranks."""
    told = re.match(r"loss ([\d.]+) -> ([\d.]+) in (\d+) steps(?:.* single device ([\d.]+)$)?", line)
    if told:
        losses = facts[1 if name == "checkpoint" else 0]["losses"]
        wanted = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}", str(len(losses)))
        Checks.equal(told.groups()[:3], wanted, f"rank {rank}: the losses and steps in {line!r}")
        if told.group(4):
            Checks.equal(told.group(4), f"{facts[1]['losses'][-1]:.4f}", f"rank {rank}: the last loss in {line!r}")


def share(size, n, rank):
    """How many of `size` rows a rank has."""
    return size // n + (rank < size % n)


def only_rank_0(function):
    return lambda n, rank, facts, graph, report: function(n, rank, facts, graph, report) if rank == 0 else []


def bubble(n, rank, facts, graph, report):
    m = computing(report)[0]["micro_batches"]
    in_graph, eager = round(100 * (n - 1) / (m + n - 1)), round(100 * (n - 1) / n)
    words = f"{in_graph}% in a graph; in eager mode {eager}%, as with m = 1"
    return [f"pipeline bubble, (n-1)/(m+n-1) with n = {n} and m = {m}: {words}"]


def all_reduces(n, rank, facts, graph, report):
    m = computing(report)[0]["micro_batches"]
    times, when = (2, "the last") if graph else (2 * m, "each")
    return [f"all-reduces in a step: {times}, of the gradients of 2 weights after {when} micro-batch"]


def ages(n, rank, facts, graph, report):
    """The gradients of the last worker are as old as the steps since it fetched weights."""
    every = computing(report)[0]["sync_every"]
    slow, usual = facts[0]["losses"], facts[1]["losses"]
    return [
        f"step {k}: the gradients are {'0 ' * (n - 1)}{k % every} steps old, loss {slow[k]:.4f}, "
        f"without a slow worker {usual[k]:.4f}"
        for k in range(len(slow))
    ]


def mixture(n, rank, facts, graph, report):
    capacity, dropped = computing(report)[0]["capacity"], facts[0]["dropped"]
    return [f"with {capacity} slots for each group at each expert, {dropped[0]:.0f} tokens are dropped at first"]


def held(n, rank, facts, graph, report):
    """Of the model's parameters, which come last."""
    of_model = [tensor for tensor in facts[0]["tensors"]]
    sizes = [sum(math.prod(tensor[i]) for tensor in of_model) for i in (1, 2)]
    return [f"{sizes[0]:,} of {sizes[1]:,} numbers of the parameters"]


def weights_of_gpt(n, rank, facts, graph, report):
    sizes = [sum(math.prod(tensor[i]) for tensor in facts[0]["tensors"]) for i in (1, 2)]
    return [f"{sizes[0]:,} of {sizes[1]:,} weights"]


def parts_held(n, rank, facts, graph, report):
    names = [name for name, local, _, _ in facts[0]["tensors"] if math.prod(local)]
    return [f"{len(names)} of {len(facts[0]['tensors'])} parameters: {names[0]} to {names[-1]}"]


def of_pipeline(n, rank, facts, graph, report):
    return [
        f"w{rank} {local} of {shape}, and nothing of other stages"
        for name, local, shape, _ in facts[0]["tensors"]
        if name == f"{rank}.w"
    ] + (bubble(n, rank, facts, graph, report) if rank == 0 else [])


def ring_chunks(n, rank, facts, graph, report):
    """In round i a rank passes on what its neighbour has added up: the chunk of a number one less."""
    add = " ".join(str((rank - i) % n) for i in range(n - 1))
    finished = " ".join(str((rank + 1 - i) % n) for i in range(n - 1))
    return [f"sends chunks {add} to add, then finished chunks {finished}"]


def epochs(n, rank, facts, graph, report):
    numbers = [" ".join(str(int(number)) for number in own.ravel()) for own in facts[0]["loaded"]]
    return [f"epoch {epoch}: samples {own}" for epoch, own in enumerate(numbers)]


def resumed(n, rank, facts, graph, report):
    losses = facts[0]["losses"]
    return [
        f"loss {losses[0]:.4f} in step 1 -> {losses[-1]:.4f} in step {len(losses)}",
        "starts with step 1: no checkpoint",
    ]


BYTES = 4 * (4 * 8 + 8 * 4)  # of the weights w0 and w1 in float32
# Recipe -> a function (n, rank, facts of each call, graph, report) to lines that this rank prints
FIGURES = {
    "train_pipeline": of_pipeline,
    "gradient_accumulation": only_rank_0(all_reduces),
    "async_update": only_rank_0(ages),
    "mixture_of_experts": only_rank_0(mixture),
    "fully_sharded_module": held,
    "activation_checkpointing": lambda n, rank, facts, graph, report: (
        [
            "a step saves 2 tensors for backward, 11 without checkpointing"  # of each block its input
        ]
        * (not graph)
    ),
    "pipeline_module": parts_held,
    "pytorch_weights": only_rank_0(lambda *_: ["saved 15 tensors, 6,412 bytes"]),
    "gpt": weights_of_gpt,
    "ring_all_reduce": ring_chunks,
    "data_loading": epochs,
    "elastic_training": only_rank_0(resumed),
    "parameter_server": only_rank_0(
        lambda n, *_: [
            f"in each step rank 0 sends (n-1) x the weights = {(n - 1) * BYTES} bytes, and receives {(n - 1) * BYTES} "
            "bytes of gradients"
        ]
    ),
    "sequence_parallel": only_rank_0(
        lambda n, *_: [
            f"a rank keeps {4 * 8 * 16 // n} bytes of x, the residual and out each; with tensor parallel it would keep "
            f"{4 * 8 * 16}"
        ]
    ),
    "transformer_block": only_rank_0(
        lambda n, *_: ["each rank computes the attention of 2 of 4 heads, and sends no scores"]
    ),
    "vocab_parallel": only_rank_0(
        lambda n, *_: ["for each of its tokens a rank computes the logits of 31 of 62 words"]
    ),
    "all_gather_kv": only_rank_0(
        lambda n, *_: [f"each rank computes the scores of {share(8, n, 0)} of 8 queries, with all 8 keys"]
    ),
    "ulysses": only_rank_0(
        lambda n, *_: [f"rank 0 computes the scores of {share(8, n, 0)} of 8 heads, with all 8 queries and keys"]
    ),
    "ring_attention": lambda n, rank, *_: [
        f"rank {rank} computes {rank + 1} of {n} x {n} blocks of scores",
        ", ".join(f"{name}{rank} {(share(8, n, rank), 2, 4)}" for name in "qkv"),
    ],
    "batch_norm": lambda n, rank, *_: [
        f"column 0 of out, 4 of {4 * n} rows: mean ...",
        *(["column 0 of out, all rows: mean 0.00, variance 1.00"] if rank == 0 else []),
    ],
    "metrics": lambda n, rank, *_: [f"{share(25, n, rank)} of 25 rows: loss ..."],
    "rendezvous": only_rank_0(
        lambda n, *_: [f"the sum over ranks is {n * (n - 1) // 2}, as in numpy: {' '.join(map(str, range(n)))}"]
    ),
    "spawn": lambda n, *_: [f"rank {rank} of 2 returned (2, 8) of (4, 8)" for rank in (0, 1)],
    "hello_ranks": only_rank_0(lambda n, *_: [f"all {n} ranks are there, once each; number of hosts: 1"]),
    "loss_placement": only_rank_0(
        lambda n, *_: [f"the model is on ranks {' '.join(map(str, range(n)))} and the loss on 0"]
    ),
    "replicate_scatter_gather": only_rank_0(
        lambda n, *_: [f"text and weights are kept on ranks 0 and used on {' '.join(map(str, range(n)))}"]
    ),
}


def check_main(pools, path, name, graph=False, options=True):
    """The main at `path`, on the first number of ranks that the recipe takes; AssertionError if something is wrong."""
    n = proven_on(name)[0]
    arguments = ARGUMENTS.get(name, []) + ["--graph"] * (graph and len(modes(name)) == 2)
    call = {"path": str(path), "arguments": arguments, "options": options, "values": VALUES.get(name)}
    reports = pools(n).call(f"{ON_RANK}:rehearse", **call)
    check_print(name, n, reports, arguments)
    check_comparisons(name, n, reports[0], graph)
    if "options" in reports[0]:
        check_options(name, reports[0])
        if name == "elastic_training":
            check_die(n, reports)
    return reports


def check_elsewhere(pool, path, name, arguments=()):
    """What main prints on another number of ranks, or with these options."""
    arguments = [*arguments_on(name, pool.world_size), *arguments]
    check_print(name, pool.world_size, pool.call(f"{ON_RANK}:played", path=str(path), arguments=arguments), arguments)


def arguments_on(name, n):
    """The arguments with which main runs on n ranks."""
    meshes = {3: ["--pipeline", "3", "--num-layers", "3"], 8: ["--tensor", "2", "--pipeline", "2"]}
    return [*ARGUMENTS.get(name, []), *(meshes.get(n, []) if name == "gpt" else [])]


# Recipe -> options with which what it prints is another
OTHER_OPTIONS = {
    "train_pipeline": ["--micro-batches", "4"],
    "gradient_accumulation": ["--micro-batches", "4"],
    "mixture_of_experts": ["--capacity", "1"],
    "async_update": ["--sync-every", "3", "--steps", "5"],
    "zero_optimizer": ["--shard-min-size", "1024"],
    "ddp": ["--batch", "9"],
    "auto_parallel": ["--batch", "16"],
    "train_data_parallel": ["--optimizer", "momentum"],
    "checkpoint": ["--steps", "5", "--save-every", "1", "--weights", "columns"],
    "elastic_training": ["--steps", "5"],
    "tensor_parallel_module": ["--optimizer", "momentum"],
    "fully_sharded_module": ["--optimizer", "momentum"],
    "pipeline_module": ["--optimizer", "adam", "--micro-batches", "4"],
    "pytorch_weights": ["--weights", VALUES["pytorch_weights"]["weights"][0]],
}


def other_runs(name):
    """(number of ranks, arguments) besides the first: 3 ranks or the next number, in a graph; the largest up to 8."""
    first, *others = proven_on(name)
    following = 3 if 3 in others else (others or [first])[0]
    largest = max(n for n in world_sizes(path_of(name)) if n <= 8)
    if following != first or len(modes(name)) == 2:
        yield following, ["--graph"] * (len(modes(name)) == 2)
    if largest not in (first, following):
        yield largest, []
    if name in OTHER_OPTIONS:
        yield following, OTHER_OPTIONS[name]


# Recipe -> command lines that its main refuses on 2 ranks, besides those in its Proof; FOLDER has files: see `refusals`
MORE_REFUSED = {
    "gpt": [
        *("--pipeline 2 --num-layers 1", "--seq-len 7", "--batch-size 7", "--data 3", "--recompute full"),
    ],
    "rendezvous": ["--init-method here"],
    "pytorch_weights": [
        f"--weights FOLDER/{what}" for what in ("no_file", "short", "zip", "int16", "cut", "size", "other")
    ],
}


def trained(trait, layout, recipe):
    """The expression that trains a model of tests/on_rank_traits.py in a graph, laid out by the recipe."""
    module = "__import__('tests.on_rank_traits', fromlist=['on_rank_traits'])"
    return f"{module}.losses_and_weights({trait!r}, {layout!r}, True, {{{recipe!r}: __file__}})"


def lost_in_a_graph(layout, recipe):
    """Two models that a graph would train differently from eager mode."""
    return [trained(trait, layout, recipe) for trait in ("forward_hook", "value_kept_in_self")]


# Recipe -> expressions of its names that it refuses
EXPRESSIONS = {
    "tensor_parallel_module": [
        "lay_out(Classifier(), placements('cpu', 2), {**PLAN, 'blocks.*middle': Row})",
        "lay_out(Classifier(), placements('cpu', 2), {'embedding': Row})",
        "lay_out(Classifier(), placements('cpu', 2), {'head': Row, 'hea.': Column})",
        *lost_in_a_graph("tensor", "tensor_parallel_module"),
    ],
    "fully_sharded_module": lost_in_a_graph("fully sharded", "fully_sharded_module"),
    "pipeline_module": [
        "assign_stages(Classifier(), [Classifier()], placements('cpu', 2))",
        "assign_stages(Classifier(), [Classifier(), Classifier()], placements('cpu', 2))",
        trained("tied_on_two_stages", "pipeline", "pipeline_module"),
        *lost_in_a_graph("pipeline", "pipeline_module"),
    ],
    "gpt": ["placements('cpu', 2, data=1)"],
}
# Recipe -> the text of a refusal that other tests reach: spawn.py needs a rank that dies
REACHED_ELSEWHERE = {"spawn": "raise RuntimeError("}


def lines_that_refuse(name, source):
    """The numbers of the lines of `raise` and of `parser.error`."""
    lines, nodes = source.splitlines(), ast.walk(ast.parse(source))
    found = {node.lineno for node in nodes if isinstance(node, ast.Raise)}
    found |= {i for i, line in enumerate(lines, 1) if line.strip().startswith("parser.error(")}
    return {line for line in found if REACHED_ELSEWHERE.get(name, "no such") not in lines[line - 1]}


def damaged(folder):
    """Files for pytorch_weights.py, each wrong in another way."""
    content = Path(VALUES["pytorch_weights"]["weights"][0]).read_bytes()
    length = int.from_bytes(content[:8], "little")
    files = {
        "short": b"",
        "zip": content[:8] + b"x" + content[9:],
        "int16": content.replace(b'"F32"', b'"I16"'),
        "size": content.replace(b'"F32"', b'"F64"'),
        "cut": content[:-1],
        "other": content.replace(b'"head.bias"', b'"tail.bias"'),
    }
    assert length and len(set(files.values())) == len(files)
    for name, data in files.items():
        (Path(folder) / name).write_bytes(data)


def check_refusals(pools, path, name):
    """Every refusal of the recipe at `path` is reached by some input, on each rank, before anything is computed."""
    n, reached = proven_on(name)[0], set()
    with tempfile.TemporaryDirectory() as folder:
        damaged(folder)
        lines = [*PROOFS[name].refused, *MORE_REFUSED.get(name, ())]
        calls = [{"arguments": line.replace("FOLDER", folder).split()} for line in lines]
        calls += [{"expression": expression} for expression in EXPRESSIONS.get(name, ())]
        for call in calls:
            for where, words in pools(n).call(f"{ON_RANK}:refused", path=str(path), **call):
                Checks.that(where and words and "\n" not in words[0], f"it is not refused: {call}")
                reached.update(where)
    missing = sorted(lines_that_refuse(name, Path(path).read_text()) - reached)
    Checks.that(not missing, f"no input reaches the refusal in line {missing}")


# The numbers of ranks that the recipes take, by what limits them
TAKEN = {
    "as many as rows, columns, heads or experts of 8, in eights": (
        range(2, 9),
        "train_data_parallel train_model_parallel ddp ring_all_reduce parameter_server async_update batch_norm "
        "random_numbers activation_checkpointing auto_parallel loss_placement replicate_scatter_gather all_gather_kv "
        "ulysses ring_attention",
    ),
    "as many as rows of 4": (
        range(2, 5),
        "data_parallel model_parallel row_parallel sbp_conversions matmul_signatures global_and_local fully_sharded "
        "zero_optimizer",
    ),
    "each rank adds a stage, rows or an expert": (
        range(2, 65),
        "train_pipeline data_loading pipeline_parallel hello_ranks rendezvous mixture_of_experts",
    ),
    "a checkpoint has 64 rows": ((2, 1, *range(3, 65)), "checkpoint"),
    "25 rows": (range(2, 26), "metrics"),
    "8 rows, and one rank alone": ((2, 1, *range(3, 9)), "elastic_training fully_sharded_module"),
    "the number divides the sizes": ((2, 4), "gradient_accumulation sequence_parallel"),
    "two by two": ((4,), "train_data_tensor train_data_pipeline hybrid_parallel two_d_sbp"),
    "a mesh with two ranks along its tensor axis": ((4, 2), "transformer_block vocab_parallel"),
    "two halves": ((4, 2, 3), "cross_placement"),
    "one process": ((1,), "single_device spawn"),
    "a width that the number divides, or 3": ((2, 1, 3, 4, 8), "tensor_parallel_module pytorch_weights"),
    "four parts": ((2, 1, 3, 4), "pipeline_module"),
    "any mesh": ((2, 1, *range(3, 1025)), "gpt"),
}
WORLD_SIZES = {name: sizes for sizes, names in TAKEN.values() for name in names.split()}


NAMES = [*CASES, *WITHOUT_CASE]
