"""Layer weights stored only as codes of eight or four bits: the parameter holds the codes, buffers hold the scales.

    weight         codes: a float8 dtype [N, K], or float4_e2m1fn_x2 [N, ceil(K / 2)], uint8 in a state dict
    weight_scale   decode scales of its blocks, as `Quantized.scale`
    weight_factor  factor of two-level scales, as `Quantized.tensor_factor`

A stack of matrices [groups, N, K] has codes [groups, N, K] and scales [groups, ...]. If the layer stores its matrices
transposed, codes and scales are transposed too, except four-bit codes, which always run along K.

GEMMs read the codes directly. Operands with other codes (another recipe, a transpose with other blocks, no recipe) are
computed from the dequantized weight and dropped after use. The gradient is float32, set by `Tensor.grad_dtype`;
four-bit codes, two to a byte, have no gradient.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import capture
from quaver.torch.numerics.quantized import FLOAT8, Quantized, storage
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.selective_checkpoint import hide_from_policies
from quaver.torch.state import weight_cache
from quaver.torch.state.weight_cache import storage_id

#: dtype of four-bit codes, two to a byte.
PACKED = torch.float4_e2m1fn_x2
#: dtype of the parameter by format. Integer dtypes would be unsafe: torch averages them silently in copies of a model.
CODE_DTYPES = {**FLOAT8, "e2m1": PACKED}
CODES = tuple(CODE_DTYPES.values())
#: Weight dtypes that torch.autocast accepts: high precision and codes.
WEIGHTS = (*ops.DTYPES, *CODES)
#: Buffers of a layer whose weight is stored as codes.
SCALES = ("weight_scale", "weight_factor")


def are_codes(weight: Tensor) -> bool:
    """Return True if the weight is stored as codes, including those that fully_shard has gathered."""
    return weight.dtype in CODES or hasattr(weight, "gathered_codes")


def check_uncast(layer: nn.Module, weight: Tensor) -> None:
    """Raise ValueError if a stored weight arrives as values instead of codes."""
    if not are_codes(weight):
        name = layer.__dict__.get("qualified_name") or type(layer).__name__
        raise ValueError(
            f"{name}: the weight is stored as codes, {layer.weight_spec}, but came as {weight.dtype}: the codes "
            "were cast as if they were numbers, as fully_shard does under MixedPrecisionPolicy(param_dtype=...). Call "
            "quaver.torch.parallel.gather_quantized(model) before fully_shard, or leave param_dtype out"
        )


def record_versions(layer: nn.Module) -> None:
    """Record that the current codes and scales belong together; called by every function that writes both."""
    weight = layer._parameters.get("weight")
    if weight.__class__ is nn.Parameter and layer.__dict__.get("versions", ()) is not None:
        layer.__dict__["versions"] = _versions(layer, weight)


def versions_unknown(layer: nn.Module) -> None:
    """Exclude a sharded weight from `check_scales`, because fully_shard gathers it into different memory each time."""
    layer.__dict__["versions"] = None


def check_scales(layer: nn.Module, weight: Tensor) -> None:
    """Check that codes were not replaced without their scales, as `b.weight.copy_(a.weight)` does.

    A write through `.data` does not change a tensor's version, so it goes undetected.

    Raises:
        ValueError: the codes changed since the last check, and a scale did not.
    """
    if weight.__class__ is not nn.Parameter or is_tracing():
        return
    before = layer.__dict__.get("versions")
    if before is None or before == (now := _versions(layer, weight)):
        return
    if now[0] != before[0] and any(one == other for one, other in zip(now[1:], before[1:], strict=True)):
        name = layer.__dict__.get("qualified_name") or type(layer).__name__
        raise ValueError(
            f"{name}: the codes of a quantized weight were copied or replaced without their scales. Call "
            "layer.load_state_dict(other.state_dict()), which carries both, or layer.set_weight(value) with a "
            "high-precision value"
        )
    layer.__dict__["versions"] = now


def _versions(layer: nn.Module, weight: Tensor) -> list[tuple[int, int]]:
    """Return (address, version) of the codes and of each scale."""
    scales = (layer._buffers.get(name) for name in SCALES)
    return [
        (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
        for tensor in (weight, *scales)
        if tensor is not None
    ]


def codes(layer: nn.Module, weight: Tensor) -> Quantized:
    """Return the weight's codes and scales as an operand."""
    gathered = getattr(weight, "gathered_codes", None)
    weight = weight if gathered is None else gathered
    check_scales(layer, weight)
    spec: QuantSpec = layer.__dict__["weight_spec"]
    scale: Any = layer._buffers["weight_scale"]
    factor = layer._buffers.get("weight_factor")
    shape: tuple[int, int] = layer.out_features, layer.in_features  # type: ignore[assignment]
    if is_tracing():
        # Operators take packed codes as they are: see `torch.ops.quaver.code_bytes`.
        return Quantized(weight.detach(), scale, spec, shape, False, factor)
    if spec.per_tensor and scale.is_cpu and scale.is_floating_point():
        # A copy on the host, so it is read in every call.
        scale = scale.item()
    keeps = gathered is None and not capture.is_captured_or_rehearsed(weight.device)
    cached = weight_cache.cache_of(layer) if keeps else None
    q = None if cached is None else cached.codes
    if q is not None and _is_view_of(q, weight, scale, factor, spec):
        # Results derived from the codes would not follow a write to the codes.
        q.decoded = q.cached_transpose = None
        return q
    q = Quantized(weight.detach().view(storage(spec.format)), scale, spec, shape, False, factor)
    if cached is not None:
        cached.codes = q
    return q


