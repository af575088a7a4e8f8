"""Layer weights stored in eight or four bits: create, write, move, save, load and multiply by them.

The weight of a linear layer [N, K], and of a grouped layer [groups, N, K] or [groups, K, N], is a `QuantizedTensor`,
which has the scales. In a state dict it is

    weight         codes as bytes, with an axis of one at the end: uint8 [N, bytes of a row, 1]
    weight_scale   decode scales of its blocks, as `Quantized.scale`
    weight_factor  factor of two-level scales, as `Quantized.tensor_factor`

`gather_quantized` replaces it by its codes, which fully_shard shards, and puts the scales into buffers of the layer
with these names; the weight that fully_shard gathers is a `QuantizedTensor` again.

GEMMs read the codes directly. Operands with other codes (another recipe, a transpose with other blocks, no recipe) are
computed from the dequantized weight and dropped after use. The gradient is float32, set by `Tensor.grad_dtype`, unless
`narrow_gradient` makes it the dtype of the weight; four-bit codes have no gradient.
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.numerics.quantized import FLOAT8, Quantized, storage
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.quantized_tensor import QuantizedTensor, dequantized, unwrap
from quaver.torch.state import weight_cache
from quaver.torch.state.layer_state import state_of
from quaver.torch.state.selective_checkpoint import hide_from_policies

#: dtypes of codes by format, in a loaded state dict and in shards of weights.
CODE_DTYPES = {**FLOAT8, "e2m1": torch.float4_e2m1fn_x2}
CODES = tuple(CODE_DTYPES.values())
#: Names of the scales in a state dict.
SCALES = ("weight_scale", "weight_factor")
#: Attributes that only such a layer has.
ATTRIBUTES = ("weight_spec", "weight_dtype", "keep_initial")
#: Attribute of a parameter that a layer no longer uses: name of the function that replaced it.
REPLACED = "quaver_replaced_by"
#: Part of the error message for formats that cannot be stored.
NO_DTYPE = f"for whose codes torch has no dtype; weights can be stored as codes in {', '.join(CODE_DTYPES)}"
#: Warning for a PEFT method applied to codes without `quaver.integrations.peft.over_codes`.
ADAPTED = (
    "PEFT adds an adapter of its own to weights that are stored as codes: it trains, but cannot be merged into them. "
    "For LoRA call get_peft_model(model, quaver.integrations.peft.over_codes(config)); for another method call "
    "quaver.torch.dequantize_weights(model) first"
)
FOUR_BITS = (
    "a weight that is stored in four bits has no gradient, because no optimizer steps codes of four bits: freeze it "
    "with weight.requires_grad_(False), or dequantize_weights(model) to train it"
)
COMPILED_GRADIENT = (
    "torch.compile rounds the float32 gradient of a stored weight to the parameter's dtype: without fullgraph such "
    "layers run in eager mode; use a stored weight of a float32 layer, or freeze it with weight.requires_grad_(False)"
)


class ShardedStoredWeight(Protocol):
    """Interface of the codes of a weight, or of one rank's rows of them, that `gather_quantized` makes."""

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


def code_shard(weight: Any) -> ShardedStoredWeight | None:
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
    """Return True if the parameter is stored as codes, sharded or not."""
    return isinstance(weight, QuantizedTensor) or code_shard(weight) is not None


def scales_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the scales of a layer's stored weight by their name in a state dict."""
    weight: Any = layer._parameters.get("weight")
    scales = {name: layer._buffers.get(name) for name in SCALES}
    if isinstance(weight, QuantizedTensor):
        scales = {"weight_scale": weight.scale, "weight_factor": weight.factor}
    return {name: scale for name, scale in scales.items() if scale is not None}


def is_prepared(layer: nn.Module) -> bool:
    """Return True if `gather_quantized` has prepared the stored weight, which fully_shard may have gathered now."""
    return SCALES[0] in layer._buffers


def is_stored_transposed(layer: nn.Module) -> bool:
    """Return True if the layer stores its stack of matrices as [groups, K, N]."""
    return layer.__dict__.get("layout") == "kn"


