"""The amaxes that the ranks of a model agree on: one all-reduce for all its weights, when any of them may have changed.

Where tensor parallelism has cut weights too, all ranks that hold parts of them take part, and amaxes that only some of
them share have a place for each.

An agreement serves one forward and its backward: a write through `.data` or `to_local()` leaves no trace that a later
forward could look for. Within `micro_batches` it serves all forwards, as long as a weight's version and memory stay and
no torch optimizer steps. All of these are the same on all ranks, so no rank waits for another one in vain. Within an
agreement a rank's rows are quantized once.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu.buffers import CrossStream
from quaver.torch.conversion.convert import RollHistories
from quaver.torch.numerics.quantized import Given
from quaver.torch.parallel.comm import agree
from quaver.torch.parallel.fsdp.operands import (
    ROWS,
    WHOLE,
    Agreed,
    GatheredLayout,
    OperandShard,
    OperandSide,
    RowShard,
    amaxes,
    part,
    sides,
    whole,
)
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, held_parameters, local
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax
from quaver.torch.state.history.sync import check_agreement, new_group
from quaver.torch.state.layer_state import graph_task_id


class TensorParallelShard(NamedTuple):
    """How tensor parallelism has cut a weight before fully_shard does."""

    #: The axis of the weight that it has cut, and the ranks that have the parts; None where it has cut nothing.
    axis: int | None = None
    mesh: Any = None


class _AmaxEntry(NamedTuple):
    """Amaxes of one operand that ranks agree on."""

    weight: "GatheredWeightState"
    side: OperandSide
    #: By which `Agreed` has them.
    block: int
    bits: Tensor

    @property
    def apart(self) -> bool:
        """Whether ranks that tensor parallelism has given other parts of a weight have other amaxes here."""
        axis, side = self.weight.across.axis, self.side
        if self.block in (WHOLE, ROWS):
            return axis is None
        return not ((axis == 0 and side.height is None) or (axis == 1 and side.width is None))


class GatheredWeightState:
    """One weight that is gathered as codes, and what is known of it on this rank."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        recipe: Recipe,
        shape: tuple[int, int],
        model: "ModelAmaxSync",
        across: "TensorParallelShard",
    ) -> None:
        self.layer, self.name, self.recipe, self.model = weakref.ref(layer), name, recipe, model
        #: Of what fully_shard divides: the weight, or the part of it that tensor parallelism leaves this rank.
        self.shape = shape
        self.across = across
        self.sides = sides(recipe)
        #: As fully_shard holds it; None before the first gather, or where its names are unknown.
        self.unit: FsdpParameter | None = None
        #: The sharded parameter, seen last.
        self.parameter: Any = None
        #: By side.
        self.agreed: dict[str, Agreed] = {}
        self.parts: dict[str, tuple[Any, OperandShard, CrossStream]] = {}
        #: Passes that were asked for an operand which their gather had not brought: from then on both travel.
        self.wants_both: set[str] = set()
        #: The number of the agreement that a forward's gather belongs to.
        self.forward = -1
        #: Version and address of the parameter that ranks agreed on.
        self.written: tuple[int, int] | None = None
        #: Shapes of what was gathered last.
        self.sent: Sequence[torch.Size] = ()

    def rows(self, mesh: Any) -> RowShard:
        """Those of this rank, of a mesh over which fully_shard divides the weight."""
        return RowShard.of(self.shape[0], mesh.size(), mesh.get_local_rank(), self.across.axis)

    @property
    def shared(self) -> bool:
        """Whether fprop's operand serves dgrad."""
        return len(self.sides) == 1

    def side(self, name: str) -> OperandSide:
        """An operand by its name; where both are one, that."""
        return self.sides[0] if self.shared or name == "fprop" else self.sides[1]

    def see(self) -> Any:
        """The sharded parameter."""
        if self.unit is not None:
            self.parameter = self.unit.sharded
        else:
            layer = self.layer()
            held = None if layer is None else layer._parameters.get("weight")
            if local(held) is not None:
                self.parameter = held
        return self.parameter

    def state_of_writes(self) -> tuple[int, int]:
        """Version and address of the sharded parameter."""
        parameter = self.see()
        part: Any = local(parameter)
        return parameter._version, 0 if part is None else getattr(part, "plain", part).data_ptr()

    def values(self) -> Tensor | None:
        """This rank's rows [n, K] in the dtype that they are quantized from; None where it is not sharded."""
        rows: Any = local(self.see())
        rows = getattr(rows, "plain", rows)
        if rows is None or rows.is_meta:
            return None
        dtype = None if self.unit is None else self.unit.dtype
        return rows.detach() if dtype is None else rows.detach().to(dtype)

    def factor(self) -> tuple[float, Given]:
        """What stands for the layer's present factor in a key, and the factor, with which a gather quantizes."""
        layer = self.layer()
        if self.recipe.delayed is None or layer is None:
            return 0.0, None
        factors = amax.saved_factors(layer)
        if isinstance(factors, Tensor):
            buffer = layer._buffers["factor"]
            assert buffer is not None
            return buffer._version, factors[amax.WEIGHT]
        return factors[amax.WEIGHT], factors[amax.WEIGHT]

    def part(self, side: OperandSide, rows: RowShard, key: float, factor: Given) -> OperandShard:
        """This rank's part of an operand, quantized once while an agreement lasts.

        fully_shard asks for it on its copy-in stream, and for some gathers on the stream that computes.
        """
        x = self.values()
        assert x is not None
        self.model.amaxes.wait()
        seen = self.model.number, key, x.data_ptr() if self.unit is None or self.unit.dtype is None else 0
        kept = self.parts.get(side.name)
        if kept is None or kept[0] != seen:
            done = part(x, side, rows, self.agreed[side.name], factor)
            written = CrossStream([t for t in done if isinstance(t, Tensor)], x.device)
            kept = self.parts[side.name] = seen, done, written
        kept[2].wait()
        return kept[1]

    def joint(self, name: str, mesh: Any, key: float, factor: Given) -> GatheredLayout:
        """How the parts of all ranks make an operand, by its name."""
        side, rows = self.side(name), self.rows(mesh)
        own = self.part(side, rows, key, factor)
        written = self.model.amaxes, self.parts[side.name][2]
        return GatheredLayout(side, self.shape, rows, own, whole(self.agreed[side.name]), written)


