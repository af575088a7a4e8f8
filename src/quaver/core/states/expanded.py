"""Dynamic range expansion: the magnitudes of a block are raised to a power, so that they fill a format's whole range.

    k = min(16, floor(16 log2(448² / 2) / log2(largest / smallest)) / 16)       c = √(largest smallest)
    S = (largest / c)^k / 448         code = e4m3(±(|x| / c)^k / S)         x = ±(|code| S)^(1 / k) c

The smallest is that of the numbers that are not zero (subnormals count as zeros), so a block keeps its mantissa where
one element is zero; k is at least 1/16. Powers are taken in float64, whose logarithms differ between libraries in the
last bit.

Source: Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training",
arXiv:2410.19313, section 4.
"""

import math

import numpy as np

from quaver.core.numbers.formats import E4M3
from quaver.core.numbers.rounding import decode as decode_format
from quaver.core.numbers.rounding import encode as encode_format
from quaver.core.numbers.rounding import round_to

F = np.float32
#: What a block keeps: k, c and S, float32, side by side.
NUMBERS = 3
#: What k is a multiple of, one over; its bounds.
PARTS, LEAST, MOST = 16, 1 / 16, 16.0
#: The powers of two between E4M3's largest number and its smallest that keeps its mantissa, squared and halved.
REACH = math.log2(E4M3.max**2 / 2)
SMALLEST_NORMAL = F(2.0**-126)


def encode(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 of blocks float32 [..., n], and their k, c and S: float32 [..., 3].

    A block of zeros has S = 0 and codes 0; one with a number that is not finite, NaN thrice and codes 0.
    Bounded: as in every other library, but for the last bit of a logarithm; see the module.
    """
    a = np.abs(blocks).astype(np.float64)
    counted = a >= SMALLEST_NORMAL
    finite = np.isfinite(a).all(-1, keepdims=True)
    usable = finite & counted.any(-1, keepdims=True)
    largest = np.where(usable, a.max(-1, keepdims=True, initial=0), 1.0)
    smallest = np.where(usable, np.where(counted, a, np.inf).min(-1, keepdims=True, initial=np.inf), 1.0)
    spread = np.maximum(np.log2(largest / smallest), REACH / MOST)
    k = np.maximum(np.floor(PARTS * REACH / spread) / PARTS, LEAST)
    # What is stored is what codes are made with.
    c = np.sqrt(largest * smallest).astype(F)
    s = (np.exp2(k * np.log2(largest / c)) / E4M3.max).astype(F)
    power = np.exp2(k * np.log2(np.where(counted, a, c) / c)) / s
    y = np.where(usable & counted, power, 0.0).astype(F)
    rounded = round_to(np.minimum(y, F(E4M3.max)), E4M3)
    codes = encode_format(np.copysign(rounded, blocks), E4M3)
    kept = np.concatenate([k.astype(F), np.where(usable, c, 1), np.where(usable, s, 0)], -1).astype(F)
    return np.where(codes & 0x7F, codes, 0).astype(np.uint8), np.where(finite, kept, F(np.nan))


def decode(codes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Values of codes uint8 [..., n], float32, by k, c and S [..., 3]. Bounded: within an ulp."""
    k, c, s = (kept[..., i : i + 1].astype(np.float64) for i in range(NUMBERS))
    values = decode_format(codes, E4M3).astype(np.float64)
    reached = np.abs(values) * s
    x = np.exp2(np.log2(np.where(reached > 0, reached, 1.0)) / k) * c
    x = np.where(reached > 0, x, np.where(np.isnan(s), np.nan, 0.0))
    with np.errstate(over="ignore"):
        return np.copysign(x, values).astype(F)
