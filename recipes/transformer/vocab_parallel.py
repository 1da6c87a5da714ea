"""Vocabulary parallel: embedding and cross-entropy; no rank has all logits.

    loss = mean(cross_entropy(table[ids] @ head, targets))
                             rank 0           rank 1           rank 2           rank 3           SBP
    ids          (8,)        rows 0-3         rows 0-3         rows 4-7         rows 4-7         S(0), B
    table        (62, 4)     rows 0-30        rows 31-61       rows 0-30        rows 31-61       B, S(0)
    x            (8, 4)      rows 0-3         rows 0-3         rows 4-7         rows 4-7         S(0), B
    head         (4, 62)     columns 0-30     columns 31-61    columns 0-30     columns 31-61    B, S(1)
    logits       (8, 62)     0-3, 0-30        0-3, 31-61       4-7, 0-30        4-7, 31-61       S(0), S(1)

A vocabulary of 61 is padded to 62, with logits of -1e9. Axis 0 of the mesh splits the tokens, axis 1 the vocabulary.
Moves: along axis 1 an all-reduce of x and one of its gradient, and for each token its largest logit and a sum, not its
       logits; along axis 0 an all-reduce of the gradients.
Run:   ./launch.sh recipes/transformer/vocab_parallel.py [--graph]
       python -m oneflow.distributed.launch --nproc_per_node 4 recipes/transformer/vocab_parallel.py [--graph]
Use it when the vocabulary is large: 50,000 logits of a token are as much as 12 layers of 4,096 features.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053.
"""

import argparse

import numpy as np
import oneflow as flow

WORLD_SIZES = (4, 2, 3, *range(5, 65))


class LanguageModel(flow.nn.Module):
    def __init__(self, table, head, unused):
        super().__init__()
        self.table = flow.nn.Parameter(table.clone())
        self.head = flow.nn.Parameter(head.clone())
        self.register_buffer("unused", unused)

    def forward(self, ids, targets):
        # a rank has 0 for ids of others, so x is a partial sum; flow._C.embedding would gather the whole table
        x = flow._C.gather(self.table, ids, axis=0)
        whole = (ids.sbp[0], flow.sbp.broadcast)
        x = x.to_global(sbp=whole, grad_sbp=whole)
        logits = flow.matmul(x, self.head)
        # nn.CrossEntropyLoss would gather the logits
        losses = flow._C.sparse_softmax_cross_entropy(logits + self.unused, targets)
        return x, logits, losses.mean()


class TrainingGraph(flow.nn.Graph):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.add_optimizer(optimizer)

    def build(self, ids, targets):
        x, logits, loss = self.module(ids, targets)
        loss.backward()  # in a graph this includes the update
        module = self.module.to(flow.nn.Module)  # the module itself has the gradients
        return x, logits, loss, module.table.grad, module.head.grad


def run(graph=False, device="cpu", seed=0, steps=1, tensor=None, tokens=None, vocabulary=61, features=4):
    """Steps of SGD in float32; returns ids, targets, x, logits, the weights before and after, gradients, the losses.

    And "indexed grad", the gradient of sum(table[ids]) where table is B and ids is split: OneFlow 0.9.0 is wrong.
    """
    n = flow.env.get_world_size()
    tensor = tensor or (2 if n % 2 == 0 else n)  # ranks along axis 1
    tokens, padded = tokens or max(8, n), -(-vocabulary // tensor) * tensor
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(vocabulary, size=(2, tokens))
    table = rng.standard_normal((padded, features), dtype=np.float32)
    head = rng.standard_normal((features, padded), dtype=np.float32)
    unused = np.where(np.arange(padded) < vocabulary, 0, -1e9).astype(np.float32)

    mesh = flow.placement(device, np.arange(n).reshape(-1, tensor).tolist())
    ids = flow.tensor(ids, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    targets = flow.tensor(targets, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    table = flow.tensor(table, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(0)))
    head = flow.tensor(head, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(1)))
    unused = flow.tensor(unused, placement=mesh, sbp=(flow.sbp.broadcast, flow.sbp.split(0)))
    module = LanguageModel(table, head, unused)
    update = flow.optim.SGD(module.parameters(), lr=0.1)
    model = TrainingGraph(module, update) if graph else module
    losses = []
    for _ in range(steps):
        if graph:
            x, logits, loss, table_grad, head_grad = model(ids, targets)
        else:
            update.zero_grad(set_to_none=True)
            x, logits, loss = model(ids, targets)
            loss.backward()
            update.step()
            table_grad, head_grad = module.table.grad, module.head.grad
        losses.append(loss.to_global(sbp=(flow.sbp.broadcast, flow.sbp.broadcast)))

    whole = table.to_global(sbp=(flow.sbp.broadcast, flow.sbp.broadcast)).requires_grad_()
    whole[ids].sum().backward()
    tensors = {"ids": ids, "targets": targets, "table": table, "head": head, "x": x, "logits": logits}
    tensors.update({"table grad": table_grad, "head grad": head_grad, "indexed grad": whole.grad})
    return {**tensors, "new table": module.table, "new head": module.head, "losses": flow.stack(losses)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="run the module inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocabulary", type=int, default=61)
    options = parser.parse_args()
    tensors = run(**vars(options))

    ranks = flow.placement("cpu", list(range(flow.env.get_world_size())))
    for name in ("ids", "table", "x", "head", "logits"):
        shape, sbp = tensors[name].to_local().shape, ", ".join(map(str, tensors[name].sbp))
        if flow.env.get_rank() == 0:  # all ranks hold as much
            print(f"{name:7}{str(tuple(tensors[name].shape)):9}{sbp:52}on each rank {tuple(shape)}")
    counted = tensors["indexed grad"].to_local().sum().reshape(1).to_global(placement=ranks, sbp=flow.sbp.split(0))
    counted, wanted = counted.numpy(), tensors["x"].numel()
    if flow.env.get_rank() == 0:
        lines, tensor = tensors["x"].placement.ranks.shape
        tokens, (_, padded) = len(tensors["ids"]) // lines, tensors["head"].shape
        moved = 2 * 2 * (tensor - 1) * 4 * tokens * tensors["x"].shape[1] // tensor
        print(f"each rank sends {moved} bytes of x and its gradient, by formula, and some numbers for each token;")
        print(f"to all-gather the logits it would send {4 * tokens * padded * (tensor - 1) // tensor} bytes")
        print(f"gradient of sum(table[ids]): each rank has counted {counted.astype(int)}, and all must have {wanted}")

    ids, targets, table, head = (tensors[name].numpy() for name in ("ids", "targets", "table", "head"))  # collective
    logits, rows = table[ids] @ head[:, : options.vocabulary], np.arange(len(ids))  # on a single device
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(tensors["losses"].numpy()[0], -np.log(odds[rows, targets]).mean(), rtol=1e-5)
    odds[rows, targets] -= 1
    x_grad, table_grad = odds / len(ids) @ head[:, : options.vocabulary].T, np.zeros_like(table)
    np.add.at(table_grad, ids, x_grad)
    np.testing.assert_allclose(tensors["table grad"].numpy(), table_grad, rtol=1e-4, atol=1e-6)
    head_grad = table[ids].T @ odds / len(ids)
    np.testing.assert_allclose(tensors["head grad"].numpy()[:, : options.vocabulary], head_grad, rtol=1e-4, atol=1e-6)
    if flow.env.get_rank() == 0:
        print("the loss and the gradients of table and head are those of a single device")


if __name__ == "__main__":
    main()
