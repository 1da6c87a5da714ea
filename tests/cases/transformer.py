"""The chapter of transformers: a block and its parts, each with one way of splitting it."""

import numpy as np

from tests.cases import reference_transformer as reference
from tests.cases.case import Case, case_of_recipe, in_steps, placed, reduced
from tests.cases.reference import Value, rows_of

OTHER_BLOCK = {"samples": 4, "sequence": 5, "heads": 12, "head_size": 2, "steps": 3, "seed": 1}


@case_of_recipe({"other": OTHER_BLOCK, "one axis": {"tensor": 4, "steps": 2}})
def transformer_block(
    n, graph=False, steps=1, tensor=None, samples=None, sequence=4, heads=None, head_size=4, matmul_scale=1.0, seed=0
):
    tensor = tensor or (2 if n % 2 == 0 else n)
    data = n // tensor
    samples, heads = samples or max(2, data), heads or 2 * tensor
    mesh, tokens, features = np.arange(n).reshape(data, tensor).tolist(), samples * sequence, heads * head_size
    returned = ("qkv", "scores", "attention", "mixed", "hidden", "out")
    values, parts = reference.trained_block(returned, seed, steps, samples, sequence, heads, head_size, data, matmul_scale)
    sbps = {"w_qkv": "B, S(1)", "w_up": "B, S(1)", "w_out": "B, S(0)", "w_down": "B, S(0)"}
    sbps.update({"x": "S(0), B", "y": "S(0), B", "out": "S(0), B"})
    sbps.update(dict.fromkeys(("qkv", "scores", "attention", "mixed", "hidden"), "S(0), S(1)"))
    layout = placed(values, mesh, "B, B", **sbps)
    if graph:
        layout.update({name: (f"P, {layout[name][0].split(', ')[1]}", mesh) for name in parts})
    x, heads_of = ("S(0), B", mesh, (tokens, features)), ("S(0), S(1)", mesh, (samples, heads, sequence, head_size))
    summed, turned = ("S(0), P", mesh, x[2]), (*heads_of[:2], (samples, heads, head_size, sequence))
    f, g = (x[:2], x[:2], "S(0), B"), (summed[:2], x[:2])
    weights = sum(values[name].exact.size for name in sbps if name.startswith("w_"))
    matmuls = [(x, "w_qkv", "qkv"), (heads_of, turned, "scores"), ("attention", heads_of, heads_of)]
    matmuls += [("mixed", "w_out", summed), (x, "w_up", (*layout["hidden"], values["hidden"].exact.shape))]
    return Case(
        layout,
        values,
        in_steps(graph, steps, [*matmuls, ("hidden", "w_down", summed)]),
        in_steps(graph, steps, [f, g, f, g], [(("P, B", mesh), ("B, B", mesh))]),
        parts if graph else {},
        sends=[4 * reduced(tensor, tokens * features / data) + reduced(data, weights / tensor + 2 * features)] * n,
    )


@case_of_recipe({"uneven": {**OTHER_BLOCK, "samples": 3}, "tensor parallel": {"split": False, "steps": 2}})
def sequence_parallel(
    n, graph=False, steps=1, split=True, samples=2, sequence=None, heads=None, head_size=4, matmul_scale=1.0, seed=0
):
    ranks, sequence, heads = list(range(n)), sequence or max(4, n), heads or 2 * n
    tokens, features = samples * sequence, heads * head_size
    returned = ("gathered0", "scores", "attention", "mixed", "residual", "gathered1", "hidden", "out")
    sizes = (samples, sequence, heads, head_size)
    values, _ = reference.trained_block(returned, seed, steps, *sizes, matmul_scale=matmul_scale, sequence_first=True)
    values = {"x": values.pop("x"), "y": values.pop("y"), "mask": reference.causal(sequence), **values}
    sbps = {"w_qkv": "S(1)", "w_up": "S(1)", "w_out": "S(0)", "w_down": "S(0)", "mixed": "S(1)", "hidden": "S(1)"}
    sbps.update({"scores": "S(1)", "attention": "S(1)"})
    sbps.update(dict.fromkeys(("x", "y", "residual", "out"), "S(0)" if split else "B"))
    layout = placed(values, ranks, **sbps)
    if graph and split:
        layout.update({"norm0 grad": ("P", ranks), "norm1 grad": ("P", ranks)})
    heads_of = ("S(1)", ranks, (samples, heads, sequence, head_size))
    turned, qkv = ("S(1)", ranks, (samples, heads, head_size, sequence)), ("S(1)", ranks, (tokens, 3 * features))
    x, whole, summed = layout["x"], ("B", ranks), ("P", ranks, (tokens, features))
    gather, scatter = (x, whole, x[0]), (summed[:2], x, "B")
    norms = 2 * features if split else 0
    matmuls = [("gathered0", "w_qkv", qkv), (heads_of, turned, "scores"), ("attention", heads_of, heads_of)]
    matmuls += [("mixed", "w_out", summed), ("gathered1", "w_up", "hidden"), ("hidden", "w_down", summed)]
    return Case(
        layout,
        values,
        in_steps(graph, steps, matmuls),
        in_steps(graph, steps, [gather, scatter, gather, scatter], [(("P" if split else "B", ranks), ("B", ranks))]),
        sends=[(n - 1) / n * (8 * tokens * features + 2 * norms)] * n,
    )


