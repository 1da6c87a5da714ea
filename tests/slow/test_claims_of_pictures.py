"""What the pictures of recipes claim, against fresh runs: layouts, moves, order, bytes, and what a rank keeps.

That a picture draws what it claims is seen in tests/test_pictures.py. Where a claim is no longer so, change the picture
and its claim by hand, in light and in dark.
"""

from functools import partial

import pytest

from harness.measure import theory
from harness.measure.events import layout
from harness.measure.sent import between_ranks
from harness.measure.steps import bytes_of
from harness.report import atlas
from harness.report.runs import MEASURE_SCRIPT, with_mode
from harness.start import recipe
from tests.cases import ROOT
from tests.cases.ladder import Checks
from tests.drawings import claim, claiming, near, picture

ON_RANK = ROOT / "tests" / "on_rank_pictures.py"
CLAIMS = {name: claim(picture(name)) for name in claiming()}  # light and dark claim the same: see test_pictures.py
EQUATIONS, STEPS = claiming("matmuls", "moves"), claiming("steps", "kept")
SMALL = 1000  # bytes of a tensor, such as a loss, that is not drawn
CONTROL = 10_000  # bytes below which a part of a step sent nothing but OneFlow's own messages


def background_calls(item):
    """What a test needs: see background.py."""
    if item.originalname == "test_conversions_send_what_is_claimed":
        return {("atlas", 2): (2, atlas.measured_on)}
    if item.originalname == "test_server_and_ring_send_what_is_claimed":
        both = CLAIMS["parameter_server"]
        return {("sends", role): script_call(both[role], 4, both[role]["options"]) for role in ("server", "ring")}
    name = item.callspec.params["name"] if hasattr(item, "callspec") else PICTURE_OF[item.originalname]
    given = CLAIMS[name]
    if name in EQUATIONS:
        return {("claim", name, size): script_call(given, given["ranks"], given[size]) for size in ("options", "large")}
    if name in STEPS:
        runs = {"own": given, "beside": given["beside"]}
        return {("order", name, which): on_rank("order", given["ranks"], runs[which]) for which in runs}
    return calls_of_other(name, given)


# The tests that are about one picture -> its name.
PICTURE_OF = {
    "test_arrows_between_ranks_are_those_of_a_run": "hybrid_parallel",
    "test_partial_sums_are_those_of_a_run": "partial_sum",
    "test_ring_is_that_of_a_run": "ring_attention",
    "test_slots_are_those_of_a_run": "all_to_all",
    "test_memory_is_that_of_a_run": "memory",
}


def calls_of_other(name, given):
    n = given["ranks"]
    if name == "partial_sum":
        return {("product",): (n, partial(call, function="product", x=given["x"], w=given["w"]))}
    if name == "ring_attention":
        return {("ring",): script_call(given, n, given["options"])}
    if name == "all_to_all":
        of = {**given, "options": {**given["options"], "capacity": given["capacity"]}}
        return {("slots",): on_rank("slots", n, of), ("experts",): script_call(given, n, given["large"])}
    return {("kept", one["strategy"]): on_rank("kept", n, one) for one in given["strategies"]}


def call(pool, function, **arguments):
    return pool.call(f"{ON_RANK}:{function}", **arguments)


def on_rank(function, n, of):
    """A call of a function of on_rank_pictures.py for the recipe and the options that a claim has."""
    inner = {"inner": True} if of.get("inner") else {}
    return n, partial(call, function=function, path=str(recipe.path_of(of["recipe"])), **inner, **of["options"])


def script_call(of, n, options):
    path = recipe.path_of(of["recipe"])
    keywords = with_mode(options, "eager" if "graph" in recipe.entry(path) else "only")
    return n, lambda pool: pool.call(MEASURE_SCRIPT, path=str(path), keywords=keywords)


def look(tensor, like):
    """What is claimed of a tensor; a first dimension "s" may have any size."""
    first = ["s"] if like["shape"][0] == "s" else list(tensor["shape"][:1])
    return [*first, *tensor["shape"][1:]], tensor["sbp"], tensor["ranks"]


