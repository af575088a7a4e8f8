"""quantize on a GPU: which kernels serve a spec, over which of the two directions of a matrix.

A family of kernels reads a matrix once as it lies, row by row, and writes its operand, that of its transpose, or both.
A weight's or a gradient's transpose, a view, is therefore never copied: the matrix it is a view of is read, and what is
written is the transpose.
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
QUIET = (0, 0, 0)
#: What kernels read, and how long a side may be: they count rows and columns in 32 bits, whole blocks of them.
READ, LONGEST_SIDE = (torch.float32, torch.bfloat16, torch.float16), 2**31 - 2**15
Pair = tuple[Quantized | None, Quantized | None]


class QuantizeCall(NamedTuple):
    """One call: x [rows, k], its last axis contiguous, not empty, and how it is quantized."""

    x: Tensor
    #: For x as it lies, or None where that is not asked for.
    spec: QuantSpec | None
    #: For its transpose [k, rows], or None.
    other: QuantSpec | None
    #: float32 on x's device, or None to measure it: of the one operand, or of both where the spec's blocks are square.
    amax: Tensor | None
    #: Of delayed scaling, float32 of one element, 0 where unset; or None.
    factor: Tensor | None
    #: True if factor is known not to be 0.
    is_set: bool
    noise: Any
    other_noise: Any
    #: A history's newest amax, float32 of one element, which the kernel raises to this one; or None.
    newest: Tensor | None
    #: True if x is to be summed over its rows, where the same read gives that.
    sums: bool = False


class QuantizeKernels(NamedTuple):
    """Kernels, and what they are for."""

    #: Whether they write both operands from one read, by these specs; or the one whose spec is not None.
    serves: Callable[[QuantSpec | None, QuantSpec | None], bool]
    run: Callable[[QuantizeCall], Pair]
    #: Both operands of a matrix decided beforehand, or the first alone, for a Linear's step; or None.
    decided: Callable[[Tensor, QuantSpec, QuantSpec | None, RequestedOperands], QuantizeLaunch | None] | None = None


def _by_tensor(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    return _plain(spec, other) and (spec or other).per_tensor and (None in (spec, other) or spec == other)  # type: ignore[union-attr]


def _plain(*specs: QuantSpec | None) -> bool:
    """FP8 rounded to nearest, with float32 scales."""
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
    # Where a GEMM reads either direction, a transpose is a view.
    views = reads_transposes(x.device)
    both = call.spec is not None and call.other is not None
    as_it_lies = call.spec is not None or views
    turn = both and not views
    q = per_tensor(x, spec, call.amax, call.factor, call.is_set, turn, as_it_lies, call.newest, sums=call.sums)
    if not both:
        return (q, None) if call.spec is not None else (None, q.T if views else q)
    transposed, q.twin = q.T, None
    # Neither refers to the other: of one that is dropped the memory is free.
    transposed.twin = None
    return q, transposed


def _in_blocks(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    blocks = {s.block for s in (spec, other) if s is not None}
    return (
        _plain(spec, other) and blocks in ({(1, BLOCK)}, {(BLOCK, BLOCK)}) and (None in (spec, other) or spec == other)
    )


def _in_rows(spec: QuantSpec | None, other: QuantSpec | None) -> bool:
    return _plain(spec, other) and {s.block for s in (spec, other) if s is not None} == {(1, None)}


def _running(kernels: Callable[..., Pair]) -> Callable[[QuantizeCall], Pair]:
    """What calls kernels that need no more of a call."""
    return lambda call: kernels(call.x, call.spec, call.other, call.amax)


def _run_with_two_levels(call: QuantizeCall) -> Pair:
    if call.spec is not None:
        return by_two_levels(call.x, call.spec, call.amax, call.noise), None
    assert call.other is not None
    return None, by_two_levels(call.x, call.other, call.amax, call.other_noise, down=True)


#: In order of preference.
FAMILIES = [
    QuantizeKernels(_by_tensor, _run_by_tensor, tensorwise.decided),
    QuantizeKernels(_in_blocks, _running(by_blocks), rowwise.decided_blockwise),
    QuantizeKernels(_in_rows, _running(by_rows), rowwise.decided),
    QuantizeKernels(with_exponents, _running(by_exponents), block_scaled.decided),
    QuantizeKernels(with_two_levels, _run_with_two_levels, block_scaled.decided_in_two_levels),
]


_families: dict[tuple[str | None, str | None], QuantizeKernels | None] = {}


def family_of(spec: QuantSpec | None, other: QuantSpec | None) -> QuantizeKernels | None:
    key = None if spec is None else spec.text, None if other is None else other.text
    if key not in _families:
        _families[key] = next((family for family in FAMILIES if family.serves(spec, other)), None)
    return _families[key]


def reason(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Why no kernel quantizes this, or ""; the device has been asked before."""
    if x.dtype not in READ:
        return f"its kernels read float32, bfloat16 and float16, not {x.dtype}"
    if x.shape and max(x.shape) > LONGEST_SIDE:
        return f"a side of {max(x.shape)} elements is more than its kernels count"
    return "" if family_of(spec, None) else f"it has no kernel for {spec}"


