"""Create, write, move, save and load weights stored as codes; see `quaver.torch.linear.stored_weight`."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.linear.stored_weight import (
    CODE_DTYPES,
    CODES,
    SCALES,
    dequantized,
    is_stored_transposed,
    record_versions,
)
from quaver.torch.numerics.rounding import NO_NOISE
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import empty_parts, parts
from quaver.torch.state import weight_cache
from quaver.torch.state.layer_state import state_of

#: Attributes that only such a layer has.
ABOUT = ("weight_spec", "weight_dtype", "keep_initial", "versions")


#: Attribute of a parameter that a layer no longer uses: name of the function that replaced it.
REPLACED = "quaver_replaced_by"
#: Part of the error message for formats whose codes cannot be a parameter.
NO_DTYPE = f"for whose codes torch has no dtype; weights can be stored as codes in {', '.join(CODE_DTYPES)}"


#: Warning for a PEFT method applied to codes without `quaver.integrations.peft.over_codes`.
ADAPTED = (
    "PEFT adds an adapter of its own to weights that are stored as codes: it trains, but cannot be merged into them. "
    "For LoRA call get_peft_model(model, quaver.integrations.peft.over_codes(config)); for another method call "
    "quaver.torch.dequantize_weights(model) first"
)


class ShardedStoredWeight(Protocol):
    """Interface of a parameter [N, K] of codes, or of its shard, under fully_shard. It shows a float dtype, because
    fully_shard gives gradients the dtype of the parameter.
    """

    @property
    def plain(self) -> Tensor:
        """The codes."""

    @property
    def layer_of_codes(self) -> "nn.Module | None":
        """Layer whose weight these codes are."""

    @property
    def name_of_codes(self) -> str:
        """Name of that layer in its model."""

    def as_bytes(self, parameter: Tensor) -> Tensor:
        """View the codes as uint8, in the parameter's layout."""

    def with_bytes(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        """Return a parameter like this one with other bytes, in the form that `as_bytes` returns."""


def divided(weight: Any) -> ShardedStoredWeight | None:
    """Return the parameter (or its local shard) as `ShardedStoredWeight`, or None if it is not one."""
    if hasattr(weight, "layer_of_codes"):
        of_whole: ShardedStoredWeight = weight
        return of_whole
    if not hasattr(weight, "device_mesh"):
        return None
    with torch.no_grad():
        part: Any = weight.to_local()
    return part if hasattr(part, "layer_of_codes") else None


def holds_codes(weight: Tensor) -> bool:
    """Return True if the parameter is codes, sharded or not."""
    return weight.dtype in CODES or divided(weight) is not None


class _Construction(threading.local):
    """Arguments of the active `quantized_init`: spec of new weights, and whether initial values are kept."""

    now: tuple[QuantSpec, bool] | None = None


construction = _Construction()


def store_if_quantized_init(layer: Any) -> None:
    """Quantize the weight of a new layer if it is constructed under `quantized_init`."""
    if construction.now is not None:
        store(layer, *construction.now)


def weight_spec(recipe: Recipe) -> QuantSpec | None:
    """Return the spec for storing the weights of a recipe: fprop's, without stochastic rounding and rotation.

    Raises:
        ValueError: torch has no dtype for the codes of this format.
    """
    spec = recipe.fprop.b
    if spec is not None and spec.format.name not in CODE_DTYPES:
        raise ValueError(
            f"recipe {recipe.name!r} has weights in {spec.format}, {NO_DTYPE}: use it without quantized_init, with "
            "weights in high precision"
        )
    return None if spec is None else replace(spec, rounding="nearest", hadamard=False)


def store(layer: Any, spec: QuantSpec, keep_initial: bool = False) -> None:
    """Replace a layer's weight by codes and scales.

    Raises:
        ValueError: the weight is not float32, bfloat16 or float16.
    """
    weight = layer.weight
    if weight.dtype not in ops.DTYPES:
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features} → {layer.out_features}) has {weight.dtype} weights; only "
            "float32, bfloat16 and float16 ones are quantized: convert the layer, or make it outside of quantized_init"
        )
    layer.__dict__.update(weight_spec=spec, weight_dtype=weight.dtype, keep_initial=keep_initial)
    if keep_initial:
        _keep_initial(layer, weight)
    codes, scales = encode(weight, spec, is_stored_transposed(layer))
    setattr(weight, REPLACED, "quantize_weights")
    layer._parameters["weight"] = nn.Parameter(codes, requires_grad=not spec.format.packed and weight.requires_grad)
    for name, value in scales.items():
        layer.register_buffer(name, value)
    register_stored_weight(layer)


