"""`gather_quantized`: which weights of a model fully_shard gathers as codes, and what a model needs for that."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Linear
from quaver.torch.linear.stored_weight import FOUR_BITS
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel import comm as traffic
from quaver.torch.parallel.consistency import compare, lines_of
from quaver.torch.parallel.fsdp.amax_sync import GatheredWeightState, ModelAmaxSync, TensorParallelShard, close
from quaver.torch.parallel.fsdp.codes import shard_codes
from quaver.torch.parallel.fsdp.operands import sides
from quaver.torch.parallel.fsdp.shard_tensors import Shard
from quaver.torch.parallel.fsdp.torch_internals import (
    Collectives,
    FsdpParameter,
    collectives,
    held_parameters,
    local,
    set_local,
)
from quaver.torch.parallel.tensor.layers import layout_of
from quaver.torch.state.history import roll, sync

# ---- gathering -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatherReport:
    """How the weights of a model's quantized layers are gathered; as text a line each."""

    #: By the layer's name: the recipe in whose codes its weight travels.
    quantized: dict[str, Recipe] = field(default_factory=dict)
    #: Names of layers whose weight exists only in codes, which travel as they are.
    stored: list[str] = field(default_factory=list)
    #: By the layer's name: why its weight travels in high precision, as without `gather_quantized`.
    in_high_precision: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name}: codes of {recipe.name}" for name, recipe in self.quantized.items()]
        lines += [f"{name}: codes, which are all of it" for name in self.stored]
        lines += [f"{name}: in high precision, {why}" for name, why in self.in_high_precision.items()]
        return "\n".join(lines)


def gather_quantized(
    model: nn.Module, *, recipe: str | Recipe | None = None, skip: str | Sequence[str] = (), mesh: Any = None
) -> GatherReport:
    """Have torch's fully_shard gather the weights of a model's quantized layers as codes and scales.

    Call it on the whole model once it is converted, on all ranks alike, before fully_shard and before the optimizer is
    built. Parameters stay in high precision for optimizers, clipping and checkpoints.

    Args:
        model: `quaver.torch.convert`ed, or made of `quaver.torch.Linear` and blocks; on meta, too.
        recipe: of layers that have none of their own and will run in `quaver.torch.autocast` of this recipe.
        skip: patterns of names of layers to gather in high precision.
        mesh: the ranks that have this very model, with those of tensor parallelism; None takes all of the default
            group. A stage of a pipeline gives its own.
    Returns:
        Which weights travel as codes, and why others do not.
    Raises:
        ValueError: fully_shard or gather_quantized was called before, a weight is sharded already, or none is left
            to gather; on all ranks, where one of them cannot go on or has built another model. In a forward: a layer
            runs under another recipe than its weight was gathered for.
    Exact: outputs, gradients and updates are, bit for bit, those of fully_shard without it.
    Source: torchao's FP8 all-gather for FSDP2 (github.com/pytorch/ao, torchao/float8) has per-tensor scales; the
        agreement on blocks that several ranks share is ours.
    """
    gathers, prepared = _agreed_on(model, recipe, skip, mesh, {})
    for weight in prepared.weights:
        of_weight = weight.layer()
        assert of_weight is not None
        _prepare(of_weight, weight)
    for name in gathers.stored:
        layer = model.get_submodule(name)
        shard_codes(layer, name or type(layer).__name__, model)
        layer.register_state_dict_post_hook(_write_plain)
    return gathers


