"""The sizes of a dense transformer, from options or from the config.json of Hugging Face."""

import dataclasses
import json
import os


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder: an embedding, layers of attention and MLP, a head.

    The defaults are those of recipes/transformer/gpt.py: learned positions, norms without a bias, an MLP of four times
    the hidden size, a head that is tied to the embedding. kv_heads: of grouped-query attention. gated: an MLP of three
    matrices, as in Llama. Raises ValueError if the numbers of heads do not divide.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_len: int
    vocab_size: int
    kv_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden_size / num_heads
    mlp_size: int = 0  # 0: 4 * hidden_size
    gated: bool = False
    biases: bool = False
    dropout: bool = False
    learned_positions: bool = True
    tied: bool = True

    def __post_init__(self):
        if not self.head_size and self.hidden_size % self.num_heads:
            raise ValueError(f"{self.num_heads} heads do not divide the hidden size, {self.hidden_size}")
        if self.kv_heads and self.num_heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key-value heads do not divide the {self.num_heads} heads")

    @property
    def query_size(self):
        """The columns of the matrix that makes the queries."""
        return self.num_heads * (self.head_size or self.hidden_size // self.num_heads)

    @property
    def kv_size(self):
        """The columns of the matrix that makes the keys."""
        return self.query_size * (self.kv_heads or self.num_heads) // self.num_heads

    @property
    def inner_size(self):
        return self.mlp_size or 4 * self.hidden_size


GPT2 = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "seq_len": "n_positions",
    "vocab_size": "vocab_size",
}
USUAL = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "seq_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "mlp_size": "intermediate_size",
}
OPTIONAL = {"mlp_size": "n_inner", "kv_heads": "num_key_value_heads", "head_size": "head_dim"}
GPT_LIKE = {"biases": True, "dropout": True}
LLAMA_LIKE = {"gated": True, "learned_positions": False, "tied": False}
KINDS = {  # model_type -> (names of the sizes in config.json, what config.json does not say)
    "gpt2": (GPT2, GPT_LIKE),
    "opt": ({**USUAL, "mlp_size": "ffn_dim"}, GPT_LIKE),
    "gpt_neox": (USUAL, {**GPT_LIKE, "learned_positions": False, "tied": False}),
    "llama": (USUAL, LLAMA_LIKE),
    "mistral": (USUAL, LLAMA_LIKE),
    "qwen2": (USUAL, LLAMA_LIKE),
    "qwen3": (USUAL, LLAMA_LIKE),
    "gemma": (USUAL, {**LLAMA_LIKE, "tied": True}),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def of_config(path, seq_len=None):
    """The Model of a config.json. seq_len: of training, by default the longest that the model takes.

    Raises ValueError, whose message is one line, if it does not describe a dense decoder.
    """
    config = read(path)
    kind = config.get("model_type")
    if any(config.get(name) not in (None, 0, 1) for name in EXPERTS):
        raise ValueError(f"{path}: a mixture of experts; plan knows dense models")
    if kind not in list(KINDS):
        words = "has no model_type; is it the model's config.json?" if kind is None else f"model_type is {kind!r}"
        raise ValueError(f"{path}: {words}; plan knows {', '.join(KINDS)}")
    names, facts = KINDS[kind]
    optional = {size: name for size, name in OPTIONAL.items() if config.get(name) is not None}
    sizes = {size: config.get(name) for size, name in {**optional, **names}.items()}
    wrong = [{**OPTIONAL, **names}[size] for size, value in sizes.items() if type(value) is not int or value < 1]
    if wrong:
        raise ValueError(f"{path}: must be whole numbers of 1 or more, but are not: {', '.join(wrong)}")
    sizes["seq_len"] = seq_len or sizes["seq_len"]
    return Model(**{**sizes, **facts, "tied": config.get("tie_word_embeddings", facts.get("tied", True))})


def read(path):
    """The dict in a file of JSON; ValueError, whose message is one line, if there is none."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            config = json.load(file)
    except OSError as error:
        link = f", a link to {os.readlink(path)}" if os.path.islink(path) else ""
        raise ValueError(f"{path}{link}: {error.strerror}; name a config.json on this machine") from None
    except ValueError:
        raise ValueError(f"{path}: not JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a model's config.json")
    return config
