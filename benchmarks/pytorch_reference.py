"""Make the files of weights that tests load: PyTorch and safetensors write them, PyTorch computes the logits.

    python benchmarks/pytorch_reference.py [FOLDER]

Needs torch, safetensors and numpy in an environment of its own; PyTorch 2.13.0 and safetensors 0.8.0 made tests/data.
The model is that of recipes/your_model, with the same names; its weights are drawn with seed 0.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, vocab_size=12, hidden_size=8, num_layers=2, num_classes=5):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList([Block(hidden_size) for _ in range(num_layers)])
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(seed=0, size=8):
    """The ids and targets that recipes/your_model/pytorch_weights.py draws."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(12, size=(size, 4)), rng.integers(5, size=size)
    return torch.from_numpy(ids), torch.from_numpy(targets)


def reference(path):
    """The logits of a file's weights in float32, and the losses of three steps of SGD with momentum from them."""
    model = Classifier()
    model.load_state_dict({name: w.float() for name, w in load_file(path).items()})
    ids, targets = batch()
    logits = model(ids).tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"logits": logits, "losses": losses}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    state, results = Classifier().state_dict(), {"torch": torch.__version__}
    for name, dtype in DTYPES.items():
        path = folder / f"pytorch_{name}.safetensors"
        save_file({key: w.to(dtype) for key, w in state.items()}, path)
        results[name] = reference(path)
    (folder / "pytorch.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{folder}: {', '.join(path.name for path in sorted(folder.glob('pytorch*')))}")


if __name__ == "__main__":
    main()