class ModelAmaxSync:
    """The weights of one model that are gathered as codes."""

    def __init__(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        self.weights: list[GatheredWeightState] = []
        #: The number of the agreement that lasts, and whether a forward of the root or an optimizer has ended it.
        self.number = 0
        self.ended = True
        #: What ranks agreed on, as the stream that agreed has it.
        self.amaxes = CrossStream((), torch.device("cpu"))
        #: Whether a backward has read operands of this agreement.
        self.in_backward = False
        #: Whether the user has said that weights do not change.
        self.steady = False
        self._compared = False
        #: Of all ranks that have something of the weight that was gathered first, replicas too.
        self.groups: tuple[Any, ...] = ()
        #: Process groups by their ranks.
        self._groups: dict[tuple[int, ...], Any] = {}

    def ready(self, weight: GatheredWeightState, mesh: Any) -> None:
        """See that ranks have agreed, before a weight is gathered.

        Raises:
            ValueError: on all ranks, where one prepared other weights or other recipes than another one.
        """
        if not self._compared:
            self._begin()
            self._compare(weight, mesh)
            self._compared = True
        backward = graph_task_id() != -1
        another = not backward and not self.steady and (self.in_backward or weight.forward == self.number)
        if self.ended or another or weight.state_of_writes() != weight.written:
            self._agree(weight, mesh)
        if backward:
            self.in_backward = True
        else:
            weight.forward = self.number

    def open(self) -> None:
        """Begin a forward of the root, which ranks compare first.

        Codes of an earlier forward serve it only within `micro_batches`.

        Raises:
            ValueError: on all ranks, where one runs under another recipe or dtype, or has other gradients.
        """
        self.ended = self.ended or not self.steady
        check_agreement("a forward after gather_quantized", self._facts(), *self.groups)

    def _facts(self) -> dict[str, Any]:
        """What ranks have alike in a forward."""
        # A layer that was reverted has no recipe.
        recipes = [(weight, getattr(weight.layer(), "recipe", None)) for weight in self.weights]
        others = [f"{w.name} {own.text}" for w, own in recipes if own is not None and own is not w.recipe]
        device = "cpu" if self.weights[0].parameter is None else self.weights[0].parameter.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        recipe, root = active_context.now[0], self.root()
        return {
            "recipe of autocast": None if recipe is None else recipe.text,
            "recipes switched off": active_context.now[1],
            "recipes of layers": others or "those of gather_quantized",
            "dtype of torch.autocast": cast,
            "gradients": torch.is_grad_enabled(),
            "frozen": [] if root is None else [name for name, p in root.named_parameters() if not p.requires_grad],
            "micro_batches": self.steady,
        }

    def _begin(self) -> None:
        root = self.root()
        by_layer = {weight.layer(): weight for weight in self.weights}
        for module, name, unit in held_parameters(root) if root is not None else ():
            if name == "weight" and module in by_layer:
                by_layer[module].unit = unit
        for module in root.modules() if root is not None else ():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, RollHistories):
                    # Before fully_shard's own, which gathers a root's weights: in the codes of the factors that rolled.
                    module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        if root is not None:
            # Before fully_shard's own hook, too.
            root.register_forward_pre_hook(_Open(self), prepend=True)
        _watch(self)

    def _compare(self, weight: GatheredWeightState, mesh: Any) -> None:
        """Refuse ranks that prepared different weights."""
        over = getattr(weight.see(), "device_mesh", mesh)
        self.groups = tuple(over.get_group(dim) for dim in range(over.ndim))
        offloaded = next((w.name for w in self.weights if w.unit is not None and w.unit.offloads), None)
        error = (
            f"{offloaded} is gathered as codes, which are made on the device that computes, and CPUOffloadPolicy keeps "
            "its rows on the CPU: give fully_shard no offload_policy, or leave the layer out with "
            "gather_quantized(model, skip=[...])"
        )
        what = {w.name: f"{w.shape} cut along {w.across.axis} under {w.recipe.text}" for w in self.weights}
        check_agreement(
            "gather_quantized's first gather",
            {"weights": len(what), **what, **self._facts()},
            *self.groups,
            error="" if offloaded is None else error,
            advice="build the model and convert it alike on all ranks before gather_quantized",
        )

    def _agree(self, asking: GatheredWeightState, mesh: Any) -> None:
        """One all-reduce for each mesh that holds weights whose blocks lie on several ranks."""
        self.number += 1
        self.ended = self.in_backward = False
        # By the ranks over which fully_shard divides, and for these how tensor parallelism has cut their weights.
        by_group: dict[Any, list[_AmaxEntry]] = {}
        cut: dict[Any, GatheredWeightState] = {}
        for weight in self.weights:
            x, over = weight.values(), mesh if weight.unit is None else weight.unit.mesh
            weight.agreed, weight.parts = {}, {}
            if x is None:
                continue
            group = over.get_group()
            weight.written = weight.state_of_writes()
            if weight.across.axis is not None:
                cut.setdefault(group, weight)
            of_history = weight.recipe.delayed is not None
            for side in weight.sides:
                own = amaxes(x, side, weight.rows(over), side.spec.two_level or of_history)
                weight.agreed[side.name] = own
                entries = [_AmaxEntry(weight, side, block, bits) for block, bits in own.items()]
                by_group.setdefault(group, []).extend(e for e in entries if over.size() > 1 or not e.apart)
        for group, entries in by_group.items():
            if entries:
                self._agree_on(entries, group, cut.get(group), _device(asking))
        agreed = [bits for weight in self.weights for each in weight.agreed.values() for bits in each.values()]
        self.amaxes = CrossStream(agreed, agreed[0].device if agreed else torch.device("cpu"))

    def _agree_on(
        self, entries: Sequence[_AmaxEntry], group: Any, cut: GatheredWeightState | None, device: torch.device
    ) -> None:
        """The amaxes of weights that fully_shard divides over one group, as far as they are not this rank's alone."""
        every = [entry.bits.to(device) for entry in entries]
        places, rank = 1, 0
        if cut is not None and not all(entry.apart for entry in entries):
            places, rank = cut.across.mesh.size(), cut.across.mesh.get_local_rank()
            group = self._group(cut)
        for i, (entry, bits) in enumerate(zip(entries, every, strict=True)):
            if entry.apart and places > 1:
                every[i] = bits.new_zeros((places, bits.numel()))
                every[i][rank] = bits
        try:
            flat = agree(torch.cat([bits.view(-1) for bits in every]), group)
        except RuntimeError as error:
            raise RuntimeError(
                f"this rank asked the others for amaxes of weights, as after each optimizer step, in vain ({error}); "
                "one that has not stepped, or has run other forwards, does not come here: skip a step on all ranks or "
                "on none, such as by an all-reduce of what it goes by"
            ) from error
        for entry, sent, agreed in zip(entries, every, flat.split([b.numel() for b in every]), strict=True):
            own = agreed if sent.dim() == 1 else agreed.view_as(sent)[rank]
            agreed_on: Any = entry.weight.agreed[entry.side.name]
            agreed_on[entry.block] = own.to(entry.bits.device)

    def _group(self, weight: GatheredWeightState) -> Any:
        """All ranks that hold parts of a weight that tensor parallelism and fully_shard have cut."""
        mesh = weight.parameter.device_mesh
        # Its last dimension is tensor parallelism's, the one before fully_shard's, and those before these are replicas.
        ranks = mesh.mesh
        for place in mesh.get_coordinate()[:-2]:
            ranks = ranks[place]
        members = tuple(ranks.flatten().tolist())
        if members not in self._groups:
            if len(members) == weight.across.mesh.size():
                group = weight.across.mesh.get_group()
            elif len(members) == dist.get_world_size():
                group = None
            else:
                group = new_group(members, use_local_synchronization=True)
            self._groups[members] = group
        return self._groups[members]