def refresh_gather(
    model: nn.Module, *, recipe: str | Recipe | None = None, skip: str | Sequence[str] = (), mesh: Any = None
) -> GatherReport:
    """Have fully_shard gather the weights of a model in the codes of the recipes that its layers have by now.

    Call it where `quaver.torch.convert` has given a sharded model other recipes, on all ranks alike, after an
    optimizer's step and before the next forward. Weights that no recipe has as codes travel in high precision, also
    those that were gathered as codes before, and the other way round.

    Args:
        model, recipe, skip, mesh: as `gather_quantized` takes them.
    Returns:
        Which weights travel as codes, and why others do not.
    Raises:
        ValueError: on all ranks, where one of them cannot go on or has another model; a weight is held by no
            fully_shard, or this torch has other names for what fully_shard keeps of it.
    Exact: what follows is what follows a checkpoint that is loaded into the model as it is now.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    units = {layer: unit for layer, name, unit in held_parameters(model) if name == "weight"}
    gathers, prepared = _agreed_on(model, recipe, skip, mesh, units)
    close(model)
    weights = {weight.layer(): weight for weight in prepared.weights}
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        weight, before = weights.get(layer), _prepared.get(layer)
        if weight is None and before is None:
            continue
        _prepare(layer, weight)
        units[layer].renew()
    return gathers


def _agreed_on(
    model: nn.Module,
    recipe: str | Recipe | None,
    skip: str | Sequence[str],
    mesh: Any,
    units: Mapping[nn.Module, FsdpParameter],
) -> tuple[GatherReport, ModelAmaxSync]:
    """`_prepared_of`, the same on all ranks."""
    patterns = [skip] if isinstance(skip, str) else list(skip)
    try:
        gathers, prepared = _prepared_of(model, None if recipe is None else recipes.get(recipe), patterns, units)
    except ValueError as error:
        # The other ranks would wait for this one.
        compare([], mesh, str(error))
        raise
    compare([*lines_of(model), *str(gathers).split("\n")], mesh)
    return gathers, prepared


def _prepared_of(
    model: nn.Module, chosen: Recipe | None, patterns: Sequence[str], units: Mapping[nn.Module, FsdpParameter]
) -> tuple[GatherReport, ModelAmaxSync]:
    """Which weights travel how, before anything is changed.

    Args:
        units: what fully_shard holds, by layer, where it does.
    """
    if not units:
        _refuse(model)
    gathers = GatherReport()
    prepared = ModelAmaxSync(model)
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    unused = set(patterns)
    for name, layer in model.named_modules():
        if isinstance(layer, GroupedLinear):
            gathers.in_high_precision[name] = _of_stack(layer, name)
        if not isinstance(layer, Linear):
            continue
        fits = {pattern for pattern in patterns if fnmatch(name, pattern)}
        unused -= fits
        of_layer = layer.recipe or chosen
        shape, across = _divided(layer, units.get(layer))
        why = "left out by name" if fits else _why_not(layer, of_layer, holders, shape, across)
        if not why and layer.weight_spec is not None:
            gathers.stored.append(name)
            continue
        if why:
            gathers.in_high_precision[name] = why
            continue
        assert of_layer is not None
        gathers.quantized[name] = of_layer
        if units and layer not in units:
            raise ValueError(f"{name}.weight is held by no fully_shard; call gather_quantized before fully_shard")
        n, k = shape
        prepared.weights.append(
            GatheredWeightState(layer, name or type(layer).__name__, of_layer, (n, k), prepared, across)
        )
    if unused:
        raise ValueError(f"no quantized layer has a name that fits {', '.join(map(repr, sorted(unused)))} of skip")
    if not prepared.weights and not gathers.stored and not units:
        raise ValueError(
            f"gather_quantized has no weight to gather as codes; call quaver.torch.convert(model, ...) before it, or "
            f"give recipe= for layers that run in an autocast\n{gathers}"
        )
    return gathers, prepared


def _of_stack(layer: GroupedLinear, name: str) -> str:
    """Why a stack of matrices travels as it is. Raises: ValueError, of codes that are trained."""
    if layer.weight_spec is not None and layer.weight.requires_grad:
        raise ValueError(
            f"{name}.weight is a stack of matrices in codes, of which fully_shard rounds gradients: call "
            "quaver.torch.dequantize_weights(model), freeze it, or leave it out with fully_shard's ignored_params"
        )
    return "a stack of matrices travels as it is"


def _refuse(model: nn.Module) -> None:
    """Raise a ValueError where it is too late."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or 'the model'} was given to fully_shard before gather_quantized, which says how weights are "
                "gathered: call gather_quantized(model) first, then fully_shard"
            )
        for key, parameter in module._parameters.items():
            if isinstance(parameter, Shard):
                raise ValueError(f"gather_quantized was called on {name or 'the model'} before; call it once")
            if isinstance(parameter, DTensor) and isinstance(module, Linear) and layout_of(module) is None:
                raise ValueError(
                    f"{name}.{key} is sharded already, over {parameter.device_mesh}: gather_quantized takes whole "
                    "weights, and those in parts by ColwiseParallel() and RowwiseParallel() of "
                    "quaver.torch.parallel; take these in the "
                    "place of torch's styles, or leave the layer unconverted"
                )


