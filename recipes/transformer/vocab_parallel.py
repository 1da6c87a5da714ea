"""Vocabulary parallel: split embedding and cross-entropy; no rank has all logits.

    loss = mean(cross_entropy(table[ids] @ head, targets))
                             rank 0           rank 1           rank 2           rank 3           SBP
    ids          (8,)        rows 0-3         rows 0-3         rows 4-7         rows 4-7         S(0), B
    table        (62, 4)     rows 0-30        rows 31-61       rows 0-30        rows 31-61       B, S(0)
    x            (8, 4)      rows 0-3         rows 0-3         rows 4-7         rows 4-7         S(0), B
    head         (4, 62)     columns 0-30     columns 31-61    columns 0-30     columns 31-61    B, S(1)
    logits       (8, 62)     0-3, 0-30        0-3, 31-61       4-7, 0-30        4-7, 31-61       S(0), S(1)

A vocabulary of 61 is padded to 62, with logits of -1e9. Axis 0 of the mesh splits the tokens, axis 1 the vocabulary.
Why:   a softmax needs from other ranks only the largest logit and a sum, both a number for each token.
Moves: along axis 1 an all-reduce of x, one of its gradient, and 5 to 8 numbers for each token, such as its largest
       logit, not its logits; along axis 0 an all-reduce of the gradients.
Run:   ./launch.sh recipes/transformer/vocab_parallel.py [--graph]
Use it when the vocabulary is large: 50,000 logits of a token take as much memory as 12 hidden states of 4,096.
Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", arXiv:1909.08053.
"""

import argparse

import numpy as np
import oneflow as flow

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (4, 2)  # numbers of ranks; launch.sh refuses others


class LanguageModel(flow.nn.Module):
    def __init__(self, table, head, mesh):
        super().__init__()
        vocab_size = len(table)
        tensor = mesh.ranks.shape[1]
        padding = -vocab_size % tensor  # all ranks have the same number of words
        table = np.pad(table, ((0, padding), (0, 0)))
        head = np.pad(head, ((0, 0), (0, padding)))
        unused = np.pad(np.zeros(vocab_size, dtype=np.float32), (0, padding), constant_values=-1e9)
        rows = (flow.sbp.broadcast, flow.sbp.split(0))
        columns = (flow.sbp.broadcast, flow.sbp.split(1))
        self.table = flow.nn.Parameter(flow.tensor(table, placement=mesh, sbp=rows))
        self.head = flow.nn.Parameter(flow.tensor(head, placement=mesh, sbp=columns))
        self.register_buffer("unused", flow.tensor(unused, placement=mesh, sbp=rows))

    def forward(self, ids, targets):
        # x is a partial sum: 0 for words of other ranks. The gradient of self.table[ids] would be wrong, silently.
        x = flow._C.gather(self.table, ids, axis=0)
        x = x.to_global(sbp=ids.sbp, grad_sbp=ids.sbp)
        logits = flow.matmul(x, self.head)
        # nn.CrossEntropyLoss would gather the logits. This one has no ignore_index: give padding the target 0, multiply
        # its loss by 0, and divide the sum by the number of other targets
        return flow._C.sparse_softmax_cross_entropy(logits + self.unused, targets).mean()


class TrainingGraph(flow.nn.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        # for micro-batches, first read each weight through flow._C.identity, as gradient_accumulation.py does

    def build(self, ids, targets):
        loss = self.model(ids, targets)
        loss.backward()  # in a graph this includes the update
        return loss


def placements(device, n, tensor=2):
    """A mesh of n ranks: axis 0 splits the tokens; axis 1, of `tensor` ranks, splits the vocabulary."""
    return flow.placement(device, np.arange(n).reshape(-1, tensor).tolist())


def train(mesh, graph=False, seed=0, steps=3, tokens=8, vocab_size=61, hidden_size=4):
    """Train in float32 on a mesh of two axes; returns the model and the loss of each step."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(vocab_size, size=(2, tokens))
    table = rng.standard_normal((vocab_size, hidden_size), dtype=np.float32)
    head = rng.standard_normal((hidden_size, vocab_size), dtype=np.float32)

    ids = flow.tensor(ids, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    targets = flow.tensor(targets, placement=mesh, sbp=(flow.sbp.split(0), flow.sbp.broadcast))
    model = LanguageModel(table, head, mesh)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
    training = TrainingGraph(model, optimizer) if graph else None
    losses = []
    for _ in range(steps):
        if graph:
            loss = training(ids, targets)
        else:
            loss = model(ids, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    model, losses = train(placements(args.device, flow.env.get_world_size()), args.graph)
    for name, w in model.named_parameters():
        print(f"{name} {tuple(w.to_local().shape)} of {tuple(w.shape)}")
    _, alone = train(flow.placement(args.device, [[0]]), args.graph)  # the same code on a single device
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if flow.env.get_rank() == 0:
        columns, vocab_size = model.head.to_local().shape[1], model.head.shape[1]
        print(f"for each of its tokens a rank computes the logits of {columns} of {vocab_size} words")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, as on a single device")


if __name__ == "__main__":
    main()
