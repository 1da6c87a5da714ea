"""What the tests of gpt.py call on the ranks of a pool."""

import sys
from dataclasses import dataclass, field

import oneflow as flow

from oneflow_cookbook.measure.entry import call_entry
from oneflow_cookbook.measure.rank_memory import bytes_held, memory_size
from oneflow_cookbook.measure.sbp import label
from oneflow_cookbook.measure.sent import quiet
from oneflow_cookbook.measure.tensors import snapshot
from oneflow_cookbook.start import recipe
from tests.on_rank_recipe import RECORDED, RecipeRecorder, arrays_by_name, observed, optimizer_state

COUNTED = (2, 3)  # steps after which the bytes are read: the first one connects the ranks


def variables_of_train():
    """The local variables of `train`, which runs."""
    frame = sys._getframe()
    while frame.f_code.co_name != "train":
        frame = frame.f_back
    return frame.f_locals


@dataclass
class StepRecorder(RecipeRecorder):
    """A RecipeRecorder that also looks at the end of each step, where the script reads its loss."""

    logits: set = field(default_factory=set)  # the SBPs of what the cross-entropy takes
    first: dict = field(default_factory=dict)  # the moments after the first step, by name
    state_bytes: dict = field(default_factory=dict)  # of weights, gradients and moments on this rank after it
    sent: dict = field(default_factory=dict)  # what its connections had sent after the steps COUNTED

    def see_cross_entropy(self, call):
        self.logits.add((label(call.arguments[0].sbp),))
        return call.proceed()

    def see_read(self, call):
        loss, step = super().see_read(call), len(self.reads)
        with self.pause():
            if step == 1:
                self.look(variables_of_train())
            if step in COUNTED:
                self.sent[step] = quiet()
        return loss

    def look(self, variables):
        graph, parameters = variables["training"], dict(variables["model"].named_parameters())
        moments = optimizer_state(variables, parameters)
        copies = {name: tensor.clone() for name, tensor in moments.items()}  # numpy's array is the tensor's own
        self.first = {f"{name} in step 1": snapshot(tensor) for name, tensor in copies.items()}
        owners = ([], [graph]) if graph else ([variables["optimizer"]], [])
        self.state_bytes = bytes_held(parameters.values(), *owners)


def trained(path, sums=0, **arguments):
    """Train gpt.py, and let it answer so many sums.

    Returns what `observe` does, with the weights before and after ("new") and their first moments as the only tensors;
    also its lines, and what else a StepRecorder saw.
    """
    recorder = StepRecorder()
    _, seen = observed(path, recorder, **arguments)
    model, tensors = seen.outer["model"], dict(recorder.first)
    module = sys.modules[type(model).__module__]
    for name, parameter in model.named_parameters():
        tensors[name] = recorder.initial[id(parameter)]
        tensors[f"new {name}"] = snapshot(parameter)
    return {
        "tensors": tensors,
        "arrays": {"losses": arrays_by_name(seen.outer)["losses"]},
        "in_graph": {},
        "lines": module.answer(model, module.SUMS[:sums]).tolist(),
        **{name: getattr(recorder, name) for name in (*RECORDED, "logits", "state_bytes", "sent")},
    }


def losses(path, **arguments):
    """The losses of a run of gpt.py."""
    return [float(loss) for loss in call_entry(recipe.load(path), arguments)[1]]


def answers(path, sums, **arguments):
    """The lines of so many sums that gpt.py writes after a run."""
    module = recipe.load(path)
    model, _ = call_entry(module, arguments)
    return module.answer(model, module.SUMS[:sums]).tolist()


def growth_in_forward(path, tensor, **sizes):
    """The bytes that this rank gains in a forward pass in eager mode: what is kept for backward, and free blocks."""
    module = recipe.load(path)
    meshes = module.placements("cpu", flow.env.get_world_size(), tensor=tensor)
    config = module.Config(**sizes)
    model = module.GPT(meshes, config, 96, seed=0)
    ids, _ = module.batch_of(config, seed=0, step=1)
    ids = model.embedding.to_mesh(ids)
    flow._oneflow_internal.eager.Sync()
    before = memory_size("VmRSS")
    logits = model(ids)
    flow._oneflow_internal.eager.Sync()
    del logits
    return memory_size("VmRSS") - before
