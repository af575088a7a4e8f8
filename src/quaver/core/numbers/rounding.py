"""Rounding float32 to a format, and the bytes that stand for the result."""

from functools import cache

import numpy as np

from quaver.core.numbers.formats import Format

#: How `codes()` shows a NaN, whichever NaN code is stored.
NAN_CODE = 0x7F


def round_to(x: np.ndarray, fmt: Format, u: np.ndarray | None = None) -> np.ndarray:
    """Round to the format's grid.

    Args:
        x: float32, any shape.
        fmt: a signed format.
        u: [0, 1) of x's shape rounds at random, away from zero where u is below the fraction; None rounds to nearest,
            ties to even.
    Returns:
        float32 of x's shape. Infinities and all that is too large become ±fmt.max, NaN stays NaN (+max where the format
        has none), the sign of zero is kept.
    Exact.
    """
    a = np.where(np.isnan(x), np.float32(0), np.minimum(np.abs(x), np.float32(fmt.max)))
    exponent = np.maximum(np.frexp(a)[1] - 1, fmt.emin)
    steps = np.ldexp(a, fmt.mantissa_bits - exponent)
    if u is None:
        whole = np.rint(steps)
    else:
        whole = np.floor(steps)
        whole = whole + (u < steps - whole)
    y = np.copysign(np.ldexp(whole, exponent - fmt.mantissa_bits), x).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan if fmt.has_nan else fmt.max), y)


@cache
def magnitudes(fmt: Format) -> np.ndarray:
    """Values of the codes without a sign, ascending: float32 [2**(bits - signed)], NaN for those above the largest."""
    codes = np.arange(2 ** (fmt.bits - fmt.signed))
    fraction = codes % 2**fmt.mantissa_bits / 2.0**fmt.mantissa_bits
    exponent = codes >> fmt.mantissa_bits
    normal = np.ldexp(1.0 + fraction, exponent - fmt.bias)
    # A format without a mantissa has no zero and no subnormals: each code is a power of two.
    subnormal = (exponent == 0) & (fmt.mantissa_bits > 0)
    values = np.where(subnormal, np.ldexp(fraction, fmt.emin), normal)
    return np.where(values > fmt.max, np.nan, values).astype(np.float32)


def encode(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of values on the grid: uint8, one an element. NaN is 0x7F, or 0xFF in a format without a sign. Exact."""
    finite = magnitudes(fmt)[: np.searchsorted(magnitudes(fmt), fmt.max) + 1]
    code = np.searchsorted(finite, np.abs(values))
    if fmt.signed:
        code = code | np.signbit(values).astype(int) << (fmt.bits - 1)
    return np.where(np.isnan(values), NAN_CODE if fmt.signed else 0xFF, code).astype(np.uint8)


def decode(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Values of codes: float32 of the same shape. Exact."""
    return values(fmt)[codes]


@cache
def values(fmt: Format) -> np.ndarray:
    """Values of all bytes as codes: float32 [256], NaN for those that are none."""
    both = np.concatenate([magnitudes(fmt), *([-magnitudes(fmt)] if fmt.signed else [])])
    return np.concatenate([both, np.full(256 - len(both), np.nan, np.float32)])