def reason_both(x: Tensor, spec: QuantSpec, other: QuantSpec, *_: object) -> str:
    """Why `quantize_both` is not for this call, or "": then two calls of `quantize` are made."""
    why = reason(x, spec)
    if why:
        return why
    return "" if family_of(spec, other) else f"no kernel writes {spec} and {other} from one read"


def quantize(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    is_set: bool = False,
    newest: Tensor | None = None,
) -> Quantized:
    """As `quaver.torch.numerics.reference.quantize`, bit for bit.

    Args:
        is_set: True if factor is known not to be 0, so that one pass over x is enough.
        newest: the place where the kernel notes the amax, float32 of one element; the result says whether it did.
    """
    family = family_of(spec, None)
    if family is None or _not_for_kernels(x, spec, factor):
        return reference.quantize(x, spec, amax, factor, noise)
    try:
        if x.stride(1) != 1 and x.stride(0) == 1:
            operand = family.run(_call(x.t(), None, spec, amax, factor, noise, noise, is_set, newest))[1]
        else:
            operand = family.run(_call(x, spec, None, amax, factor, noise, noise, is_set, newest))[0]
    except torch.OutOfMemoryError as error:
        raise out_of_memory(x, 1) from error
    assert operand is not None
    return operand


def quantize_both(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    other_noise: Any = QUIET,
    is_set: bool = False,
    newest: Tensor | None = None,
    sums: bool = False,
) -> tuple[Quantized, Quantized]:
    """x [rows, k] by `spec` and its transpose [k, rows] by `other`, from one read of x where a kernel does that.

    Args:
        amax: of x; one that is given serves the transpose too only where the blocks are square.
        newest: as `quantize` takes it; the first of the results says whether it was noted.
        sums: of x over its rows, wanted where they cost no read: the first of the results holds them as `partial_sums`,
            or None.
    """
    family = family_of(spec, other)
    transposed_amax = amax.t() if isinstance(amax, Tensor) and amax.dim() == 2 else amax
    one_amax = amax is None or (spec == other and spec.transposable)
    if family is None or _not_for_kernels(x, spec, factor) or not one_amax:
        q = quantize(x, spec, amax, factor, noise, is_set, newest)
        return q, quantize(x.t(), other, transposed_amax, factor, other_noise, is_set)
    pair: Pair
    try:
        if x.stride(1) != 1 and x.stride(0) == 1:
            pair = family.run(_call(x.t(), other, spec, transposed_amax, factor, other_noise, noise, is_set, newest))[
                ::-1
            ]
        else:
            pair = family.run(_call(x, spec, other, amax, factor, noise, other_noise, is_set, newest, sums))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(x, 2) from error
    assert pair[0] is not None
    assert pair[1] is not None
    return pair[0], pair[1]


def _not_for_kernels(x: Tensor, spec: QuantSpec, factor: Tensor | float | None) -> bool:
    """True if x is empty or too large for kernels, or if this is delayed scaling of blocks, which no recipe uses."""
    delayed_blocks = factor is not None and not spec.per_tensor
    return x.numel() == 0 or x.dtype not in READ or max(x.shape) > LONGEST_SIDE or delayed_blocks


def _call(
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
) -> QuantizeCall:
    if amax is not None:
        amax = torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    if factor is not None and not isinstance(factor, Tensor):
        is_set = factor != 0.0
        factor = torch.full((1,), factor, dtype=torch.float32, device=x.device) if is_set else None
    elif factor is not None and (factor.dtype is not torch.float32 or factor.device != x.device):
        # A kernel is told an address, whatever lies there.
        factor = factor.to(x.device, torch.float32)
    x = x if x.stride(1) == 1 else x.contiguous()
    return QuantizeCall(x, spec, other, amax, factor, is_set, noise, other_noise, newest, sums)
