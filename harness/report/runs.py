"""Run the recipes on pools of ranks: all that a run does, and what a training step costs."""

from harness.report.atlas import MODES
from harness.start.recipe import HARNESS, entry, path_of, world_sizes

MEASURE_SCRIPT = f"{HARNESS / 'measure' / 'script.py'}:measure_script"
PER_STEP = f"{HARNESS / 'measure' / 'training.py'}:per_step"
# The sizes at which runs and steps are measured.
SIZES = dict(batch=480, in_features=720, hidden_size=960, out_features=1080, rows=480, columns=1080, steps=1)
TRAINING_SIZES = dict(batch=384, in_features=384, hidden_size=768, out_features=384)
TRAINED_ON = (2, 4)  # ranks
OTHER_SIZES = {
    "checkpoint": {"size": 720},
    "auto_parallel": {"batch": 96},  # at more it chooses otherwise
    # Many features and short sequences: much moves, and little is computed.
    "transformer_block": {"batch": 32, "seq_len": 48, "num_heads": 12, "head_size": 16},
    "sequence_parallel": {"batch": 32, "seq_len": 48, "num_heads": 12, "head_size": 16},
    **dict.fromkeys(
        ("all_gather_kv", "ulysses", "ring_attention"), {"seq_len": 120, "num_heads": 12, "head_size": 256}
    ),
    "mixture_of_experts": {"group_size": 512, "hidden_size": 256, "ffn_size": 96, "capacity": 256},
    "vocab_parallel": {"tokens": 9600, "vocab_size": 200, "hidden_size": 32},
    # Whole models, which compute much more for what they send.
    **dict.fromkeys(
        ("tensor_parallel_module", "fully_sharded_module", "pipeline_module"), {"batch": 96, "hidden_size": 384}
    ),
}
STRATEGIES = {  # of training the same layers at the same sizes, by name; the first recipe is the plain one
    "data parallel": ("train_data_parallel", "ddp", "gradient_accumulation", "activation_checkpointing"),
    "data parallel through rank 0": ("loss_placement", "parameter_server"),
    "data parallel, sharded": ("zero_optimizer", "fully_sharded"),
    "data x pipeline": ("train_data_pipeline",),
    "data x tensor": ("train_data_tensor",),
    "pipeline": ("train_pipeline",),
    "tensor parallel": ("train_model_parallel",),
}


def modes(path):
    """The modes of a recipe: eager and graph, or only the one that it has."""
    return MODES if "graph" in entry(path) else ("only",)


def measured_modes(path):
    """The modes in which its run is measured: one, if it trains."""
    return modes(path)[:1] if "steps" in entry(path) else modes(path)


def with_mode(keywords, mode):
    return keywords if mode == "only" else {**keywords, "graph": mode == "graph"}


def recipe_run(pool, path, mode):
    """What measure_script says of one recipe, by rank."""
    keywords = {name: SIZES[name] for name in entry(path) if name in SIZES}
    if path.stem == "matmul_signatures":
        keywords = dict.fromkeys(keywords, SIZES["in_features"])  # x and w of one size
    return pool.call(MEASURE_SCRIPT, path=str(path), keywords=with_mode(keywords, mode))


def training_runs():
    """(name, number of ranks, mode) of every run of a recipe whose costs are compared."""
    for path in (path_of(name) for names in STRATEGIES.values() for name in names):
        for n in (n for n in TRAINED_ON if n in world_sizes(path)):
            yield from ((path.stem, n, mode) for mode in modes(path))


def training_sizes(name):
    """The sizes at which a step of a recipe is measured: those of its parameters that it has."""
    sizes = {**TRAINING_SIZES, **OTHER_SIZES.get(name, {})}
    return {option: size for option, size in sizes.items() if option in entry(path_of(name))}


def training_run(pool, name, n, mode, **keywords):
    """What per_step says of one training recipe on a pool of n ranks, by rank."""
    keywords = with_mode({**training_sizes(name), **keywords}, mode)
    return pool.call(PER_STEP, path=str(path_of(name)), **keywords)