def _device(weight: GatheredWeightState) -> torch.device:
    """Where ranks agree: of the device that the weight is computed on."""
    kind = weight.parameter.device_mesh.device_type if weight.parameter is not None else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class _Open:
    """A forward pre-hook of the root."""

    def __init__(self, model: ModelAmaxSync) -> None:
        self._model = weakref.ref(model)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: object) -> None:
        model = self._model()
        if model is not None and graph_task_id() == -1:
            model.open()


def close(root: nn.Module) -> None:
    """End what earlier preparations of a model compare: when garbage is collected differs between ranks."""
    for module in root.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Open):
                del module._forward_pre_hooks[key]


@contextmanager
def micro_batches(model: nn.Module) -> Iterator[None]:
    """Declare that a model's weights do not change within the block: its forwards reuse one quantization of them.

        with micro_batches(model):
            for x in batches:
                model(x).backward()
        optimizer.step()

    Without it each forward quantizes this rank's rows of weights that `gather_quantized` has prepared, and ranks agree
    on amaxes anew, since no trace is left of a step that writes through `.data`. Within it an optimizer's step, a
    write in place or another tensor in a parameter's place still begin anew. Call it on all ranks alike.

    Args:
        model: of `gather_quantized`; one without such weights is left as it is.
    """
    # What a rank holds of a prepared weight names the model that it was prepared with.
    prepared: set[Any] = {getattr(local(p), "model", None) for p in model.parameters()} - {None}
    for each in prepared:
        each.ended, each.steady = True, True
    try:
        yield
    finally:
        for each in prepared:
            each.ended, each.steady = True, False


class _OptimizerStepHook:
    """The hook of all optimizers, which is put there once."""

    hooked = False


#: Models that an optimizer's step ends the agreement of.
_watched: "weakref.WeakSet[ModelAmaxSync]" = weakref.WeakSet()


def _watch(model: ModelAmaxSync) -> None:
    if not _OptimizerStepHook.hooked:
        _OptimizerStepHook.hooked = True
        register_optimizer_step_post_hook(_stepped)
    _watched.add(model)


def _stepped(optimizer: Optimizer, *_: object) -> None:
    """End the agreements of those models whose weights an optimizer holds."""
    for model in list(_watched):
        if not model.ended and any(
            getattr(local(p), "model", None) is model for group in optimizer.param_groups for p in group["params"]
        ):
            model.ended = True
            for weight in model.weights:
                # Codes of what the weights were.
                weight.parts = {}
