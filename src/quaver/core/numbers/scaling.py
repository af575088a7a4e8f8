"""From the largest magnitude of a block to its encode factor, on the bits wherever a compiler could round otherwise."""

import numpy as np

from quaver.core.numbers.formats import E4M3, Format
from quaver.core.numbers.rounding import round_to

#: Powers of two that an encode factor may be: its reciprocal and the products it enters stay normal numbers.
FACTOR_EXPONENTS = (-126, 100)
#: The same for a tensor's factor of two-level scaling.
TENSOR_EXPONENTS = (-117, 100)
#: A two-level tensor factor brings the largest element to this: the largest E2M1 times the largest E4M3.
TWO_LEVEL_MAX = 448.0 * 6.0
FLT_MAX = np.finfo(np.float32).max


def amax(x: np.ndarray, block: tuple[int | None, int | None]) -> np.ndarray:
    """Largest magnitude of each block, compared as bits, so that NaN > infinity > finite.

    Args:
        x: float32 [rows, k].
        block: (rows, k), None for the whole axis.
    Returns:
        float32 [ceil(rows / br), ceil(k / bk)]; subnormal maxima are 0.
    Exact.
    """
    rows, k = x.shape
    br, bk = (min(b or max(n, 1), max(n, 1)) for b, n in zip(block, (rows, k), strict=True))
    nr = 1 if block[0] is None else -(-rows // br)
    nk = 1 if block[1] is None else -(-k // bk)
    bits = np.zeros((nr * br, nk * bk), np.uint32)
    bits[:rows, :k] = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    top = bits.reshape(nr, br, nk, bk).max(axis=(1, 3)) if bits.size else np.zeros((nr, nk), np.uint32)
    return np.where(top < 0x00800000, np.uint32(0), top).view(np.float32)


def exponent(amax: np.ndarray, largest: float, bounds: tuple[int, int] = FACTOR_EXPONENTS) -> np.ndarray:
    """The largest p within bounds with amax * 2**p <= largest; 0 where amax is 0, infinite or NaN. int32, Exact."""
    mantissa, e = np.frexp(np.float32(largest))
    top_mantissa = int((2 * mantissa - 1) * 2**23)
    bits = np.asarray(amax, np.float32).view(np.uint32).astype(np.int64)
    p = int(e) - 1 + 127 - ((bits + 0x7FFFFF - top_mantissa) >> 23)
    return np.where(usable(amax), np.clip(p, *bounds), 0).astype(np.int32)


def usable(amax: np.ndarray) -> np.ndarray:
    """Where an amax defines a factor: finite and not zero."""
    return np.isfinite(amax) & (amax > 0)


def encode_factor(amax: np.ndarray, fmt: Format, power_of_two: bool) -> np.ndarray:
    """What data are multiplied by before rounding; 1 where amax is 0, infinite or NaN.

    Args:
        amax: float32, any shape.
        fmt: format of the data.
        power_of_two: else fmt.max / amax, correctly rounded and held to normal numbers.
    Exact.
    """
    if power_of_two:
        return np.ldexp(np.float32(1), exponent(amax, fmt.max))
    return np.where(usable(amax), _ratio(fmt.max, amax), np.float32(1))


def tensor_factor(amax: np.ndarray, power_of_two: bool) -> np.ndarray:
    """The first level of two-level scaling; 1 where amax is 0, infinite or NaN. Exact."""
    if power_of_two:
        return np.ldexp(np.float32(1), exponent(amax, TWO_LEVEL_MAX, TENSOR_EXPONENTS))
    return np.where(usable(amax), _ratio(TWO_LEVEL_MAX, amax), np.float32(1))


def block_scale(amax: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """The second level: E4M3 values, float32 of amax's shape. Exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to(amax * (factor * np.float32(1 / 6)), E4M3)


def block_factor(scale: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """What two-level data are multiplied by: 1 / (scale × (1 / factor)), 0 where the block's scale is 0.

    Three roundings in Transformer Engine's order; where the factor is a power of two only the last one rounds, and
    factor × (1 / scale) is the same number.
    Exact.
    """
    safe = np.where(scale == 0, np.float32(1), scale)
    with np.errstate(over="ignore"):
        e = np.minimum(np.float32(1) / (safe * (np.float32(1) / factor)), FLT_MAX)
    return np.where(scale == 0, np.float32(0), e)


def _ratio(largest: float, amax: np.ndarray) -> np.ndarray:
    safe = np.where(usable(amax), amax, np.float32(1))
    with np.errstate(over="ignore"):
        return np.clip(np.float32(largest) / safe, np.finfo(np.float32).tiny, FLT_MAX)