def narrow_gradient(layer: Any) -> None:
    """Make the gradient of a stored weight `weight_dtype` instead of float32."""
    layer.__dict__["nominal_gradient"] = True
    if layer.weight_spec is not None:
        register_stored_weight(layer)


def restore(layer: Any) -> None:
    """Replace the codes by a weight in the original dtype."""
    weight = layer.weight
    value = dequantized(layer, weight, layer.__dict__["weight_dtype"])
    setattr(weight, REPLACED, "dequantize_weights")
    layer._parameters["weight"] = nn.Parameter(value, requires_grad=weight.requires_grad)
    for name in SCALES:
        layer._buffers.pop(name, None)
    for name in ABOUT:
        layer.__dict__.pop(name, None)
    state_of(layer).initial = None
    _stored.discard(layer)
    weight_cache.drop(layer)


def encode(value: Tensor, spec: QuantSpec, transposed: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Quantize a weight [N, K] or a stack of them; return codes, and scales by buffer name.

    Args:
        transposed: True if the matrices of a stack are stored as [K, N], codes included.
    """
    if value.dim() == 3:
        each = [_encoded(matrix.t() if transposed else matrix, spec, transposed) for matrix in value]
        like = _encoded(value.new_empty(value.shape[1:], device="meta"), spec, transposed)
        codes, scale, factor = (
            torch.stack(tensors) if tensors else empty.new_empty((0, *empty.shape), device=value.device)
            for tensors, empty in zip(list(zip(*each, strict=True)) or [()] * 3, like, strict=True)
        )
    else:
        codes, scale, factor = _encoded(value, spec, False)
    scales = {"weight_scale": scale, "weight_factor": factor} if spec.two_level else {"weight_scale": scale}
    return codes.detach().view(CODE_DTYPES[spec.format.name]), scales


def _encoded(value: Tensor, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix [N, K]; if `transposed`, return transposed codes and scales, except for packed codes."""
    if value.is_meta:
        return empty_parts(value, spec, transposed and not spec.format.packed)[:3]
    value = value.detach() if transposed else value.detach().contiguous()
    value = value if value.dtype in ops.DTYPES else value.float()
    return parts(ops.QUANTIZE(value, spec, None, None, NO_NOISE), transposed)[:3]


def shape_of(layer: Any) -> tuple[int, ...]:
    """Return the shape of a layer's weight in high precision, in the layer's layout."""
    shape = (layer.out_features, layer.in_features)
    if layer._parameters["weight"].dim() == 2:
        return shape
    return layer._parameters["weight"].shape[0], *(shape[::-1] if is_stored_transposed(layer) else shape)


@torch.no_grad()
def write(layer: Any, value: Tensor) -> None:
    """Quantize a new value [N, K] into the codes and scales, in place.

    Raises:
        ValueError: the value has another shape.
    """
    if value.shape != shape_of(layer):
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features} → {layer.out_features}) got a weight of shape "
            f"{tuple(value.shape)}; it must be {shape_of(layer)}"
        )
    spec = layer.__dict__.get("weight_spec")
    if spec is None:
        layer.weight.copy_(value)
        return
    codes, scales = encode(value.to(layer.weight.device), spec, is_stored_transposed(layer))
    layer.weight.copy_(codes)
    for name, scale in scales.items():
        layer._buffers[name].copy_(scale)
    record_versions(layer)


@torch.no_grad()
def reset(layer: nn.Linear) -> None:
    """Initialize weight and bias as nn.Linear does."""
    dtype, biased = layer.__dict__["weight_dtype"], layer.bias is not None
    fresh = nn.Linear(layer.in_features, layer.out_features, biased, device=layer.weight.device, dtype=dtype)
    fill(layer, fresh.weight)
    if layer.bias is not None:
        layer.bias.copy_(fresh.bias)


@torch.no_grad()
def fill(layer: Any, value: Tensor) -> None:
    """Write an initial value, and save it if the layer keeps initial values."""
    if layer.__dict__["keep_initial"]:
        _keep_initial(layer, value)
    if not value.is_meta:
        write(layer, value)


def _keep_initial(layer: nn.Module, value: Tensor) -> None:
    if not value.is_meta:
        state_of(layer).initial = value.detach().to("cpu", copy=True)