def _why_not(
    layer: Linear, recipe: Recipe | None, holders: Counter[int], shape: Sequence[int], across: TensorParallelShard
) -> str:
    """Why a layer's weight is gathered in high precision, or ""; see `_divided`."""
    weight = layer._parameters.get("weight")
    if layer.weight_spec is not None:
        if layer.weight_spec.format.packed and weight is not None and weight.requires_grad:
            raise ValueError(FOUR_BITS)
        return "another module holds it, too" if holders[id(weight)] > 1 else ""
    if recipe is None:
        return "it has no recipe of its own: give recipe="
    if not recipe.quantizes:
        return f"{recipe.name} quantizes nothing"
    if recipe.fprop.b is None or recipe.dgrad.b is None:
        return f"{recipe.name} multiplies by it in high precision, too"
    if recipe.dgrad.b.hadamard:
        return f"{recipe.name} rotates the rows of it that ranks divide"
    if weight is None and "weight" in layer._modules:
        return "its matrices lie in parts by themselves"
    if weight is None:
        return "a parametrization makes it"
    if weight.dtype not in DTYPES:
        return f"it is {weight.dtype}, which recipes leave alone"
    if holders[id(weight)] > 1:
        return "another module holds it, too"
    return _cut_through(shape, across.axis, recipe)


def _divided(layer: Linear, unit: FsdpParameter | None) -> tuple[Sequence[int], TensorParallelShard]:
    """The shape of what fully_shard divides of a layer's weight, or will, and how tensor parallelism has cut that."""
    weight: Any = layer._parameters.get("weight")
    if weight is None:
        return (), TensorParallelShard()
    part = local(weight)
    shape = (weight.shape if part is None else part.shape) if unit is None else unit.shape
    layout = layout_of(layer)
    if layout is None or not isinstance(weight, DTensor):
        return shape, TensorParallelShard()
    mesh: Any = weight.device_mesh
    if unit is not None:
        # Its last dimension is tensor parallelism's, before which fully_shard puts its own.
        mesh = mesh[mesh.mesh_dim_names[-1]]
    return shape, TensorParallelShard() if mesh.size() == 1 else TensorParallelShard(layout.weight_axis, mesh)


def _cut_through(shape: Sequence[int], axis: int | None, recipe: Recipe) -> str:
    """Which blocks of a weight tensor parallelism has cut through, which its layer refuses in a forward; or ""."""
    if axis is None:
        return ""
    for side in sides(recipe):
        needed = (side.height, side.width)[axis] or 1
        if axis == 1 and side.spec.hadamard and needed % 16:
            needed = 16
        if shape[axis] % needed:
            return f"ranks of tensor parallelism have {shape[axis]} features each, no multiple of {needed}"
    return ""


#: The weight of each layer that is prepared; None of one whose weight was gathered as codes, and is no more.
_prepared: "weakref.WeakKeyDictionary[nn.Module, GatheredWeightState | None]" = weakref.WeakKeyDictionary()


def _prepare(layer: nn.Module, weight: GatheredWeightState | None) -> None:
    """Have a layer's weight travel as codes, or as it is."""
    parameter = layer._parameters["weight"]
    assert parameter is not None
    part = local(parameter)
    if part is not None:
        # Of fully_shard, or of tensor parallelism, which fully_shard divides once more.
        plain = getattr(part, "plain", part).detach()
        set_local(parameter, plain if weight is None else Shard(plain, weight))
    elif weight is not None:
        layer._parameters["weight"] = nn.Parameter(Shard(parameter.detach(), weight), parameter.requires_grad)
    if layer not in _prepared:
        layer.register_state_dict_post_hook(_write_plain)
        layer.register_load_state_dict_post_hook(_prepare_again)
    _prepared[layer] = weight