def claimed_look(tensor):
    return tensor["shape"], tensor["sbp"], tensor["ranks"]


def matching(events, claimed, tensors_of_event):
    """The number of the first of these events for each of what is claimed, in order; None if one is missing."""
    numbers, begin = [], 0
    for tensors in claimed:
        wanted = [claimed_look(tensor) for tensor in tensors]
        alike = [
            k
            for k in range(begin, len(events))
            if [look(one, like) for one, like in zip(tensors_of_event(events[k]), tensors)] == wanted
        ]
        if not alike:
            return None
        numbers.append(alike[0])
        begin = alike[0] + 1
    return numbers


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_and_moves_are_those_of_a_run(measured, name):
    given, small, large = CLAIMS[name], measured("claim", name, "options"), measured("claim", name, "large")
    events, large_events = small[0]["events"], large[0]["events"]
    matmuls = [k for k, event in enumerate(events) if event.kind == "matmul"]
    moves = [
        k
        for k, event in enumerate(events)
        if event.kind == "to_global"
        and layout(event.inputs[0]) != layout(event.outputs[0])
        and bytes_of(large_events[k].inputs[0]) >= SMALL
    ]
    drawn = matching([events[k] for k in matmuls], given["matmuls"], lambda event: [*event.inputs[:2], *event.outputs])
    Checks.that(drawn is not None, name, "claims matmuls", given["matmuls"], "of", [events[k] for k in matmuls])
    pairs = [(move["old"], move["new"]) for move in given["moves"]]
    moved = matching([events[k] for k in moves], pairs, lambda event: [*event.inputs[:1], *event.outputs])
    Checks.that(moved is not None, name, "claims moves", pairs, "of", [events[k] for k in moves])
    if "part" not in given:
        Checks.equal((len(drawn), len(moved)), (len(matmuls), len(moves)), name, "claims as many matmuls and moves")
    for move, k in zip(given["moves"], [moves[k] for k in moved]):
        for rank, wanted in enumerate(move["sent"]):
            found = large[rank]["events"][k].sent / bytes_of(large_events[k].inputs[0])
            Checks.that(
                near(found, wanted), name, "rank", rank, "sends", found, "for", move["new"]["name"], "not", wanted
            )
    if not drawn:
        return
    first, last = matmuls[drawn[0]], matmuls[drawn[-1]]
    still = range(first, last + 1) if "part" in given else range(len(large_events))
    for k in set(still) - {moves[k] for k in moved}:
        sent, event = max(result["events"][k].sent for result in large), large_events[k]
        most = 0.01 * bytes_of(large_events[last].outputs[0]) if given["moves"] else 0
        Checks.that(sent <= most, name, "sends", sent, "bytes in", event.kind, event.text)


def test_arrows_between_ranks_are_those_of_a_run(measured):
    name = "hybrid_parallel"
    given, results = CLAIMS[name], measured("claim", name, "large")
    sent = between_ranks(*zip(*(result["connections"] for result in results)))
    [move] = given["moves"]
    [unit] = {
        bytes_of(event.inputs[0])
        for event in results[0]["events"]
        if event.kind == "to_global" and event.inputs[0]["ranks"] == move["old"]["ranks"]
    }
    first = move["old"]["ranks"]  # what ranks of one stage send each other is for making tensors
    between = {ends: count for ends, count in sent.items() if (ends[0] in first) != (ends[1] in first)}
    units = {f"{rank} -> {to}": count / unit for (rank, to), count in between.items() if count >= CONTROL}
    Checks.equal(set(units), set(given["sends"]), name, "arrows")
    for ends, wanted in given["sends"].items():
        Checks.that(near(units[ends], wanted), name, ends, "sends", units[ends], "not", wanted)


