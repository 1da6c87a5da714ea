"""Record the values of a script on this rank, or run it with the values that another run has recorded."""

import contextlib
import functools
import hashlib
import os
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import oneflow as flow

from harness.measure.graph import modules_in
from harness.measure.recorder import Recorder
from harness.measure.script import run_script
from harness.measure.tensors import layout_of, tensors_in
from harness.verify.one_rank import on_one_rank
from harness.verify.values import Key, Run, Value, Writer, at, difference

HARNESS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = tuple({*map(os.path.realpath, [*sysconfig.get_paths().values(), sys.prefix, os.path.dirname(os.__file__)])})
INITIALS = ("rand", "randn", "tensor")  # of calls.CREATORS, those whose values are not written in the call


class EnoughSteps(BaseException):
    """Ends a script after the last step that is looked at; not an Exception, so that scripts do not catch it."""


class CannotReplay(BaseException):
    """Its text says why the recorded values cannot take the place of this run's own."""


class Observer(Recorder):
    """A Recorder of values.

    What enters the global world is an "entry": a local tensor that becomes global, a tensor that is created with a
    placement from data or at random. With `replay`, each entry takes the value that it had in that run. Other kinds:
    "output" of a module, "matmul", "to_global", "loss", "gradient of an output", "gradient" and "parameter" of an
    optimizer's step, "initial" parameter, "input" of a model, "graph output", "read" by numpy() and "before" to_global.
    Only global tensors are recorded.
    """

    def __init__(self, writer, steps, replay=None, nudge=None, strict=True):
        """steps: how many to look at. nudge: the seed with which entries are changed in their last bit.

        strict: whether an entry that the recorded run does not have, or in another shape, raises CannotReplay.
        """
        super().__init__(keeps_initial=False)
        self.writer, self.steps, self.replay, self.strict = writer, steps, replay, strict
        self.nudge = None if nudge is None else np.random.default_rng(nudge)
        self.seen = Counter()  # (kind, name, place) -> how often
        self.replayed = 0  # entries
        self.updates = Counter()  # id of an optimizer or graph -> its steps
        self.names = {}  # id of a parameter -> its path in the model
        self.trainable = {}  # id of a parameter that needs gradients -> (it, the hash of its first value)
        self.has_gradients = False  # whether a parameter of an optimizer has ever had a gradient
        self.updated = set()  # ids of the parameters of optimizers and graphs that have made a step
        self.paths = {}  # module -> its path in the outermost module
        self.random = []  # places of random numbers that cannot be replayed, each with what draws them
        self.parts = []  # places where the rank's own addend of a tensor in P is taken
        self.took_block = None  # the place of the last to_local: local tensors may be computed from global ones
        self.other_blocks = []  # places of local tensors that hold other numbers than those which take their place
        self.models = []  # the outermost modules that were called
        self.outputs = {}  # id of an output of a graph -> (the output, number of micro-batches)

    def observe(self, kind, name, tensor, **facts):
        """Record a tensor, unless it has no value; returns its Key."""
        if tensor is None or tensor.is_lazy or not self.records(tensor):
            return None
        place = place_now()
        self.seen[kind, name, place] += 1
        key = Key(kind, name, place, self.seen[kind, name, place])
        self.write(key, tensor, **facts)
        return key

    def write(self, key, tensor, **facts):
        """Write this rank's block of a tensor."""
        with self.pause():
            block = block_of(tensor)
        layout, dtype = layout_of(tensor), str(np.dtype("f4") if block is None else block.dtype)
        step = 1 + max(self.updates.values(), default=0)
        if self.took_block:
            facts["took_block"] = at(self.took_block)
        self.writer.add(Value(key, step, layout, tuple(tensor.shape), dtype, facts=facts), block)

    def records(self, tensor):
        """Whether the values of such a tensor are recorded."""
        return tensor.is_global

    def see_entry(self, call, local=None):
        """Make a call whose result enters the global world, and record it; returns what the script continues with.

        local: the tensor that it was made of. With `replay` the script gets the recorded value, and that is recorded
        here too, except where `local` was computed from this rank's block: it would be compared with itself.
        """
        own = call.proceed()
        if not tensors_in(own) or not own.is_global:
            return own
        if own.is_lazy:
            if call.kind == "random" or call.name in ("rand", "randn"):
                self.random.append((at(place_now()), call.name))
            return own
        facts = {"computed": self.is_computed(call, own)}
        if local is not None:
            facts["local"] = digest(local)
        is_replayed = self.replay is not None and not facts["computed"]
        used = self.replaced(call, own) if is_replayed else own
        recorded = used
        if is_replayed and local is not None and own.shape == used.shape:
            if self.took_block and layout_of(own).sbp != "S(0)":
                recorded = own
            elif "S" in layout_of(own).sbp and have_other_numbers(own, used):
                self.other_blocks.append(at(place_now()))
        self.observe("entry", call.name, recorded, **facts)
        return used

    def replaced(self, call, result):
        """A tensor like the result of a call, with the recorded value; without one, the result itself."""
        place = place_now()
        key = Key("entry", call.name, place, self.seen["entry", call.name, place] + 1)
        whole = self.replay.whole(key) if key in self.replay else None
        same_shape = whole is not None and whole.shape == tuple(result.shape)
        is_part = whole is not None and call.kind == "to_global"  # of the batch, say, of which each rank loads its own
        if self.strict and not (same_shape or (is_part and "S" in self.replay[key].layout.sbp)):
            raise CannotReplay(f"{at(place)} makes a different tensor than on n ranks, of shape {tuple(result.shape)}")
        self.replayed += same_shape or is_part
        if not (same_shape or is_part):
            return result
        with self.pause(), flow.no_grad():
            whole = self.nudged(whole)
            value = flow.tensor(whole, dtype=result.dtype, placement=result.placement, sbp=result.sbp)
        is_in_place = "out" in call.keywords or call.name.endswith("_")
        if not (result.requires_grad or is_in_place):
            return value
        if not same_shape:
            raise CannotReplay(f"{at(place)} makes a tensor that needs gradients, in a different shape than on n ranks")
        with self.pause(), flow.no_grad():
            result.data = value
        return result

    def is_computed(self, call, result):
        """Whether the script computes a tensor, from global ones or from the number of ranks: it is not replayed."""
        if call.kind != "to_global":
            return call.name == "tensor" and result.numel() == 1  # such as a factor of the number of ranks
        local = call.arguments[0]
        is_addend = self.took_block and "P" in layout_of(result).sbp
        return bool(is_addend or (local.requires_grad and not local.is_leaf))

    def nudged(self, array):
        """The array, with a nudge each number in its last bit up or down; whole numbers stay."""
        if self.nudge is None or array.dtype.kind != "f":
            return array
        up = self.nudge.integers(2, size=array.shape).astype(bool)
        moved = np.nextafter(array, np.where(up, np.inf, -np.inf).astype(array.dtype))
        return np.where(np.isfinite(array) & (array != np.round(array)), moved, array)

    def see_create(self, call):
        return self.see_entry(call) if call.name in INITIALS else call.proceed()

    def see_random(self, call):
        return self.see_entry(call)

    def see_dropout(self, call):
        named = {**dict(zip(("x", "p", "training"), call.arguments)), **call.keywords}
        if named.get("p", 0.5) > 0 and named.get("training", named.get("train", True)):
            self.random.append((at(place_now()), "dropout"))
        return call.proceed()

    def see_to_global(self, call):
        tensor = call.arguments[0]
        if not tensor.is_global:
            return self.see_entry(call, local=tensor)
        if "P" in layout_of(tensor).sbp:
            self.observe("before", call.name, tensor)
        result = call.proceed()
        self.observe("to_global", call.name, result)
        return result

    def see_to_local(self, call):
        tensor = call.arguments[0]
        self.took_block = place_now()
        if not tensor.is_lazy and "P" in layout_of(tensor).sbp and tensor.placement.ranks.size > 1:
            self.parts.append(at(place_now()))
        return call.proceed()

    def see_matmul(self, call):
        result = call.proceed()
        self.observe("matmul", call.name, result)
        return result

    def see_module(self, call):
        module = call.arguments[0]
        if "update" in call.around:
            return call.proceed()
        if "module" not in call.around and "graph" not in call.around:
            self.stop_if_enough()
            self.add_names(module)
            for number, tensor in enumerate(tensors_in([call.arguments[1:], call.keywords])):
                self.observe("input", f"{type(module).__name__}, argument {number}", tensor)
        result = call.proceed()
        path = self.paths.get(module, type(module).__name__)
        for number, tensor in enumerate(tensors_in(result)):
            name = path if number == 0 else f"{path} ({number})"
            key = self.observe("output", name, tensor, module=type(module).__name__)
            if key and tensor.requires_grad and flow.is_grad_enabled():
                tensor.register_hook(functools.partial(self.gradient_arrived, key))
        return result

    def gradient_arrived(self, output, gradient):
        """Record the gradient of an output: the order of the ranks' backwards is not that of one rank's."""
        key = output._replace(kind="gradient of an output")
        if not self.paused and not self.seen[key]:
            self.seen[key] += 1
            self.write(key, gradient)

    def add_names(self, module):
        if module not in self.models:
            self.models.append(module)
        for path, part in module.named_modules():
            self.paths.setdefault(part, path or type(module).__name__)
        for path, parameter in module.named_parameters():
            if id(parameter) not in self.names:
                taken = sum(name.split(" ")[0] == path for name in self.names.values())
                path = f"{path} ({taken + 1})" if taken else path
                self.names[id(parameter)] = path
                self.referenced.append(parameter)
                self.begin(path, parameter)
                if parameter.requires_grad:
                    with self.pause():
                        self.trainable[id(parameter)] = parameter, digest(parameter)

    def begin(self, path, parameter):
        """Record the initial value of a parameter."""
        self.observe("initial", path, parameter)

    def see_read(self, call):
        tensor = call.arguments[0]
        micro_batches = self.outputs.get(id(tensor), (None, 1))[1]
        self.observe("read", call.name, tensor, micro_batches=micro_batches)
        return call.proceed()

    def see_set_stage(self, call):
        return call.proceed()

    def see_backward(self, call):
        self.stop_if_enough()
        self.observe("loss", "loss", call.arguments[0])
        return call.proceed()

    def see_zero_grad(self, call):
        self.stop_if_enough()
        return call.proceed()

    def see_update(self, call):
        optimizer = call.arguments[0]
        if self.updates[id(optimizer)] >= self.steps:
            raise EnoughSteps
        parameters = [parameter for group in optimizer.param_groups for parameter in group.parameters]
        names = {id(p): self.names.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters)}
        self.updated.update(names)
        if any(parameter.grad is not None for parameter in parameters):
            self.has_gradients = True
        for parameter in reversed(parameters):  # backward comes to the last ones first
            self.observe("gradient", names[id(parameter)], parameter.grad)
        result = call.proceed()
        for parameter in parameters:
            self.observe("parameter", names[id(parameter)], parameter)
        self.observe_buffers()
        self.updates[id(optimizer)] += 1
        self.referenced.append(optimizer)
        return result

    def see_graph(self, call):
        graph = call.arguments[0]
        self.stop_if_enough()
        for module in modules_in(graph).values():
            self.add_names(module)
        result = super().see_graph(call)
        facts = {"micro_batches": graph.config.proto.num_gradient_accumulation_steps}
        for tensor in tensors_in(result):
            self.outputs[id(tensor)] = tensor, facts["micro_batches"]
            self.observe("graph output", type(graph).__name__, tensor, **facts)
        if graph._opts:
            self.observe_training(graph, **facts)
            self.updates[id(graph)] += 1
        return result

    def observe_training(self, graph, **facts):
        """Observe the gradients, as far as OneFlow gives them, and the parameters after a step of a graph."""
        trained = [p for module in modules_in(graph).values() for p in module.parameters()]
        self.updated.update(map(id, trained))
        for parameter in reversed(trained):
            gradient = self.gradients.get(id(parameter))
            self.observe("gradient", self.names[id(parameter)], gradient)
        for parameter in trained:
            self.observe("parameter", self.names[id(parameter)], parameter, **facts)
        self.observe_buffers()

    def observe_buffers(self):
        """Observe the buffers of the models after an update, such as the statistics of BatchNorm."""
        for model in self.models:
            for path, buffer in model.named_buffers():
                self.observe("buffer", path, buffer)

    def never_updated(self):
        """The number of trainable parameters, if optimizers make steps, and update none of these, nor anything else."""
        if not self.updated or self.has_gradients or self.updated & set(self.trainable):
            return 0
        with self.pause():
            unchanged = [digest(parameter) == before for parameter, before in self.trainable.values()]
        return len(unchanged) if all(unchanged) else 0

    def stop_if_enough(self):
        """Raises EnoughSteps if an optimizer or graph has made the last step that is looked at."""
        if max(self.updates.values(), default=0) >= self.steps:
            raise EnoughSteps


