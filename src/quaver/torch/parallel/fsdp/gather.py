"""`gather_quantized`: have fully_shard all-gather weights as codes, and `CommCounter`: count what training sends."""

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
from quaver.torch.parallel.consistency import compare, describe_model
from quaver.torch.parallel.fsdp.amax_sync import (
    GatheredWeightState,
    ModelAmaxSync,
    TensorParallelShard,
    remove_forward_hooks,
)
from quaver.torch.parallel.fsdp.codes import shard_codes
from quaver.torch.parallel.fsdp.operands import weight_operands
from quaver.torch.parallel.fsdp.shard_tensors import Shard
from quaver.torch.parallel.fsdp.torch_internals import (
    Collectives,
    FsdpParameter,
    collectives,
    local,
    managed_parameters,
    set_local,
)
from quaver.torch.parallel.tensor.layers import layout_of
from quaver.torch.state.history import sync

# ---- gather_quantized ----


@dataclass(frozen=True)
class GatherReport:
    """How the weight of each quantized layer is gathered; its text has one line per layer."""

    #: Recipe in whose codes the weight is gathered, by layer name.
    quantized: dict[str, Recipe] = field(default_factory=dict)
    #: Names of layers whose weight is stored as codes and gathered unchanged.
    stored: list[str] = field(default_factory=list)
    #: Reason why the weight is gathered in high precision, by layer name.
    in_high_precision: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name}: codes of {recipe.name}" for name, recipe in self.quantized.items()]
        lines += [f"{name}: codes, as stored" for name in self.stored]
        lines += [f"{name}: in high precision, {why}" for name, why in self.in_high_precision.items()]
        return "\n".join(lines)


def gather_quantized(
    model: nn.Module, *, recipe: str | Recipe | None = None, skip: str | Sequence[str] = (), mesh: Any = None
) -> GatherReport:
    """Have torch's fully_shard all-gather the weights of a model's quantized layers as codes and scales.

    Call it on all ranks on the whole converted model, before fully_shard and before the optimizer is built. Parameters
    stay in high precision for optimizers, gradient clipping and checkpoints.

    Args:
        model: converted by `quaver.torch.convert`, or built of `quaver.torch.Linear` and blocks; may be on meta.
        recipe: recipe of layers that have none of their own and will run in `quaver.torch.autocast` of this recipe.
        skip: glob patterns of names of layers to gather in high precision.
        mesh: DeviceMesh of the ranks that hold this same model, including those of tensor parallelism; None means the
            default group. A pipeline stage passes its own mesh.
    Returns:
        A report of the weights that are gathered as codes, and why others are not.
    Raises:
        ValueError: fully_shard or gather_quantized was called before, a weight is already sharded, or no weight is left
            to gather. Raised on all ranks if one of them fails or has built another model. Later, in a forward: a layer
            runs under another recipe than its weight was gathered for.
    Exact: outputs, gradients and updates are bit for bit those of fully_shard without it.
    Source: torchao's FP8 all-gather for FSDP2 (github.com/pytorch/ao, torchao/float8) has per-tensor scales; the
        agreement on blocks that cross shards is Quaver's.
    """
    report, amax_sync = _choose_gathers_checked(model, recipe, skip, mesh, {})
    for weight_state in amax_sync.weight_states:
        layer = weight_state.layer()
        assert layer is not None
        _prepare(layer, weight_state)
    for name in report.stored:
        layer = model.get_submodule(name)
        shard_codes(layer, name or type(layer).__name__, model)
        layer.register_state_dict_post_hook(_write_plain)
    return report


