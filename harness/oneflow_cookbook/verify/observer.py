"""Record the values of a script on this rank, or run it with the values that another run has recorded."""

import contextlib
import functools

import numpy as np
import oneflow as flow

from oneflow_cookbook.measure.script import run_script
from oneflow_cookbook.measure.tensors import layout_of, tensors_in
from oneflow_cookbook.verify.one_rank import on_one_rank
from oneflow_cookbook.verify.updates import CannotFollow, EnoughSteps, UpdateRecorder
from oneflow_cookbook.verify.value_recorder import block_of, digest, place_now
from oneflow_cookbook.verify.values import Key, Run, Writer, largest_difference, line_of

INITIALS = ("rand", "randn", "tensor")  # of calls.CREATORS, those whose values are not written in the call


class Observer(UpdateRecorder):
    """Records the values of a script on n ranks.

    A "source" is where a value enters the global world: a local tensor that becomes global, or a tensor that is created
    with a placement from data or at random. Other kinds: "output" of a module, "matmul", "to_global", "input" of a
    model, "graph output", "read" by numpy() and "before" to_global; and those of UpdateRecorder.
    """

    def __init__(self, writer, steps, replay=None):
        super().__init__(writer, steps, replay)
        self.random = []  # places of random numbers that cannot be replayed, each with what draws them
        self.parts = []  # places where the rank's own addend of a tensor in P is taken
        self.took_block = None  # the place of the last to_local: local tensors may be computed from global ones
        self.indexed_in_graph = None  # the place of an x[i] in a graph, where its gradient cannot be looked at
        self.outputs = {}  # id of an output of a graph -> (the output, number of micro-batches)

    def facts(self):
        """What is known of the run beside its values."""
        return {"never_updated": self.never_updated(), "random": self.random, "parts": self.parts}

    def facts_of(self, kind):
        facts = dict(super().facts_of(kind))
        if self.took_block:
            facts["took_block"] = line_of(self.took_block)
        if self.indexed_in_graph:
            facts["indexed"] = self.indexed_in_graph
        return facts

    def see_source(self, call, local=None):
        """Make a call whose result enters the global world, and record it; returns what the script continues with.

        local: the tensor that it was made of.
        """
        own = call.proceed()
        if not tensors_in(own) or not own.is_global:
            return own
        if own.is_lazy:
            if call.kind == "random" or call.name in ("rand", "randn"):
                self.random.append((line_of(place_now()), call.name))
            return own
        computed = self.is_computed(call, own)
        used, recorded = (own, own) if computed else self.used_and_recorded(call, own, local)
        self.observe(
            "source", call.name, recorded, computed=computed, **({"local": digest(local)} if local is not None else {})
        )
        return used

    def used_and_recorded(self, call, own, local):
        """(what the script continues with, what is recorded) where a source is not computed."""
        return own, own

    def is_computed(self, call, result):
        """Whether the script computes a tensor, from global ones or from the number of ranks: it is not replayed."""
        if call.kind != "to_global":
            return call.name == "tensor" and result.numel() == 1  # such as a factor of the number of ranks
        local = call.arguments[0]
        is_addend = self.took_block and "P" in layout_of(result).sbp
        is_parameter = local.is_leaf and id(local) not in self.names  # which becomes global before the model is called
        return bool(is_addend or (local.requires_grad and not is_parameter))

    def see_create(self, call):
        return self.see_source(call) if call.name in INITIALS else call.proceed()

    def see_random(self, call):
        return self.see_source(call)

    def see_dropout(self, call):
        named = {**dict(zip(("x", "p", "training"), call.arguments)), **call.keywords}
        if named.get("p", 0.5) > 0 and named.get("training", named.get("train", True)):
            self.random.append((line_of(place_now()), "dropout"))
        return call.proceed()

    def see_to_global(self, call):
        tensor = call.arguments[0]
        if not tensor.is_global:
            return self.see_source(call, local=tensor)
        if "P" in layout_of(tensor).sbp:
            self.observe("before", call.name, tensor)
        result = call.proceed()
        self.observe("to_global", call.name, result)
        return result

    def see_to_local(self, call):
        tensor = call.arguments[0]
        self.took_block = place_now()
        if not tensor.is_lazy and "P" in layout_of(tensor).sbp and tensor.placement.ranks.size > 1:
            self.parts.append(line_of(place_now()))
        return call.proceed()

    def see_matmul(self, call):
        result = call.proceed()
        self.observe("matmul", call.name, result)
        return result

    def see_index(self, call):
        """x[i] with tensors in i: OneFlow may give it a wrong gradient, see silently-wrong.md."""
        result, x = call.proceed(), call.arguments[0]
        indices = tensors_in([*call.arguments[1:], *call.keywords.values()])
        if not indices or not x.is_global or not result.requires_grad:
            return result
        place, is_split = line_of(place_now()), any("S" in layout_of(tensor).sbp for tensor in (x, *indices))
        if not result.is_lazy:
            result.register_hook(functools.partial(self.index_gradient_arrived, place, is_split))
        elif is_split and len(layout_of(x).axes) > 1:  # on a list of ranks a graph is right
            self.indexed_in_graph = place
        return result

    def index_gradient_arrived(self, place, is_split, gradient):
        if is_split or "P" in layout_of(gradient).sbp:
            self.backward_facts["indexed"] = place

    def see_module(self, call):
        module = call.arguments[0]
        if "update" in call.around:
            return call.proceed()
        if "module" not in call.around and "graph" not in call.around:
            self.stop_if_enough()
            self.add_model(module)
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
        if not self.paused and not self.times[key]:
            self.times[key] += 1
            self.write(key, gradient)

    def see_read(self, call):
        tensor = call.arguments[0]
        micro_batches = self.outputs.get(id(tensor), (None, 1))[1]
        self.observe("read", call.name, tensor, micro_batches=micro_batches)
        return call.proceed()

    def observe_graph_output(self, graph, tensor, micro_batches):
        self.outputs[id(tensor)] = tensor, micro_batches
        super().observe_graph_output(graph, tensor, micro_batches=micro_batches)