class SingleDevice(Observer):
    """An Observer of a script for a single device, whose parameters begin with those recorded in `replay`, by name."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.recorded = {key.name: key for key in self.replay.keys if key.kind == "initial"}
        self.unknown = []  # names of its parameters that are not in the recorded run, or have another shape there

    def records(self, tensor):
        return not tensor.is_global

    def see_entry(self, call, local=None):
        return call.proceed()

    def begin(self, path, parameter):
        whole = self.replay.whole(self.recorded[path]) if path in self.recorded else None
        if whole is None or whole.shape != tuple(parameter.shape):
            self.unknown.append(path)
        else:
            with self.pause(), flow.no_grad():
                parameter.copy_(flow.tensor(self.nudged(whole), dtype=parameter.dtype, device=parameter.device))
        super().begin(path, parameter)


def have_other_numbers(own, result):
    """Whether two tensors differ by more than the order of their numbers and rounding."""
    a, b = (np.sort(block_of(tensor), axis=None) for tensor in (own, result))
    return difference(a, b) > 1e-5 * float(np.abs(b).max(initial=0))


def block_of(tensor):
    """This rank's block as an array, None outside the placement."""
    if tensor.is_global and flow.env.get_rank() not in tensor.placement.ranks:
        return None
    local = tensor.detach().to_local() if tensor.is_global else tensor.detach()
    is_in_numpy = local.dtype not in (flow.bfloat16, flow.float16)
    return (local if is_in_numpy else local.float()).numpy()


