"""What the main of every recipe must do: notice a wrong result, hand on its options, and print correct figures."""

import ast
import math
import re
import tempfile
from pathlib import Path

from oneflow_cookbook.start.recipe import entry, path_of, world_sizes
from tests.cases import (  # noqa: F401  (gpt_meshes and whole_run add their Proofs)
    CASES,
    PROOFS,
    ROOT,
    WITHOUT_CASE,
    figures,
    gpt_meshes,
    modes,
    proven_on,
    whole_run,
)
from tests.cases.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_main.py")


def main_of(name):
    return PROOFS[name].main


def check_die(n, reports):
    """elastic_training.py trains up to that step first, and then the last rank alone is killed."""
    for rank, report in enumerate(reports):
        [(step, code, calls)] = report["options"]["die"]
        Checks.equal(code, 137 if rank == n - 1 else 0, f"rank {rank}: exit code with --die")
        Checks.equal(figures.computing({"calls": calls})[0]["steps"], step, "the step up to which --die trains")


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
    of_the_call = ("tensors for backward", "tokens/s")  # not made again, or of the machine
    changing = [line for line in report["changing"] if not any(words in line for words in of_the_call)]
    Checks.that(not changing, "main prints something else the second time:", *changing)
    reasons = main_of(name).not_compared
    for number, part, how in report["unnoticed"]:
        known = {part.split(".")[0], f"{number} {part.split('.')[0]}"} & set(reasons)
        is_noticed_otherwise = name == "random_numbers" and how == "zeros"
        result = f"{part}, returned by its call {number} of train or run,"
        Checks.that(known and not is_noticed_otherwise, f"main still passes when {result} is off: compare it")
    calls = figures.computing(report)
    Checks.that(calls, "main does not compute")
    for number, call in enumerate(calls):
        Checks.equal(call.get("graph", graph), graph, f"call {number} of main: graph")
        Checks.equal(devices_of(call) - {None}, {"cpu"}, f"call {number} of main: device")
    of_all = next((call for call in calls if ranks_of(call) == set(range(n))), calls[0])
    if ranks_of(of_all):
        Checks.equal(ranks_of(of_all), set(range(n)), "the ranks of main's call")
    if "losses" not in report["facts"][0] and name not in ("pipeline_parallel", "hybrid_parallel"):
        return
    alone = calls[2] if main_of(name).further else calls[1]
    Checks.that(ranks_of(alone) in ({0}, set()), "main does not compare with a single device")
    Checks.equal(
        options_of(alone), {**options_of(of_all), **main_of(name).alone}, "on a single device main computes with"
    )
    for key, value in main_of(name).further.items():
        further = calls[0] if name == "checkpoint" else calls[1]
        Checks.equal(further[key], value, f"{key} of main's further call")


def check_options(name, report):
    """Each option reaches train, run or placements, in each call that computes; its default is the signature's."""
    defaults = entry(path_of(name))
    for option, default in report["defaults"].items():
        if option in defaults:
            wanted = main_of(name).defaults.get(option, (defaults[option], defaults[option]))
            Checks.equal((default, defaults[option]), wanted, f"the defaults of --{option} and of the function")
        stated = re.search(r"\(default: (\S+)\)", report["helps"][option])
        Checks.that(not stated or stated.group(1) == str(default), f"--{option}: help states another default")
        tried = report["options"][option]
        Checks.that(tried or option in ("init_method",), f"--{option}: no other value was tried")
        for value, code, calls in tried:
            Checks.that(code != 2, f"--{option} {value} is refused")
            check_option(name, option, value, calls, report)
    for reaching, option, value, calls in report["elsewhere"]:
        for _, arguments in calls:
            where = f"--{reaching} --{option} {value}: a call has"
            allowed = [value, main_of(name).alone.get(option, value)]
            if option == "device":
                Checks.equal(devices_of(arguments) - {None}, {value}, where)
            elif option in figures.computing(report)[0] and (reaching, option) != ("die", "steps"):  # up to --die
                Checks.that(arguments.get(option) in allowed, where, option, arguments.get(option))


