"""Kernels that compute the input of linear layers and quantize it in the same pass; imports Triton only when needed.

Also issues the warning which GEMMs of a recipe do not run natively on a GPU.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.gpu import device
from quaver.torch.numerics.quantized import FLOAT8, Quantized

# ---- warnings ----

_announced: set[tuple[str, torch.device]] = set()


def warn_once(recipe: Recipe, x: Tensor) -> None:
    """Warn once per recipe and GPU which GEMMs do not run natively, and why."""
    known = str(recipe), x.device
    if known in _announced or not recipe.quantizes:
        return
    _announced.add(known)
    gemms = {name: (gemm.a, gemm.b) for name, gemm in recipe.gemms.items() if gemm.a is not None and gemm.b is not None}
    why = device.why_no_fp8(x.device, "native")
    reasons = {why: list(gemms)} if why else {}
    if not why:
        # Triton is imported only when a GPU tensor arrives.
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


# ---- results ----

#: Widest row that a forward kernel keeps in registers.
WIDEST = 16384


class FusedQuantizeResult(NamedTuple):
    """Results of an operation that quantizes its output."""

    #: Output in high precision, or None if it was not requested.
    y: Tensor | None
    #: Output as an operand, or None if only the amax was measured.
    quantized: Quantized | None
    amax: Tensor | None
    #: Tensors that the operation's backward needs.
    saved: tuple[Any, ...]


def mode(spec: QuantSpec, one_pass: bool, columns: int) -> str:
    """Return the name of the fused kernel mode for a spec, or "" if fusing saves nothing.

    Args:
        one_pass: True if the encode factor of the tensor is known.
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


# ---- producers ----

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Widest row: 64 columns for each of the 65535 programs that a grid has on its second axis.
WIDEST_PRODUCERS = 65535 * 64


def reason_unsupported(x: Tensor, *_: Any) -> str:
    """Return why no kernel normalizes or activates this tensor, or ""."""
    if x.is_cpu and not device.forced_implementations:
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
    """Interface of an operation that computes the input of linear layers and may quantize it."""

    def quantized(
        self, x: Sequence[Any], spec: QuantSpec, factor: Tensor | None, want_output: bool, transposed: bool
    ) -> FusedQuantizeResult | None:
        """Compute the input and quantize it, or measure its amax, in one GPU kernel; see
        `quaver.torch.backends.gpu.norm`.

        Args:
            spec: spec with one scale per tensor, or with blocks along a row.
            factor: known encode factor, so that one pass quantizes; or None.
            want_output: True if the input itself is needed too.
            transposed: True to write only the codes of the transpose.

        Returns:
            The results, or None if there is no such kernel.
        """


def operand(
    op: QuantizingProducer,
    x: Sequence[Tensor | None],
    width: int,
    spec: QuantSpec,
    factor: Tensor | float | None,
    is_set: bool,
    want_output: bool,
    want_transpose: bool,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[FusedQuantizeResult, Quantized, Quantized | None] | None:
    """Run an operation that quantizes its result [..., width] in the same pass, or return None if that saves nothing.

    Codes, scales and amax equal those of the same result quantized separately.

    Args:
        factor: encode factor of delayed scaling, 0 if unset; or None.
        is_set: True if it is known to be nonzero: then one pass writes the codes. Otherwise one pass computes the
            result and its amax, and a second one casts.
        want_output: True if the result itself is needed too.
        want_transpose: True if the transpose is needed.
        agree: maps the amax of this shard to that of the whole tensor.

    Returns:
        The operation's results, its operand, and the transpose if it was requested.
    """
    kind = mode(spec, is_set, width)
    whole = kind in ("amax", "tensor")
    # Narrower blocks have no amax to reuse, and a result that is written anyway can be read once for both directions.
    if not kind or (not whole and (want_output or want_transpose)) or (factor is not None and not whole):
        return None
    on_device = _on_device(factor, x[0]) if whole else None  # type: ignore[arg-type]
    result = op.quantized(x, spec, on_device if kind == "tensor" else None, want_output, False)
    if result is None:
        return None
    q = result.quantized
    if q is None:
        assert result.y is not None
        top = result.amax if agree is None or result.amax is None else agree(result.amax)
        q = cast(result.y.view(-1, result.y.shape[-1]), spec, on_device, top, want_transpose)
    elif agree is not None and isinstance(q.amax, Tensor) and spec.per_tensor:
        q.amax = agree(q.amax)
    if not want_transpose:
        return result, q, None
    # No references between the two, so that each can be freed alone.
    transposed, q.cached_transpose = q.T, None
    transposed.cached_transpose = None
    return result, q, transposed


def cast(y: Tensor, spec: QuantSpec, factor: Tensor | None, amax: Tensor | None, want_transpose: bool) -> Quantized:
    """Quantize y [rows, k] by a measured amax or a set factor, with the transpose as `cached_transpose` if GEMMs need
    a copy.
    """
    from quaver.torch.backends.gpu.scaled_mm import reads_transposes
    from quaver.torch.backends.gpu.tensorwise import per_tensor

    return per_tensor(
        y, spec, None, factor, False, want_transpose and not reads_transposes(y.device), measured_amax=amax
    )


def recomputed(
    op: QuantizingProducer, saved: Sequence[Any], spec: QuantSpec, factor: Tensor | float | None, is_set: bool
) -> Quantized | None:
    """Recompute and quantize the transpose of an operation's output in one pass over its saved tensors; None if that
    takes two.
    """
    if mode(spec, is_set, 1) != "tensor":
        return None
    result = op.quantized(saved, spec, _on_device(factor, saved[0]), False, True)
    return None if result is None or result.quantized is None else result.quantized.T


def _on_device(factor: Tensor | float | None, like: Tensor) -> Tensor | None:
    if factor is None or isinstance(factor, Tensor):
        return factor
    return torch.full((1,), factor, dtype=torch.float32, device=like.device)