def _write_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Make what a state dict has of a weight a tensor like any other, of the same memory."""
    key = prefix + "weight"
    value: Any = state_dict.get(key)
    part: Any = value if isinstance(value, Shard) else local(value)
    if not isinstance(part, Shard) or value.requires_grad:
        return
    if value is part:
        state_dict[key] = part.plain
    else:
        state_dict[key] = DTensor.from_local(
            part.plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def _prepare_again(module: nn.Module, _: object) -> None:
    """Loading with assign=True brings another parameter."""
    weight, parameter = _prepared.get(module), module._parameters.get("weight")
    if weight is None or parameter is None:
        return
    part = local(parameter)
    if part is None and not isinstance(parameter, Shard):
        module._parameters["weight"] = nn.Parameter(Shard(parameter.detach(), weight), parameter.requires_grad)
    elif part is not None and not isinstance(part, Shard):
        set_local(parameter, Shard(part, weight))


# ---- watching --------------------------------------------------------------------------------------------
# `CommCounter`: what a training step sends between ranks, for any loop.
#
# fully_shard sends by itself; it is asked to count by its own seam, a custom all-gather and reduce-scatter, which are
# taken back at the end.


class CommCounter(traffic.SentBytes):
    """What this rank sends to others while this is entered, by kind, and how long it waits.

        with CommCounter(model) as traffic:
            loss = step(batch)
        print(traffic.bytes, traffic.seconds)

    Kinds are "weights", "gradients", "activations", "keys_values", "amaxes" and "control". Counted is what this library
    sends, and what fully_shard does: not what torch's own tensor parallelism, pipelines that `stage` has not made, or
    DistributedDataParallel without `quantize_gradients` send. May be entered again, and then goes on; may be nested.

    Args:
        model: sharded by fully_shard, wholly or in part; None if nothing is.
        look: whether `nonfinite` is kept, which reads each gradient once more.
    Attributes:
        bytes: Counter by kind: what goes to other ranks, by the algorithms that send fewest. Where each of R ranks
            gives n bytes, an all-gather sends (R - 1) n, a reduce-scatter and an all-to-all (R - 1) n / R, an
            all-reduce twice that.
        calls: Counter of collectives by kind.
        seconds: of waiting for others and for what they send. Of a GPU's tensors, those that the stream of a collective
            stood still; fully_shard's stream does so beside the model's own. A gather that is waited for later
            (`set_unshard_in_backward`, asynchronous unsharding) is counted without its time, and so is what a
            pipeline's schedule waits for on GPUs.
        waiting: the kind that this rank waits for now, or "".
        nonfinite: bool tensor []: whether a gradient of this rank, before any sum over ranks, had a NaN or an infinity
            since `forget`; None without `look` or before the first.
    """

    def __init__(self, model: nn.Module | None = None, *, look: bool = False) -> None:
        super().__init__()
        self.model, self.look = model, look
        self.nonfinite: Tensor | None = None
        self._before: list[tuple[Collectives, Any, Any]] = []

    def forget(self) -> None:
        """Begin to look at gradients anew."""
        self.nonfinite = None

    def __enter__(self) -> "CommCounter":
        if any(each is self for each in traffic.active.all):
            raise ValueError("this CommCounter counts already, and would count twice; make another one")
        traffic.active.all += (self,)
        roll.watched.by, sync.watched.by = _of_histories, _of_headers
        if self.model is not None:
            self._attach(self.model)
        return self

    def also(self, model: nn.Module) -> None:
        """Count what fully_shard sends of another model, too, while this is entered."""
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        for unit in collectives(model):
            gather, scatter = unit.all_gather, unit.reduce_scatter
            self._before.append((unit, gather, scatter))
            unit.all_gather = _as(gather, _gathering(_kind(gather)), self, unit)
            unit.reduce_scatter = _as(scatter, _scattering(_kind(scatter)), self, unit)

    def __exit__(self, *_: object) -> None:
        for unit, gather, scatter in self._before:
            unit.all_gather, unit.reduce_scatter = gather, scatter
        self._before.clear()
        traffic.active.all = tuple(each for each in traffic.active.all if each is not self)

    def _see(self, gradient: Tensor) -> None:
        if self.look and gradient.numel():
            # One pass, and no sum that could overflow.
            bad = ~torch.linalg.vector_norm(gradient, float("inf")).isfinite()
            self.nonfinite = bad if self.nonfinite is None else self.nonfinite | bad


def _of_histories(maxima: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.during("amaxes", "reduce", maxima, group)


def _of_headers(header: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.during("control", "reduce", header, group)


def _as(comm: Any, kind: type, owner: CommCounter, unit: Collectives) -> Any:
    """A collective of fully_shard's as one of another class, which does the same and counts."""
    counting = copy.copy(comm)
    counting.__class__ = kind
    counting.owner, counting.unit = owner, unit
    return counting


@cache
def _gathering(kind: Any) -> type:
    """The class of an all-gather that counts, of the class of one."""

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        owner = (self.owner,)
        if async_op:
            traffic.count("weights", "gather", input_tensor, group, owner)
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)
        with traffic.during("weights", "gather", input_tensor, group, owner):
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)

    return _derived(kind, call)


@cache
def _scattering(kind: Any) -> type:
    """The class of a reduce-scatter that counts, of the class of one."""
    counts_itself = getattr(kind, "counts_itself", False)

    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        owner = (self.owner,)
        self.owner._see(input_tensor)
        if self.unit.replicas is not None:
            traffic.count("gradients", "reduce", output_tensor, self.unit.replicas, owner)
        with traffic.during("gradients", "scatter", input_tensor, group, () if counts_itself else owner):
            return kind.__call__(self, output_tensor, input_tensor, group, op, async_op)

    return _derived(kind, call)


def _derived(kind: Any, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _kind(x: Any) -> Any:
    return type(x)