def refresh_gather(
    model: nn.Module, *, recipe: str | Recipe | None = None, skip: str | Sequence[str] = (), mesh: Any = None
) -> GatherReport:
    """Update the gathers of a sharded model to the recipes that its layers have now.

    Call it on all ranks after `quaver.torch.convert` has changed the recipes of a sharded model, after an optimizer
    step and before the next forward. Weights may switch from codes to high precision and back.

    Args:
        model, recipe, skip, mesh: as in `gather_quantized`.
    Returns:
        A report of the weights that are gathered as codes, and why others are not.
    Raises:
        ValueError: on all ranks, if one of them fails or has another model, if fully_shard does not manage a weight, or
            if this torch has other fully_shard internals.
    Exact: training continues as if a checkpoint was loaded into a new model with the present recipes.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    fsdp_parameters = {layer: p for layer, name, p in managed_parameters(model) if name == "weight"}
    report, amax_sync = _choose_gathers_checked(model, recipe, skip, mesh, fsdp_parameters)
    remove_forward_hooks(model)
    weight_states = {weight_state.layer(): weight_state for weight_state in amax_sync.weight_states}
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        weight_state, before = weight_states.get(layer), _prepared.get(layer)
        if weight_state is None and before is None:
            continue
        _prepare(layer, weight_state)
        fsdp_parameters[layer].reinitialize()
    return report


def _choose_gathers_checked(
    model: nn.Module,
    recipe: str | Recipe | None,
    skip: str | Sequence[str],
    mesh: Any,
    fsdp_parameters: Mapping[nn.Module, FsdpParameter],
) -> tuple[GatherReport, ModelAmaxSync]:
    """Call `_choose_gathers` and check that all ranks get the same result."""
    patterns = [skip] if isinstance(skip, str) else list(skip)
    try:
        report, amax_sync = _choose_gathers(
            model, None if recipe is None else recipes.get(recipe), patterns, fsdp_parameters
        )
    except ValueError as error:
        # The other ranks would otherwise wait for this one.
        compare([], mesh, str(error))
        raise
    compare([*describe_model(model), *str(report).split("\n")], mesh)
    return report, amax_sync


def _choose_gathers(
    model: nn.Module,
    default_recipe: Recipe | None,
    patterns: Sequence[str],
    fsdp_parameters: Mapping[nn.Module, FsdpParameter],
) -> tuple[GatherReport, ModelAmaxSync]:
    """Choose how each weight is gathered, without changing the model.

    Args:
        model: the model.
        default_recipe: recipe of layers without one.
        patterns: glob patterns of layers to gather in high precision.
        fsdp_parameters: fully_shard's object by layer, empty before fully_shard.
    """
    if not fsdp_parameters:
        _check_unsharded(model)
    report = GatherReport()
    amax_sync = ModelAmaxSync(model)
    sharing_counts = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    unused = set(patterns)
    for name, layer in model.named_modules():
        if isinstance(layer, GroupedLinear) and layer.weight_spec is None:
            report.in_high_precision[name] = "a stack of matrices is gathered unchanged"
        elif isinstance(layer, GroupedLinear):
            _check_frozen_stack(layer, name)
            report.stored.append(name)
        if not isinstance(layer, Linear):
            continue
        fits = {pattern for pattern in patterns if fnmatch(name, pattern)}
        unused -= fits
        layer_recipe = layer.recipe or default_recipe
        shape, tensor_parallel = _tp_sharding(layer, fsdp_parameters.get(layer))
        why = "left out by name" if fits else _why_not(layer, layer_recipe, sharing_counts, shape, tensor_parallel)
        if not why and layer.weight_spec is not None:
            report.stored.append(name)
            continue
        if why:
            report.in_high_precision[name] = why
            continue
        assert layer_recipe is not None
        report.quantized[name] = layer_recipe
        if fsdp_parameters and layer not in fsdp_parameters:
            raise ValueError(f"{name}.weight is not managed by fully_shard; call gather_quantized before fully_shard")
        n, k = shape
        amax_sync.weight_states.append(
            GatheredWeightState(layer, name or type(layer).__name__, layer_recipe, (n, k), amax_sync, tensor_parallel)
        )
    if unused:
        raise ValueError(f"no quantized layer has a name that matches {', '.join(map(repr, sorted(unused)))} in skip")
    if not amax_sync.weight_states and not report.stored and not fsdp_parameters:
        raise ValueError(
            f"gather_quantized has no weight to gather as codes; call quaver.torch.convert(model, ...) before it, or "
            f"give recipe= for layers that run in an autocast\n{report}"
        )
    return report, amax_sync


def _check_frozen_stack(layer: GroupedLinear, name: str) -> None:
    """Raise a ValueError if a stored stack of matrices is trained, which optimizers do not support on shards."""
    if layer.weight.requires_grad:
        raise ValueError(
            f"{name}.weight is a trainable stack of matrices stored as codes, which optimizers cannot step "
            "in shards: call quaver.torch.dequantize_weights(model), freeze it, or leave it out with "
            "fully_shard's ignored_params"
        )


def _check_unsharded(model: nn.Module) -> None:
    """Raise a ValueError if the model is already sharded or prepared."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or 'the model'} was sharded by fully_shard before gather_quantized, which decides how "
                "weights are gathered: call gather_quantized(model) first, then fully_shard"
            )
        for key, parameter in module._parameters.items():
            if isinstance(parameter, Shard):
                raise ValueError(f"gather_quantized was called on {name or 'the model'} before; call it once")
            if isinstance(parameter, DTensor) and isinstance(module, Linear) and layout_of(module) is None:
                raise ValueError(
                    f"{name}.{key} is already sharded, over {parameter.device_mesh}: gather_quantized accepts "
                    "whole weights, and those sharded by ColwiseParallel() and RowwiseParallel() of "
                    "quaver.torch.parallel; use these instead of torch's styles, or leave the layer "
                    "unconverted"
                )


