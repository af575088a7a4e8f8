"""`gather_quantized`: which weights of a model fully_shard gathers as codes, and what a model needs for that."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver import recipes
from quaver.core.spec import Recipe
from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.layer import Linear
from quaver.torch.linear.stored.stored import FOUR_BITS
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel.alike.comparing import compare, lines_of
from quaver.torch.parallel.fsdp.agreeing import Across, Model, Weight, close
from quaver.torch.parallel.fsdp.codes import shard_codes
from quaver.torch.parallel.fsdp.cutting import sides
from quaver.torch.parallel.fsdp.shards import Shard
from quaver.torch.parallel.fsdp.units import Unit, held_parameters, local, set_local
from quaver.torch.parallel.tensor.layers import layout_of


@dataclass(frozen=True)
class Gathers:
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
) -> Gathers:
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


def gather_again(
    model: nn.Module, *, recipe: str | Recipe | None = None, skip: str | Sequence[str] = (), mesh: Any = None
) -> Gathers:
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
    model: nn.Module, recipe: str | Recipe | None, skip: str | Sequence[str], mesh: Any, units: Mapping[nn.Module, Unit]
) -> tuple[Gathers, Model]:
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
    model: nn.Module, chosen: Recipe | None, patterns: Sequence[str], units: Mapping[nn.Module, Unit]
) -> tuple[Gathers, Model]:
    """Which weights travel how, before anything is changed.

    Args:
        units: what fully_shard holds, by layer, where it does.
    """
    if not units:
        _refuse(model)
    gathers = Gathers()
    prepared = Model(model)
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
        prepared.weights.append(Weight(layer, name or type(layer).__name__, of_layer, (n, k), prepared, across))
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
                    "weights, and those in parts by Column() and Row() of quaver.torch.parallel; take these in the "
                    "place of torch's styles, or leave the layer unconverted"
                )


def _why_not(layer: Linear, recipe: Recipe | None, holders: Counter[int], shape: Sequence[int], across: Across) -> str:
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


def _divided(layer: Linear, unit: Unit | None) -> tuple[Sequence[int], Across]:
    """The shape of what fully_shard divides of a layer's weight, or will, and how tensor parallelism has cut that."""
    weight: Any = layer._parameters.get("weight")
    if weight is None:
        return (), Across()
    part = local(weight)
    shape = (weight.shape if part is None else part.shape) if unit is None else unit.shape
    layout = layout_of(layer)
    if layout is None or not isinstance(weight, DTensor):
        return shape, Across()
    mesh: Any = weight.device_mesh
    if unit is not None:
        # Its last dimension is tensor parallelism's, before which fully_shard puts its own.
        mesh = mesh[mesh.mesh_dim_names[-1]]
    return shape, Across() if mesh.size() == 1 else Across(layout.weight_axis, mesh)


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
_prepared: "weakref.WeakKeyDictionary[nn.Module, Weight | None]" = weakref.WeakKeyDictionary()


def _prepare(layer: nn.Module, weight: Weight | None) -> None:
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
