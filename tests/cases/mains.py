"""What the main of every recipe must do: notice a wrong result, hand on its options, and print what is so."""

import ast
import math
import re
import tempfile
from pathlib import Path

from oneflow_cookbook.start.recipe import entry_options, path_of
from tests.cases import (  # noqa: F401  (gpt_meshes and whole_run add their Proofs)
    CASES,
    PROOFS,
    ROOT,
    WITHOUT_CASE,
    gpt_meshes,
    modes,
    proven_on,
    whole_run,
)
from tests.cases.ladder import Checks

ON_RANK = str(ROOT / "tests" / "on_rank_main.py")


def main_of(name):
    return PROOFS[name].main


def check_main(pools, path, name, graph=False):
    """Run the main at `path` and check it; AssertionError if something is wrong."""
    main = main_of(name)
    n = main.ranks or proven_on(name)[0]
    arguments = main.arguments + ["--graph"] * (graph and len(modes(name)) == 2)
    other_lines = main.other_lines if graph == modes(name)[0] else []
    source = Path(path).read_text()
    reports = pools(n).call(f"{ON_RANK}:rehearse", path=str(path), arguments=arguments, other_lines=other_lines)
    check_device(name, source)
    for rank, report in enumerate(reports):
        Checks.equal((report["code"], report["err"]), (0, ""), f"rank {rank}: code and errors")
        check_calls(name, n, graph, report)
        check_comparisons(name, source, report)
        check_options(name, report)
        report["facts_of_ranks"] = [other["facts"] for other in reports]
        check_print(name, rank, graph, report, ")} of {tuple(" in source)
    has_losses = 'print(f"loss {losses[0]' in source
    is_printed = any(map(LOSSES.match, reports[0]["out"].splitlines()))
    Checks.that(is_printed or not has_losses, "rank 0 does not print the losses")


def ranks_of(arguments):
    """The ranks on which a call computes, from its placements; none if it takes none."""
    places = [place for value in arguments.values() for place in (value if isinstance(value, list) else [value])]
    rows = [row for place in places if isinstance(place, dict) for row in place.get("ranks", ())]
    return {rank for row in rows for rank in (row if isinstance(row, list) else [row])}


def computing(calls):
    """The calls of train or run: [{argument: value}]."""
    return [arguments for function, arguments in calls if function in ("train", "run")]


def check_calls(name, n, graph, report):
    """A call is on all ranks, in this mode; where losses are compared, a later one is on a single device."""
    calls = computing(report["calls"])
    Checks.that(calls, "main does not compute")
    for number, call in enumerate(calls):
        Checks.equal(call.get("graph", graph), graph, f"call {number} of main: graph")
    for number, arguments in main_of(name).further.items():
        Checks.that(arguments.items() <= calls[number].items(), f"call {number} of main must have", arguments)
    folders = [call["checkpoint_dir"] for call in calls if call.get("checkpoint_dir")]
    Checks.that(all(folders.count(folder) > 1 for folder in folders), "one call alone uses a folder of checkpoints")
    ranks = [ranks_of(call) for call in calls]
    Checks.that(not any(ranks) or set(range(n)) in ranks, "no call of main is on all ranks, but on", ranks)
    if "losses" in report["facts"][0] or name in ("pipeline_parallel", "hybrid_parallel"):
        Checks.that({0} in ranks[1:] or not any(ranks), "no later call of main is on a single device, but on", ranks)


def check_comparisons(name, source, report):
    """Each comparison of main fails if a result is off by a little, and none is missing."""
    calls = [node for node in ast.walk(function_main(source)) if isinstance(node, ast.Call)]
    comparisons = [call for call in calls if ast.get_source_segment(source, call.func).startswith("np.testing.assert_")]
    Checks.equal(len(comparisons), main_of(name).comparisons, "the number of main's comparisons")
    for comparison in comparisons:
        changes = ("scaled", "zeros") if comparison.func.attr == "assert_array_equal" else ("scaled",)
        lines = range(comparison.lineno, comparison.end_lineno + 1)
        is_red = any(report["noticed"].get((line, change)) for line in lines for change in changes)
        Checks.that(is_red, "main still passes when each result is off:", ast.get_source_segment(source, comparison))