OTHER_VOCABULARY = {"tokens": 16, "vocabulary": 21, "features": 6, "steps": 3, "seed": 1}
ONE_AXIS = {"tensor": 4, "tokens": 6, "vocabulary": 16, "steps": 2}


@case_of_recipe({"other": OTHER_VOCABULARY, "one axis": ONE_AXIS})
def vocab_parallel(n, graph=False, steps=1, tensor=None, tokens=None, vocabulary=61, features=4, matmul_scale=1.0, seed=0):
    tensor = tensor or (2 if n % 2 == 0 else n)
    data, tokens, padded = n // tensor, tokens or max(8, n), -(-vocabulary // tensor) * tensor
    mesh = np.arange(n).reshape(data, tensor).tolist()
    values, parts = reference.vocab_parallel(seed, steps, tokens, vocabulary, padded, features, data, matmul_scale)
    order = ("ids", "targets", "table", "head", "x", "logits", "table grad", "head grad", "indexed grad")
    values = {name: values[name] for name in (*order, "new table", "new head", "losses")}
    sbps = {"table": "B, S(0)", "head": "B, S(1)", "logits": "S(0), S(1)", "indexed": "B, B", "losses": "B, B"}
    sbps.update(dict.fromkeys(("ids", "targets", "x"), "S(0), B"))
    layout = placed(values, mesh, **sbps)
    if graph:
        layout.update({"table grad": ("P, S(0)", mesh), "head grad": ("P, S(1)", mesh)})
    else:
        parts = {"indexed grad": parts["indexed grad"]}
    embedded, losses = (("S(0), P", mesh), ("S(0), B", mesh), "S(0), B"), (("P, P", mesh), ("B, B", mesh))
    cross_entropy = 5 if graph else 8  # numbers for each token that OneFlow reduces in it, measured
    activations = reduced(tensor, (2 * features + cross_entropy) * tokens / data)
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "head", "logits")]),
        [*in_steps(graph, steps, [embedded], [losses]), (("B, S(0)", mesh), ("B, B", mesh))],
        parts,
        sends=[activations + reduced(data, 2 * padded * features / tensor)] * n,
    )


