"""The sizes of a dense transformer, from options or from the config.json of Hugging Face."""

import dataclasses
import json
import os


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder: an embedding, layers of attention and MLP, a head.

    The defaults are those of recipes/transformer/gpt.py: learned positions, norms without a bias, an MLP of four times
    the hidden size, a head that is tied to the embedding. kv_heads: of grouped-query attention. gated: an MLP of three
    matrices, as in Llama.
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


class ConfigError(ValueError):
    """A config.json that does not describe a dense decoder; the message is one line."""


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

    Raises ConfigError if it does not describe a dense decoder.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise ConfigError(f"{path} is a link to {os.readlink(path)}, which is not there")
    try:
        with open(path, encoding="utf-8-sig") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        why = f"{error.strerror}; name a config.json on this machine" if isinstance(error, OSError) else "not JSON"
        raise ConfigError(f"{path}: {why}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a model's config.json")
    kind = config.get("model_type")
    if any((config.get(name) or 0) > 1 for name in EXPERTS):
        raise ConfigError(f"{path}: a mixture of experts; plan knows dense models")
    if kind not in KINDS:
        words = "has no model_type; is it the model's config.json?" if kind is None else f"model_type is {kind!r}"
        raise ConfigError(f"{path}: {words}; plan knows {', '.join(KINDS)}")
    names, facts = KINDS[kind]
    wrong = [name for name in names.values() if type(config.get(name)) is not int]
    if wrong:
        raise ConfigError(f"{path}: must be whole numbers, but are not: {', '.join(wrong)}")
    heads, kv_heads = config[names["num_heads"]], config.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise ConfigError(f"{path}: {kv_heads} key-value heads do not divide the {heads} heads")
    sizes = {"mlp_size": config.get("n_inner") or 0, **{size: config[name] for size, name in names.items()}}
    sizes["seq_len"] = seq_len or sizes["seq_len"]
    tied = config.get("tie_word_embeddings", facts.get("tied", True))
    head_size = config.get("head_dim") or 0
    return Model(**{**sizes, **facts, "tied": tied, "kv_heads": kv_heads or 0, "head_size": head_size})