def _is_view_of(q: Quantized, weight: Tensor, scale: Tensor | float, factor: Tensor | None, spec: QuantSpec) -> bool:
    """Return True if the operand is a view of these codes and has these scales."""
    same = q.scale is scale or (isinstance(scale, float) and q.scale.__class__ is float and q.scale == scale)
    return bool(
        q.spec is spec
        and same
        and q.tensor_factor is factor
        and q.data.data_ptr() == weight.data_ptr()
        and storage_id(q.data.untyped_storage()) == storage_id(weight.untyped_storage())
    )


def operand(layer: nn.Module, weight: Tensor, transposed: bool, reuses: bool, spec: QuantSpec, call: Any) -> Quantized:
    """Return the weight or its transpose as an operand in the recipe's spec.

    Args:
        layer, weight: the layer and its codes.
        transposed: True for dgrad.
        reuses: True if dgrad reads the transpose of fprop's operand.
        spec: spec of the recipe.
        call: context whose `quantize_unrecorded` quantizes.
    """
    q = codes(layer, weight)
    same = q.spec is spec or q.spec == spec
    if same and (reuses or not transposed):
        return q.T if transposed else q
    value = _values(q)
    if transposed and reuses:
        fprop_operand: Quantized = call.quantize_unrecorded(value, spec, False)
        return fprop_operand.T
    quantized: Quantized = call.quantize_unrecorded(value.t() if transposed else value, spec, transposed)
    return quantized


