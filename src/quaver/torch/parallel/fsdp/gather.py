"""`gather_quantized`: have fully_shard all-gather weights as codes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.linear import Linear
from quaver.torch.linear.stored_weight import FOUR_BITS
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel.consistency import compare_models
from quaver.torch.parallel.fsdp.codes import shard_codes
from quaver.torch.parallel.fsdp.scales import GatheredModelState, GatheredWeightState
from quaver.torch.parallel.fsdp.shards import Shard, wrap
from quaver.torch.parallel.fsdp.torch_internals import FsdpParameter, local, managed_parameters
from quaver.torch.parallel.tensor.layers import layout_of


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
        If `fully_shard` gives a rank part of a block, it gathers that weight in high precision, and
        `quaver.torch.explain` names it.
    Source: torchao's FP8 all-gather for FSDP2 (github.com/pytorch/ao, torchao/float8) has per-tensor scales; scales of
        blocks, rows and columns are Quaver's.
    """
    report, states = _choose_gathers(model, recipe, skip, mesh, {})
    for state in states:
        layer = state.layer()
        assert layer is not None
        wrap(layer, Shard, state)
    for name in report.stored:
        layer = model.get_submodule(name)
        shard_codes(layer, name or type(layer).__name__, model)
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
    report, states = _choose_gathers(model, recipe, skip, mesh, fsdp_parameters)
    for shard in (local(p) for p in model.parameters()):
        if type(shard) is Shard and shard.weight_state.model.hook is not None:
            # Not left to garbage collection, whose time differs between ranks.
            shard.weight_state.model.hook.remove()
    by_layer = {state.layer(): state for state in states}
    for layer in [module for module in model.modules() if isinstance(module, Linear)]:
        shard, state = local(layer._parameters.get("weight")), by_layer.get(layer)
        if state is not None or type(shard) is Shard:
            wrap(layer, Shard, state)
            fsdp_parameters[layer].reinitialize()
    return report


def _choose_gathers(
    model: nn.Module,
    recipe: str | Recipe | None,
    skip: str | Sequence[str],
    mesh: Any,
    fsdp_parameters: Mapping[nn.Module, FsdpParameter],
) -> tuple[GatherReport, list[GatheredWeightState]]:
    """Choose how each weight is gathered, without changing the model, and check that all ranks choose the same.

    Args:
        model, recipe, skip, mesh: as in `gather_quantized`.
        fsdp_parameters: fully_shard's object by layer, empty before fully_shard.
    """
    report, model_state = GatherReport(), GatheredModelState(model)
    try:
        if not fsdp_parameters:
            _check_unsharded(model)
        default_recipe = None if recipe is None else recipes.get(recipe)
        patterns = [skip] if isinstance(skip, str) else list(skip)
        sharing = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}
        names = [name for name, layer in layers.items() if isinstance(layer, Linear)]
        unused = ", ".join(repr(p) for p in sorted(patterns) if not any(fnmatch(name, p) for name in names))
        if unused:
            raise ValueError(f"no quantized layer has a name that matches {unused} in skip")
        for name, layer in layers.items():
            own_recipe = layer.recipe or default_recipe
            if isinstance(layer, GroupedLinear):
                why = _why_stack_in_high_precision(layer, name)
            elif any(fnmatch(name, pattern) for pattern in patterns):
                why = "left out by name"
            else:
                why = _why_in_high_precision(layer, own_recipe, sharing)
            if why:
                report.in_high_precision[name] = why
                continue
            if layer.weight_spec is not None:
                report.stored.append(name)
                continue
            assert own_recipe is not None
            if fsdp_parameters and layer not in fsdp_parameters:
                raise ValueError(
                    f"{name}.weight is not managed by fully_shard; call gather_quantized before fully_shard"
                )
            weight = _weight_state(model_state, layer, name, own_recipe, fsdp_parameters.get(layer))
            why = weight.why_high_precision
            if why:
                report.in_high_precision[name] = why
            else:
                report.quantized[name] = own_recipe
                model_state.weights.append(weight)
        if not model_state.weights and not report.stored and not fsdp_parameters:
            raise ValueError(
                "gather_quantized has no weight to gather as codes; call quaver.torch.convert(model, ...) before it, "
                f"or give recipe= for layers that run in an autocast\n{report}"
            )
    except ValueError as error:
        # The other ranks would otherwise wait for this one.
        compare_models(model, mesh, error=error)
        raise
    gathers = (line.partition(": ") for line in str(report).splitlines())
    compare_models(model, mesh, {f"gather of {name}": how for name, _, how in gathers})
    return report, model_state.weights


def _why_stack_in_high_precision(layer: GroupedLinear, name: str) -> str:
    """Return why a stack of matrices is not gathered as stored codes, or ""; raise a ValueError if it is trained ones,
    which optimizers do not support on shards.
    """
    if layer.weight_spec is None:
        return "a stack of matrices is gathered unchanged"
    if layer.weight.requires_grad:
        raise ValueError(
            f"{name}.weight is a trainable stack of matrices stored as codes, which optimizers cannot step "
            "in shards: call quaver.torch.dequantize_weights(model), freeze it, or leave it out with "
            "fully_shard's ignored_params"
        )
    return ""


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


def _why_in_high_precision(layer: Linear, recipe: Recipe | None, sharing: Counter[int]) -> str:
    """Return why a layer's weight is gathered in high precision, whatever its shape, or "".

    Args:
        layer: the layer.
        recipe: its recipe.
        sharing: number of modules that have a parameter, by its id.
    """
    weight = layer._parameters.get("weight")
    if layer.weight_spec is not None:
        if layer.weight_spec.format.packed and weight is not None and weight.requires_grad:
            raise ValueError(FOUR_BITS)
        return "another module shares it" if sharing[id(weight)] > 1 else ""
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
    return "another module shares it" if sharing[id(weight)] > 1 else ""


def _weight_state(
    model: GatheredModelState, layer: nn.Module, name: str, recipe: Recipe, fsdp_parameter: FsdpParameter | None
) -> GatheredWeightState:
    """Return the state of a weight that is gathered as codes."""
    weight: Any = layer._parameters["weight"]
    shard, layout, tp_axis, tp_mesh = local(weight), layout_of(layer), None, None
    n, k = (weight.shape if shard is None else shard.shape) if fsdp_parameter is None else fsdp_parameter.shape
    if layout is not None and isinstance(weight, DTensor):
        tp_mesh = weight.device_mesh
        if fsdp_parameter is not None:
            # The last mesh dimension is tensor parallelism's; fully_shard's precedes it.
            tp_mesh = tp_mesh[tp_mesh.mesh_dim_names[-1]]
        tp_axis, tp_mesh = (None, None) if tp_mesh.size() == 1 else (layout.weight_axis, tp_mesh)
    state = GatheredWeightState(model, layer, name or type(layer).__name__, recipe, (n, k), tp_axis, tp_mesh)
    state.mesh = None if fsdp_parameter is None else fsdp_parameter.mesh
    return state
