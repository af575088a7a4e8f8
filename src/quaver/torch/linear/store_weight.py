"""Weights that exist only in eight bits: making, writing, moving and loading them; see
`quaver.torch.linear.stored_weight`."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.linear.stored_weight import CODE_DTYPES, CODES, SCALES, dequantized, lies_turned, record_versions
from quaver.torch.numerics.rounding import QUIET
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import empty_parts, parts
from quaver.torch.state import weight_cache
from quaver.torch.state.layer_state import state_of

#: Attributes of such a layer.
ABOUT = ("weight_spec", "weight_dtype", "keep_initial", "versions")


#: Attribute of a parameter that a layer no longer has: what has put another in its place.
REPLACED = "quaver_replaced_by"
#: Said of a format whose codes cannot be a parameter.
NO_DTYPE = f"for whose codes torch has no dtype; weights that exist only as codes are {', '.join(CODE_DTYPES)}"


#: Said where a method of PEFT is put over codes without the seam that merges it.
ADAPTED = (
    "PEFT puts an adapter of its own over weights that exist only as codes: it trains, and cannot be merged into them. "
    "For LoRA call get_peft_model(model, quaver.integrations.peft.over_codes(config)); for another method call "
    "quaver.torch.dequantize_weights(model) first"
)


class ShardedStoredWeight(Protocol):
    """What a parameter [N, K] of codes is, or its part on this rank, that does not show their dtype: fully_shard takes
    it for floats, whose gradients have their dtype."""

    @property
    def plain(self) -> Tensor:
        """The codes."""

    @property
    def layer_of_codes(self) -> "nn.Module | None":
        """The layer whose weight they are."""

    @property
    def name_of_codes(self) -> str:
        """The layer's name in its model."""

    def as_bytes(self, parameter: Tensor) -> Tensor:
        """The codes as uint8, of the same memory, which lie as their parameter does."""

    def with_bytes(self, parameter: Tensor, data: Tensor) -> nn.Parameter:
        """A parameter like this one of other bytes, as `as_bytes` gives them."""


def divided(weight: Any) -> ShardedStoredWeight | None:
    """What a parameter is as `Divided`; None of every other one."""
    if hasattr(weight, "layer_of_codes"):
        of_whole: ShardedStoredWeight = weight
        return of_whole
    if not hasattr(weight, "device_mesh"):
        return None
    with torch.no_grad():
        part: Any = weight.to_local()
    return part if hasattr(part, "layer_of_codes") else None


def holds_codes(weight: Tensor) -> bool:
    """Whether a parameter is codes, however it lies."""
    return weight.dtype in CODES or divided(weight) is not None


class _Construction(threading.local):
    """What `quantized_init` has in force: how the weights of new layers are kept, and whether their values are too."""

    now: tuple[QuantSpec, bool] | None = None


construction = _Construction()


def begin(layer: Any) -> None:
    """Turn a new layer's weight into codes, if it is made under `quantized_init`."""
    if construction.now is not None:
        store(layer, *construction.now)


def weight_spec(recipe: Recipe) -> QuantSpec | None:
    """How a recipe's weight is kept: as fprop consumes it, but neither rounded at random nor rotated.

    Raises:
        ValueError: a format without a dtype of torch's.
    """
    spec = recipe.fprop.b
    if spec is not None and spec.format.name not in CODE_DTYPES:
        raise ValueError(
            f"recipe {recipe.name!r} has weights in {spec.format}, {NO_DTYPE}: use it without quantized_init, with "
            "weights in high precision"
        )
    return None if spec is None else replace(spec, rounding="nearest", hadamard=False)


def store(layer: Any, spec: QuantSpec, keep_initial: bool = False) -> None:
    """Turn a layer's weight into codes.

    Raises:
        ValueError: a weight that is neither float32, bfloat16 nor float16.
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
    codes, scales = encode(weight, spec, lies_turned(layer))
    setattr(weight, REPLACED, "quantize_weights")
    layer._parameters["weight"] = nn.Parameter(codes, requires_grad=not spec.format.packed and weight.requires_grad)
    for name, value in scales.items():
        layer.register_buffer(name, value)
    settle(layer)


def narrow_gradient(layer: Any) -> None:
    """Have the gradient of a layer's weight in `weight_dtype`, and not in float32, whenever the weight is codes."""
    layer.__dict__["nominal_gradient"] = True
    if layer.weight_spec is not None:
        settle(layer)