@case_of_recipe(
    {
        "uneven ring": {"way": "ring", "sequence": 10, "heads": 3, "seed": 1},
        "other": {"sequence": 24, "heads": 12, "head_size": 2, "steps": 2, "seed": 1},
        "all-to-all": {"way": "all-to-all", "seed": 1},
        "ring": {"way": "ring"},
    }
)
def context_parallel(n, graph=False, steps=1, way="gather", sequence=None, heads=None, head_size=4, matmul_scale=1.0, seed=0):
    ranks, sequence, heads = list(range(n)), sequence or 4 * n, heads or 2 * n
    whole = reference.context_parallel(seed, steps, sequence, heads, head_size, matmul_scale)
    mask = reference.causal(sequence)
    rows = rows_of(sequence, n)
    order = ("q", "k", "v", "y", "mask", "scores", "out", "q grad", "k grad", "v grad", "losses")
    values = {name: mask if name == "mask" else whole[name] for name in order}
    scores = (heads, sequence, sequence)
    if way == "ring":
        layout, values, matmuls, moves = {}, {"losses": values["losses"]}, [], []
        for name in order[:-1]:
            for rank in ranks:
                one = mask if name == "mask" else whole[name]
                key = name.replace(name.split()[0], f"{name.split()[0]}{rank}")
                values[key] = one[:, rows[rank], rows[rank]] if name == "scores" else one[rows[rank]]
                layout[key] = ("B", [rank])
        values["losses"] = values.pop("losses")
        for step in range(n):
            for rank in range(step, n):
                block, here = rank - step, ("B", [rank])
                q, k = ((values[f"{name}{r}"].exact.shape[0]) for name, r in (("q", rank), ("k", block)))
                matmuls.append(((*here, (heads, q, head_size)), (*here, (heads, k, head_size)), (*here, (heads, q, k))))
                matmuls.append(((*here, (heads, q, k)), (*here, (heads, k, head_size)), (*here, (heads, q, head_size))))
                moves += [(("B", [max(rank - 1, block)]), here)] * 2
        moves += [(("B", [rank]), ("B", [0])) for rank in ranks]
        # a graph sends each block straight from its owner to each rank that wants it
        pairs = [n - 1 if graph else (rank < n - 1) * (rank + 1) + rank for rank in ranks]
        sends = [2 * whole["q"].exact.size / n * count for count in pairs]
    else:
        layout = {name: ("S(0)", ranks) for name in values}
        inside = "S(0)" if way == "gather" else "S(1)"
        layout["scores"] = ("S(1)" if way == "gather" else "S(0)", ranks)
        layout["mask"] = (inside if way == "gather" else "B", ranks)
        others = "B" if way == "gather" else inside
        turned = {"S(0)": "S(1)", "S(1)": "S(0)", "B": "B"}  # heads first
        q, v = ((turned[sbp], ranks, (heads, sequence, head_size)) for sbp in (inside, others))
        matmuls = [(q, v, "scores"), ((*layout["scores"], scores), v, q)]
        moves = [(("S(0)", ranks), (sbp, ranks), "S(0)") for sbp in (inside, others, others)]
        moves += [((inside, ranks), ("S(0)", ranks), inside), (("P", ranks), ("B", [0]))]
        size = whole["q"].exact.size
        sends = [4 * (n - 1) / n * size if way == "gather" else 8 * (n - 1) / n**2 * size] * n
    layout["losses"] = ("B", [0])
    return Case(
        layout,
        values,
        in_steps(graph, steps, matmuls),
        in_steps(graph, steps, moves),
        sends=sends,
    )


OTHER_EXPERTS = {"tokens": 10, "features": 6, "hidden_features": 5, "capacity": 4, "steps": 3, "seed": 1}


@case_of_recipe({"other": OTHER_EXPERTS, "none dropped": {"capacity": 8}})
def mixture_of_experts(n, graph=False, steps=1, tokens=8, features=4, hidden_features=8, capacity=3, matmul_scale=1.0, seed=0):
    ranks, slots = list(range(n)), n * capacity
    values = reference.mixture_of_experts(n, seed, steps, tokens, features, hidden_features, capacity, matmul_scale)
    numbers = Value(np.arange(1, capacity + 1))
    values = {"x": values.pop("x"), "y": values.pop("y"), "slots": numbers, **values}
    whole = ("slots", "router", "new router", "router grad", "losses")
    layout = {name: ("B" if name in whole else "S(1)" if name == "arrived" else "S(0)", ranks) for name in values}
    if graph:
        layout["router grad"] = ("P", ranks)
    shapes = ((n, slots, tokens), (n, tokens, features), (n, slots, features), (n, tokens, n))
    dispatched, rows, own, odds = (("S(0)", ranks, shape) for shape in shapes)
    matmuls = [(rows, "router", odds), (dispatched, rows, own), (own, "w_up", "hidden")]
    matmuls += [("hidden", "w_down", own), ("dispatch", own, rows)]
    there, back = (("S(0)", ranks), ("S(1)", ranks), "S(0)"), (("S(1)", ranks), ("S(0)", ranks), "S(1)")
    moved = (n - 1) * capacity * features  # of each rank, in an all-to-all
    return Case(
        layout,
        values,
        in_steps(graph, steps, matmuls),
        in_steps(graph, steps, [there, back], [(("P", ranks), ("B", ranks))]),
        sends=[4 * moved + 2 * (n - 1) * (tokens + features)] * n,  # tokens: for cumsum
    )