def _why_not(
    layer: Linear,
    recipe: Recipe | None,
    sharing_counts: Counter[int],
    shape: Sequence[int],
    tensor_parallel: TensorParallelShard,
) -> str:
    """Return why a layer's weight is gathered in high precision, or "".

    `shape` and `tensor_parallel` come from `_tp_sharding`.
    """
    weight = layer._parameters.get("weight")
    if layer.weight_spec is not None:
        if layer.weight_spec.format.packed and weight is not None and weight.requires_grad:
            raise ValueError(FOUR_BITS)
        return "another module shares it" if sharing_counts[id(weight)] > 1 else ""
    if recipe is None:
        return "it has no recipe of its own: give recipe="
    if not recipe.quantizes:
        return f"{recipe.name} quantizes nothing"
    if recipe.fprop.b is None or recipe.dgrad.b is None:
        return f"{recipe.name} also multiplies by it in high precision"
    if recipe.dgrad.b.hadamard:
        return f"{recipe.name} rotates its rows, which ranks shard"
    if weight is None and "weight" in layer._modules:
        return "its matrices are separate parameters"
    if weight is None:
        return "a parametrization computes it"
    if weight.dtype not in DTYPES:
        return f"it is {weight.dtype}, which recipes do not quantize"
    if sharing_counts[id(weight)] > 1:
        return "another module shares it"
    return _cut_block_reason(shape, tensor_parallel.axis, recipe)


def _tp_sharding(layer: Linear, fsdp_parameter: FsdpParameter | None) -> tuple[Sequence[int], TensorParallelShard]:
    """Return the shape of the tensor that fully_shard shards, and how tensor parallelism has sharded it before."""
    weight: Any = layer._parameters.get("weight")
    if weight is None:
        return (), TensorParallelShard()
    shard = local(weight)
    shape = (weight.shape if shard is None else shard.shape) if fsdp_parameter is None else fsdp_parameter.shape
    layout = layout_of(layer)
    if layout is None or not isinstance(weight, DTensor):
        return shape, TensorParallelShard()
    mesh: Any = weight.device_mesh
    if fsdp_parameter is not None:
        # The last mesh dimension is tensor parallelism's; fully_shard's precedes it.
        mesh = mesh[mesh.mesh_dim_names[-1]]
    return shape, TensorParallelShard() if mesh.size() == 1 else TensorParallelShard(layout.weight_axis, mesh)