def digest(local):
    """What tells whether ranks passed the same values: (shape, hash of the values, whether they are all equal).

    None outside the placement.
    """
    array = block_of(local)
    if array is None:
        return None
    return (
        array.shape,
        hashlib.sha256(array.tobytes()).hexdigest(),
        bool(array.size == 0 or (array == array.flat[0]).all()),
    )


@functools.lru_cache(maxsize=None)
def is_users(file):
    """Whether a file of Python code is the user's, and not OneFlow's, Python's or ours."""
    path = os.path.realpath(file)
    return not (file.startswith("<") or path.startswith((*LIBRARIES, HARNESS)))


def place_now():
    """((file, line), ...) of the user's code that runs, innermost first."""
    places, frame = [], sys._getframe()
    while frame:
        if is_users(frame.f_code.co_filename):
            places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


def observe_script(folder, script, steps, replay=None, world_size=None, nudge=None, strict=True):
    """Run a script, and write the values that this rank sees to a folder. Collective.

    script: the arguments of run_script. replay: (folder, number of ranks) of the run whose entries to use; then this
    runs on one rank, and the script is told that there are world_size ranks; with None it is one for a single device.
    Returns None or why it cannot be replayed.
    """
    writer, cannot = Writer(folder, flow.env.get_rank()), None
    run = None if replay is None else Run(*replay)
    kind = SingleDevice if run is not None and world_size is None else Observer
    observer = kind(writer, steps, run, nudge, strict)
    place = contextlib.nullcontext() if world_size is None else on_one_rank(world_size)
    try:
        with place, observer.recording():
            run_script(**script)
    except EnoughSteps:
        pass
    except CannotReplay as reason:
        cannot = str(reason)
    except Exception:
        if nudge is None:  # else it may compare exactly what the nudge has changed; what came before is recorded
            raise
    if kind is SingleDevice:
        missing = set(observer.recorded) - set(observer.names.values())
        facts = {"unknown": observer.unknown, "missing": sorted(missing)}
    else:
        facts = {}
        if run is not None and strict and cannot is None:
            fewer = sum(key.kind == "entry" and not run[key].facts["computed"] for key in run.keys) - observer.replayed
            cannot = f"on one rank it makes {fewer} tensors fewer" if fewer else None
    facts.update(
        never_updated=observer.never_updated(),
        random=observer.random,
        parts=observer.parts,
        other_blocks=observer.other_blocks,
    )
    writer.close(**facts)
    return cannot
