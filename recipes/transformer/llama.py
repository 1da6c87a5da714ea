"""Llama: generate text from Hugging Face weights, split by heads over ranks and by layers over stages, with a KV cache.

    one layer, a weight (out, in)                    rank 0         rank 1         SBP
    model.layers.0.self_attn.q_proj.weight (32, 32)  rows 0-15      rows 16-31     S(0)
    model.layers.0.self_attn.k_proj.weight (16, 32)  rows 0-7       rows 8-15      S(0)
    model.layers.0.self_attn.o_proj.weight (32, 32)  columns 0-15   columns 16-31  S(1)
    model.layers.0.mlp.up_proj.weight (48, 32)       rows 0-23      rows 24-47     S(0)
    model.layers.0.mlp.down_proj.weight (32, 48)     columns 0-23   columns 24-47  S(1)

Queries, keys, values and the cache, (batch, heads, length, head_dim), are S(1): each rank has its own heads.
The rows of embed_tokens and lm_head are S(0), norms B. Each rank reads only its slices of the .safetensors files.
Why:   a head needs no other head, so a rank that has its heads and their cache computes attention alone.
Moves: for each token 2 all-reduces of the residual in a layer and 1 after the embedding, an all-gather of the logits,
       and the residual from stage to stage. The cache stays where it is.
Run:   ./launch.sh recipes/transformer/llama.py [--graph] [--tensor 2] [--checkpoint FOLDER --prompt-ids 1,5 7]
Use it for a model that does not fit on one device: FOLDER is what transformers' save_pretrained writes. Prompts are
token ids, as transformers.AutoTokenizer.from_pretrained(FOLDER).encode(text) makes them; its decode makes text again.
Source: H. Touvron et al., arXiv:2302.13971; J. Ainslie et al., arXiv:2305.13245; R. Pope et al., arXiv:2211.05102.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import time

import numpy as np
import oneflow as flow
from oneflow import nn

# flow._C is private to OneFlow 0.9.0: a different version may lack what is called here
WORLD_SIZES = (2, 1, *range(3, 65))  # numbers of ranks; launch.sh refuses others
LAYOUT = {  # weight, (out, in) as in torch.nn.Linear -> its SBP on the ranks of its stage
    "embed_tokens": flow.sbp.split(0),  # words
    "q_proj": flow.sbp.split(0),  # heads
    "k_proj": flow.sbp.split(0),  # and B where there are fewer heads than ranks
    "v_proj": flow.sbp.split(0),
    "o_proj": flow.sbp.split(1),  # heads
    "gate_proj": flow.sbp.split(0),
    "up_proj": flow.sbp.split(0),
    "down_proj": flow.sbp.split(1),
    "input_layernorm": flow.sbp.broadcast,
    "post_attention_layernorm": flow.sbp.broadcast,
    "norm": flow.sbp.broadcast,
    "lm_head": flow.sbp.split(0),  # words
}


@dataclasses.dataclass
class Config:
    """What the recipe reads from config.json, under the names that it has there."""

    vocab_size: int = 32
    hidden_size: int = 32
    intermediate_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    rms_norm_eps: float = 1e-6
    rope_parameters: dict = None  # without them rope_theta is 10000
    tie_word_embeddings: bool = False
    eos_token_id: list = None  # of generation_config.json, if there is one

    def shape_of(self, name):
        """The shape of a weight, by its name in LAYOUT."""
        q_size, kv_size = (heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads))
        if name in ("embed_tokens", "lm_head"):
            return self.vocab_size, self.hidden_size
        if name.endswith("norm"):
            return (self.hidden_size,)
        if name in ("q_proj", "o_proj"):
            shape = (q_size, self.hidden_size)
        elif name in ("k_proj", "v_proj"):
            shape = (kv_size, self.hidden_size)
        else:
            shape = (self.intermediate_size, self.hidden_size)
        return shape[::-1] if LAYOUT[name] == flow.sbp.split(1) else shape

    def frequencies(self):
        """Radians by which each pair of numbers of a head turns from a token to the next, head_dim / 2 of them."""
        rope = {"rope_theta": 10000.0, **(self.rope_parameters or {})}
        turns = rope["rope_theta"] ** (-np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim)
        if rope.get("rope_type", "default") == "llama3":  # slow ones turn slower; those in between are interpolated
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            in_context = rope["original_max_position_embeddings"] * turns / (2 * math.pi)  # full turns
            smooth = np.clip((in_context - low) / (high - low), 0, 1)
            turns = (1 - smooth) * turns / rope["factor"] + smooth * turns
        return turns.astype(np.float32)


def placements(device, n, tensor=0):
    """The ranks of each stage: `tensor` ranks, with the same layers and different heads; 0: one stage of all ranks."""
    tensor = tensor or n
    if tensor < 1 or n % tensor:
        raise ValueError(f"--tensor {tensor} does not divide the {n} ranks")
    return [flow.placement(device, ranks) for ranks in np.arange(n).reshape(-1, tensor).tolist()]


class Weight(nn.Module):
    """A weight on the ranks of a stage, with the name and the shape that it has in transformers."""

    def __init__(self, name, config, ranks):
        super().__init__()
        is_replicated = name in ("k_proj", "v_proj") and config.num_key_value_heads < ranks.ranks.size
        sbp = flow.sbp.broadcast if is_replicated else LAYOUT[name]
        self.weight = nn.Parameter(flow.zeros(config.shape_of(name), placement=ranks, sbp=sbp))


class Linear(Weight):
    def forward(self, x):
        return flow.matmul(x, self.weight, transpose_b=True)


class RMSNorm(Weight):
    """Each token divided by its root mean square."""

    def __init__(self, name, config, ranks):
        super().__init__(name, config, ranks)
        self.eps = config.rms_norm_eps

    def forward(self, x):
        scale = flow.rsqrt(flow.square(x).mean(-1, keepdim=True) + self.eps)
        return x * scale.expand(*x.shape) * self.weight  # without expand this is slow on a CPU


class Columns:
    """The columns of a left-padded batch on the ranks of a stage: the position of each token, and what is padding."""

    def __init__(self, config, is_token, ranks):
        positions = np.maximum(is_token.cumsum(1) - 1, 0)
        angles = positions[:, None, :, None].astype(np.float32) * config.frequencies()
        angles = np.concatenate((angles, angles), -1)
        hidden = np.where(is_token, 0, -1e9)[:, None, None].astype(np.float32)
        self.cos, self.sin, self.hidden = (
            flow.tensor(array, placement=ranks, sbp=flow.sbp.broadcast)
            for array in (np.cos(angles), np.sin(angles), hidden)
        )

    def rotate(self, x, begin):
        """RoPE of queries or keys, the first of them in column `begin`."""
        end = begin + x.shape[2]
        cos, sin = self.cos[:, :, begin:end], self.sin[:, :, begin:end]
        first, second = x.chunk(2, -1)
        turned = flow.cat((-second, first), -1)  # transformers calls it rotate_half
        return x * cos + turned * sin

    def mask(self, begin, end):
        """What is added to the scores of these columns: -1e9 for padding and for later tokens."""
        shape, hidden = (end - begin, end), self.hidden
        all_hidden = flow._C.global_constant(
            shape, -1e9, dtype=hidden.dtype, placement=hidden.placement, sbp=(flow.sbp.broadcast,)
        )
        return hidden[:, :, :, :end] + all_hidden.triu(begin + 1)


class KVCache:
    """The keys and values of one layer, (batch, heads, length, head_dim), each rank those of its own heads."""

    def __init__(self, shape, ranks):
        self.k, self.v = (flow.zeros(shape, placement=ranks, sbp=flow.sbp.split(1)) for _ in range(2))

    def append(self, k, v, begin):
        """Put in new columns, from `begin` on; returns all up to them."""
        end, every = begin + k.shape[2], [None, None, None]
        for cache, new in ((self.k, k), (self.v, v)):
            flow.slice_update(cache, new, [every, every, [begin, end, 1]])  # cache[:, :, begin:end] = new would gather
        return self.k[:, :, :end], self.v[:, :, :end]


def repeat_heads(x, times):
    """Each head of x, (batch, heads, length, head_dim), so many times in a row."""
    batch, heads, length, head_dim = x.shape
    return x.unsqueeze(2).expand(batch, heads, times, length, head_dim).reshape(batch, -1, length, head_dim)


class Attention(nn.Module):
    def __init__(self, config, ranks):
        super().__init__()
        self.config, self.tensor = config, ranks.ranks.size
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, Linear(name, config, ranks))

    def forward(self, x, columns, begin, cache):
        batch, length, _ = x.shape
        q, k, v = self.heads_of(self.q_proj, x), self.heads_of(self.k_proj, x), self.heads_of(self.v_proj, x)
        if k.shape[1] < self.tensor:  # B: each rank computes all, and keeps the one that its queries need
            k, v = (repeat_heads(kv, self.tensor // k.shape[1]).to_global(sbp=flow.sbp.split(1)) for kv in (k, v))
        q, k = columns.rotate(q, begin), columns.rotate(k, begin)
        if cache:
            k, v = cache.append(k, v, begin)
        k, v = (repeat_heads(kv, q.shape[1] // kv.shape[1]) for kv in (k, v))
        scores = flow.matmul(q, k, transpose_b=True) * self.config.head_dim**-0.5
        scores = scores + columns.mask(begin, begin + length)
        values = flow.matmul(scores.softmax(-1), v)
        return self.o_proj(values.permute(0, 2, 1, 3).reshape(batch, length, -1))

    def heads_of(self, projection, x):
        """S(2), by columns, becomes S(1), by heads: no communication."""
        return projection(x).reshape(*x.shape[:2], -1, self.config.head_dim).permute(0, 2, 1, 3)


class MLP(nn.Module):
    def __init__(self, config, ranks):
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, Linear(name, config, ranks))

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, stage, ranks):
        super().__init__()
        self.stage, self.ranks = stage, ranks
        self.input_layernorm = RMSNorm("input_layernorm", config, ranks)
        self.self_attn = Attention(config, ranks)
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", config, ranks)
        self.mlp = MLP(config, ranks)

    def forward(self, x, columns, begin=0, cache=None):
        """The outputs of a split part are summed over the ranks, and in backward the gradients of its input."""
        x = x.to_global(placement=self.ranks)  # from the stage before
        h = self.input_layernorm(x).to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.broadcast)
        x = x + self.self_attn(h, columns, begin, cache).to_global(sbp=flow.sbp.broadcast)
        h = self.post_attention_layernorm(x).to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.broadcast)
        return x + self.mlp(h).to_global(sbp=flow.sbp.broadcast)


class LlamaModel(nn.Module):
    def __init__(self, config, stages):
        super().__init__()
        self.embed_tokens = Weight("embed_tokens", config, stages[0])
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            stage = i * len(stages) // config.num_hidden_layers
            self.layers.append(DecoderLayer(config, stage, stages[stage]))
        self.norm = RMSNorm("norm", config, stages[-1])

    def forward(self, ids, columns, begin=0, caches=None):
        """The last hidden states, on the last stage. columns: of each stage; caches: of each layer."""
        x = flow._C.gather(self.embed_tokens.weight, ids, 0)  # 0 for the words of other ranks
        x = x.to_global(sbp=flow.sbp.broadcast)
        for i, layer in enumerate(self.layers):
            x = layer(x, columns[layer.stage], begin, caches[i] if caches else None)
        return self.norm(x).to_global(sbp=flow.sbp.broadcast, grad_sbp=flow.sbp.broadcast)


class LlamaForCausalLM(nn.Module):
    """Its parameters have the names, shapes and values of transformers' class of this name."""

    def __init__(self, config, stages):
        super().__init__()
        self.config, self.stages = config, stages
        self.model = LlamaModel(config, stages)
        if not config.tie_word_embeddings:
            self.lm_head = Weight("lm_head", config, stages[-1])

    def head(self):
        """The weight of lm_head on the last stage; tied, it is the embedding's, and comes from the first."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        # without identity a graph that moves a parameter to other ranks aborts
        return flow._C.identity(head.weight).to_global(placement=self.stages[-1])

    def forward(self, ids, columns):
        """The logits of every column, (batch, length, vocab_size), S(2)."""
        return flow.matmul(self.model(ids, columns), self.head(), transpose_b=True)

    def next_tokens(self, ids, columns, head, begin=0, caches=None):
        """The most likely token after the last column, (batch), on all ranks. ids: the columns from `begin` on."""
        hidden = self.model(self.on_first_stage(ids), columns, begin, caches)[:, -1]
        logits = flow.matmul(head, hidden, transpose_b=True)  # (vocab_size, batch): S(0) takes no detour to B
        return logits.to_global(sbp=flow.sbp.broadcast).argmax(0).numpy()  # collective: all ranks call it

    def on_first_stage(self, ids):
        return flow.tensor(ids, placement=self.stages[0], sbp=flow.sbp.broadcast)

    def columns_of(self, is_token):
        return [Columns(self.config, is_token, ranks) for ranks in self.stages]

    def new_caches(self, batch, length):
        """An empty cache for each layer, on the ranks of its stage."""
        heads = max(self.config.num_key_value_heads, self.stages[0].ranks.size)
        shape = (batch, heads, length, self.config.head_dim)
        return [KVCache(shape, layer.ranks) for layer in self.model.layers]


def left_padded(prompts, length):
    """(ids, which of them are tokens), (batch, length): the prompts end in the same column."""
    ids, is_token = np.zeros((len(prompts), length), int), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        is_token[row, length - len(prompt) :] = True
    return ids, is_token


def generate(model, prompts, max_new_tokens, caches=None):
    """Continue each prompt with its most likely tokens; returns the new ones, up to the first eos_token_id.

    caches: what new_caches returns; without them each token is computed from all tokens before it.
    """
    ids, is_token = left_padded(prompts, max(map(len, prompts)))
    columns = model.columns_of(np.pad(is_token, ((0, 0), (0, max_new_tokens)), constant_values=True))
    eos, finished = model.config.eos_token_id or [], np.zeros(len(prompts), bool)
    with flow.no_grad():
        head = model.head()
        tokens = [model.next_tokens(ids, columns, head, 0, caches)]  # prefill: all columns of the prompts at once
        while len(tokens) < max_new_tokens:
            finished |= np.isin(tokens[-1], eos)
            if finished.all():
                break
            ids = np.append(ids, tokens[-1][:, None], 1)
            begin = ids.shape[1] - 1 if caches else 0  # decode: the newest column, as the others are in the cache
            tokens.append(model.next_tokens(ids[:, begin:], columns, head, begin, caches))
    rows = np.stack(tokens, 1).tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends)]


def bytes_per_token(model, batch):
    """What all ranks together send to decode one column: the formulas of the collectives, in float32."""
    config, tensor = model.config, model.stages[0].ranks.size
    residual, logits = 4 * batch * config.hidden_size, 4 * batch * config.vocab_size
    all_reduces = (1 + 2 * config.num_hidden_layers) * 2 * (tensor - 1) * residual
    between_stages = (len(model.stages) - 1) * (2 * tensor - 1) * residual
    return all_reduces + between_stages + (tensor - 1) * logits


def logits_of(model, prompts):
    """The logits of every column, as an array, computed at once and without a cache. All ranks call it."""
    ids, is_token = left_padded(prompts, max(map(len, prompts)))
    with flow.no_grad():
        return model(model.on_first_stage(ids), model.columns_of(is_token)).numpy()


def cross_entropy(logits, targets):
    """The mean over all tokens. OneFlow keeps only two-dimensional logits split."""
    return flow._C.sparse_softmax_cross_entropy(logits.flatten(0, 1), targets.flatten()).mean()


class TrainingGraph(nn.Graph):
    def __init__(self, model, optimizer, columns):
        super().__init__()
        self.model, self.columns = model, columns
        self.add_optimizer(optimizer)

    def build(self, ids, targets):
        loss = cross_entropy(self.model(ids, self.columns), targets)
        loss.backward()  # in a graph this includes the update
        return loss


def batch_of(config, seed, step, batch, seq_len):
    """Rows that count, such as 30, 31, 0, 1; and the same shifted by one, the targets."""
    first = np.random.RandomState([seed, step]).randint(config.vocab_size, size=(batch, 1))
    rows = (first + np.arange(seq_len + 1)) % config.vocab_size
    return rows[:, :-1], rows[:, 1:]


def train(stages, config=None, graph=False, weights=None, seed=0, steps=3, batch=8, seq_len=8):
    """Load weights, {name: array} or None for random ones, and train them to count; returns model and losses.

    stages: what `placements` returns. Without steps the model stays as it is loaded.
    """
    config = config or Config()
    check_sizes(config, stages)
    model = load(LlamaForCausalLM(config, stages), weights or random_weights(config, seed))
    columns = model.columns_of(np.ones((batch, seq_len), bool))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = TrainingGraph(model, optimizer, columns) if graph else None
    losses = []
    for step in range(steps):
        ids, targets = batch_of(config, seed, step, batch, seq_len)
        ids, targets = model.on_first_stage(ids), flow.tensor(targets, placement=stages[-1], sbp=flow.sbp.broadcast)
        if graph:
            loss = training(ids, targets)
        else:
            loss = cross_entropy(model(ids, columns), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        losses.append(loss.numpy())  # collective: all ranks call it
    return model, losses


def weight_shapes(config):
    """{name in transformers: shape} of all weights."""
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    mlp = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    names = [f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in layer]
    names = ["model.embed_tokens", *names, "model.norm", *([] if config.tie_word_embeddings else ["lm_head"])]
    return {f"{name}.weight": config.shape_of(name.split(".")[-1]) for name in names}


def random_weights(config, seed):
    rng = np.random.default_rng(seed)  # all ranks draw the same
    shapes = weight_shapes(config)
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else 0.1 * rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def load(model, arrays):
    """Fill a model; each rank reads only what it holds."""
    for name, w in model.named_parameters():
        if flow.env.get_rank() in w.placement.ranks:
            copy(own_slice(arrays[name], w), w.to_local())  # to_local shares the memory of w
    return model


def own_slice(array, w):
    """What this rank holds of a global tensor: a view, of which nothing is read yet."""
    ranks = w.placement.ranks
    [coordinates] = np.argwhere(ranks == flow.env.get_rank())
    for k, size, sbp in zip(coordinates, ranks.shape, w.sbp):
        for dim in range(array.ndim):
            if sbp == flow.sbp.split(dim):
                array = np.array_split(array, size, axis=dim)[k]
    return array


def copy(array, local):
    if array.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with flow.no_grad():
        local.copy_(flow.tensor(array, dtype=local.dtype, device=local.device))


DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # numpy has no bfloat16


def is_there(path):
    """Whether a file is there. ValueError for a link that points nowhere, as in a copied Hugging Face cache."""
    path = pathlib.Path(path)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            target = f"{place} is a link to {os.readlink(place)}"
            raise ValueError(f"{target}, which is not there: where it is, copy the folder with cp -rL")
    return path.exists()


def open_safetensors(path):
    """{name: array} of a file: the length of a header (8 bytes), the header in JSON, and one tensor after another.

    The arrays are np.memmap, of which nothing is read yet; bfloat16 is uint16. Raises ValueError.
    """
    is_there(path)  # refuses a link that points nowhere
    try:
        data = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a safetensors file, or cut off") from None
    numbers, arrays = data[8 + length :], {}
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} is {dtype}; this recipe reads {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[dtype])
        if end > numbers.size or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: cut off or damaged at {name}")
        arrays[name] = numbers[begin:end].view(dtype).reshape(shape)
    return arrays


def open_checkpoint(folder):
    """{name: array} of all files of a folder, as np.memmap: nothing but the headers is read.

    An index beside a single file is out of date: transformers does not read it either.
    """
    files, index = [pathlib.Path(folder, "model.safetensors")], pathlib.Path(folder, "model.safetensors.index.json")
    if not is_there(files[0]):
        weight_map = read_json(index).get("weight_map") if is_there(index) else None
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder}: no {files[0].name}, and no {index.name} with a weight_map")
        files = [pathlib.Path(folder, name) for name in sorted(set(weight_map.values()))]
    arrays = {}
    for path in files:
        arrays.update(open_safetensors(path))
    return arrays


WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile", "_fsdp_wrapped_module": "FSDP"}


def check_names(names, wanted, way):
    """Raise ValueError, with a way out, if PyTorch's wrappers add words such as module., or all names have a prefix."""
    prefix = os.path.commonprefix(list(names)).rpartition(".")[0]
    for name in names:
        words = [word for word in name.split(".") if word in WRAPPERS]
        inner = ".".join(word for word in name.split(".") if word not in WRAPPERS)
        cause = " and ".join(f"PyTorch's {WRAPPERS[word]} adds {word}." for word in words)
        if prefix and not words:
            words, inner, cause = [prefix], name[len(prefix) + 1 :], f"all names begin with {prefix}."
        if words and name not in wanted and inner in wanted:
            renamed = "name" + "".join(f'.replace("{word}.", "")' for word in words)
            raise ValueError(f"{name} is {inner} in the model: {cause}; take it away, as {way.format(renamed)}")