def dequantized(layer: nn.Module, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] (or a stack in the layer's layout) in high precision; the caller drops it after use."""
    if weight.dim() == 2:
        return _values(codes(layer, weight)).to(dtype)
    stack_info = stack_codes(layer)
    matrices = weight.transpose(1, 2) if stack_info.transposed and weight.dtype is not PACKED else weight
    each = [stack_info.values(matrices, group).to(dtype) for group in range(weight.shape[0])]
    value = torch.stack(each) if each else weight.new_empty((0, *stack_info.shape(matrices)), dtype=dtype)
    return value.transpose(1, 2).contiguous() if stack_info.transposed else value


# ---- stacks of matrices [groups, N, K], possibly transposed views of [groups, K, N] ----


def is_stored_transposed(layer: nn.Module) -> bool:
    """Return True if the layer stores its stack of matrices as [groups, K, N]."""
    return layer.__dict__.get("layout") == "kn"


class StackCodes(NamedTuple):
    """Scales and layout of a stack of codes."""

    spec: QuantSpec
    #: Decode scales [groups, ...], and the factors of two-level scales [groups, ...].
    scale: Tensor
    factor: Tensor | None
    #: True if stored as [groups, K, N]; never for four-bit codes.
    transposed: bool
    #: Number of columns K.
    columns: int

    def shape(self, weight: Tensor) -> tuple[int, int]:
        """Return (N, K) of one matrix."""
        n, k = weight.shape[1:]
        return (n, self.columns) if weight.dtype is PACKED else (n, k)

    def of(self, weight: Tensor, group: int) -> Quantized:
        """Return codes and scales of one group as an operand [N, K]."""
        scale: Any = self.scale[group]
        factor, data = self.factor, weight.detach()[group]
        transposed = self.transposed and weight.dtype is not PACKED
        if self.spec.per_tensor and scale.is_cpu and scale.is_floating_point():
            scale = scale.item()
        stored = (data.t() if transposed else data).view(storage(self.spec.format))
        of_group = None if factor is None else factor[group]
        return Quantized(stored, scale, self.spec, self.shape(weight), transposed, of_group)

    def values(self, weight: Tensor, group: int) -> Tensor:
        """Return the float32 matrix [N, K] of one group; the caller drops it after use."""
        return _values(self.of(weight, group))

    def operand(self, weight: Tensor, group: int, transposed: bool, spec: QuantSpec, quantize: Any) -> Quantized:
        """Return one group's matrix [N, K] or its transpose as an operand in the recipe's spec."""
        q = self.of(weight, group)
        if not transposed and q.spec == spec:
            return q
        value = _values(q)
        quantized: Quantized = quantize(value.t() if transposed else value, spec, None, None)
        return quantized


def stack_codes(layer: Any) -> StackCodes:
    """Return the scales and layout of a layer's stack of codes."""
    check_scales(layer, layer._parameters["weight"])
    buffers = layer._buffers
    spec, scale, factor = layer.__dict__["weight_spec"], buffers["weight_scale"], buffers.get("weight_factor")
    return StackCodes(spec, scale, factor, is_stored_transposed(layer), layer.in_features)


def _values(q: Quantized) -> Tensor:
    if q.data.dtype is PACKED:
        q = replace(q, data=ops.CODE_BYTES(q.data))
    return q.dequantize()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
    """Compute F.linear for a weight stored as codes; backward dequantizes the weight again."""
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer = layer
        return F.linear(x, dequantized(layer, weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_input, need_weight, need_bias, _ = ctx.needs_input_grad
        of_x = g @ dequantized(ctx.layer, weight, g.dtype) if need_input else None
        g2, of_weight = g.reshape(-1, g.shape[-1]), None
        if need_weight:
            of_weight = (g2.t() @ x.reshape(-1, x.shape[-1])).float()
        return of_x, of_weight, g2.sum(0) if need_bias else None, None


def check_gradient(weight: Tensor) -> None:
    """Raise if the codes cannot have a gradient: four-bit codes never, eight-bit codes not under torch.compile.

    Raises:
        ValueError: four-bit codes require a gradient.
        NotImplementedError: under torch.compile, which would round the gradient; the caller then runs eagerly.
    """
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return
    if weight.dtype is PACKED:
        raise ValueError(FOUR_BITS)
    if is_tracing():
        raise NotImplementedError(COMPILED_GRADIENT)


FOUR_BITS = (
    "a weight that is stored in four bits has no gradient, because two codes share an element: freeze it with "
    "weight.requires_grad_(False), or dequantize_weights(model) to train it"
)
COMPILED_GRADIENT = (
    "torch.compile rounds the gradient of an eight-bit weight to eight bits: without fullgraph such layers run in "
    "eager mode; for inference freeze the weight with weight.requires_grad_(False)"
)
