"""The GPU's implementations as the operations list them: their modules, and Triton, are imported when one is wanted."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu.launching import device
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized

#: A side that 32-bit indices of rows and columns cannot reach; offsets are of 64 bits.
SIDE = 2**31 - 1


@contextmanager
def asking(name: str) -> Iterator[None]:
    """While open, an implementation of a GPU that is asked for by name takes tensors on a CPU as well as it can."""
    added = {name} & {"triton", "native", "decoded"} - device.asked
    device.asked |= added
    try:
        yield
    finally:
        device.asked -= added


def asked() -> bool:
    """True if `only` names one of them."""
    return bool(device.asked)


def why_not_quantize(x: Tensor, spec: QuantSpec, *rest: Any) -> str:
    """Why no kernel quantizes this, or ""."""
    why = device.why_no_kernels(x.device) or _too_large(x)
    if why:
        return why
    from quaver.torch.backends.gpu import families as kernels

    return kernels.reason(x, spec, *rest)


def quantize(x: Tensor, *args: Any) -> Quantized:
    from quaver.torch.backends.gpu import families as kernels

    if max(x.shape) > SIDE:
        # An implementation chosen for a recipe has seen another tensor.
        return reference.quantize(x, *args[:4])
    try:
        return kernels.quantize(x, *args)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(x, 1) from error


def why_not_quantize_both(x: Tensor, spec: QuantSpec, other: QuantSpec, *rest: Any) -> str:
    """Why no kernel quantizes this and its transpose, or ""."""
    why = device.why_no_kernels(x.device) or _too_large(x)
    if why:
        return why
    from quaver.torch.backends.gpu import families as kernels

    return kernels.reason_both(x, spec, other, *rest)


def quantize_both(x: Tensor, *args: Any) -> tuple[Quantized, Quantized]:
    from quaver.torch.backends.gpu import families as kernels

    if max(x.shape) > SIDE:
        return quantize(x, args[0], *args[2:5]), quantize(x.t(), args[1], *args[2:4], *args[5:6])
    try:
        return kernels.quantize_both(x, *args)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(x, 2) from error


def out_of_memory(x: Tensor, copies: int) -> torch.OutOfMemoryError:
    """The sentence for a quantization that finds no memory."""
    size = copies * x.numel() / 2**20
    return torch.OutOfMemoryError(
        f"no memory for the quantized copy of a {x.dtype} tensor of shape {tuple(x.shape)}, {size:.0f} MiB. "
        "Nothing was recorded: the step can be run again with a smaller batch, under quaver.torch.checkpoint, or after "
        "torch.cuda.empty_cache()"
    )


def why_not_sum(g: Tensor, dtype: torch.dtype) -> str:
    """Why no kernel sums a gradient [tokens, features] over its tokens, or ""."""
    why = device.why_no_kernels(g.device)
    if why:
        return why
    other = {g.dtype, dtype} - {torch.float32, torch.bfloat16, torch.float16}
    if other:
        return f"its kernel is for float32, bfloat16 and float16, not {other.pop()}"
    if not g.numel():
        return "there is nothing to sum"
    return f"a side of {max(g.shape)} elements is more than it counts" if max(g.shape) > 2**30 else ""


def column_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    from quaver.torch.backends.gpu.fused import column_sums as kernels

    return kernels.column_sum(g, dtype)


def add_up(partial: Tensor, dtype: torch.dtype) -> Tensor:
    from quaver.torch.backends.gpu.fused import column_sums as kernels

    return kernels.add_up(partial, dtype)


def why_not_native(a: Quantized, b: Quantized, *rest: Any) -> str:
    """Why cuBLASLt does not multiply these, or ""."""
    why = device.why_no_fp8(a.device, "native")
    if why:
        return why
    from quaver.torch.backends.gpu.gemms import scaled_mm

    return scaled_mm.reason(a, b, *rest)


def native(*args: Any) -> Tensor:
    from quaver.torch.backends.gpu.gemms import scaled_mm

    return scaled_mm.matmul(*args)


def why_not_decoded(a: Quantized, *_: Any) -> str:
    """Why no GEMM of decoded operands runs, or ""."""
    if a.data.is_cuda or (a.data.is_cpu and device.asked & {"native", "decoded"}):
        return ""
    return "the operands are not on a GPU"


def decoded(*args: Any) -> Tensor:
    from quaver.torch.backends.gpu.gemms import decoded as slow

    return slow.matmul(*args)


def resolve_matmul(x: Tensor) -> Callable[..., Tensor]:
    """The implementation that multiplies on a GPU, native or decoded, without asking again."""
    from quaver.torch.backends.gpu.gemms import decoded, scaled_mm

    return decoded.matmul if device.why_no_fp8(x.device, "native") else scaled_mm.matmul


_announced: set[tuple[str, torch.device]] = set()


def announce(recipe: Recipe, x: Tensor) -> None:
    """Warn once for a recipe and a GPU which of its GEMMs do not run natively, and why."""
    known = str(recipe), x.device
    if known in _announced or not recipe.quantizes:
        return
    _announced.add(known)
    why = device.why_no_fp8(x.device, "native")
    reasons = {why: list(recipe.gemms)} if why else {}
    if not why:
        from quaver.torch.backends.gpu.gemms import scaled_mm

        for name, gemm in recipe.gemms.items():
            if gemm.a is not None and gemm.b is not None:
                why = scaled_mm.unavailable(gemm.a, gemm.b, x.device)
                if why:
                    reasons.setdefault(why, []).append(name)
    for why, gemms in reasons.items():
        warnings.warn(
            f"recipe {recipe} on {device.name(x.device)}: {', '.join(gemms)} run as bf16 GEMMs of decoded operands, "
            f"exact but slower than unquantized ones, because {why}",
            stacklevel=2,
        )


def _too_large(x: Tensor) -> str:
    return (
        f"a side of {max(x.shape)} elements is beyond 2^31 - 1, where kernels stop counting"
        if (x.shape and max(x.shape) > SIDE)
        else ""
    )
