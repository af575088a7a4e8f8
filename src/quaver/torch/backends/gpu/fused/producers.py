"""Kernels that make the input of linear layers on a GPU and quantize it in the same pass.

Importing this module imports no kernels; they are imported when one is wanted.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.fused.results import Made, mode
from quaver.torch.backends.gpu.launching import device
from quaver.torch.numerics.quantized import Quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The widest row: 65535 blocks, as many as a grid has on its second axis, of 64 columns.
WIDEST = 65535 * 64


def why_not(x: Tensor, *_: Any) -> str:
    """Why no kernel normalizes or activates a tensor, whatever goes with it, or ""."""
    if x.is_cpu and not device.asked:
        return "the tensor is not on a GPU"
    why = device.why_no_kernels(x.device)
    if why:
        return why
    if x.dtype not in DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
    elements, columns = x.numel(), x.shape[-1]
    if columns > WIDEST or elements > columns * (2**31 - 1):
        return f"no grid of a GPU covers a tensor of shape {tuple(x.shape)}"
    return "" if elements else "the tensor is empty"


class Quantizing(Protocol):
    """What makes the input of linear layers, and may quantize it."""

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, turned: bool
    ) -> Made | None:
        """On a GPU: the input quantized by the kernel that makes it, or with its amax; see
        `quaver.torch.backends.gpu.fused.norm`.

        Args:
            spec: with one scale for the tensor, or blocks along a row.
            factor: known, so that one pass quantizes; or None.
            want_output: whether the input itself is needed too.
            turned: write the codes of the transpose alone.
        Returns:
            None where the prologue has no such kernel.
        """


def operand(
    prologue: Quantizing,
    x: Sequence[Tensor | None],
    width: int,
    spec: QuantSpec,
    factor: Tensor | float | None,
    is_set: bool,
    want_output: bool,
    turn: bool,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Made, Quantized, Quantized | None] | None:
    """A prologue's result [..., width] quantized on the way, or None where that saves nothing.

    Args:
        factor: encode factor of delayed scaling, 0 where unset; or None.
        is_set: True if it is known not to be 0: then one pass writes the codes. Else one pass makes the result and its
            amax, and a second one casts.
        want_output: True if the result itself is needed too.
        turn: True if the transpose is wanted.
        agree: gives of an amax of this tensor that of a larger one, of which others have the rest.
    Returns:
        What the prologue made, that as an operand, and its transpose if that was wanted.
    Exact: the codes, scales and amax of the result, made by the same kernel, and quantized.
    """
    kind = mode(spec, is_set, width)
    whole = kind in ("amax", "tensor")
    # Narrower blocks have no amax to save, and of a result that is written anyway both directions take one read.
    if not kind or (not whole and (want_output or turn)) or (factor is not None and not whole):
        return None
    on_device = _on_device(factor, x[0]) if whole else None  # type: ignore[arg-type]
    result = prologue.quantized(x, spec, on_device if kind == "tensor" else None, want_output, False)
    if result is None:
        return None
    q = result.quantized
    if q is None:
        assert result.y is not None
        top = result.amax if agree is None or result.amax is None else agree(result.amax)
        q = cast(result.y.view(-1, result.y.shape[-1]), spec, on_device, top, turn)
    elif agree is not None and isinstance(q.amax, Tensor) and spec.per_tensor:
        q.amax = agree(q.amax)
    if not turn:
        return result, q, None
    # Neither refers to the other: of one that is dropped the memory is free.
    turned, q.twin = q.T, None
    turned.twin = None
    return result, q, turned


def cast(y: Tensor, spec: QuantSpec, factor: Tensor | None, amax: Tensor | None, turn: bool) -> Quantized:
    """y [rows, k] by its measured amax, or a set factor, and its transpose as the `twin` where GEMMs read one."""
    from quaver.torch.backends.gpu.gemms.scaled_mm import reads_transposes
    from quaver.torch.backends.gpu.quantizing.tensorwise import per_tensor

    return per_tensor(y, spec, None, factor, False, turn and not reads_transposes(y.device), measured_amax=amax)


def remade(
    prologue: Quantizing, saved: Sequence[Any], spec: QuantSpec, factor: Tensor | float | None, is_set: bool
) -> Quantized | None:
    """The transpose of what a prologue made, quantized by one pass over what it kept; None where that takes two."""
    if mode(spec, is_set, 1) != "tensor":
        return None
    result = prologue.quantized(saved, spec, _on_device(factor, saved[0]), False, True)
    return None if result is None or result.quantized is None else result.quantized.T


def _on_device(factor: Tensor | float | None, like: Tensor) -> Tensor | None:
    if factor is None or isinstance(factor, Tensor):
        return factor
    return torch.full((1,), factor, dtype=torch.float32, device=like.device)
