"""Executable specification of quantize, dequantize and matmul in numpy; fast versions are compared with it."""

from dataclasses import dataclass

import numpy as np

from quaver.recipes.formats import Format
from quaver.recipes.spec import Block, Delayed, QuantSpec
from quaver.reference.numerics import (
    FACTOR_EXPONENTS,
    FLT_MAX,
    block_factor,
    block_scale,
    decode,
    encode,
    encode_factor,
    exponent,
    rotate,
    round_to,
    tensor_factor,
    uniform,
)
from quaver.reference.numerics import amax as block_amax

# ---- operands ----


@dataclass(frozen=True, eq=False)
class Quantized:
    """Operand [rows, k]: data on the format's grid and the scales of its blocks; original ≈ data × scale."""

    #: float32 [rows, k] on the grid of spec.format; k includes the padding of the Hadamard rotation.
    data: np.ndarray
    #: float32 decode scales [blocks of rows, blocks of k], with both levels multiplied.
    scale: np.ndarray
    spec: QuantSpec

    def codes(self) -> np.ndarray:
        """Return uint8 codes [rows, k], one per element, NaN as 0x7F."""
        return encode(self.data, self.spec.format)

    def scales(self) -> np.ndarray:
        return self.scale

    def dequantize(self) -> np.ndarray:
        """Return data × scale, float32 [rows, k]; after a Hadamard rotation these are the rotated values that the GEMM
        uses.

        Values rounded up beyond float32's largest number are infinite.
        """
        with np.errstate(over="ignore"):
            return self.data * spread(self.scale, self.spec.block, self.data.shape)


def quantize(
    x: np.ndarray | Quantized,
    spec: QuantSpec,
    amax: np.ndarray | None = None,
    *,
    factor: float | None = None,
    seed: int = 0,
    tensor_id: int = 0,
    count: int = 0,
) -> Quantized:
    """Quantize one GEMM operand: data = round_to(x × e), scale = 1 / e, with a factor e per block.

    Args:
        x: [rows, k], convertible to float32; k is the contraction axis of the GEMM. A `Quantized` of this spec is
            returned unchanged.
        spec: format, block, kind of scale and rounding of the operand.
        amax: [blocks of rows, blocks of k], or [1, 1] of the tensor for two-level scales; None measures it.
        factor: encode factor of delayed scaling, used instead of the one computed from amax; 0 is unset. Only for specs
            with one fp32 or power-of-two scale per tensor.
        seed, tensor_id, count: Philox stream of stochastic rounding.

    Returns:
        The quantized operand. If an amax (measured or given) is infinite or NaN, the factor is 1 and the scale NaN; if
        it is 0, both are 1 (but for E8M0 the scale is 2**-127 and the data 0, for two-level scales both are 0). A block
        with an infinity or NaN has scale NaN whatever amax or factor was given.

    Raises:
        ValueError: x is quantized by another spec, or is not a matrix, or factor is passed for other scales.
    """
    spec.check_factor(factor)
    if isinstance(x, Quantized):
        if x.spec != spec:
            raise ValueError(f"the operand is quantized as {x.spec} and {spec} was asked for; dequantize() it first")
        return x
    if np.ndim(x) != 2:
        raise ValueError(f"an operand is a matrix [rows, k]; this one has shape {np.shape(x)}: reshape it first")
    x = np.asarray(x, np.float32)
    if spec.hadamard:
        x = rotate(x)
    u = None
    if spec.rounding == "stochastic":
        x = _flush(x)
        u = uniform(x.shape[0], x.shape[1], seed, tensor_id, count)
    e, scale = factors(x, spec, amax, factor)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = x * spread(e, spec.block, x.shape)
    return Quantized(round_to(scaled, spec.format, u), scale, spec)