def steps_of(results):
    """What `order` saw, as a picture claims it: the parts of a step in order, and what each rank sends for them."""
    found, waiting, places = [], [], {}  # places: the number of a move -> what it is of, and the part of its matmul
    events = results[0]["events"]
    for number, event in enumerate(events):
        sent, facts = [result["events"][number].sent for result in results], event.facts
        if event.kind == "move":
            if max(sent) >= CONTROL:
                places[facts["number"]] = place_of_move(events, number)
                found.append(moved(event, sent, places[facts["number"]], backward=False))
            continue
        if max(sent) >= CONTROL:
            ready, place = waiting.pop(0)
            found.append(moved(ready, sent, place, backward=True))
        if event.kind == "ready":
            place = place_of_gradient(facts, places)
            if event.outputs[0]["shape"] and place and place not in [known for _, known in waiting]:
                waiting.append((event, place))
        elif event.kind == "update":
            found += [{"step": "update", "ranks": [rank]} for rank in facts["ranks"]]
        else:
            step = f"{event.kind} w{facts['weight']} {facts['part']}"
            found.append({"step": step, "ranks": event.outputs[0]["ranks"]})
    assert not waiting, f"gradients that never went on: {waiting}"
    return found


def place_of_move(events, number):
    """(what moves forward, its part): the weight of the matmul that follows, or the output of the last one."""
    following = next((one.facts for one in events[number:] if one.kind == "forward"), None)
    if following:
        return f"w{following['weight']}", following["part"]
    return "out", next(one.facts["part"] for one in reversed(events[:number]) if one.kind == "forward")


def place_of_gradient(facts, places):
    """The same of a gradient that must still move; None of one whose tensor had no bytes to move."""
    if "number" in facts:
        place = places.get(facts["number"])
        return None if place and place[0] == "out" else place
    return facts.get("input") or f"w{facts['weight']}", facts["part"]


def moved(event, sent, place, backward):
    old, new, (name, part) = event.facts["old"], event.facts["new"], place
    units = [one / bytes_of(event.outputs[0]) for one in sent]
    if old.ranks == new.ranks:
        of = "gradient" if backward else "output" if name == "out" else "weight"
        return {"step": f"{theory.collective(old, new)} {name} {part}", "ranks": old.members, "sent": units, "of": of}
    of = "gradient" if backward else "output"
    return {"step": f"send {of} {part}", "ranks": old.members, "to": new.members, "sent": units, "of": of}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_a_run(measured, name):
    given, found = CLAIMS[name], steps_of(measured("order", name, "own"))
    Checks.equal(
        [{key: value for key, value in step.items() if key != "sent"} for step in found],
        [{key: value for key, value in step.items() if key != "sent"} for step in given["steps"]],
        *(name, "steps"),
    )
    for step, wanted in zip(found, given["steps"]):
        for amount, claimed in zip(step.get("sent", []), wanted.get("sent", [])):
            Checks.that(near(amount, claimed), name, step["step"], "sends", amount, "not", claimed)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("which, key", [("own", "kept"), ("beside", "kept beside")])
def test_ranks_keep_what_is_claimed(measured, name, which, key):
    for rank, result in enumerate(measured("order", name, which)):
        for kind, by_rank in CLAIMS[name][key].items():
            Checks.equal(result["kept"][kind] / result["weights"], by_rank[rank], name, which, "keeps", kind)


def test_conversions_send_what_is_claimed(measured):
    table = measured("atlas", 2)["conversions", (0, 1), (0, 1), "eager"]
    claimed = CLAIMS["sbp_conversions"]["sent"]
    assert set(claimed) == {" -> ".join(pair) for pair in table}
    for pair, by_rank in table.items():
        for found, wanted in zip(by_rank, claimed[" -> ".join(pair)]):
            Checks.that(near(found, wanted), *pair, "sends", found, "not", wanted)


