"""The GPU's implementations as the operations list them: their modules, and Triton, are imported when one is wanted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import reference
from quaver.torch.gpu import device
from quaver.torch.quantized import Quantized

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
    """Whether one of them is asked for by name."""
    return bool(device.asked)


def why_not_quantize(x: Tensor, spec: QuantSpec, *rest: Any) -> str:
    """Why no kernel quantizes this, or ""."""
    why = device.why_no_kernels(x.device) or _too_large(x)
    if why:
        return why
    from quaver.torch.gpu import quantize as kernels

    return kernels.reason(x, spec, *rest)


def quantize(x: Tensor, *args: Any) -> Quantized:
    from quaver.torch.gpu import quantize as kernels

    # An implementation chosen for a recipe has seen another tensor.
    return reference.quantize(x, *args[:4]) if max(x.shape) > SIDE else kernels.quantize(x, *args)


def why_not_quantize_both(x: Tensor, spec: QuantSpec, other: QuantSpec, *rest: Any) -> str:
    """Why no kernel quantizes this and its transpose, or ""."""
    why = device.why_no_kernels(x.device) or _too_large(x)
    if why:
        return why
    from quaver.torch.gpu import quantize as kernels

    return kernels.reason_both(x, spec, other, *rest)


def quantize_both(*args: Any) -> tuple[Quantized, Quantized]:
    from quaver.torch.gpu import quantize as kernels

    return kernels.quantize_both(*args)


def why_not_native(a: Quantized, b: Quantized, *rest: Any) -> str:
    return device.why_no_fp8(a.device, "native") or "it is not there yet"


def native(*args: Any) -> Tensor:
    raise NotImplementedError


def why_not_decoded(a: Quantized, b: Quantized, *rest: Any) -> str:
    return device.why_no_fp8(a.device, "decoded") or "it is not there yet"


def decoded(*args: Any) -> Tensor:
    raise NotImplementedError


def resolve_matmul(recipe: Recipe, x: Tensor) -> Callable[..., Tensor]:
    return reference.matmul


def _too_large(x: Tensor) -> str:
    return (
        f"a side of {max(x.shape)} elements is beyond 2^31 - 1, where kernels stop counting"
        if (x.shape and max(x.shape) > SIDE)
        else ""
    )
