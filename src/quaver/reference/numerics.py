"""Number specification in numpy: Hadamard rotation, Philox noise, rounding to formats, and scale factors.

Source of the 16-point rotation of NVFP4's weight gradient: NVIDIA, arXiv:2509.25149, appendix C; the signs are those of
Transformer Engine.
"""

from functools import cache
from typing import Any

import numpy as np

from quaver.recipes.formats import E4M3, Format

# ---- Hadamard rotation ----

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotate groups of 16 along the last axis, padded with zeros.

    Every stage is rounded to float32, in this order: signs, four butterfly stages of stride 1, 2, 4, 8 (a + b, a - b),
    division by four.

    Args:
        x: float32 [rows, k].

    Returns:
        float32 [rows, ceil16(k)].
    """
    rows, k = x.shape
    groups = -(-k // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :k] = x
    with np.errstate(over="ignore", invalid="ignore"):
        y = padded.reshape(rows, groups, GROUP) * np.array(SIGNS, np.float32)
        for stride in (1, 2, 4, 8):
            pairs = y.reshape(rows, groups, GROUP // (2 * stride), 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([a + b, a - b], -2).reshape(rows, groups, GROUP)
        return (y * np.float32(0.25)).reshape(padded.shape)


# ---- noise of stochastic rounding: random words as a function of counter and key ----
# Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
#: Multiplier of Philox2x32, whose keys are incremented by the first number of `WEYL`.
MULTIPLIER = 0xD256D193
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Run ten rounds of four-word Philox on one counter; all numbers are below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _LOW, p0 >> 32 ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox2x32(counter: tuple[np.ndarray, ...], key: int) -> np.ndarray:
    """Run ten rounds of two-word Philox, with one product a round.

    Args:
        counter: two arrays of one shape [...], values below 2**32.
        key: below 2**32.

    Returns:
        uint32 [..., 2].
    """
    c0, c1 = (np.asarray(c, np.uint64) for c in np.broadcast_arrays(*counter))
    for round_key in round_keys(key):
        wide: Any = c0 * MULTIPLIER
        c0, c1 = wide >> 32 ^ c1 ^ round_key, wide & _LOW
    return np.stack([c0, c1], -1).astype(np.uint32)


def round_keys(key: int) -> list[int]:
    """Return the keys of all rounds of `philox2x32`, beginning with this one."""
    return [(key + i * WEYL[0]) & _LOW for i in range(ROUNDS)]


def noise_stream(seed: int, tensor_id: int, count: int) -> tuple[int, int]:
    """Return the key and the upper counter word of one quantization's noise, each below 2**32.

    They are the first two words of Philox4x32-10 at (0, 0, tensor_id, count), keyed by the seed.

    Args:
        seed: 64 bits.
        tensor_id: number of the tensor, 32 bits.
        count: number of earlier quantizations of this tensor; the low 32 bits are used.
    """
    return philox4x32((0, 0, tensor_id, count & _LOW), (seed & _LOW, seed >> 32 & _LOW))[:2]


def uniform(rows: int, k: int, seed: int, tensor_id: int, count: int) -> np.ndarray:
    """Return the uniform number in (0, 1) for stochastic rounding of each element of an operand [rows, k].

    Element number e = row × k + column reads half a word of Philox2x32-10 at counter e // 4: elements 0 and 1 of four
    the upper and the lower half of the first word, elements 2 and 3 those of the second. The counter depends on the
    element's position in the whole operand, so a shard gets the same numbers as the whole.

    Args:
        rows, k: shape of the quantized operand.
        seed, tensor_id, count: stream, as in `noise_stream`.

    Returns:
        float32 [rows, k], (half + 1/2) × 2**-16.
    """
    key, upper = noise_stream(seed, tensor_id, count)
    groups = np.arange(-(-rows * k // 4), dtype=np.uint64)
    words = philox2x32((groups & _LOW, groups >> 32 ^ np.uint64(upper)), key)
    halves = np.stack([words >> np.uint32(16), words & np.uint32(0xFFFF)], -1).reshape(-1)[: rows * k]
    return ((halves.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)).reshape(rows, k)


# ---- rounding float32 to a format, and codes ----

#: Code that `codes()` returns for NaN, whichever NaN code is stored.
NAN_CODE = 0x7F


def round_to(x: np.ndarray, fmt: Format, u: np.ndarray | None = None) -> np.ndarray:
    """Round to the format's grid.

    Args:
        x: float32, any shape.
        fmt: the format; one without a sign rounds magnitudes.
        u: numbers in (0, 1) of x's shape for stochastic rounding: away from zero where u is below the fraction. None
            rounds to nearest even.

    Returns:
        float32 of x's shape. Infinities and overflow become ±fmt.max, NaN stays NaN (+max if the format has none), and
        the sign of zero is preserved. A format without mantissa bits has no zero: its smallest number takes the place.
    """
    a = np.where(np.isnan(x), np.float32(0), np.minimum(np.abs(x), np.float32(fmt.max)))
    if fmt.mantissa_bits == 0:
        a = np.maximum(a, np.float32(2.0**fmt.emin))
    exponent = np.maximum(np.frexp(a)[1] - 1, fmt.emin)
    steps = np.ldexp(a, fmt.mantissa_bits - exponent)
    if u is None:
        whole = np.rint(steps)
    else:
        whole = np.floor(steps)
        whole = whole + (u < steps - whole)
    y = np.ldexp(whole, exponent - fmt.mantissa_bits).astype(np.float32)
    if fmt.signed:
        y = np.copysign(y, x)
    return np.where(np.isnan(x), np.float32(np.nan if fmt.has_nan else fmt.max), y)


@cache
def magnitudes(fmt: Format) -> np.ndarray:
    """Return the values of codes without a sign, ascending: float32 [2**(bits - signed)], NaN above the largest."""
    codes = np.arange(2 ** (fmt.bits - fmt.signed))
    fraction = codes % 2**fmt.mantissa_bits / 2.0**fmt.mantissa_bits
    exponent = codes >> fmt.mantissa_bits
    normal = np.ldexp(1.0 + fraction, exponent - fmt.bias)
    # A format without mantissa bits has no zero and no subnormals: each code is a power of two.
    subnormal = (exponent == 0) & (fmt.mantissa_bits > 0)
    values = np.where(subnormal, np.ldexp(fraction, fmt.emin), normal)
    return np.where(values > fmt.max, np.nan, values).astype(np.float32)


def encode(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Return uint8 codes of values on the grid, one per element. NaN is 0x7F, or 0xFF in a format without a sign."""
    finite = magnitudes(fmt)[: np.searchsorted(magnitudes(fmt), fmt.max) + 1]
    code = np.searchsorted(finite, np.abs(values))
    if fmt.signed:
        code = code | np.signbit(values).astype(int) << (fmt.bits - 1)
    return np.where(np.isnan(values), NAN_CODE if fmt.signed else 0xFF, code).astype(np.uint8)


