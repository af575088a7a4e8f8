"""Quantization on a GPU: which kernels support a spec, for a matrix, its transpose, or both.

Kernels read a matrix once, row by row in storage order, and write its operand, that of its transpose, or both. So the
transpose of a weight or gradient, which is a view, is never copied: the underlying matrix is read, and the operand of
the transpose is written.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import block_scaled, rowwise, tensorwise
from quaver.torch.backends.gpu.block_scaled import by_exponents, by_two_levels, with_exponents, with_two_levels
from quaver.torch.backends.gpu.device import out_of_memory
from quaver.torch.backends.gpu.quantize_launch import QuantizeLaunch, RequestedOperands
from quaver.torch.backends.gpu.rowwise import BLOCK, by_blocks, by_rows
from quaver.torch.backends.gpu.scaled_mm import reads_transposes
from quaver.torch.backends.gpu.tensorwise import measure as measure
from quaver.torch.backends.gpu.tensorwise import per_tensor as per_tensor
from quaver.torch.backends.gpu.tensorwise import transpose as transpose
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized

#: No noise: (seed, tensor id, count) of stochastic rounding.
NO_NOISE = (0, 0, 0)
#: dtypes that kernels read, and the longest side of a matrix: they index rows and columns in 32 bits, in whole blocks.
READ, LONGEST_SIDE = (torch.float32, torch.bfloat16, torch.float16), 2**31 - 2**15
Pair = tuple[Quantized | None, Quantized | None]


class QuantizeCall(NamedTuple):
    """One quantization: a nonempty x [rows, k] with contiguous last axis, and the specs of its operands."""

    x: Tensor
    #: Spec of x in storage order, or None if that operand is not requested.
    spec: QuantSpec | None
    #: Spec of the transpose [k, rows], or None.
    other: QuantSpec | None
    #: float32 amaxes on x's device, or None to measure them; valid for both operands if blocks are square.
    amax: Tensor | None
    #: Encode factor of delayed scaling, float32 of one element, 0 if unset; None without delayed scaling.
    factor: Tensor | None
    #: True if `factor` is known to be nonzero.
    is_set: bool
    noise: Any
    other_noise: Any
    #: Newest amax of a scaling history, float32 of one element, which the kernel raises to this one; or None.
    newest: Tensor | None
    #: True to also sum x over its rows, if the same read can do it.
    sums: bool = False


class QuantizeKernels(NamedTuple):
    """Kernels of one kind of scaling."""

    #: Returns True if one read writes operands by both specs, or the one whose spec is not None.
    serves: Callable[[QuantSpec | None, QuantSpec | None], bool]
    run: Callable[[QuantizeCall], Pair]
    #: Returns the buffers and launches that quantize a matrix and its transpose, or None if the specs are unsupported.
    #: None instead of a function: linear layers cannot plan these launches.
    plan_launch: Callable[[Tensor, QuantSpec, QuantSpec | None, RequestedOperands], QuantizeLaunch | None] | None = None


def _by_tensor(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    return _plain(spec, other) and (spec or other).per_tensor and (None in (spec, other) or spec == other)  # type: ignore[union-attr]


def _plain(*specs: QuantSpec | None) -> bool:
    """Return True if all specs are FP8 rounded to nearest with float32 scales."""
    return all(
        s is None
        or (
            s.format.name in FLOAT8
            and s.rounding == "nearest"
            and not s.hadamard
            and s.scale in ("fp32", "power_of_two")
        )
        for s in specs
    )


def _run_by_tensor(call: QuantizeCall) -> Pair:
    x, spec = call.x, call.spec or call.other
    assert spec is not None
    # Where GEMMs read either direction, the transpose is a view.
    views = reads_transposes(x.device)
    both = call.spec is not None and call.other is not None
    untransposed = call.spec is not None or views
    want_transpose = both and not views
    q = per_tensor(
        x, spec, call.amax, call.factor, call.is_set, want_transpose, untransposed, call.newest, sums=call.sums
    )
    if not both:
        return (q, None) if call.spec is not None else (None, q.T if views else q)
    transposed, q.cached_transpose = q.T, None
    # No references between the two, so that each can be freed alone.
    transposed.cached_transpose = None
    return q, transposed


def _in_blocks(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    blocks = {s.block for s in (spec, other) if s is not None}
    return (
        _plain(spec, other) and blocks in ({(1, BLOCK)}, {(BLOCK, BLOCK)}) and (None in (spec, other) or spec == other)
    )


def _in_rows(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    return _plain(spec, other) and {s.block for s in (spec, other) if s is not None} == {(1, None)}


def _running(kernels: Callable[..., Pair]) -> Callable[[QuantizeCall], Pair]:
    """Adapt kernels that need only x, the specs and the amax to the signature of `QuantizeKernels.run`."""
    return lambda call: kernels(call.x, call.spec, call.other, call.amax)


def _run_with_two_levels(call: QuantizeCall) -> Pair:
    if call.spec is not None:
        return by_two_levels(call.x, call.spec, call.amax, call.noise), None
    assert call.other is not None
    return None, by_two_levels(call.x, call.other, call.amax, call.other_noise, down=True)


#: Kernels in order of preference.
FAMILIES = [
    QuantizeKernels(_by_tensor, _run_by_tensor, tensorwise.plan_launch),
    QuantizeKernels(_in_blocks, _running(by_blocks), rowwise.plan_launch_blockwise),
    QuantizeKernels(_in_rows, _running(by_rows), rowwise.plan_launch),
    QuantizeKernels(with_exponents, _running(by_exponents), block_scaled.plan_launch),
    QuantizeKernels(with_two_levels, _run_with_two_levels, block_scaled.plan_launch_two_level),
]


_families: dict[tuple[str | None, str | None], QuantizeKernels | None] = {}


def family_of(spec: QuantSpec | None, other: QuantSpec | None) -> QuantizeKernels | None:
    key = None if spec is None else spec.text, None if other is None else other.text
    if key not in _families:
        _families[key] = next((family for family in FAMILIES if family.serves(spec, other)), None)
    return _families[key]


def reason(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Return why no kernel quantizes x by this spec, or ""; the caller has checked the device."""
    if x.dtype not in READ:
        return f"its kernels read float32, bfloat16 and float16, not {x.dtype}"
    if x.shape and max(x.shape) > LONGEST_SIDE:
        return f"a side of {max(x.shape)} elements is too long for its kernels"
    return "" if family_of(spec, None) else f"it has no kernel for {spec}"


