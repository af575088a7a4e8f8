"""Autograd and torch.compile support of operations: errors for second derivatives, flattened operands, exact sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, pack, storage
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.operation import Operation

# ---- derivatives ----

_C: Any = torch._C
#: Returns True under vmap, grad and other torch.func transforms. If torch lacks it, torch raises its own errors there.
transforms_active: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", lambda: False)
#: Returns the level of forward mode, -1 outside of torch.autograd.forward_ad.dual_level. If torch lacks it, torch
#: raises its own errors there.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", -1)

#: Error message of linear layers.
NO_DOUBLE_BACKWARD = (
    "quantized layers have no second derivative: rounding has none. Compute the part that is differentiated twice in "
    "high precision: with quaver.torch.autocast(enabled=False)"
)


def first_derivative(run: Callable[..., tuple[Any, ...]], ctx: Any, sentence: str, *gs: Tensor) -> tuple[Any, ...]:
    """Run run(ctx, saved tensors, *gs), a backward whose gradients have no derivative.

    Under create_graph=True the gradients are connected to the saved tensors and to gs, so that differentiating one
    raises NotImplementedError instead of treating it as a constant. The saved tensors are read once, because under
    checkpointing each read unpacks them, and torch allows only one.

    Args:
        sentence: error message: why there is no derivative, and what to do.
    """
    saved = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return run(ctx, saved, *gs)
    with torch.no_grad():
        grads = run(ctx, saved, *gs)
    tied = *gs, *saved, torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    return tuple(_Refuse.apply(g, sentence, *tied) if isinstance(g, Tensor) else g for g in grads)


class _Refuse(torch.autograd.Function):
    """Identity on a gradient, connected to its sources in the graph; its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sentence: str, *sources: Tensor | None) -> Tensor:
        ctx.sentence = sentence
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise NotImplementedError(ctx.sentence)


def refuse_transforms(*tensors: Tensor | None, sentence: str | None = None) -> None:
    """Raise NotImplementedError under vmap, torch.func.grad and forward mode.

    Args:
        sentence: error message for functions that do not run there in high precision either; None for linear layers.
    """
    if transforms_active():
        raise NotImplementedError(sentence or NO_FUNCTORCH)
    if forward_level() >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors if t is not None):
        raise NotImplementedError(sentence or NO_FORWARD_MODE)


NO_FORWARD_MODE = (
    "quantized layers have no forward-mode derivative; use reverse mode, or run them in high precision for this: "
    "with quaver.torch.autocast(enabled=False)"
)


NO_FUNCTORCH = (
    "quantized layers do not run under torch.func transforms such as vmap and grad; loop over the batch and use "
    "torch.autograd, or run them in high precision for this: with quaver.torch.autocast(enabled=False)"
)


# ---- operands as plain tensors, for opaque operators ----
# Scales are passed as tensors; fields that a spec does not use are empty tensors.


def flat(q: Quantized) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
    """Flatten an operand to the arguments of the `matmul` operator."""
    scale = q.scale if isinstance(q.scale, Tensor) else q.data.new_full((1, 1), q.scale, dtype=torch.float32)
    factor = scale.new_empty(0) if q.tensor_factor is None else q.tensor_factor
    return q.data, scale, factor, q.spec.text, q.transposed, q.stored_shape[1], q.swizzled


def restored(
    data: Tensor, scale: Tensor, factor: Tensor, text: str, transposed: bool, columns: int, swizzled: bool
) -> Quantized:
    """Rebuild the operand that `flat` has flattened."""
    spec = QuantSpec.parse(text)
    data = data.view(storage(spec.format))
    layout = (data.shape[0], columns)
    shape = layout[::-1] if transposed else layout
    host = spec.per_tensor and data.is_cpu and scale.is_floating_point()
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale.item() if host else scale, spec, shape, transposed, tensor_factor, swizzled=swizzled)


def parts(q: Quantized, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (data, scales, tensor factor, amax) of an operand, stored transposed if `transposed` and not packed."""
    # Separate empty tensors, because results of an operator must not alias.
    none, top = (q.data.new_empty(0, dtype=torch.float32) for _ in range(2))
    data, scale = q.data, q.plain_scale() if isinstance(q.scale, Tensor) else none.new_full((1, 1), q.scale)
    if q.spec.format.packed:
        data, scale = (pack(q.codes()), scale.t()) if q.transposed else (data, scale)
    elif q.transposed is not transposed:
        data, scale = data.t(), scale.t()
    if q.spec.per_tensor:
        top = q.amax if isinstance(q.amax, Tensor) else none.new_full((1, 1), q.amax or 0.0)
    return data.contiguous(), scale.contiguous(), none if q.tensor_factor is None else q.tensor_factor, top


def empty_parts(x: Tensor, spec: QuantSpec, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of `parts` for x [rows, k], or x [k, rows] if `transposed`."""
    rows, k = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    k = spec.padded(k)
    blocks = spec.blocks(rows, k)
    if spec.format.packed:
        shape = (rows, (k + 1) // 2)
    elif transposed:
        shape, blocks = (k, rows), blocks[::-1]
    else:
        shape = (rows, k)
    narrow = spec.scale == "e8m0" or spec.two_level
    return (
        x.new_empty(shape, dtype=storage(spec.format)),
        x.new_empty(blocks, dtype=torch.uint8 if narrow else torch.float32),
        x.new_empty((1, 1) if spec.two_level else (0,), dtype=torch.float32),
        x.new_empty((1, 1) if spec.per_tensor else (0,), dtype=torch.float32),
    )


def joined(
    x: Tensor, spec: QuantSpec, transposed: bool, data: Tensor, scale: Tensor, factor: Tensor, amax: Tensor
) -> Quantized:
    """Rebuild the operand of x [rows, k] from its `parts`."""
    is_stored_transposed = transposed and not spec.format.packed
    tensor_factor = factor if spec.two_level else None
    return Quantized(
        data, scale, spec, (x.shape[0], spec.padded(x.shape[1])), is_stored_transposed, tensor_factor, amax
    )


# ---- sums rounded where eager mode rounds them ----
# Inductor keeps a fused bf16 sum in float32, which changes the bits of a following quantization. So these sums are
# opaque operators in compiled code, and torch's own sums in eager mode.


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b of the same shape and dtype, for backward functions; not differentiable."""
    return ADD(a, b) if is_tracing() else torch.add(a, b)


class Fork(torch.autograd.Function):
    """Split x for several uses: (x, uses). Gradients are summed in eager's order: the first, the last, the one before,
    ...
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, first: Tensor, *others: Tensor) -> Any:
        for g in reversed(others):
            first = add(first, g)
        return first, None


class Join(torch.autograd.Function):
    """Compute x + y, rounded in compiled code too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.constants = x.dtype, y.dtype
        return ADD(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return tuple(g.to(dtype) for dtype in ctx.constants)


ADD: Operation[Tensor] = Operation("add(Tensor a, Tensor b) -> Tensor", torch.add, fake=torch.add)
