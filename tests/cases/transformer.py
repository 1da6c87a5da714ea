"""The chapter of transformers: a block and its parts, each with one way of splitting it."""

import numpy as np

from tests.cases import reference_transformer as reference
from tests.cases.case import Case, case_of_recipe, in_steps, placed, reduced
from tests.cases.reference import Value, rows_of

OTHER_BLOCK = {"batch": 4, "seq_len": 5, "num_heads": 12, "head_size": 2, "seed": 1}


@case_of_recipe({"other": OTHER_BLOCK, "one axis": {"tensor": 4, "steps": 2}})
def transformer_block(
    n, graph=False, steps=3, tensor=None, batch=None, seq_len=4, num_heads=None, head_size=4, matmul_scale=1.0, seed=0
):
    tensor, batch, num_heads = tensor or (2 if n % 2 == 0 else n), batch or n, num_heads or n
    data = n // tensor
    mesh, tokens, hidden_size = np.arange(n).reshape(data, tensor).tolist(), batch * seq_len, num_heads * head_size
    values, parts = reference.trained_block(seed, steps, batch, seq_len, num_heads, head_size, data, matmul_scale)
    sbps = {"w_qkv": "B, S(1)", "w_up": "B, S(1)", "w_out": "B, S(0)", "w_down": "B, S(0)"}
    sbps.update(dict.fromkeys(("x", "y", "attention_in", "residual", "mlp_in", "out"), "S(0), B"))
    sbps.update(dict.fromkeys(("qkv", "scores", "probs", "context", "hidden"), "S(0), S(1)"))
    layout = placed(values, mesh, "B, B", **sbps)
    if graph:
        layout.update({name: (f"P, {layout[name][0].split(', ')[1]}", mesh) for name in parts})
    x, heads = ("S(0), B", mesh, (tokens, hidden_size)), ("S(0), S(1)", mesh, (batch, num_heads, seq_len, head_size))
    summed, turned = ("S(0), P", mesh, x[2]), (*heads[:2], (batch, num_heads, head_size, seq_len))
    f, g = (x[:2], x[:2], "S(0), B"), (summed[:2], x[:2])
    norms = [(("local", []), ("B, B", mesh))] * 4  # weight and bias of two
    weights = sum(values[name].exact.size for name in sbps if name.startswith("w_"))
    matmuls = [("attention_in", "w_qkv", "qkv"), (heads, turned, "scores"), ("probs", heads, heads)]
    matmuls += [("context", "w_out", summed), ("mlp_in", "w_up", "hidden"), ("hidden", "w_down", summed)]
    return Case(
        layout,
        values,
        in_steps(graph, steps, matmuls),
        [*norms, *in_steps(graph, steps, [f, g, f, g])],
        parts if graph else {},
        reads=[("P, B", mesh)] * steps,
        sends=[4 * reduced(tensor, tokens * hidden_size / data) + reduced(data, weights / tensor + 4 * hidden_size)] * n,
    )


@case_of_recipe({"uneven": {**OTHER_BLOCK, "batch": 3}})
def sequence_parallel(
    n, graph=False, steps=3, batch=2, seq_len=None, num_heads=None, head_size=4, matmul_scale=1.0, seed=0
):
    ranks, seq_len, num_heads = list(range(n)), seq_len or max(4, n), num_heads or n
    tokens, hidden_size = batch * seq_len, num_heads * head_size
    sizes = (batch, seq_len, num_heads, head_size)
    values, parts = reference.trained_block(seed, steps, *sizes, matmul_scale=matmul_scale, sequence_first=True)
    sbps = {"w_qkv": "S(1)", "w_up": "S(1)", "w_out": "S(0)", "w_down": "S(0)"}
    sbps.update(dict.fromkeys(("qkv", "scores", "probs", "context", "hidden"), "S(1)"))
    sbps.update(dict.fromkeys(("x", "y", "residual", "out"), "S(0)"))
    layout = placed(values, ranks, **sbps)
    norms = [f"{norm}.{name}" for norm in ("attention_norm", "mlp_norm") for name in ("weight", "bias")]
    if graph:
        layout.update({f"{name} grad": ("P", ranks) for name in norms})
    heads, turned = (
        ("S(1)", ranks, (batch, num_heads, *shape)) for shape in ((seq_len, head_size), (head_size, seq_len))
    )
    x, whole, summed = layout["x"], ("B", ranks), ("P", ranks, (tokens, hidden_size))
    gather, scatter = (x, whole, "S(0)"), (summed[:2], x, "B")
    matmuls = [("attention_in", "w_qkv", "qkv"), (heads, turned, "scores"), ("probs", heads, heads)]
    matmuls += [("context", "w_out", summed), ("mlp_in", "w_up", "hidden"), ("hidden", "w_down", summed)]
    return Case(
        layout,
        values,
        in_steps(graph, steps, matmuls),
        [*[(("local", []), whole)] * len(norms), *in_steps(graph, steps, [gather, scatter, gather, scatter])],
        reads=[("P", ranks)] * steps,
        sends=[(n - 1) / n * (8 * tokens * hidden_size + 2 * len(norms) * hidden_size)] * n,
    )


OTHER_VOCABULARY = {"tokens": 16, "vocab_size": 21, "hidden_size": 6, "seed": 1}
ONE_AXIS = {"tensor": 4, "tokens": 6, "vocab_size": 16, "steps": 2}


@case_of_recipe({"other": OTHER_VOCABULARY, "one axis": ONE_AXIS})
def vocab_parallel(
    n, graph=False, steps=3, tensor=None, tokens=None, vocab_size=61, hidden_size=4, matmul_scale=1.0, seed=0
):
    tensor, tokens = tensor or (2 if n % 2 == 0 else n), tokens or 2 * n
    data, padded = n // tensor, -(-vocab_size // tensor) * tensor
    mesh = np.arange(n).reshape(data, tensor).tolist()
    values, parts = reference.vocab_parallel(seed, steps, tokens, vocab_size, padded, hidden_size, data, matmul_scale)
    sbps = {"table": "B, S(0)", "unused": "B, S(0)", "head": "B, S(1)", "logits": "S(0), S(1)", "losses": "B, B"}
    sbps.update(dict.fromkeys(("ids", "targets", "x"), "S(0), B"))
    layout = placed(values, mesh, **sbps)
    if graph:
        layout.update({"table grad": ("P, S(0)", mesh), "head grad": ("P, S(1)", mesh)})
    cross_entropy = 5 if graph else 8  # numbers for each token that OneFlow reduces in it, measured
    activations = reduced(tensor, (2 * hidden_size + cross_entropy) * tokens / data)
    return Case(
        layout,
        values,
        in_steps(graph, steps, [("x", "head", "logits")]),
        in_steps(graph, steps, [(("S(0), P", mesh), ("S(0), B", mesh), "S(0), B")]),
        parts if graph else {},
        reads=[("P, P", mesh)] * steps,
        sends=[activations + reduced(data, 2 * padded * hidden_size / tensor)] * n,
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