def reason_both(x: Tensor, spec: QuantSpec, other: QuantSpec, *_: object) -> str:
    """Return why `quantize_both` does not support the call, so that `quantize` is called twice, or ""."""
    why = reason(x, spec)
    if why:
        return why
    return "" if family_of(spec, other) else f"no kernel writes {spec} and {other} from one read"


def quantize(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = NO_NOISE,
    is_set: bool = False,
    newest: Tensor | None = None,
) -> Quantized:
    """Quantize x by kernels; same bits as `quaver.torch.numerics.reference.quantize`.

    Args:
        is_set: True if `factor` is known to be nonzero, so that one pass over x suffices.
        newest: float32 of one element in which the kernel may record the amax; the result says whether it did.
    """
    family = family_of(spec, None)
    if family is None or _not_for_kernels(x, spec, factor):
        return reference.quantize(x, spec, amax, factor, noise)
    operand = _run(family, x, spec, None, amax, factor, noise, noise, is_set, newest)[0]
    assert operand is not None
    return operand


def quantize_both(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = NO_NOISE,
    other_noise: Any = NO_NOISE,
    is_set: bool = False,
    newest: Tensor | None = None,
    sums: bool = False,
) -> tuple[Quantized, Quantized]:
    """Quantize x [rows, k] by `spec` and its transpose [k, rows] by `other`, from one read of x if a kernel can.

    Args:
        amax: amax of x; a given one is used for the transpose too only if blocks are square.
        newest: as in `quantize`; the first result says whether it was recorded.
        sums: True to sum x over its rows if that costs no extra read: `partial_sums` of the first result, or None.
    """
    family = family_of(spec, other)
    one_amax = amax is None or (spec == other and spec.transposable)
    if family is None or _not_for_kernels(x, spec, factor) or not one_amax:
        q = quantize(x, spec, amax, factor, noise, is_set, newest)
        return q, quantize(x.t(), other, _transposed(amax), factor, other_noise, is_set)
    pair = _run(family, x, spec, other, amax, factor, noise, other_noise, is_set, newest, sums)
    assert pair[0] is not None and pair[1] is not None
    return pair[0], pair[1]


def _transposed(amax: Any) -> Any:
    return amax.t() if isinstance(amax, Tensor) and amax.dim() == 2 else amax


def _not_for_kernels(x: Tensor, spec: QuantSpec, factor: Tensor | float | None) -> bool:
    """Return True if x is empty or too large for kernels, or for delayed scaling of blocks, which no recipe uses."""
    delayed_blocks = factor is not None and not spec.per_tensor
    return x.numel() == 0 or x.dtype not in READ or max(x.shape) > LONGEST_SIDE or delayed_blocks


def _run(
    family: QuantizeKernels,
    x: Tensor,
    spec: QuantSpec | None,
    other: QuantSpec | None,
    amax: Any,
    factor: Any,
    noise: Any,
    other_noise: Any,
    is_set: bool,
    newest: Tensor | None,
    sums: bool = False,
) -> Pair:
    """Quantize x and its transpose, as far as their specs are given; reads a transposed view in storage order."""
    if amax is not None:
        amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    if factor is not None and not isinstance(factor, Tensor):
        is_set = factor != 0.0
        factor = torch.full((1,), factor, dtype=torch.float32, device=x.device) if is_set else None
    elif factor is not None and (factor.dtype is not torch.float32 or factor.device != x.device):
        # Kernels get raw addresses, so the tensor must be on their device.
        factor = factor.to(x.device, torch.float32)
    try:
        if x.stride(1) != 1 and x.stride(0) == 1:
            amax = amax if other is None else _transposed(amax)
            call = QuantizeCall(x.t(), other, spec, amax, factor, is_set, other_noise, noise, newest)
            return family.run(call)[::-1]
        x = x if x.stride(1) == 1 else x.contiguous()
        return family.run(QuantizeCall(x, spec, other, amax, factor, is_set, noise, other_noise, newest, sums))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(x, 1 if other is None else 2) from error