def check_option(name, option, value, calls, report):
    if option in main_of(name).elsewhere:
        return
    computing_calls = [arguments for function, arguments in calls if function in ("train", "run")]
    others = [arguments for function, arguments in calls if function == "placements"]
    if option == "device":
        found = [devices_of(call) for call in computing_calls]
        Checks.equal(found, [{value}] * len(figures.computing(report)), f"--device {value} reaches placements on")
        return
    receiving = [call for call in computing_calls if option in call and not isinstance(call[option], dict)]
    if not receiving:
        Checks.that(any(call.get(option) == value for call in others), f"--{option} {value} reaches no call")
        return
    own = main_of(name).alone, main_of(name).further
    for i, call in enumerate(receiving):
        usual = figures.computing(report)[i][option] if i < len(figures.computing(report)) else None
        exempt = any(option in words for words in own) and call[option] in [words.get(option) for words in own] + [
            usual
        ]
        stopped = name in ("checkpoint", "training_run") and option == "steps" and call[option] == value // 2
        exempt = exempt or stopped
        Checks.that(call[option] == value or exempt, f"--{option} {value}: call {i} has {call[option]}")
    Checks.that(any(call[option] == value for call in receiving), f"--{option} {value} reaches no call")


def check_print(name, n, reports, arguments=()):
    """What each rank printed is correct: shapes, sums, shares, losses, and the figures of the recipe."""
    for rank, report in enumerate(reports):
        report["facts_of_ranks"] = [other["facts"] for other in reports]
        Checks.equal((report["code"], report["err"]), (0, ""), f"rank {rank}: code and errors")
        facts, lines = report["facts"], report["out"].splitlines()
        for line in lines:
            check_shapes(name, line, facts, rank)
            check_sums(line, facts, rank)
            check_losses(name, line, facts, rank)
            alike = [other for other in reports if line in other["out"].splitlines()]
            Checks.that(OF_ALL.search(line) or len(alike) == 1, f"several ranks print {line!r}")
        graph = "--graph" in arguments or modes(name) == (True,)
        closing = [line for line in lines if CLOSING.search(line)]
        Checks.that(rank or closing, "rank 0 does not say that it is equal, but", *lines)
        for line in main_of(name).figures(n, rank, facts, graph, report):
            begins = line.endswith("...") and any(other.startswith(line[:-3]) for other in lines)
            Checks.that(line in lines or begins, f"rank {rank} does not print {line!r} but", *lines)


CLOSING = re.compile(r"on a single device|in numpy|of a single rank|of a single device|once|that of rank 0")
IN_PROGRAM = "returned"  # spawn.py's shards are arrays: its `figures` have their line
SHAPE = r"(\([\d, ]*\))"
OF_ALL = re.compile(  # what each rank prints of its own, and may be the same on several
    rf"{SHAPE} of |its sum after training|^epoch |^column 0|^nn.Dropout keeps \[|^last row|^local |^rows \(|"
    r"tensors for backward|weights$|numbers of the parameters$|values in each layer$"
)


def check_shapes(name, line, facts, rank):
    """Each "NAME (shape here) of (shape)" is that of a tensor of this name."""
    for word, here, whole, share in re.findall(rf"(\S+) {SHAPE} of {SHAPE}(?:: (\d+)%)?", line):
        known = [
            (str(local), str(shape))
            for call in facts
            for tensor, local, shape, _ in call["tensors"]
            if tensor == word or tensor.endswith(f".{word}") or re.fullmatch(r"w\d*", word)
        ]
        Checks.that((here, whole) in known or word == IN_PROGRAM, f"rank {rank}: no tensor is as in {line!r}")
        is_held = not re.search(r"\b0\b", here)
        Checks.that(is_held or main_of(name).prints_empty, f"rank {rank} holds nothing of what it prints: {line!r}")
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


def check_prints(name, source, reports):
    """Each print of main is reached on some rank."""
    main = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "main")
    reached = set().union(*(report["printing"] for report in reports))
    for node in ast.walk(main):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            text = ast.get_source_segment(source, node)
            known = any(part in text for part in main_of(name).not_printed)
            printed = reached & set(range(node.lineno, node.end_lineno + 1))
            Checks.that(printed or known, f"no rank reaches {text}")