def _cut_block_reason(shape: Sequence[int], axis: int | None, recipe: Recipe) -> str:
    """Return a message if tensor parallelism has cut blocks, which the layer's forward would reject; else ""."""
    if axis is None:
        return ""
    for operand in weight_operands(recipe):
        needed = (operand.height, operand.width)[axis] or 1
        if axis == 1 and operand.spec.hadamard and needed % 16:
            needed = 16
        if shape[axis] % needed:
            return f"ranks of tensor parallelism have {shape[axis]} features each, which is no multiple of {needed}"
    return ""


#: State of each prepared layer; None if its weight was once gathered as codes but no longer is.
_prepared: "weakref.WeakKeyDictionary[nn.Module, GatheredWeightState | None]" = weakref.WeakKeyDictionary()


def _prepare(layer: nn.Module, weight_state: GatheredWeightState | None) -> None:
    """Switch a layer's weight to gathers of codes, or to high precision if `weight_state` is None."""
    parameter = layer._parameters["weight"]
    assert parameter is not None
    shard = local(parameter)
    if shard is not None:
        # The local tensor is fully_shard's shard, or a tensor-parallel shard that fully_shard will shard again.
        plain = getattr(shard, "plain", shard).detach()
        set_local(parameter, plain if weight_state is None else Shard(plain, weight_state))
    elif weight_state is not None:
        layer._parameters["weight"] = nn.Parameter(Shard(parameter.detach(), weight_state), parameter.requires_grad)
    if layer not in _prepared:
        layer.register_state_dict_post_hook(_write_plain)
        layer.register_load_state_dict_post_hook(_prepare_again)
    _prepared[layer] = weight_state