def check_weights(arrays, config):
    """Raise ValueError, in one line, if the arrays are not those of the model."""
    shapes = weight_shapes(config)
    check_names(
        arrays, shapes, "by save_file({{{}: w for name, w in load_file(path).items()}}, path) of safetensors.torch"
    )
    problems = [f"{name} is missing" for name in shapes if name not in arrays]
    for name, array in arrays.items():
        is_unused = name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
        if name not in shapes and not is_unused:
            problems.append(f"{name} is not in the model")
        elif name in shapes and array.shape != shapes[name]:
            problems.append(f"{name} is {array.shape}, the model has {shapes[name]}")
    if config.tie_word_embeddings and not problems and not same(arrays, "lm_head", "model.embed_tokens"):
        problems.append("lm_head is not embed_tokens, and config.json says tie_word_embeddings; which one is right?")
    if problems:
        raise ValueError("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))


def same(arrays, name, other):
    """Whether two weights are equal, or the first is not there; a few rows at a time, so that no rank holds one."""
    a, b = arrays.get(f"{name}.weight"), arrays[f"{other}.weight"]
    return a is None or all(np.array_equal(a[i : i + 256], b[i : i + 256]) for i in range(0, len(b), 256))


def check_sizes(config, stages):
    """Raise ValueError where a size does not fit the stages."""
    tensor, heads, kv_heads = stages[0].ranks.size, config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tensor not in fitting:
        raise ValueError(
            f"--tensor {tensor} does not fit {heads} heads with {kv_heads} of keys and values: "
            f"type --tensor {' or '.join(map(str, fitting))}, and a multiple of it as -n"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd; RoPE turns pairs")
    if min(config.vocab_size, config.intermediate_size) < tensor:
        raise ValueError(f"--tensor {tensor} is more than a weight has rows")
    if len(stages) > config.num_hidden_layers:
        raise ValueError(f"{len(stages)} stages are more than the {config.num_hidden_layers} layers")


IMPLEMENTED = {  # entries of config.json -> the only value that this recipe computes
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
GREEDY = {  # entries of generation_config.json that change the tokens -> the value with which they do not
    **dict.fromkeys(("num_beams", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "penalty_alpha"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), None),
    **dict.fromkeys(("sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "stop_strings"), None),
    "exponential_decay_length_penalty": None,
}
ROPE_TYPES = {  # type -> what it needs
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_json(path):
    is_there(path)
    try:
        return dict(json.loads(path.read_bytes()))  # UTF-8, whatever the locale is
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not an object in JSON: {error}") from None


def check_numbers(entries, names, kinds=(int, float)):
    """Raise ValueError if one of these entries is there and not a number: OneFlow would end with SIGSEGV."""
    for name in names:
        if not isinstance(entries.get(name) or 1, kinds):
            raise ValueError(f"config.json: {name} is {entries[name]!r}, not a {'whole ' * (kinds is int)}number")


def read_rope(entries):
    """The parameters of RoPE in config.json. ValueError if this recipe would compute something else."""
    old, new = (entries.get(name) or {} for name in ("rope_scaling", "rope_parameters"))  # of transformers 4 and 5
    if not (isinstance(old, dict) and isinstance(new, dict)):
        raise ValueError("rope_scaling or rope_parameters is not an object")
    if old and new:
        raise ValueError("both rope_scaling and rope_parameters are given; keep the right one")
    rope = {"rope_theta": entries.get("rope_theta") or 10000.0, **old, **new}
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if str(kind) not in ROPE_TYPES:
        raise ValueError(f"RoPE of type {kind!r}; this recipe computes {', '.join(ROPE_TYPES)}")
    rope.setdefault("original_max_position_embeddings", entries.get("max_position_embeddings"))
    missing = [name for name in ROPE_TYPES[kind] if not rope.get(name)]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    check_numbers(rope, ("rope_theta", *ROPE_TYPES[kind]))
    return rope


def read_config(folder):
    """The Config of a folder; ValueError, in one line, if this recipe would compute something else."""
    folder = pathlib.Path(folder)
    entries = read_json(folder / "config.json")
    generation = {"eos_token_id": entries.get("eos_token_id", 2)}
    if is_there(folder / "generation_config.json"):
        generation = read_json(folder / "generation_config.json")
    rope = read_rope(entries)
    for place, values in ((entries, IMPLEMENTED), (rope, IMPLEMENTED), (entries, GREEDY), (generation, GREEDY)):
        for name, value in values.items():
            if place.get(name) not in (None, value):
                raise ValueError(f"{name} is {place[name]!r}; this recipe computes {value!r} only")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in ("model_type", *sizes) if not entries.get(name)]
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}")
    check_numbers(entries, (*sizes, "num_key_value_heads", "head_dim"), int)
    check_numbers(entries, ["rms_norm_eps"])
    heads, eos = entries["num_attention_heads"], generation.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in ends):
        raise ValueError(f"eos_token_id is {eos!r}, not a number or a list of numbers")
    return Config(
        **{name: entries[name] for name in sizes},
        num_key_value_heads=entries.get("num_key_value_heads") or heads,
        head_dim=entries.get("head_dim") or entries["hidden_size"] // heads,
        rms_norm_eps=1e-6 if entries.get("rms_norm_eps") is None else entries["rms_norm_eps"],
        rope_parameters=rope,
        tie_word_embeddings=entries.get("tie_word_embeddings", False),
        eos_token_id=ends,
    )


def prompt_of(text, config):
    """The token ids of a text such as 1,5,9."""
    ids = [int(word) if word.isdecimal() else -1 for word in text.split(",")]
    if not all(0 <= token < config.vocab_size for token in ids):
        raise ValueError(f"--prompt-ids {text}: numbers from 0 to {config.vocab_size - 1}, with commas between them")
    return ids


def describe(model, caches):
    """A line of what this rank holds."""
    own = [i for i, layer in enumerate(model.model.layers) if flow.env.get_rank() in layer.ranks.ranks]
    weights = list(model.parameters())
    held, total = sum(w.to_local().numel() for w in weights), sum(w.numel() for w in weights)
    shape = tuple(caches[own[0]].k.to_local().shape)
    return f"layers {own[0]} to {own[-1]}: {held:,} of {total:,} weights, keys {shape} and values in each layer"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="store_true", help="train inside an nn.Graph")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tensor", type=int, default=0, help="ranks of a stage (default: all, in one stage)")
    parser.add_argument("--checkpoint", help="a folder of save_pretrained (default: trains a tiny model)")
    parser.add_argument("--prompt-ids", nargs="+", help="token ids of each prompt (default: some for the tiny model)")
    parser.add_argument("--max-new-tokens", type=int, default=8, help="for each prompt (default: 8)")
    parser.add_argument("--steps", type=int, default=40, help="of training the tiny model")
    parser.add_argument("--check", action="store_true", help="compare with a single device, as without --checkpoint")
    args = parser.parse_args()
    try:
        stages = placements(args.device, flow.env.get_world_size(), args.tensor)
        if args.checkpoint is None:
            config = Config(num_hidden_layers=max(2, len(stages)))
            weights = random_weights(config, seed=0)
            args.prompt_ids = args.prompt_ids or ["3,4,5", "30", "11,12"]
        elif args.graph:
            raise ValueError("--graph trains, and a checkpoint is not trained here: leave it out")
        elif not args.prompt_ids:
            raise ValueError("--checkpoint needs --prompt-ids, such as 1,5 7")
        else:
            config = read_config(args.checkpoint)
            weights = open_checkpoint(args.checkpoint)
        check_sizes(config, stages)
        check_weights(weights, config)
        prompts = [prompt_of(text, config) for text in args.prompt_ids]
        if args.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {args.max_new_tokens}: 1 or more")
    except (OSError, ValueError) as error:
        parser.error(str(error))  # each rank ends with this line before it waits for another
    return args, stages, config, weights, prompts


def main():
    args, stages, config, weights, prompts = parse_arguments()
    steps = args.steps if args.checkpoint is None else 0
    model, losses = train(stages, config, args.graph, weights, steps=steps)
    caches = model.new_caches(len(prompts), max(map(len, prompts)) + args.max_new_tokens)
    print(describe(model, caches))
    begin = time.monotonic()
    tokens = generate(model, prompts, args.max_new_tokens, caches)
    seconds = time.monotonic() - begin
    if flow.env.get_rank() == 0:
        if losses:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")
        for text, new in zip(args.prompt_ids, tokens):
            print(f"{text} -> {','.join(map(str, new))}")
        print(f"{sum(map(len, tokens)) / seconds:.3g} tokens/s with the cache")
        print(f"all ranks together send {bytes_per_token(model, len(prompts)):,} bytes for a token of each prompt")
    if args.checkpoint is not None and not args.check:
        return

    begin = time.monotonic()
    assert generate(model, prompts, args.max_new_tokens) == tokens
    seconds = time.monotonic() - begin
    logits = logits_of(model, prompts)
    model_alone, losses_alone = train(placements(args.device, 1), config, args.graph, weights, steps=steps)
    np.testing.assert_allclose(losses, losses_alone, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits, logits_of(model_alone, prompts), atol=5e-5 * np.abs(logits).max())
    assert generate(model_alone, prompts, args.max_new_tokens) == tokens
    if flow.env.get_rank() == 0:
        print(f"{sum(map(len, tokens)) / seconds:.3g} tokens/s without it, and the same tokens")
        print("the same tokens and logits on a single device")


if __name__ == "__main__":
    main()