def check_main(pools, path, name, graph=False, options=True):
    """The main at `path`, on the first number of ranks that the recipe takes; AssertionError if something is wrong."""
    n = proven_on(name)[0]
    arguments = main_of(name).arguments + ["--graph"] * (graph and len(modes(name)) == 2)
    options = options and not (graph and PROOFS[name].eager_only)  # main refuses that one with --graph
    call = {"path": str(path), "arguments": arguments, "options": options, "values": main_of(name).values}
    reports = pools(n).call(f"{ON_RANK}:rehearse", **call)
    check_print(name, n, reports, arguments)
    longest = max((line for report in reports for line in report["out"].splitlines()), key=len)
    Checks.that(len(longest) <= 120, f"a line is too wide for a page: {longest}")
    check_prints(name, Path(path).read_text(), reports)
    for report in reports:
        check_comparisons(name, n, report, graph)
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
    more = {
        "gpt": {3: ["--pipeline", "3", "--num-layers", "3"], 8: ["--tensor", "2", "--pipeline", "2"]},
        "llama": {3: ["--tensor", "1"], 8: ["--tensor", "4"]},
        "training_run": dict.fromkeys((2, 6), ["--steps", "4", "--save-every", "2"]),  # its default takes long
    }
    return [*main_of(name).arguments, *more.get(name, {}).get(n, [])]


def other_runs(name):
    """(number of ranks, arguments) besides the first: 3 ranks or the next number, in a graph; one rank; and 7, which
    divides no size of a recipe, or the largest up to 8.

    Other options are tried on those. training_run compiles eight graphs, so on its first number.
    """
    first, *others = proven_on(name)
    following = first if name == "training_run" else 3 if 3 in others else (others or [first])[0]
    taken = world_sizes(path_of(name))
    if first != 1 and 1 in taken:
        yield 1, []
    largest = 7 if 7 in taken and name not in ("gpt", "llama") else max(n for n in taken if n <= 8)
    if following != first or len(modes(name)) == 2:
        yield following, ["--graph"] * (len(modes(name)) == 2)
    options = main_of(name).other_options
    if largest not in (first, following) or options:
        yield largest, options


def lines_that_refuse(name, source):
    """The numbers of the lines of `raise` and of `parser.error`."""
    lines, nodes = source.splitlines(), ast.walk(ast.parse(source))
    found = {node.lineno for node in nodes if isinstance(node, ast.Raise)}
    found |= {i for i, line in enumerate(lines, 1) if line.strip().startswith("parser.error(")}
    elsewhere = main_of(name).refused_elsewhere
    return {line for line in found if not any(text in lines[line - 1] for text in elsewhere)}


def check_refusals(pools, path, name):
    """Every refusal of the recipe at `path` is reached by some input, on each rank, before anything is computed."""
    n, reached = proven_on(name)[0], set()
    with tempfile.TemporaryDirectory() as folder:
        main_of(name).make_files(folder)
        lines = [*PROOFS[name].refused, *main_of(name).refused]
        calls = [{"arguments": line.replace("FOLDER", folder).split()} for line in lines]
        calls += [{"expression": expression} for expression in main_of(name).refused_expressions]
        for call in calls:
            for where, words in pools(n).call(f"{ON_RANK}:refused", path=str(path), **call):
                Checks.that(where and words and "\n" not in words[0], f"it is not refused: {call}")
                reached.update(where)
    missing = sorted(lines_that_refuse(name, Path(path).read_text()) - reached)
    Checks.that(not missing, f"no input reaches the refusal in line {missing}")


# The numbers of ranks that the recipes take, by what limits them; a recipe without a line takes at least 2, 3 and 4.
TAKEN = {
    "as many as rows, columns, heads, sequences or experts of 8, in eights": (
        range(2, 9),
        "train_data_parallel train_model_parallel ddp ring_all_reduce parameter_server async_update batch_norm "
        "random_numbers activation_checkpointing auto_parallel loss_placement replicate_scatter_gather all_gather_kv "
        "ulysses ring_attention mixture_of_experts",
    ),
    "as many as micro-batches of 8, or of 3 for each rank of 24": (
        range(2, 9),
        "pipeline_schedules interleaved_pipeline",
    ),
    "as many as rows of 4": (
        range(2, 5),
        "data_parallel model_parallel row_parallel sbp_conversions matmul_signatures global_and_local fully_sharded "
        "zero_optimizer",
    ),
    "each rank adds a stage or rows": (
        range(2, 65),
        "train_pipeline data_loading pipeline_parallel hello_ranks rendezvous",
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
    "a number that divides the 12 rows of a micro-batch": ((2, 1, 3, 4, 6, 12), "training_run"),
    "as many as heads of a model, times stages": ((2, 1, *range(3, 65)), "llama"),
}
WORLD_SIZES = {name: sizes for sizes, names in TAKEN.values() for name in names.split()}


NAMES = [*CASES, *WITHOUT_CASE]