def _write_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace a Shard in a state dict by the plain tensor with the same memory."""
    key = prefix + "weight"
    value: Any = state_dict.get(key)
    shard: Any = value if isinstance(value, Shard) else local(value)
    if not isinstance(shard, Shard) or value.requires_grad:
        return
    if value is shard:
        state_dict[key] = shard.plain
    else:
        state_dict[key] = DTensor.from_local(
            shard.plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


def _prepare_again(module: nn.Module, _: object) -> None:
    """Wrap the weight again: load_state_dict with assign=True replaces the parameter."""
    weight_state, parameter = _prepared.get(module), module._parameters.get("weight")
    if weight_state is None or parameter is None:
        return
    shard = local(parameter)
    if shard is None and not isinstance(parameter, Shard):
        module._parameters["weight"] = nn.Parameter(Shard(parameter.detach(), weight_state), parameter.requires_grad)
    elif shard is not None and not isinstance(shard, Shard):
        set_local(parameter, Shard(shard, weight_state))


# ---- CommCounter ----
# fully_shard's traffic is counted through its own extension point: a custom all-gather and reduce-scatter, which are
# removed at the end.


class CommCounter(traffic.SentBytes):
    """Count the bytes that this rank sends to others, by kind, and the time it waits, while the context is active.

        with CommCounter(model) as traffic:
            loss = step(batch)
        print(traffic.bytes, traffic.seconds)

    Kinds are "weights", "gradients", "activations", "keys_values", "amaxes" and "control". It counts what Quaver and
    fully_shard send. It does not count torch's own tensor parallelism, pipelines not made by `pipeline_stage`, or
    DistributedDataParallel without `quantize_gradients`. The context may be entered again to continue counting, and
    different counters may be nested.

    Args:
        model: model with fully_shard on all or some modules; None if nothing is sharded.
        look: set `nonfinite`, at the cost of reading each gradient once more.
    Attributes:
        bytes: Counter by kind of bytes sent to other ranks, assuming the algorithm that sends fewest. If each of R
            ranks contributes n bytes, an all-gather sends (R - 1) n, a reduce-scatter or all-to-all (R - 1) n / R, and
            an all-reduce twice that.
        calls: Counter of collectives by kind.
        seconds: seconds spent waiting for collectives. For GPU tensors, time that the collective's stream stood still;
            fully_shard's stream does so beside the model's own. Gathers that are waited for later
            (`set_unshard_in_backward`, asynchronous unsharding) are counted without their time, and so are a pipeline
            schedule's waits on GPUs.
        waiting: the kind of traffic that this rank waits for now, or "".
        nonfinite: bool tensor [], True if a gradient of this rank, before any sum over ranks, had a NaN or an infinity
            since `forget`; None without `look` or before the first gradient.
    """

    def __init__(self, model: nn.Module | None = None, *, look: bool = False) -> None:
        super().__init__()
        self.model, self.look = model, look
        self.nonfinite: Tensor | None = None
        self._before: list[tuple[Collectives, Any, Any]] = []

    def forget(self) -> None:
        """Reset `nonfinite`."""
        self.nonfinite = None

    def __enter__(self) -> "CommCounter":
        if any(each is self for each in traffic.active.all):
            raise ValueError("this CommCounter is already counting; make another one")
        traffic.active.all += (self,)
        sync.watched.of_rows, sync.watched.by = _of_histories, _of_headers
        if self.model is not None:
            self._attach(self.model)
        return self

    def also(self, model: nn.Module) -> None:
        """Also count fully_shard's traffic of another model until the context ends."""
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        for fsdp_group in collectives(model):
            gather, scatter = fsdp_group.all_gather, fsdp_group.reduce_scatter
            self._before.append((fsdp_group, gather, scatter))
            fsdp_group.all_gather = _as(gather, _gathering(_kind(gather)), self, fsdp_group)
            fsdp_group.reduce_scatter = _as(scatter, _scattering(_kind(scatter)), self, fsdp_group)

    def __exit__(self, *_: object) -> None:
        for fsdp_group, gather, scatter in self._before:
            fsdp_group.all_gather, fsdp_group.reduce_scatter = gather, scatter
        self._before.clear()
        traffic.active.all = tuple(each for each in traffic.active.all if each is not self)

    def _see(self, gradient: Tensor) -> None:
        if self.look and gradient.numel():
            # A single pass with no sum that could overflow.
            bad = ~torch.linalg.vector_norm(gradient, float("inf")).isfinite()
            self.nonfinite = bad if self.nonfinite is None else self.nonfinite | bad


def _of_histories(maxima: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("amaxes", "reduce", maxima, group)


def _of_headers(header: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("control", "reduce", header, group)


def _as(comm: Any, kind: type, owner: CommCounter, fsdp_group: Collectives) -> Any:
    """Copy a fully_shard collective and change its class to one that counts."""
    counting = copy.copy(comm)
    counting.__class__ = kind
    counting.owner, counting.fsdp_group = owner, fsdp_group
    return counting


@cache
def _gathering(kind: Any) -> type:
    """Return a subclass of an all-gather class that counts its traffic."""

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        owner = (self.owner,)
        if async_op:
            traffic.count("weights", "gather", input_tensor, group, owner)
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)
        with traffic.count_collective("weights", "gather", input_tensor, group, owner):
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)

    return _derived(kind, call)


@cache
def _scattering(kind: Any) -> type:
    """Return a subclass of a reduce-scatter class that counts its traffic and checks gradients for NaN and infinity."""
    counts_itself = getattr(kind, "counts_itself", False)

    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        owner = (self.owner,)
        self.owner._see(input_tensor)
        if self.fsdp_group.replicas is not None:
            traffic.count("gradients", "reduce", output_tensor, self.fsdp_group.replicas, owner)
        with traffic.count_collective("gradients", "scatter", input_tensor, group, () if counts_itself else owner):
            return kind.__call__(self, output_tensor, input_tensor, group, op, async_op)

    return _derived(kind, call)


def _derived(kind: Any, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _kind(x: Any) -> Any:
    return type(x)