def shape_of(layer: Any) -> tuple[int, ...]:
    """Return the shape of a layer's weight in high precision, in the layer's layout."""
    weight = layer._parameters["weight"]
    shape = (layer.out_features, layer.in_features)
    if weight.dim() == 2:
        return shape
    return weight.shape[0], *(shape[::-1] if is_stored_transposed(layer) else shape)


# ---- GEMMs ----


def check_stored(layer: nn.Module, weight: Tensor) -> None:
    """Raise ValueError if the weight of a layer with stored weights was replaced by another tensor."""
    if not isinstance(weight, QuantizedTensor):
        name = layer.__dict__.get("qualified_name") or type(layer).__name__
        raise ValueError(
            f"{name}: the weight is stored quantized, {layer.weight_spec}, and was replaced by a {weight.dtype} "
            "parameter without scales: assign the weight of another such layer, or call layer.set_weight(value) with "
            "a value in high precision. Before fully_shard, which replaces it so, call "
            "quaver.torch.parallel.gather_quantized(model)"
        )


def check_gradient(weight: Tensor) -> None:
    """Raise if a stored weight cannot have its gradient: of four-bit codes, or one that torch.compile would round.

    Raises:
        ValueError: four-bit codes require a gradient.
        NotImplementedError: under torch.compile, which gives a gradient the parameter's dtype; the caller then runs
            eagerly.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()) or not isinstance(weight, QuantizedTensor):
        return
    if weight.spec.format.packed:
        raise ValueError(FOUR_BITS)
    if is_tracing() and weight.dtype is not torch.float32:
        raise NotImplementedError(COMPILED_GRADIENT)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a weight gradient: the parameter's, float32 for a stored weight."""
    return torch.float32 if isinstance(weight, QuantizedTensor) else weight.dtype


def saved_codes(weights: Iterable[Tensor | None], layers: Iterable[Any]) -> list[Tensor]:
    """Return the codes of stored weights, which a forward saves with the weights: autograd then raises if they are
    written before backward. fully_shard fills those that it gathers again, so they are left out.
    """
    return [
        weight.codes
        for weight, layer in zip(weights, layers, strict=True)
        if isinstance(weight, QuantizedTensor) and not is_prepared(layer)
    ]


def operand(weight: QuantizedTensor, transposed: bool, reuses: bool, spec: QuantSpec, call: Any) -> Quantized:
    """Return the weight or its transpose as an operand in the recipe's spec.

    Args:
        transposed: True for dgrad.
        reuses: True if dgrad reads the transpose of fprop's operand.
        spec: spec of the recipe.
        call: context whose `quantize_unrecorded` quantizes.
    """
    q = unwrap(weight)
    same = q.spec is spec or q.spec == spec
    if same and (reuses or not transposed):
        return q.T if transposed else q
    value = q.dequantize()
    if transposed and reuses:
        fprop_operand: Quantized = call.quantize_unrecorded(value, spec, False)
        return fprop_operand.T
    quantized: Quantized = call.quantize_unrecorded(value.t() if transposed else value, spec, transposed)
    return quantized