def function_main(source):
    return next(node for node in ast.parse(source).body if getattr(node, "name", "") == "main")


def check_options(name, report):
    """Each option reaches the calls of train, run or placements; its default is the signature's."""
    main, options = main_of(name), entry_options(path_of(name))
    for option, default in report["defaults"].items():
        if option in options:
            wanted = main.defaults.get(option, (options[option], options[option]))
            Checks.equal((default, options[option]), wanted, f"the defaults of --{option} and of the function")
        stated = re.search(r"\(default: (\S+)\)", report["helps"][option])
        Checks.that(not stated or stated.group(1) == str(default), f"--{option}: help states another default")
    left = set(report["defaults"]) - {"device", *main.elsewhere}
    for line, typed, code, calls in report["lines"]:
        Checks.that(code != 2 and typed, f"main refuses {line}")
        for function, call in calls:
            others = set().union(*(other for name_of_other, other in calls if name_of_other == function))
            Checks.that(not set(typed) & others - set(call), f"{line}: a call of {function} has no", others - set(call))
            for option in set(typed) & set(call) - {"device", *main.elsewhere}:
                if isinstance(call[option], dict):  # placements that it has made of the option
                    continue
                allowed = [typed[option], *main.alone.get(option, ())]
                Checks.that(call[option] in allowed, f"{line}: main calls {function} with {option} {call[option]}")
        for option in [option for option in left if typed[option] != report["defaults"][option]]:
            Checks.that(any(call.get(option) == typed[option] for _, call in calls), f"{line}: no call has {option}")
            left.remove(option)
    Checks.that(not report["lines"] or not left, "no line of Main.other_lines changes", left)


def check_device(name, source):
    """No call of main names a device: --device does."""
    calls = [node for node in ast.walk(function_main(source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "attr", "") != "add_argument"]
    constants = [argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)]
    named = [value for value in constants if value in ("cpu", "cuda")]
    Checks.equal(len(named), main_of(name).on_cpu, "the number of main's calls with a device of their own")


SHAPE = r"(\([\d, ]*\))"
SHARD = re.compile(rf"(\S+) {SHAPE} of {SHAPE}(?:: (\d+)%)?")  # NAME (shape here) of (shape)
SUM = re.compile(r"(\S+) .*its sum after training (-?[\d.]+)")
LOSSES = re.compile(
    r"loss ([\d.]+) -> ([\d.]+) in (\d+) steps"
    r"(?:$|, as (?:in one run )?on a single device$|; on a single device ([\d.]+)$)"
)
SUMS = re.compile(r"(\S+(?: -> \S+)?) +((?:-?\d+ ?){2,})")  # NAME, and the sum of its block on each rank


def check_print(name, rank, graph, report, shows_shards):
    """Each line shows shapes of a result or its losses, or stands in the case; and all lines of the case are there."""
    prints = main_of(name).prints
    prints = prints[graph] if isinstance(prints, dict) else prints
    of_rank = [line for line in prints if not line.startswith("[") or line.startswith(f"[{rank}] ")]
    of_rank = [re.sub(r"^\[\d+\] ", "", line) for line in of_rank]
    lines = report["out"].splitlines()
    shards = [tensor for call in report["facts"] for tensor in call["tensors"] if 0 not in tensor[1]]
    has_shards = any(map(SHARD.search, lines)) or not shards
    Checks.that(has_shards or not shows_shards, f"rank {rank} prints nothing of what it holds, but", lines)
    for line in of_rank:
        Checks.that(any(is_like(line, printed) for printed in lines), f"rank {rank} does not print {line!r} but", lines)
    for line in lines:
        is_default = not main_of(name).arguments  # as pages show it
        Checks.that(len(line) <= 120 or not is_default, f"a line is too wide for a page: {line}")
        facts = report["facts"]
        is_known = shows_shapes(name, line, facts, rank) or (rank == 0 and shows_losses(name, line, facts))
        is_known = is_known or shows_sums(line, report["facts_of_ranks"])
        Checks.that(is_known or any(is_like(other, line) for other in of_rank), f"rank {rank} prints {line!r}")