def factors(
    x: np.ndarray, spec: QuantSpec, amax: np.ndarray | None, factor: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return encode factors and decode scales of x's blocks, both float32 [blocks of rows, blocks of k]."""
    shape = spec.blocks(*x.shape)
    if spec.scale == "unit":
        return np.ones(shape, np.float32), np.ones(shape, np.float32)
    if spec.two_level:
        return _two_level(x, spec, block_amax(x, (None, None)) if amax is None else _as_array(amax))
    measured = block_amax(x, spec.block)
    top = measured if amax is None else _as_array(amax).reshape(shape)
    if factor:
        e = np.full(shape, factor, np.float32)
    else:
        e = encode_factor(top, spec.format, spec.power_of_two)
    scale = np.where(np.isfinite(top) & np.isfinite(measured), np.float32(1) / e, np.float32(np.nan))
    if spec.scale == "e8m0":
        scale = np.where((top == 0) & np.isfinite(measured), np.float32(2.0**-127), scale)
        e = np.where(top == 0, np.float32(0), e)
    return e, scale.astype(np.float32)


def _two_level(x: np.ndarray, spec: QuantSpec, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    big = tensor_factor(tensor, spec.scale == "two_level")
    measured = block_amax(x, spec.block)
    small = block_scale(measured, big)
    with np.errstate(invalid="ignore"):
        e = block_factor(small, big)
        scale = np.where(np.isfinite(tensor) & np.isfinite(measured), small / big, np.float32(np.nan))
    return e, scale.astype(np.float32)


def _flush(x: np.ndarray) -> np.ndarray:
    """Flush subnormals to signed zeros: stochastic rounding could round one up, and some machines flush them anyway."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _as_array(amax: np.ndarray) -> np.ndarray:
    """Return a given amax as magnitudes, with subnormals set to 0."""
    a = np.abs(np.atleast_2d(np.asarray(amax, np.float32)))
    return np.where(a < np.float32(2.0**-126), np.float32(0), a)


def dequantize(q: Quantized) -> np.ndarray:
    """Return data × scale, float32 [rows, k]."""
    return q.dequantize()


def matmul(a: Quantized | np.ndarray, b: Quantized | np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Compute a [m, k] @ b [n, k].T + bias in float64, the reference of every GEMM.

    Returns:
        float64 [m, n].
    """
    high = [(q.dequantize() if isinstance(q, Quantized) else np.asarray(q)).astype(np.float64) for q in (a, b)]
    y = high[0] @ high[1].T
    return y if bias is None else y + np.asarray(bias, np.float64)


def spread(blocks: np.ndarray, block: Block, shape: tuple[int, ...]) -> np.ndarray:
    """Expand one value per block to one per element of `shape`."""
    rows, k = shape
    height, width = (min(b or max(n, 1), max(n, 1)) for b, n in zip(block, shape, strict=True))
    wide = np.repeat(blocks, height, axis=0)[:rows]
    return np.repeat(wide, width, axis=1)[:, :k]


__all__ = ["Quantized", "decode", "dequantize", "encode", "factors", "matmul", "quantize", "round_to", "spread"]


# ---- scaling histories: a window of amaxes per tensor, and its encode factor, as pure functions ----
# A column of the window is [being recorded, oldest … newest]. Source: Transformer Engine's delayed scaling.


def record(history: np.ndarray, amax: float) -> np.ndarray:
    """Record the amax of one quantization, ignoring infinities and NaN. float32 [length] to [length]."""
    new = history.copy()
    if np.isfinite(amax):
        new[0] = max(new[0], np.float32(amax))
    return new


def roll(
    history: np.ndarray, factor: np.float32, delayed: Delayed, fmt: Format, power_of_two: bool = True
) -> tuple[np.ndarray, np.float32]:
    """End a step: move the recorded amax into the window, and compute the factor.

    Args:
        history: float32 [length]; row 0 is the amax recorded in this step, 0 if none.
        factor: encode factor so far, 0 if unset.
        delayed: window length, margin, algorithm.
        fmt: format of the data.
        power_of_two: True for a power-of-two factor.

    Returns:
        New history and factor; both unchanged if nothing was recorded.
    """
    newest = history[0]
    if newest == 0:
        return history, factor
    amax = newest if delayed.algorithm == "most_recent" else history.max()
    rolled = np.concatenate([[np.float32(0)], history[2:], [newest]])[: len(history)].astype(np.float32)
    return rolled, factor_from(amax, delayed, fmt, power_of_two)


def factor_from(amax: np.float32, delayed: Delayed, fmt: Format, power_of_two: bool) -> np.float32:
    """Return the encode factor of a window's amax, with the margin applied, clamped to bounds."""
    if power_of_two:
        p = int(exponent(np.asarray(amax), fmt.max)) - delayed.margin
        return np.float32(2.0 ** min(max(p, FACTOR_EXPONENTS[0]), FACTOR_EXPONENTS[1]))
    e = float(encode_factor(np.asarray(amax), fmt, power_of_two)) * 2.0**-delayed.margin
    return np.float32(min(max(e, float(np.finfo(np.float32).tiny)), float(FLT_MAX)))
