"""What is said once: which GEMMs of a recipe do not run natively on a GPU, and why."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import device
from quaver.torch.numerics.quantized import FLOAT8, Quantized

# ---- announcing ------------------------------------------------------------------------------------------

_announced: set[tuple[str, torch.device]] = set()


def warn_once(recipe: Recipe, x: Tensor) -> None:
    """Warn once for a recipe and a GPU which of its GEMMs do not run natively, and why."""
    known = str(recipe), x.device
    if known in _announced or not recipe.quantizes:
        return
    _announced.add(known)
    gemms = {name: (gemm.a, gemm.b) for name, gemm in recipe.gemms.items() if gemm.a is not None and gemm.b is not None}
    why = device.why_no_fp8(x.device, "native")
    reasons = {why: list(gemms)} if why else {}
    if not why:
        # Triton is imported when a tensor on a GPU comes.
        from quaver.torch.backends.gpu import scaled_mm

        for name, operands in gemms.items():
            why = scaled_mm.why_not_native(*operands, x.device)
            if why:
                reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        warnings.warn(
            f"recipe {recipe} on {device.name(x.device)}: {', '.join(names)} run as bf16 GEMMs of decoded operands, "
            f"exact but slower than unquantized ones, because {why}",
            stacklevel=2,
        )


# ---- results ---------------------------------------------------------------------------------------------
# What kernels that make the input of linear layers write for a spec, and what they give.

#: The widest row that lies in registers, forward.
WIDEST = 16384


class FusedQuantizeResult(NamedTuple):
    """The results of a prologue that quantizes."""

    #: Its result, or None where the caller did not want it.
    y: Tensor | None
    #: That as an operand; None where only the amax was found.
    quantized: Quantized | None
    amax: Tensor | None
    #: The tensors that its backward needs.
    saved: tuple[Any, ...]


def mode(spec: QuantSpec, one_pass: bool, columns: int) -> str:
    """The name of what a kernel writes for a spec, or "" where one pass saves nothing.

    Args:
        one_pass: whether the encode factor of the tensor is known.
    """
    if spec.format.name not in FLOAT8 or spec.rounding != "nearest" or spec.hadamard:
        return ""
    if spec.per_tensor and spec.scale in ("fp32", "power_of_two"):
        return "tensor" if one_pass else "amax"
    if columns > WIDEST:
        return ""
    if spec.block == (1, None) and spec.scale in ("fp32", "power_of_two"):
        return "row"
    if spec.block == (1, 128) and spec.scale in ("fp32", "power_of_two"):
        return "blocks"
    return "e8m0" if spec.block == (1, 32) and spec.scale == "e8m0" else ""


# ---- producers -------------------------------------------------------------------------------------------
# Kernels that make the input of linear layers on a GPU and quantize it in the same pass.
#
# Importing this module imports no kernels; they are imported when one is wanted.

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The widest row: 65535 blocks, as many as a grid has on its second axis, of 64 columns.
WIDEST_PRODUCERS = 65535 * 64


def reason_unsupported(x: Tensor, *_: Any) -> str:
    """Why no kernel normalizes or activates a tensor, whatever goes with it, or ""."""
    if x.is_cpu and not device.asked:
        return "the tensor is not on a GPU"
    why = device.why_no_kernels(x.device)
    if why:
        return why
    if x.dtype not in DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {x.dtype}"
    elements, columns = x.numel(), x.shape[-1]
    if columns > WIDEST_PRODUCERS or elements > columns * (2**31 - 1):
        return f"no grid of a GPU covers a tensor of shape {tuple(x.shape)}"
    return "" if elements else "the tensor is empty"


class QuantizingProducer(Protocol):
    """What makes the input of linear layers, and may quantize it."""

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> FusedQuantizeResult | None:
        """On a GPU: the input quantized by the kernel that makes it, or with its amax; see
        `quaver.torch.backends.gpu.norm`.

        Args:
            spec: with one scale for the tensor, or blocks along a row.
            factor: known, so that one pass quantizes; or None.
            want_output: whether the input itself is needed too.
            transposed: write the codes of the transpose alone.
        Returns:
            None where the prologue has no such kernel.
        """


def operand(
    prologue: QuantizingProducer,
    x: Sequence[Tensor | None],
    width: int,
    spec: QuantSpec,
    factor: Tensor | float | None,
    is_set: bool,
    want_output: bool,
    turn: bool,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[FusedQuantizeResult, Quantized, Quantized | None] | None:
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
    transposed, q.twin = q.T, None
    transposed.twin = None
    return result, q, transposed


def cast(y: Tensor, spec: QuantSpec, factor: Tensor | None, amax: Tensor | None, turn: bool) -> Quantized:
    """y [rows, k] by its measured amax, or a set factor, and its transpose as the `twin` where GEMMs read one."""
    from quaver.torch.backends.gpu.scaled_mm import reads_transposes
    from quaver.torch.backends.gpu.tensorwise import per_tensor

    return per_tensor(y, spec, None, factor, False, turn and not reads_transposes(y.device), measured_amax=amax)


def recomputed(
    prologue: QuantizingProducer, saved: Sequence[Any], spec: QuantSpec, factor: Tensor | float | None, is_set: bool
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