def plain_values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a stored weight, which the caller drops after use; any other weight unchanged."""
    return dequantized(weight, dtype) if isinstance(weight, QuantizedTensor) else weight


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
    """Compute F.linear for a stored weight; backward dequantizes the weight again."""
    check_gradient(weight)
    device = ops.autocast_device(x)
    casting = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype is not torch.float64
    dtype = torch.get_autocast_dtype(device) if casting else x.dtype
    with ops.without_autocast(device):
        y: Tensor = _Unquantized.apply(x.to(dtype), weight, None if bias is None else bias.to(dtype), layer)
    return y


class _Unquantized(torch.autograd.Function):
    """F.linear that saves the codes instead of the dequantized weight."""

    @staticmethod
    @hide_from_policies
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
        needed = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, needed, *saved_codes([needed], [layer]))
        return F.linear(x, plain_values(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, *_ = ctx.saved_tensors
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = g @ plain_values(weight, g.dtype) if need_input else None
        g2, grad_weight = g.reshape(-1, g.shape[-1]), None
        if need_weight:
            grad_weight = (g2.t() @ x.reshape(-1, x.shape[-1])).float()
        return grad_x, grad_weight, g2.sum(0) if need_bias else None, None


# ---- create and write ----


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
    """Replace a layer's weight by a QuantizedTensor.

    Raises:
        ValueError: the weight is not float32, bfloat16 or float16.
    """
    weight = layer.weight
    if weight.dtype not in ops.DTYPES:
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features} → {layer.out_features}) has {weight.dtype} weights; only "
            "float32, bfloat16 and float16 ones are quantized: convert the layer, or make it outside of quantized_init"
        )
    layer.__dict__["keep_initial"] = keep_initial
    if keep_initial:
        _keep_initial(layer, weight)
    stored = QuantizedTensor.from_tensor(weight.detach(), spec, is_stored_transposed(layer))
    setattr(weight, REPLACED, "quantize_weights")
    layer.weight = nn.Parameter(stored, requires_grad=not spec.format.packed and weight.requires_grad)


def narrow_gradient(layer: Any) -> None:
    """Make the gradient of a stored weight `weight_dtype` instead of float32."""
    layer.__dict__["nominal_gradient"] = True
    if layer.weight_spec is not None:
        register_stored_weight(layer)


def restore(layer: Any) -> None:
    """Replace the codes by a weight in the original dtype."""
    weight = layer.weight
    setattr(weight, REPLACED, "dequantize_weights")
    layer._parameters["weight"] = nn.Parameter(unsharded_weight(layer).dequantize(), requires_grad=weight.requires_grad)
    for name in SCALES:
        layer._buffers.pop(name, None)
    for name in ATTRIBUTES:
        layer.__dict__.pop(name, None)
    state_of(layer).initial = None
    _stored.discard(layer)
    weight_cache.drop(layer)


@torch.no_grad()
def write(layer: Any, value: Tensor) -> None:
    """Write a new value into the weight, in place; a stored one is quantized.

    Raises:
        ValueError: the value has another shape.
    """
    if value.shape != shape_of(layer):
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features} → {layer.out_features}) got a weight of shape "
            f"{tuple(value.shape)}; it must be {shape_of(layer)}"
        )
    if layer.weight_spec is None or isinstance(layer.weight, QuantizedTensor):
        layer.weight.copy_(value)
        return
    stored = QuantizedTensor.from_tensor(value.to(layer.weight.device), layer.weight_spec, is_stored_transposed(layer))
    layer.weight.copy_(stored.codes.view(CODE_DTYPES[stored.spec.format.name]))
    layer.weight_scale.copy_(stored.scale)
    if stored.factor is not None:
        layer.weight_factor.copy_(stored.factor)


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


# ---- state dicts ----


def adapt(layer: Any, state_dict: Any, prefix: str, missing: list[str], errors: list[str]) -> None:
    """Prepare a state dict for loading: join codes and scales, and quantize values for a stored weight; report a
    quantized checkpoint for an ordinary weight.
    """
    key = prefix + "weight"
    loaded, spec = state_dict.get(key), layer.__dict__.get("weight_spec")
    if loaded is None or isinstance(loaded, QuantizedTensor):
        return
    weight, codes = layer._parameters["weight"], loaded.dtype is torch.uint8 or loaded.dtype in CODES
    if spec is None:
        if codes:
            errors.append(
                f"{key} is quantized in the checkpoint ({loaded.dtype}) and not in this model; make the model under "
                "quantized_init(recipe), or call quantize_weights(model, recipe) before loading"
            )
            for name in ("weight", *SCALES):
                state_dict.pop(prefix + name, None)
    elif codes:
        if loaded.dtype is torch.uint8:
            loaded = loaded.squeeze(-1) if loaded.dim() > weight.dim() else loaded
            state_dict[key] = loaded.view(CODE_DTYPES[spec.format.name])
        # The saved initial value does not belong to these codes.
        state_of(layer).initial = None
        _refuse_others(layer, state_dict, prefix, errors)
        if isinstance(weight, QuantizedTensor):
            _join_scales(layer, state_dict, prefix, missing, errors)
    elif loaded.shape == shape_of(layer):
        if layer.__dict__["keep_initial"]:
            _keep_initial(layer, loaded)
        stored = QuantizedTensor.from_tensor(loaded.detach(), spec, is_stored_transposed(layer))
        state_dict[key] = stored
        if not isinstance(weight, QuantizedTensor):
            codes_to_bytes(state_dict, key)
            state_dict[key] = stored.codes.view(CODE_DTYPES[spec.format.name])


def _join_scales(layer: Any, state_dict: Any, prefix: str, missing: list[str], errors: list[str]) -> None:
    """Replace codes and scales in a state dict by one QuantizedTensor; load neither if one of them does not fit."""
    weight: QuantizedTensor = layer._parameters["weight"]
    loaded = {name: state_dict.pop(prefix + name, None) for name in ("weight", *SCALES)}
    expected = {"weight": weight.codes, **scales_of(layer)}
    complete = True
    for name, tensor in expected.items():
        value = loaded[name]
        if value is None:
            missing.append(prefix + name)
        elif value.shape != tensor.shape:
            errors.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {value.shape} from checkpoint, the "
                f"shape in current model is {tensor.shape}."
            )
        complete = complete and value is not None and value.shape == tensor.shape
    if not complete:
        # The error is already reported; torch would add that the weight is missing.
        state_dict[prefix + "weight"] = weight.detach()
        return
    codes = loaded["weight"].detach().view(weight.codes.dtype)
    state_dict[prefix + "weight"] = weight.like(codes, loaded["weight_scale"], loaded["weight_factor"])


def _refuse_others(layer: nn.Linear, state_dict: Any, prefix: str, errors: list[str]) -> None:
    """Report codes or scales of another dtype than the layer's, which a copy would convert as numbers."""
    expected_dtypes: dict[str, Any] = {name: scale.dtype for name, scale in scales_of(layer).items()}
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
            decoded[layer] = unsharded_weight(layer).dequantize()
    state_dict[prefix + "weight"] = decoded[layer]
    for name in SCALES:
        state_dict.pop(prefix + name, None)