def restore(layer: Any) -> None:
    """Turn the codes into a weight of the dtype it had."""
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
    """A weight [N, K] as codes, and its scales by the names of their buffers; of a stack of matrices those of each.

    Args:
        transposed: whether matrices of a stack lie as [K, N], and so their codes.
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
    """Codes, scales and factor of a matrix [N, K]; of one that lies turned their transposes, but for packed ones."""
    if value.is_meta:
        return empty_parts(value, spec, transposed and not spec.format.packed)[:3]
    value = value.detach() if transposed else value.detach().contiguous()
    value = value if value.dtype in ops.DTYPES else value.float()
    return parts(ops.QUANTIZE(value, spec, None, None, QUIET), transposed)[:3]


def shape_of(layer: Any) -> tuple[int, ...]:
    """The shape of a layer's weight in high precision, as it lies."""
    shape = (layer.out_features, layer.in_features)
    if layer._parameters["weight"].dim() == 2:
        return shape
    return layer._parameters["weight"].shape[0], *(shape[::-1] if lies_turned(layer) else shape)


@torch.no_grad()
def write(layer: Any, value: Tensor) -> None:
    """Quantize a new value [N, K] into the codes and scales, in place.

    Raises:
        ValueError: another shape.
    """
    if value.shape != shape_of(layer):
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features} → {layer.out_features}) was given a weight of shape "
            f"{tuple(value.shape)}; it is {shape_of(layer)}"
        )
    spec = layer.__dict__.get("weight_spec")
    if spec is None:
        layer.weight.copy_(value)
        return
    codes, scales = encode(value.to(layer.weight.device), spec, lies_turned(layer))
    layer.weight.copy_(codes)
    for name, scale in scales.items():
        layer._buffers[name].copy_(scale)
    record_versions(layer)


@torch.no_grad()
def reset(layer: nn.Linear) -> None:
    """Fill weight and bias as nn.Linear does."""
    dtype, biased = layer.__dict__["weight_dtype"], layer.bias is not None
    fresh = nn.Linear(layer.in_features, layer.out_features, biased, device=layer.weight.device, dtype=dtype)
    fill(layer, fresh.weight)
    if layer.bias is not None:
        layer.bias.copy_(fresh.bias)


@torch.no_grad()
def fill(layer: Any, value: Tensor) -> None:
    """Begin with a value, which is kept if the layer keeps initial ones."""
    if layer.__dict__["keep_initial"]:
        _keep_initial(layer, value)
    if not value.is_meta:
        write(layer, value)


def _keep_initial(layer: nn.Module, value: Tensor) -> None:
    if not value.is_meta:
        state_of(layer).initial = value.detach().to("cpu", copy=True)


def adapt(layer: Any, state_dict: Any, prefix: str, errors: list[str]) -> None:
    """Make a checkpoint in high precision fit a weight that is codes; say where the reverse is meant."""
    key = prefix + "weight"
    given, spec = state_dict.get(key), layer.__dict__.get("weight_spec")
    if given is None:
        return
    if spec is None:
        if given.dtype in CODES or given.dtype is torch.uint8:
            errors.append(
                f"{key} is quantized in the checkpoint ({given.dtype}) and not in this model; make the model under "
                "quantized_init(recipe), or call quantize_weights(model, recipe) before loading"
            )
            for name in ("weight", *SCALES):
                state_dict.pop(prefix + name, None)
    elif given.dtype is torch.uint8 or given.dtype in CODES:
        if given.dtype is torch.uint8:
            given = given.squeeze(-1) if given.dim() > layer._parameters["weight"].dim() else given
            state_dict[key] = given.view(CODE_DTYPES[spec.format.name])
        # Not what these codes are of.
        state_of(layer).initial = None
        _refuse_others(layer, state_dict, prefix, errors)
    elif given.shape == shape_of(layer):
        if layer.__dict__["keep_initial"]:
            _keep_initial(layer, given)
        state_dict[key], scales = encode(given, spec, lies_turned(layer))
        state_dict.update({prefix + name: scale for name, scale in scales.items()})


def _refuse_others(layer: nn.Linear, state_dict: Any, prefix: str, errors: list[str]) -> None:
    """Say where codes or scales are of another kind than the layer's: copying would convert them as numbers."""
    held: dict[str, Any] = {name: getattr(layer._buffers.get(name), "dtype", None) for name in SCALES}
    held["weight"] = CODE_DTYPES[layer.__dict__["weight_spec"].format.name]
    for name, dtype in held.items():
        given = state_dict.get(prefix + name)
        if dtype is not None and given is not None and given.dtype is not dtype:
            errors.append(
                f"{prefix}{name} is {given.dtype} in the checkpoint and {dtype} here, as another recipe has it; "
                "make the model under quantized_init of that one, or call quantize_weights(model, that recipe)"
            )
            state_dict.pop(prefix + name)


def decode(layer: Any, state_dict: Any, prefix: str, decoded: dict[nn.Module, Tensor]) -> None:
    """Put the weight's values in place of its codes and scales.

    Args:
        decoded: of the layers so far, to which this one is added: a layer with two names has one value.
    Raises:
        ValueError: a weight that is sharded.
    """
    weight = layer._parameters["weight"]
    mesh = getattr(weight, "device_mesh", None)
    if mesh is not None:
        raise ValueError(
            f"{prefix}weight is codes that are sharded over {mesh}; take the state dict before sharding "
            "the model, or keep weights in high precision"
        )
    if layer not in decoded:
        with torch.no_grad():
            decoded[layer] = dequantized(layer, weight, layer.__dict__["weight_dtype"])
    state_dict[prefix + "weight"] = decoded[layer]
    for name in SCALES:
        state_dict.pop(prefix + name, None)


