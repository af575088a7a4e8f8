"""Planned GEMMs on a GPU without native ones: bf16 GEMMs multiply the values that the codes would have.

Codes are not written. One kernel reads a matrix and rounds it to the values of its codes, once along rows and once
along columns. A bf16 GEMM reads either direction, so nothing is transposed. Backward saves the input's codes and
scales, as with native GEMMs, and decodes them in one launch. A cached weight holds values, two bytes an element for
each direction with its own values. Blocks that a transpose shares are saved as values.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import capture, emulation, fused_quantize
from quaver.torch.backends.gpu.emulation import round_two
from quaver.torch.backends.gpu.quantize import LONGEST_SIDE
from quaver.torch.backends.gpu.scaled_mm import fills, finished, narrow, why_not_native, wide
from quaver.torch.linear.plan import (
    LinearCall,
    LinearPlan,
    Operands,
    WeightOperands,
    cached_operands,
    saved_operands,
    written_transpose,
)
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.state import weight_cache
from quaver.torch.state.noise import fresh_count, tensor_ids

# ---- noise of stochastic rounding ----


def noise_of(layer: nn.Module, device: torch.device) -> emulation.StochasticRounding:
    """Return the noise for rounding grad_output and its transpose: `state.noise.draw` without a copy."""
    count = layer._buffers.get("count")
    count = fresh_count(layer) if count is None else count
    if count.device != device or count.dtype is not torch.int64:
        count = count.to(device, torch.int64)
    straight, transposed = tensor_ids(layer, "grad_output")
    return emulation.StochasticRounding(layer.__dict__.get("seed", 0), straight, transposed, count)


def write_back_counts(layer: nn.Module, count: Tensor) -> None:
    """Copy the counter that the kernels have advanced back into the layer's buffer."""
    own = layer._buffers.get("count")
    if own is not None:
        own.copy_(count)


# ---- kernels and steps ----

#: Name of the weight's cache entry.
VALUES = "values"


class Kernels(NamedTuple):
    """Kernels that round a matrix by one spec and its transpose by another, for bf16 GEMMs."""

    #: (matrix, save codes, noise, need matrix, need transpose) -> result of `gpu.emulation.values`.
    values: Callable[..., tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]]
    #: Decodes saved codes and scales to values.
    saved_values: Callable[[Tensor, Tensor], Tensor]


def kernels(spec: QuantSpec | None, other: QuantSpec | None) -> Kernels | None:
    """Return the kernels for a matrix by `spec` and its transpose by `other`, or None if there are none."""
    if spec is None or other is None:
        return None
    if emulation.serves(spec, other):
        return Kernels(
            lambda x, saves_codes, noise, *needs: emulation.values(x, spec, saves_codes, *needs),
            lambda codes, scales: emulation.saved_values(codes, scales, spec),
        )
    if emulation.serves_two_level(spec, other):
        return Kernels(
            lambda x, saves_codes, *rest: emulation.two_level_values(x, spec, other, saves_codes, *rest),
            emulation.cached_two_level_values,
        )
    return None


def reason_unsupported(recipe: Recipe, device: torch.device, why_no_gemm: Callable[..., str] = why_not_native) -> str:
    """Return why a recipe has no emulated plan on this device, or "" if it has one; independent of shapes.

    Args:
        why_no_gemm: (spec, spec, device) -> why the GPU has no GEMM for these specs, or "".
    """
    for name, gemm in recipe.gemms.items():
        if gemm.a is None or gemm.b is None:
            return f"{name} is not quantized"
        if not why_no_gemm(gemm.a, gemm.b, device):
            return f"the GPU has {name}'s GEMM"
    pairs = {
        "input": (recipe.fprop.a, recipe.wgrad.b),
        "weight": (recipe.fprop.b, recipe.dgrad.b),
        "grad_output": (recipe.dgrad.a, recipe.wgrad.a),
    }
    drawn = [name for name, specs in list(pairs.items())[:2] if any(s and s.rounding != "nearest" for s in specs)]
    if drawn:
        return f"no kernel rounds {' and '.join(drawn)} stochastically to bf16 values"
    lacking = [f"{name} by {a} and {b}" for name, (a, b) in pairs.items() if kernels(a, b) is None]
    return f"no kernel writes bf16 values of {', '.join(lacking)}" if lacking else ""