@pytest.mark.parametrize("role", ["server", "ring"])
def test_server_and_ring_send_what_is_claimed(measured, role):
    """Of the ring without what its run moves besides, by to_global, for the comparison."""
    given, results = CLAIMS["parameter_server"][role], measured("sends", role)
    before, after = zip(*(result["connections"] for result in results))
    sent = between_ranks(before, after)
    if role == "ring":
        sent.update({(rank, to): results[rank]["outside"] for rank, to in sent if (rank + 1) % 4 == to})
    units = {f"{rank} -> {to}": count / given["unit"] for (rank, to), count in sent.items() if count >= CONTROL}
    assert set(units) == set(given["sends"])
    for ends, wanted in given["sends"].items():
        Checks.that(near(units[ends], wanted), role, ends, "sends", units[ends], "not", wanted)


def test_partial_sums_are_those_of_a_run(measured):
    given, results = CLAIMS["partial_sum"], measured("product")
    for rank, result in enumerate(results):
        wanted = {"sbps": ["P", "B"], "partial": given["partial"][rank], "out": given["out"]}
        Checks.equal(result, wanted, "partial_sum", "rank", rank)


def test_ring_is_that_of_a_run(measured):
    """Which block of k and v a rank attends to is that which came to it last, or else its own."""
    given, results = CLAIMS["ring_attention"], measured("ring")
    begun, blocks, attends, moves = {}, {}, [], []  # begun: the id of a tensor that moved -> the rank where it began
    for number, event in enumerate(results[0]["events"]):
        if event.kind == "matmul" and len(event.outputs[0]["ranks"]) == 1:
            [rank] = event.outputs[0]["ranks"]
            block = blocks.get(rank, rank)
            attends += [[rank - block, rank, block]] if [rank - block, rank, block] not in attends else []
        elif event.kind == "to_global" and bytes_of(event.inputs[0]) >= SMALL:
            [old], [new] = event.inputs[0]["ranks"], event.outputs[0]["ranks"]
            block = begun.get(event.inputs[0]["id"], old)
            begun[event.outputs[0]["id"]] = blocks[new] = block
            moves.append([new - block, block, old, new])
            sent = results[old]["events"][number].sent / bytes_of(event.inputs[0])
            Checks.that(near(sent, 1.0), "ring_attention", moves[-1], "sends", sent)
    Checks.equal(attends, given["attends"], "ring_attention", "attends")
    Checks.equal(moves, [move for move in given["moves"] for _ in "kv"], "ring_attention", "moves")
    Checks.equal(given["sent"], [1.0, 1.0], "ring_attention", "k and v of each move")


def test_slots_are_those_of_a_run(measured):
    given, large = CLAIMS["all_to_all"], measured("experts")
    for rank, result in enumerate(measured("slots")):
        wanted = {"slots": given["slots"], "dropped": given["dropped"]}
        Checks.equal(result, wanted, "all_to_all", "rank", rank)
    pairs = [(move["old"], move["new"]) for move in given["moves"]]
    events = large[0]["events"]
    found = [
        k
        for k, event in enumerate(events)
        if event.kind == "to_global" and len(event.inputs[0]["shape"]) == 4 and event.inputs[0]["ranks"]
    ]
    layouts = [[(one["sbp"], one["ranks"]) for one in (*events[k].inputs[:1], *events[k].outputs)] for k in found]
    Checks.equal(layouts, [[(one["sbp"], one["ranks"]) for one in pair] for pair in pairs], "all_to_all", "moves")
    for move, k in zip(given["moves"], found):
        for rank, wanted in enumerate(move["sent"]):
            sent = large[rank]["events"][k].sent / bytes_of(events[k].inputs[0])
            Checks.that(near(sent, wanted), "all_to_all", "rank", rank, "sends", sent, "not", wanted)


def test_memory_is_that_of_a_run(measured):
    for one in CLAIMS["memory"]["strategies"]:
        results = measured("kept", one["strategy"])
        for kind, by_rank in one["kept"].items():
            found = [result["kept"][kind] / result["weights"] for result in results[: len(by_rank)]]
            Checks.equal(found, by_rank, one["strategy"], "keeps", kind)