def portable(state_dict: Any, key: str) -> None:
    """Codes as bytes [N, bytes of a row, 1]: every safetensors takes them, and nn.Linear and its like refuse them."""
    weight = state_dict.get(key)
    if weight is None:
        return
    part = divided(weight)
    if part is not None:
        state_dict[key] = part.as_bytes(weight).unsqueeze(-1)
    elif weight.dtype in CODES:
        state_dict[key] = weight.detach().view(torch.uint8).unsqueeze(-1)


def moved(layer: Any, fn: Any, apply: Any) -> None:
    """`Module._apply` for such a layer: codes and scales move between devices and are never cast.

    Args:
        layer: whose weight is codes.
        fn: what is applied to tensors.
        apply: the module's own `_apply`, without the buffers of `SCALES`.
    """
    weight: Tensor = layer.weight
    dtype, part = weight.dtype, divided(weight)
    # As integers they pass through a change of dtype as they are.
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
    settle(layer)
    if gradient is not None:
        weight.grad = gradient.to(data.device, weight.grad_dtype)


#: Whether a parameter takes data of another tensor's kind; without that private name, those of its own device.
_takes: Any = getattr(torch, "_has_compatible_shallow_copy_type", lambda weight, data: weight.device == data.device)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """A layer's state with the codes as bytes: plain pickle has no float8, and four bits cannot always be copied."""
    weight = state["_parameters"].get("weight")
    if weight is None:
        return state
    part = divided(weight)
    if part is not None:
        # A copy of the layer is not prepared.
        weight = nn.Parameter(part.plain, requires_grad=weight.requires_grad)
    if weight.dtype not in CODES:
        return state
    plain = nn.Parameter(weight.detach().view(torch.uint8), requires_grad=False)
    parameters = {**state["_parameters"], "weight": plain}
    return {**state, "_parameters": parameters, "_packed": (weight.dtype, weight.requires_grad)}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """The state that `packed` was given."""
    if "_packed" not in state:
        return state
    state = dict(state)
    dtype, requires_grad = state.pop("_packed")
    weight = nn.Parameter(state["_parameters"]["weight"].detach().view(dtype), requires_grad=requires_grad)
    return {**state, "_parameters": {**state["_parameters"], "weight": weight}}


def remember(layer: Any, copied: Any, memo: dict[int, Any]) -> None:
    """Have a copied layer and what else is copied with it, such as its optimizer, share one parameter of codes."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dtype not in CODES:
        return
    before = memo.get(id(weight))
    if before is None:
        memo[id(weight)] = copied._parameters["weight"]
    else:
        copied._parameters["weight"] = before
        settle(copied)


# What torch does not carry along with a parameter.

#: Layers whose parameter is codes. Of the parameter itself `torch.utils.swap_tensors` allows no weak reference.
_stored: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def settle(layer: Any) -> None:
    """Say again, after a parameter was made, that its gradient is a float, and whose it is."""
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
#: As `_owners` had them; an entry holds as long as the layer has that parameter.
_known: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()


def owner(weight: Tensor) -> nn.Module | None:
    """The layer that a parameter of codes belongs to."""
    part = divided(weight)
    if part is not None:
        return part.layer_of_codes
    layer = _known.get(id(weight))
    if layer is None or layer not in _stored or layer._parameters.get("weight") is not weight:
        # One pass over all layers, for the parameters that are asked of next too; other threads may do the same.
        owners = _owners()
        _known.clear()
        _known.update(owners)
        return owners.get(id(weight))
    return layer


def without_layer(weights: Iterable[Tensor]) -> list[Tensor]:
    """Of these, trained parameters of codes that belong to no layer."""
    of_codes = [weight for weight in weights if weight.dtype in CODES and weight.requires_grad]
    owners = _owners() if of_codes else {}
    return [weight for weight in of_codes if divided(weight) is None and id(weight) not in owners]


def _owners() -> dict[int, nn.Module]:
    """Such layers by the identity of their parameter."""
    return {id(layer._parameters.get("weight")): layer for layer in list(_stored)}


def _refuse_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer that knows nothing of scales must not write to codes."""
    if getattr(optimizer, "writes_quantized_weights", False):
        return
    owners = _owners()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and (divided(p) is not None or (p.dtype in CODES and id(p) in owners)):
                raise ValueError(
                    f"{type(optimizer).__name__} was given a weight that exists only in eight bits and would write to "
                    "its codes; let it step a high-precision copy, and call layer.set_weight(copy) after that"
                )