def adapt(layer: Any, state_dict: Any, prefix: str, errors: list[str]) -> None:
    """Quantize a high-precision checkpoint for a stored weight; report a quantized one for an ordinary weight."""
    key = prefix + "weight"
    loaded, spec = state_dict.get(key), layer.__dict__.get("weight_spec")
    if loaded is None:
        return
    if spec is None:
        if loaded.dtype in CODES or loaded.dtype is torch.uint8:
            errors.append(
                f"{key} is quantized in the checkpoint ({loaded.dtype}) and not in this model; make the model under "
                "quantized_init(recipe), or call quantize_weights(model, recipe) before loading"
            )
            for name in ("weight", *SCALES):
                state_dict.pop(prefix + name, None)
    elif loaded.dtype is torch.uint8 or loaded.dtype in CODES:
        if loaded.dtype is torch.uint8:
            loaded = loaded.squeeze(-1) if loaded.dim() > layer._parameters["weight"].dim() else loaded
            state_dict[key] = loaded.view(CODE_DTYPES[spec.format.name])
        # The saved initial value does not belong to these codes.
        state_of(layer).initial = None
        _refuse_others(layer, state_dict, prefix, errors)
    elif loaded.shape == shape_of(layer):
        if layer.__dict__["keep_initial"]:
            _keep_initial(layer, loaded)
        state_dict[key], scales = encode(loaded, spec, is_stored_transposed(layer))
        state_dict.update({prefix + name: scale for name, scale in scales.items()})


def _refuse_others(layer: nn.Linear, state_dict: Any, prefix: str, errors: list[str]) -> None:
    """Report codes or scales of another dtype than the layer's, which a copy would convert as numbers."""
    expected_dtypes: dict[str, Any] = {name: getattr(layer._buffers.get(name), "dtype", None) for name in SCALES}
    expected_dtypes["weight"] = CODE_DTYPES[layer.__dict__["weight_spec"].format.name]
    for name, dtype in expected_dtypes.items():
        loaded = state_dict.get(prefix + name)
        if dtype is not None and loaded is not None and loaded.dtype is not dtype:
            errors.append(
                f"{prefix}{name} is {loaded.dtype} in the checkpoint and {dtype} here, because it was quantized by "
                "another recipe; make the model under quantized_init of that recipe, or call quantize_weights(model, "
                "that recipe)"
            )
            state_dict.pop(prefix + name)


def decode(layer: Any, state_dict: Any, prefix: str, decoded: dict[nn.Module, Tensor]) -> None:
    """Replace codes and scales in a state dict by the dequantized weight.

    Args:
        decoded: weights dequantized so far, by layer; this one is added, so that a layer with two names has one value.

    Raises:
        ValueError: the weight is sharded.
    """
    weight = layer._parameters["weight"]
    mesh = getattr(weight, "device_mesh", None)
    if mesh is not None:
        raise ValueError(
            f"{prefix}weight is stored as codes sharded over {mesh}; take the state dict before sharding the model, or "
            "keep weights in high precision"
        )
    if layer not in decoded:
        with torch.no_grad():
            decoded[layer] = dequantized(layer, weight, layer.__dict__["weight_dtype"])
    state_dict[prefix + "weight"] = decoded[layer]
    for name in SCALES:
        state_dict.pop(prefix + name, None)


def codes_to_bytes(state_dict: Any, key: str) -> None:
    """Replace codes in a state dict by bytes [N, bytes of a row, 1].

    Every version of safetensors accepts bytes, and nn.Linear rejects the three axes.
    """
    weight = state_dict.get(key)
    if weight is None:
        return
    part = divided(weight)
    if part is not None:
        state_dict[key] = part.as_bytes(weight).unsqueeze(-1)
    elif weight.dtype in CODES:
        state_dict[key] = weight.detach().view(torch.uint8).unsqueeze(-1)


def moved(layer: Any, fn: Any, apply: Any) -> None:
    """Run `Module._apply` for a layer with stored weight: codes and scales change device but not dtype.

    Args:
        layer: layer whose weight is codes.
        fn: function that is applied to tensors.
        apply: the module's own `_apply`, without the buffers of `SCALES`.
    """
    weight: Tensor = layer.weight
    dtype, part = weight.dtype, divided(weight)
    # A change of floating dtype leaves integers unchanged.
    data = weight.detach().view(torch.uint8) if part is None else part.as_bytes(weight)
    layer._parameters["weight"] = nn.Parameter(data, requires_grad=False)
    try:
        apply(fn)
        data = layer._parameters["weight"].detach()
    finally:
        layer._parameters["weight"] = weight
    probe = torch.empty(0, dtype=layer.__dict__["weight_dtype"], device=weight.device)
    layer.__dict__["weight_dtype"] = fn(probe).dtype
    if part is not None:
        layer._parameters["weight"] = part.with_bytes(weight, data)
        return
    data = data.view(dtype)
    gradient = None
    if _takes(weight, data):
        gradient, weight.grad = weight.grad, None
        weight.data = data
    else:
        weight = nn.Parameter(data, requires_grad=weight.requires_grad)
    layer._parameters["weight"] = weight
    register_stored_weight(layer)
    if gradient is not None:
        weight.grad = gradient.to(data.device, weight.grad_dtype)