class Replaying(Observer):
    """An Observer on one rank, whose sources and local parameters get the values of the run `replay` on n ranks.

        the source                                  the script continues with   what is compared with n ranks
        is computed, see is_computed                its own value               its own copies, as the value may differ
        from a local tensor, after a to_local       the recorded value          its own: it may be of one block alone
        from a local tensor split on n ranks, of    the recorded value          the recorded one, so nothing; the place
        other numbers                                                           is in other_blocks
        any other                                   the recorded value          the recorded one, so nothing

    nudge: the seed with which the values are changed in their last bit, None: not at all. strict: whether a source that
    the recorded run does not have, or in another shape, raises CannotFollow; else it keeps its own value.
    """

    def __init__(self, writer, steps, replay, nudge=None, strict=True):
        super().__init__(writer, steps, replay)
        self.strict = strict
        self.nudge = None if nudge is None else np.random.default_rng(nudge)
        self.replayed = 0  # sources
        self.other_blocks = []  # places of local tensors that hold other numbers than those which take their place
        self.batch_rows = set()  # rows of sources in S(0) that are as long on one rank
        self.parts_at = {}  # place of a source that is shorter on one rank -> its rows on n ranks
        self.unknown = []  # names of parameters of a script for a single device that the recorded run lacks

    def facts(self):
        """short: places of sources with fewer rows on one rank, where others that are split like them have all rows."""
        short = [place for place, rows in self.parts_at.items() if rows in self.batch_rows]
        more = {"other_blocks": self.other_blocks, "short": short, "unknown": self.unknown, "missing": self.missing()}
        return {**super().facts(), **more}

    def used_and_recorded(self, call, own, local):
        used = self.with_recorded_value(call, own)
        if local is None or own.shape != used.shape:
            return used, used
        if self.took_block and layout_of(own).sbp != "S(0)":
            return used, own
        if "S" in layout_of(own).sbp and have_other_numbers(own, used):
            self.other_blocks.append(line_of(place_now()))
        return used, used

    def with_recorded_value(self, call, result):
        """A tensor like the result of a call, with the recorded value; without one, the result itself."""
        whole = self.recorded_source(call, result)
        if whole is None:
            return result
        self.replayed += 1
        with self.pause(), flow.no_grad():
            value = flow.tensor(self.nudged(whole), dtype=result.dtype, placement=result.placement, sbp=result.sbp)
        is_in_place = "out" in call.keywords or call.name.endswith("_")
        if not (result.requires_grad or is_in_place):
            return value
        if value.shape != result.shape:
            words = "makes a tensor that needs gradients, in a different shape than on n ranks"
            raise CannotFollow(f"{line_of(place_now())} {words}")
        with self.pause(), flow.no_grad():
            result.data = value
        return result

    def recorded_source(self, call, result):
        """The recorded value of a source as an array, None if there is none. Raises CannotFollow."""
        place = place_now()
        key = Key("source", call.name, place, self.times["source", call.name, place] + 1)
        whole = self.replay.whole(key) if key in self.replay else None
        if whole is not None and whole.shape == tuple(result.shape):
            if self.replay[key].layout.sbp == "S(0)":
                self.batch_rows.add(len(whole))
            return whole
        is_part = whole is not None and call.kind == "to_global"  # of the batch, say, of which each rank loads its own
        if self.strict and not (is_part and "S" in self.replay[key].layout.sbp):
            words = f"makes a different tensor than on n ranks, of shape {tuple(result.shape)}"
            raise CannotFollow(f"{line_of(place)} {words}")
        if is_part:
            self.parts_at[line_of(place)] = len(whole)
        return whole if is_part else None

    def begin(self, path, parameter):
        if not parameter.is_global:
            self.take_recorded(path, parameter)
        super().begin(path, parameter)

    def take_recorded(self, path, parameter):
        """Give a local parameter the value with which it begins in the replayed run; returns whether that has it."""
        key = next((key for key in self.replay.keys if key.kind == "initial" and key.name == path), None)
        if key is None or self.replay[key].shape != tuple(parameter.shape):
            return False
        whole = self.replay.whole(key)
        if whole is not None:
            with self.pause(), flow.no_grad():
                parameter.copy_(flow.tensor(self.nudged(whole), dtype=parameter.dtype, device=parameter.device))
        return True

    def nudged(self, array):
        """The array, with a nudge each number in its last bit up or down; whole numbers stay."""
        if self.nudge is None or array.dtype.kind != "f":
            return array
        up = self.nudge.integers(2, size=array.shape).astype(bool)
        moved = np.nextafter(array, np.where(up, np.inf, -np.inf).astype(array.dtype))
        return np.where(np.isfinite(array) & (array != np.round(array)), moved, array)

    def why_not_like(self):
        """Why a run that makes other sources than the replayed one cannot be compared with it, None if it can."""
        recorded = [key for key in self.replay.keys if key.kind == "source" and not self.replay[key].facts["computed"]]
        fewer = len(recorded) - self.replayed
        return f"on one rank it makes {fewer} tensors fewer" if fewer and self.strict else None

    def missing(self):
        """The names of parameters that only the replayed run has; asked of two different scripts."""
        return []