def build(x: Tensor, weight: Tensor, recipe: Recipe) -> LinearPlan | None:
    """Plan a layer for inputs like x [..., K], or return None if only the general plan supports them."""
    tokens, (n, k) = x.numel() // max(x.shape[-1], 1), weight.shape
    sides = tokens, n, k
    if x.numel() == 0 or any(side & 15 for side in sides) or max(sides) > LONGEST_SIDE or x.dtype is not weight.dtype:
        return None
    if (
        x.dtype not in ops.DTYPES
        or ops.no_kernels(x)
        or recipe.delayed is not None
        or reason_unsupported(recipe, x.device)
    ):
        return None
    input_kernels, grad_kernels = kernels(recipe.fprop.a, recipe.wgrad.b), kernels(recipe.dgrad.a, recipe.wgrad.a)
    weight_kernels, dtype = kernels(recipe.fprop.b, recipe.dgrad.b), x.dtype
    if x.is_cuda:
        # The general plan, which issues this warning otherwise, may never run.
        fused_quantize.warn_once(recipe, x)
    assert input_kernels is not None and grad_kernels is not None and weight_kernels is not None

    def quantize_input(call: LinearCall, x: Tensor, save: bool) -> Operands:
        along, down, saved = input_kernels.values(x.detach().view(-1, x.shape[-1]), True, None, True, save)
        codes, scales = saved or (along if down is None else down, None)
        return along, None, codes, scales, None

    def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
        if capture.is_captured_or_rehearsed(weight.device):
            return _uncached_weight(call, weight, weight_kernels)
        return cached_operands(call, weight, 0.0) or _weight(call, weight, weight_kernels)

    def transpose_weight(call: LinearCall, weight: Tensor) -> tuple[Any, None]:
        w = saved_operands(call)
        if w is not None and w.dgrad is not None:
            return w.dgrad, None
        along, down, _ = weight_kernels.values(weight.detach(), False, None, False, True)
        return along if down is None else down, None

    def quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], bias_dtype: Any) -> Operands:
        return _quantize_grad(call, g, needs, grad_kernels)

    fprop_narrow, dgrad_narrow, wgrad_narrow = (
        dtype is torch.bfloat16 and fills(*shape) for shape in ((tokens, n), (tokens, k), (n, k))
    )

    def fprop(call: LinearCall, x: Tensor, _: None, w: Tensor, __: None, bias: Tensor | None) -> Tensor:
        if fprop_narrow and (bias is None or bias.dtype is dtype):
            return narrow(x, w, bias)
        return finished(wide(x, w), dtype, bias)

    def dgrad(call: LinearCall, g: Tensor, _: None, w: Tensor, __: None, bias: None) -> Tensor:
        return narrow(g, w, None) if dgrad_narrow else wide(g, w)

    def wgrad(call: LinearCall, g: Tensor, _: None, codes: Tensor, scales: Tensor | None, __: torch.dtype) -> Tensor:
        x = codes if scales is None else input_kernels.saved_values(codes, scales)
        return narrow(g.t(), x, None) if wgrad_narrow else wide(g.t(), x)

    return LinearPlan(
        recipe=recipe,
        quantize_input=quantize_input,
        transpose_input=written_transpose,
        quantize_weight=quantize_weight,
        transpose_weight=transpose_weight,
        quantize_grad=quantize_grad,
        transpose_grad=written_transpose,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        finish=lambda *products: _finished(products, dtype),
        cache_name=VALUES,
        aligned=True,
        training_only=False,
        implementation=0,
    )


def _quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], grad_kernels: Kernels) -> Operands:
    """Round grad_output along rows and along columns, as far as gradients need them."""
    straight, transposed, _ = needs
    if not (straight or transposed):
        return (None,) * 5
    layer, g = call.layer, g.detach().view(-1, g.shape[-1])
    noise = noise_of(layer, g.device) if call.recipe.stochastic else None
    along, down, _ = grad_kernels.values(g, False, noise, straight, transposed)
    if noise is not None and noise.counts is not layer._buffers.get("count"):
        write_back_counts(layer, noise.counts)
    return along, None, along if down is None else down, None, None


def _weight(call: LinearCall, weight: Tensor, weight_kernels: Kernels) -> WeightOperands:
    """Return the weight's values, and cache them; without gradients only under `frozen`, and those for fprop alone."""
    layer, spec, other = call.layer, call.recipe.fprop.b, call.recipe.dgrad.b
    assert spec is not None and other is not None
    entry = weight_cache.lookup(layer, VALUES, weight, spec, 0.0, call.training)
    q = None if entry is None else entry.quantized
    if entry is None or q is None or (call.training and (q.cached_transpose or q).spec != other):
        window = weight_cache.begin(layer, weight, call.training)
        if window is None and not call.training:
            weight_cache.count_uncached_forward(layer, weight)
            return _uncached_weight(call, weight, weight_kernels)
        # Cached tensors must not be inference tensors, because other modes read them too.
        with torch.inference_mode(False), torch.no_grad():
            along, down, _ = weight_kernels.values(weight.detach(), False, None, True, call.training)
        assert along is not None
        # Values stored in the data field: the cache tracks the tensors of a `Quantized`.
        q = Quantized(along, 1.0, spec, (along.shape[0], along.shape[1]))
        q.cached_transpose = None if down is None else Quantized(down, 1.0, other, (down.shape[0], down.shape[1]))
        entry = weight_cache.store(layer, VALUES, weight, spec, 0.0, q, window) or weight_cache.CachedWeight(q)
    w = entry.fast_operands = WeightOperands(q.data.t(), None, _for_dgrad(q, other), None, call.recipe)
    call.entry = entry
    return w


def _for_dgrad(q: Quantized, other: QuantSpec) -> Tensor | None:
    """Return the values that dgrad reads, or None if a forward without gradients has not made them."""
    if q.cached_transpose is not None:
        return q.cached_transpose.data
    return q.data if q.spec == other and q.spec.block[0] == q.spec.block[1] else None


def _uncached_weight(call: LinearCall, weight: Tensor, weight_kernels: Kernels) -> WeightOperands:
    """Return the values that fprop reads, for this call alone; backward computes those of dgrad."""
    along, _, _ = weight_kernels.values(weight.detach(), False, None, True, False)
    assert along is not None
    call.entry = weight_cache.CachedWeight(None)
    return WeightOperands(along.t())


def _finished(products: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Round the dgrad and wgrad products to dtype, in one launch if both are float32."""
    a, b = products
    if a is not None and b is not None and a.dtype is b.dtype is torch.float32 is not dtype:
        return round_two(a, b, dtype)
    return tuple(None if y is None else y.to(dtype) for y in products)