#: True if a parameter accepts other data in place; without that private torch function, data of the same device.
_takes: Any = getattr(torch, "_has_compatible_shallow_copy_type", lambda weight, data: weight.device == data.device)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's state with the codes as bytes, because plain pickle has no float8 and four bits cannot be
    copied.
    """
    weight = state["_parameters"].get("weight")
    if weight is None:
        return state
    part = divided(weight)
    if part is not None:
        # The copied layer is not sharded.
        weight = nn.Parameter(part.plain, requires_grad=weight.requires_grad)
    if weight.dtype not in CODES:
        return state
    plain = nn.Parameter(weight.detach().view(torch.uint8), requires_grad=False)
    parameters = {**state["_parameters"], "weight": plain}
    return {**state, "_parameters": parameters, "_packed": (weight.dtype, weight.requires_grad)}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Undo `packed`."""
    if "_packed" not in state:
        return state
    state = dict(state)
    dtype, requires_grad = state.pop("_packed")
    weight = nn.Parameter(state["_parameters"]["weight"].detach().view(dtype), requires_grad=requires_grad)
    return {**state, "_parameters": {**state["_parameters"], "weight": weight}}


def share_parameter(layer: Any, copied: Any, memo: dict[int, Any]) -> None:
    """Share one parameter of codes between a copied layer and other copies in `memo`, such as its optimizer."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dtype not in CODES:
        return
    before = memo.get(id(weight))
    if before is None:
        memo[id(weight)] = copied._parameters["weight"]
    else:
        copied._parameters["weight"] = before
        register_stored_weight(copied)


# ---- attributes that torch does not copy with a parameter ----

#: Layers with stored weights. Weak references to the parameters would make `torch.utils.swap_tensors` fail.
_stored: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def register_stored_weight(layer: Any) -> None:
    """Set the gradient dtype of a new parameter of codes again, and register its layer."""
    weight = layer._parameters["weight"]
    if weight is None or weight.dtype not in CODES:
        return
    nominal = layer.__dict__["weight_dtype"] if layer.__dict__.get("nominal_gradient") else None
    if nominal is not None or weight.grad_dtype not in ops.DTYPES:
        weight.grad_dtype = nominal or torch.float32
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse_optimizer))
    _stored.add(layer)
    record_versions(layer)


_hooked: list[Any] = []
#: Layer by the id of its parameter of codes, as `_owners` returns it; ignored once the layer has another parameter.
_known: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()


def owner(weight: Tensor) -> nn.Module | None:
    """Return the layer that a parameter of codes belongs to, or None."""
    part = divided(weight)
    if part is not None:
        return part.layer_of_codes
    layer = _known.get(id(weight))
    if layer is None or layer not in _stored or layer._parameters.get("weight") is not weight:
        # Rebuild the table once for the parameters looked up next; other threads may do the same.
        owners = _owners()
        _known.clear()
        _known.update(owners)
        return owners.get(id(weight))
    return layer


def without_layer(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the trained parameters of codes that belong to no layer."""
    of_codes = [weight for weight in weights if weight.dtype in CODES and weight.requires_grad]
    owners = _owners() if of_codes else {}
    return [weight for weight in of_codes if divided(weight) is None and id(weight) not in owners]


def _owners() -> dict[int, nn.Module]:
    """Return layers with stored weights by the id of their parameter."""
    return {id(layer._parameters.get("weight")): layer for layer in list(_stored)}


def _refuse_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer that does not support stored weights would write to codes."""
    if getattr(optimizer, "writes_quantized_weights", False):
        return
    owners = _owners()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and (divided(p) is not None or (p.dtype in CODES and id(p) in owners)):
                raise ValueError(
                    f"{type(optimizer).__name__} got a weight that is stored as codes and would write to the codes; "
                    "let it step a high-precision copy, and call layer.set_weight(copy) after that"
                )