class SingleDevice(Replaying):
    """Runs a script for a single device, whose parameters begin with those recorded in `replay`, by name."""

    def records(self, tensor):
        return not tensor.is_global

    def see_source(self, call, local=None):
        return call.proceed()

    def take_recorded(self, path, parameter):
        if not super().take_recorded(path, parameter):
            self.unknown.append(path)
            return False
        return True

    def why_not_like(self):
        return None

    def missing(self):
        recorded = {key.name for key in self.replay.keys if key.kind == "initial"}
        return sorted(recorded - set(self.names.values()))


def have_other_numbers(own, result):
    """Whether two tensors differ by more than the order of their numbers and rounding."""
    a, b = (np.sort(block_of(tensor), axis=None) for tensor in (own, result))
    return largest_difference(a, b) > 1e-5 * float(np.abs(b).max(initial=0))


def observe_script(folder, script, steps, replay=None, world_size=None, nudge=None, strict=True):
    """Run a script, and write the values that this rank sees to a folder. Collective.

    script: the arguments of run_script. replay: (folder, number of ranks) of the run whose sources to use; then this
    runs on one rank, and the script is told that there are world_size ranks; with None it is one for a single device.
    Returns None or why it cannot be replayed.
    """
    writer, cannot, raised = Writer(folder, flow.env.get_rank()), None, None
    if replay is None:
        observer, place = Observer(writer, steps), contextlib.nullcontext()
    else:
        kind = SingleDevice if world_size is None else Replaying
        observer = kind(writer, steps, Run(*replay), nudge, strict)
        place = contextlib.nullcontext() if world_size is None else on_one_rank(world_size)
    try:
        with place, observer.recording():
            run_script(**script)
            observer.finish()
    except EnoughSteps:
        pass
    except CannotFollow as reason:
        cannot = str(reason)
    except Exception as error:
        if nudge is None:
            raise
        raised = f"{type(error).__name__}: {error}"  # it may compare exactly what the nudge has changed
    if replay is not None and cannot is None:
        cannot = observer.why_not_like()
    writer.close(raised=raised, **observer.facts())
    return cannot