def codes_to_bytes(state_dict: Any, key: str) -> None:
    """Replace a stored weight in a state dict by the bytes of its codes [..., 1], and add its scales.

    Every version of safetensors accepts bytes, and nn.Linear rejects the additional axis.
    """
    weight = state_dict.get(key)
    if weight is None:
        return
    if isinstance(weight, QuantizedTensor):
        prefix = key.removesuffix("weight")
        state_dict[key] = weight.codes.detach().view(torch.uint8).unsqueeze(-1)
        state_dict[prefix + "weight_scale"] = weight.scale
        if weight.factor is not None:
            state_dict[prefix + "weight_factor"] = weight.factor
        return
    part = code_shard(weight)
    if part is not None:
        state_dict[key] = part.as_bytes(weight).unsqueeze(-1)


# ---- moves and copies ----


def moved(layer: Any, fn: Any, apply: Any) -> None:
    """Run `Module._apply` for a layer with stored weight: codes and scales change device but not dtype.

    Args:
        fn: function that is applied to tensors.
        apply: the module's own `_apply`, without the buffers of `SCALES`.
    """
    weight: Any = layer._parameters["weight"]
    part = code_shard(weight)
    if part is not None:
        _move_shard(layer, weight, part, fn, apply)
        return
    layer._parameters["weight"] = None
    try:
        apply(fn)
        with torch.no_grad():
            data = fn(weight.detach())
    finally:
        layer._parameters["weight"] = weight
    gradient, weight.grad = weight.grad, None
    if _takes(weight, data):
        weight.move(data)
    else:
        weight = nn.Parameter(data, requires_grad=weight.requires_grad)
    layer._parameters["weight"] = weight
    layer.__dict__["weight_dtype"] = weight.dtype
    register_stored_weight(layer)
    if gradient is not None and (data.is_meta or not gradient.is_meta):
        weight.grad = gradient.to(data.device, weight.grad_dtype)