def decode(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the values of codes: float32 of the same shape."""
    return values(fmt)[codes]


@cache
def values(fmt: Format) -> np.ndarray:
    """Return the values of all bytes as codes: float32 [256], NaN for invalid codes."""
    both = np.concatenate([magnitudes(fmt), *([-magnitudes(fmt)] if fmt.signed else [])])
    return np.concatenate([both, np.full(256 - len(both), np.nan, np.float32)])


# ---- scaling: from a block's amax to its encode factor, on the bits where a compiler could round otherwise ----

#: Range of exponents of power-of-two encode factors, for which reciprocals and products stay normal.
FACTOR_EXPONENTS = (-126, 100)
#: The same for the tensor factor of two-level scaling.
TENSOR_EXPONENTS = (-117, 100)
#: Magnitude to which a two-level tensor factor scales the largest element: largest E2M1 times largest E4M3.
TWO_LEVEL_MAX = 448.0 * 6.0
FLT_MAX = np.finfo(np.float32).max


def amax(x: np.ndarray, block: tuple[int | None, int | None]) -> np.ndarray:
    """Return the largest magnitude of each block, compared as bits, so that NaN > infinity > finite.

    Args:
        x: float32 [rows, k].
        block: (rows, k), None for the whole axis.

    Returns:
        float32 [ceil(rows / br), ceil(k / bk)]; subnormal maxima are 0.
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
    """Return the largest p within bounds with amax * 2**p <= largest, int32; 0 if amax is 0, infinite or NaN."""
    mantissa, e = np.frexp(np.float32(largest))
    top_mantissa = int((2 * mantissa - 1) * 2**23)
    bits = np.asarray(amax, np.float32).view(np.uint32).astype(np.int64)
    p = int(e) - 1 + 127 - ((bits + 0x7FFFFF - top_mantissa) >> 23)
    return np.where(usable(amax), np.clip(p, *bounds), 0).astype(np.int32)


def usable(amax: np.ndarray) -> np.ndarray:
    """Return a mask of amaxes that define a factor: finite and nonzero."""
    return np.isfinite(amax) & (amax > 0)


def encode_factor(amax: np.ndarray, fmt: Format, power_of_two: bool) -> np.ndarray:
    """Return the encode factor of an amax; 1 if it is 0, infinite or NaN.

    Args:
        amax: float32, any shape.
        fmt: format of the data.
        power_of_two: False for fmt.max / amax, correctly rounded and clamped to normal numbers.
    """
    if power_of_two:
        return np.ldexp(np.float32(1), exponent(amax, fmt.max))
    return np.where(usable(amax), _ratio(fmt.max, amax), np.float32(1))


def tensor_factor(amax: np.ndarray, power_of_two: bool) -> np.ndarray:
    """Return the tensor factor of two-level scaling; 1 if amax is 0, infinite or NaN."""
    if power_of_two:
        return np.ldexp(np.float32(1), exponent(amax, TWO_LEVEL_MAX, TENSOR_EXPONENTS))
    return np.where(usable(amax), _ratio(TWO_LEVEL_MAX, amax), np.float32(1))


def block_scale(amax: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return the block scales of two-level scaling: E4M3 values, float32 of amax's shape."""
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to(amax * (factor * np.float32(1 / 6)), E4M3)


def block_factor(scale: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return the encode factor of two-level data: 1 / (scale × (1 / factor)), 0 if the block's scale is 0.

    Rounds three times, in Transformer Engine's order. If the tensor factor is a power of two only the last operation
    rounds, and factor × (1 / scale) is the same number.
    """
    safe = np.where(scale == 0, np.float32(1), scale)
    with np.errstate(over="ignore"):
        e = np.minimum(np.float32(1) / (safe * (np.float32(1) / factor)), FLT_MAX)
    return np.where(scale == 0, np.float32(0), e)


def _ratio(largest: float, amax: np.ndarray) -> np.ndarray:
    safe = np.where(usable(amax), amax, np.float32(1))
    with np.errstate(over="ignore"):
        return np.clip(np.float32(largest) / safe, np.finfo(np.float32).tiny, FLT_MAX)