def shows_shapes(name, line, facts, rank):
    """Whether a line has shapes and sums of tensors; AssertionError if they are not those of the results."""
    tensors = [tensor for call in facts for tensor in call["tensors"]]
    shards = SHARD.findall(line)
    for word, here, whole, share in shards:
        known = [
            (str(local), str(shape))
            for tensor, local, shape, _ in tensors
            if tensor == word or tensor.endswith(f".{word}") or re.fullmatch(r"w\d*", word)
        ]
        if not known:
            return False
        Checks.that((here, whole) in known, f"rank {rank}: no tensor is as in {line!r}")
        is_held = not re.search(r"\b0\b", here)
        Checks.that(is_held or main_of(name).prints_empty, f"rank {rank} holds nothing of what it prints: {line!r}")
        if share:
            sizes = [math.prod(int(size) for size in re.findall(r"\d+", shape)) for shape in (here, whole)]
            Checks.equal(share, f"{sizes[0] / sizes[1] * 100:.0f}", f"rank {rank}: the share in {line!r}")
    for word, total in SUM.findall(line):
        sums = [f"{known:.4f}" for tensor, _, _, known in facts[0]["tensors"] if tensor == word]
        Checks.that(total in sums, f"rank {rank}: the sum in {line!r} is {sums}")
    return bool(shards)


def shows_losses(name, line, facts):
    """Whether a line has "loss FIRST -> LAST in K steps"; AssertionError if they are not those of the call."""
    printed = LOSSES.match(line)
    if printed:
        losses = facts[1 if name == "checkpoint" else 0]["losses"]
        wanted = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}", str(len(losses)))
        Checks.equal(printed.groups()[:3], wanted, f"the losses and steps in {line!r}")
        alone = printed.group(4)
        Checks.that(not alone or alone == f"{facts[1]['losses'][-1]:.4f}", f"the last loss in {line!r}")
    return bool(printed)


def shows_sums(line, facts_of_ranks):
    """Whether a line has the sum of a tensor's block on each rank."""
    printed = SUMS.fullmatch(line)
    by_rank = [{name: total for name, _, _, total in facts[0]["tensors"]} for facts in facts_of_ranks]
    return bool(printed) and [int(sums.get(printed.group(1), -1)) for sums in by_rank] == [
        int(number) for number in printed.group(2).split()
    ]


NUMBER = re.compile(r"-?\d+\.\d+")
OF_THE_MACHINE = re.compile(r"[\d.]+ tokens/s|\(\S+, \d+(?:\.\d+){3}\)|process \d+|127\.0\.0\.1:\d+")


def is_like(shown, printed):
    """Whether two lines are equal but for the last digit of decimal numbers, and for names and times of the machine."""
    shown, printed = OF_THE_MACHINE.sub("*", shown), OF_THE_MACHINE.sub("*", printed)
    if NUMBER.sub("*", shown) != NUMBER.sub("*", printed):
        return False
    for number, other in zip(NUMBER.findall(shown), NUMBER.findall(printed)):
        digits = len(number.split(".")[1])
        if digits != len(other.split(".")[1]) or abs(float(number) - float(other)) > 1.5 * 10**-digits:
            return False
    return True


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
        "train_data_parallel train_tensor_parallel ddp ring_all_reduce parameter_server async_update batch_norm "
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