def _move_shard(layer: Any, weight: Any, part: ShardedStoredWeight, fn: Any, apply: Any) -> None:
    # A change of floating dtype leaves integers unchanged.
    layer._parameters["weight"] = nn.Parameter(part.as_bytes(weight), requires_grad=False)
    try:
        apply(fn)
        data = layer._parameters["weight"].detach()
    finally:
        layer._parameters["weight"] = weight
    probe = torch.empty(0, dtype=layer.__dict__["weight_dtype"], device=weight.device)
    layer.__dict__["weight_dtype"] = fn(probe).dtype
    layer._parameters["weight"] = part.with_bytes(weight, data)


#: True if a parameter accepts other data in place; without that private torch function, data of the same device.
_takes: Any = getattr(torch, "_has_compatible_shallow_copy_type", lambda weight, data: weight.device == data.device)


def unsharded_weight(layer: Any) -> Any:
    """Return the stored weight of a layer as a QuantizedTensor, also if `gather_quantized` has prepared it."""
    weight = layer._parameters["weight"]
    part = code_shard(weight)
    if part is None:
        return weight
    return of_codes(layer, part.plain, layer.weight_dtype)


def of_codes(layer: Any, codes: Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """Return the codes of a layer's whole stored weight, with the layer's scales, as a tensor that reports `dtype`."""
    spec, scales = layer.weight_spec, scales_of(layer)
    return QuantizedTensor(
        codes.view(storage(spec.format)),
        scales["weight_scale"],
        spec,
        factor=scales.get("weight_factor"),
        dtype=dtype,
        columns=layer.in_features,
        transposed=is_stored_transposed(layer),
    )


def copyable_state(layer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's state for copies and pickles, in which a weight that `gather_quantized` prepared is whole."""
    weight = layer._parameters.get("weight")
    if weight is None or code_shard(weight) is None:
        return state
    parameters = {
        **state["_parameters"],
        "weight": nn.Parameter(unsharded_weight(layer), requires_grad=weight.requires_grad),
    }
    buffers = {name: buffer for name, buffer in state["_buffers"].items() if name not in SCALES}
    return {**state, "_parameters": parameters, "_buffers": buffers}


# ---- attributes that torch does not copy with a parameter ----

#: Layers with stored weights. Weak references to the parameters would make `torch.utils.swap_tensors` fail.
_stored: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def register_stored_weight(layer: Any) -> None:
    """Set the gradient dtype of a new stored weight, and register its layer."""
    weight = layer._parameters["weight"]
    if not isinstance(weight, QuantizedTensor):
        return
    nominal = layer.__dict__["weight_dtype"] if layer.__dict__.get("nominal_gradient") else None
    if nominal is not None or weight.grad_dtype is not torch.float32:
        weight.grad_dtype = nominal or torch.float32
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse_optimizer))
    _stored.add(layer)


_hooked: list[Any] = []
#: Layer by the id of its stored weight, as `_owners` returns it; ignored once the layer has another parameter.
_known: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()


def owner(weight: Tensor) -> nn.Module | None:
    """Return the layer that a stored weight belongs to, or None."""
    part = code_shard(weight)
    if part is not None:
        return part.layer_of_codes
    layer = _known.get(id(weight))
    if layer is None or layer not in _stored or layer._parameters.get("weight") is not weight:
        # Rebuild the table once for the parameters looked up next; other threads may do the same.
        owners = _owners()
        _known.clear()
        _known.update(owners)
        layer = owners.get(id(weight))
    return layer


def without_layer(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the trained stored weights that belong to no layer."""
    of_codes = [weight for weight in weights if isinstance(weight, QuantizedTensor) and weight.requires_grad]
    owners = _owners() if of_codes else {}
    return [weight for weight in of_codes if id(weight) not in owners]


def _owners() -> dict[int, nn.Module]:
    """Return layers with stored weights by the id of their parameter."""
    return {id(layer._parameters.get("weight")): layer for layer in list(_stored)}


def _refuse_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer that does not support stored weights would write to codes."""
    if getattr(optimizer, "writes_quantized_weights", False):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and holds_codes(p):
                raise ValueError(
                    f"{type(optimizer).__name__} got a weight that is stored as codes and would write to the codes; "
                    "use an optimizer of quaver.torch.optim, or step a high-precision copy and call "
                    "layer.set_weight(copy) after that"
                )
