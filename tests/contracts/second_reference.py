"""A second, independent reading of the number formats and the scaling (docs/design/numerics.md).

Written from the text alone, without sight of `quaver.reference`, one element at a time: values are
rounded by searching the list of all values of a format with exact fractions, exponents come from
`math.frexp`, Philox from Python's integers; float32 where the specification requires it, one `numpy.float32` operation
after the other. That two people read the same text and get the same bits is the test; nothing here is meant
to be fast.

Where the text leaves a case open, the most literal reading is taken:

 1. `amax=` finite but the block holds an infinity or a NaN: data by the given amax, scale NaN ("no overflow
    is silently made finite"). With two levels the same, for that block only: the tensor's amax, and so its
    scale, is finite.
 2. Two levels, amax_tensor not finite: S = 1 for the data (the rule for e), every decode scale NaN.
 3. Two levels, amax_b infinite: s_b = E4M3(inf) = 448 by round_to, for the data. amax_b NaN: s_b and with it
    e_b are NaN, so every code of the block is that of +6.
 4. E8M0, amax 0: "data 0" is taken as a rule: every finite element becomes a zero of its sign, also a
    subnormal under stochastic rounding and anything under a given amax of 0. Any other scale then has e = 1,
    scale 1.
 5. Subnormal elements are not flushed: x * e is IEEE float32. So they can show up in codes with stochastic
    rounding (u < f holds for u = 0 and any f > 0) or with a scale that is no power of two and e beyond 2^100.
 6. Where e or S is no power of two, scale = 1 / e and s_b / S may be subnormal (e > 2^126); they stay subnormal.
 7. Two levels, S no power of two: e_b = 1 / (s_b * (1/S)) may overflow; then e_b is infinite, and an element
    of 0 gives NaN and hence +6. The decode scale is s_b / S, one division.
 8. Hadamard: "nothing rounded between" means nothing but float32's own rounding; the padding is multiplied by
    the signs like the rest (which gives zeros their sign only); a block of a whole axis spans the padded
    axis.
 9. Empty axes: a whole-axis block on an axis of length 0 is one block (amax 0), other blocks are none.
10. Margin: p(a) is the p of the rule, already limited; minus margin it is limited again. With power_of_two=False
    undefined in the text: e = max / a, limited, times 2^-margin, limited again.
11. `count` is 64 bits wide and its place in the counter 32: its low half is used.
12. A given amax is read like a measured one: no sign, an exponent field of 0 counts as 0.
13. A history that holds a non-finite value (nothing records one): e = 1, the rule for a non-finite amax.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

ONE, ZERO, NAN = np.float32(1), np.float32(0), np.float32("nan")
SMALLEST_NORMAL, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max

# Mantissa bits, bias and the code of the largest value: from the table of formats, for positive codes.
FORMATS = {
    "e4m3": (3, 7, 0x7E),
    "e5m2": (2, 15, 0x7B),
    "e3m2": (2, 3, 0x1F),
    "e2m3": (3, 1, 0x1F),
    "e2m1": (1, 1, 0x07),
}
SIGN_BIT = {"e4m3": 0x80, "e5m2": 0x80, "e3m2": 0x20, "e2m3": 0x20, "e2m1": 0x08}
# E2M1, E3M2 and E2M3 have none: +6, +28, +7.5
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x07}

HADAMARD_SIGNS = [np.float32(s) for s in (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)]


# Formats


def value_of_code(code: int, format: str) -> Fraction:
    """(1 + m/2^M) 2^(e-bias), or (m/2^M) 2^(1-bias) where the exponent field is 0. Positive codes only."""
    mantissa_bits, bias, _ = FORMATS[format]
    exponent, mantissa = divmod(code, 2**mantissa_bits)
    if exponent == 0:
        return Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


@cache
def magnitudes(format: str) -> tuple[Fraction, ...]:
    """Every non-negative value of the format in rising order: the index is the code."""
    return tuple(value_of_code(code, format) for code in range(FORMATS[format][2] + 1))


@lru_cache(maxsize=1 << 16)
def nearest_code(magnitude: float, format: str) -> int:
    """The code of the closest value, of two equally close ones the even code; the largest beyond it."""
    values = magnitudes(format)
    if magnitude >= values[-1]:
        return len(values) - 1
    exact = Fraction(magnitude)
    below = bisect_right(values, exact) - 1
    to_below, to_above = exact - values[below], values[below + 1] - exact
    if to_below == to_above:
        return below + below % 2
    return below if to_below < to_above else below + 1


def stochastic_code(magnitude: float, format: str, u: Fraction) -> int:
    """Clip to max, divide the distance from the value below by the local step: up iff u is less than that."""
    values = magnitudes(format)
    if magnitude >= values[-1]:
        return len(values) - 1
    exact = Fraction(magnitude)
    below = bisect_right(values, exact) - 1
    fraction = (exact - values[below]) / (values[below + 1] - values[below])
    return below + 1 if u < fraction else below


def round_to(value: np.float32, format: str, u: Fraction | None = None) -> int:
    """The code of one float32: to nearest, or stochastically with the uniform u. A zero keeps its sign."""
    value = float(value)
    if math.isnan(value):
        return NAN_CODE[format]
    code = nearest_code(abs(value), format) if u is None else stochastic_code(abs(value), format, u)
    return code | SIGN_BIT[format] if math.copysign(1, value) < 0 else code


# Noise


@lru_cache(maxsize=4096)
def _philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011), the key moved on by the Weyl constants after each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def philox(counter4, key2) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a counter of four and a key of two."""
    return _philox(tuple(int(c) for c in counter4), tuple(int(k) for k in key2))


@lru_cache(maxsize=4096)
def _philox_of_two(counter: tuple[int, int], key: int) -> tuple[int, int]:
    """Ten rounds of Philox2x32."""
    c0, c1 = counter
    for _ in range(10):
        high, low = divmod(0xD256D193 * c0, 2**32)
        c0, c1 = high ^ c1 ^ key, low
        key = (key + 0x9E3779B9) % 2**32
    return c0, c1


def uniform(element: int, seed: int, tensor_id: int, count: int) -> Fraction:
    """(half + 1/2) 2^-16 of the element numbered row * kp + column: four elements share the two words of a counter."""
    key, upper, _, _ = philox((0, 0, tensor_id % 2**32, count % 2**32), (seed % 2**32, seed // 2**32 % 2**32))
    group, inside = divmod(element, 4)
    word = _philox_of_two((group % 2**32, group // 2**32 ^ upper), key)[inside // 2]
    return (Fraction(word % 2**16 if inside % 2 else word // 2**16) + Fraction(1, 2)) / 2**16


# Hadamard


def butterflies(group: list[np.float32]) -> list[np.float32]:
    """Signs, then (a+b, a-b) at strides 1, 2, 4, 8, then a quarter: sixteen float32 values to sixteen."""
    values = [sign * value for sign, value in zip(HADAMARD_SIGNS, group, strict=True)]
    for stride in (1, 2, 4, 8):
        for i in [i for i in range(16) if i // stride % 2 == 0]:
            a, b = values[i], values[i + stride]
            values[i], values[i + stride] = a + b, a - b
    return [value * np.float32(0.25) for value in values]


def hadamard_rows(x: np.ndarray) -> np.ndarray:
    """Transform k in groups of 16, the tail padded with zeros that stay: [rows, k] -> [rows, ceil16(k)]."""
    rows, k = x.shape
    out = np.zeros((rows, -(-k // 16) * 16), np.float32)
    out[:, :k] = x
    for row in out:
        for start in range(0, len(row), 16):
            row[start : start + 16] = butterflies(list(row[start : start + 16]))
    return out


# Scales


def largest_bits(values: np.ndarray) -> np.float32:
    """amax: the largest bits & 0x7FFFFFFF, so that NaN > inf > finite; an exponent field of 0 counts as 0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel().tolist()
    top = max((b & 0x7FFFFFFF for b in bits), default=0)
    return np.uint32(top if top >= 0x00800000 else 0).view(np.float32)


def hold(value, low, high):
    """The value, or the bound it is beyond."""
    return min(max(value, low), high)


def power_of_two_exponent(amax: float, largest: float, low: int, high: int) -> int:
    """The largest p with amax * 2^p <= largest, clamped to [low, high]; amax is positive and finite."""
    fraction, exponent = math.frexp(amax)
    largest_fraction, largest_exponent = math.frexp(largest)
    p = largest_exponent - exponent
    return hold(p if fraction <= largest_fraction else p - 1, low, high)


def power_of_two_factor(amax: np.float32, largest: float, low: int = -126, high: int = 100) -> np.float32:
    """2^p of the rule above."""
    return np.float32(math.ldexp(1.0, power_of_two_exponent(float(amax), largest, low, high)))


def divided_factor(amax: np.float32, largest: float) -> np.float32:
    """largest / amax in one correctly rounded float32 division, clamped to normal numbers."""
    return hold(np.float32(largest) / amax, SMALLEST_NORMAL, LARGEST)


def factor_from_amax(amax: np.float32, largest: float, scale: str) -> np.float32:
    """The encode factor e of one block: 1 where amax is 0 or not finite."""
    if amax == 0 or not np.isfinite(amax):
        return ONE
    return divided_factor(amax, largest) if scale == "fp32" else power_of_two_factor(amax, largest)


def one_level(measured, given, format: str, scale: str, factor) -> tuple[np.float32, np.float32]:
    """(encode factor, decode scale) of one block. A factor of None or 0 is unset: then amax decides.

    Args:
        measured: the block's amax.
        given: the amax to use instead, or None.
    """
    amax = measured if given is None else given
    e = np.float32(factor) if factor else factor_from_amax(amax, float(magnitudes(format)[-1]), scale)
    decode = ONE / e
    if scale == "e8m0" and amax == 0:
        e, decode = ZERO, np.float32(2.0**-127)
    if not np.isfinite(measured) or (not factor and not np.isfinite(amax)):
        decode = NAN
    return e, decode


def tensor_factor(amax: np.float32, power_of_two: bool) -> np.float32:
    """S of two-level scaling: 1 where the tensor's amax is 0 or not finite."""
    if amax == 0 or not np.isfinite(amax):
        return ONE
    if power_of_two:
        return power_of_two_factor(amax, 448 * 6, -117, 100)
    return min(np.float32(448 * 6) / amax, LARGEST)


def two_level(measured: np.float32, s: np.float32, tensor_amax: np.float32) -> tuple[np.float32, np.float32]:
    """(encode factor e_b, decode scale s_b / S) of one block whose amax is `measured`, s being S."""
    code = round_to(measured * (s * (ONE / np.float32(6))), "e4m3")
    s_b = NAN if code == 0x7F else np.float32(magnitudes("e4m3")[code])
    e_b = ZERO if s_b == 0 else ONE / (s_b * (ONE / s))
    finite = np.isfinite(measured) and np.isfinite(tensor_amax)
    return e_b, s_b / s if finite else NAN


# The operand


def spans(length: int, block: int | None) -> list[slice]:
    """The blocks of one axis: None is the whole axis; a last, partial block is a separate block."""
    if block is None:
        return [slice(0, length)]
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def blocks_of(shape: tuple[int, int], block) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """((block row, block column), (rows, columns)) of every block."""
    for i, rows in enumerate(spans(shape[0], block[0])):
        for j, columns in enumerate(spans(shape[1], block[1])):
            yield (i, j), (rows, columns)


def block_scales(x, format, block, scale, power_of_two, amax, factor) -> tuple[np.ndarray, np.ndarray]:
    """The encode factors and the decode scales of every block, both [ceil(rows/br), ceil(kp/bk)]."""
    shape = len(spans(x.shape[0], block[0])), len(spans(x.shape[1], block[1]))
    factors, scales = np.empty(shape, np.float32), np.empty(shape, np.float32)
    if scale == "two_level":
        tensor_amax = largest_bits(x if amax is None else np.float32(amax))
        s = tensor_factor(tensor_amax, power_of_two)
    elif amax is not None:
        amax = np.broadcast_to(np.asarray(amax, np.float32), shape)
    for at, area in blocks_of(x.shape, block):
        measured = largest_bits(x[area])
        if scale == "two_level":
            factors[at], scales[at] = two_level(measured, s, tensor_amax)
        else:
            given = None if amax is None else largest_bits(amax[at])
            factors[at], scales[at] = one_level(measured, given, format, scale, factor)
    return factors, scales


def validate(format: str, scale: str, rounding: str, factor) -> None:
    """Refuse arguments that the specification does not define."""
    if format not in FORMATS or rounding not in ("nearest", "stochastic"):
        raise ValueError(f"unknown format {format!r} or rounding {rounding!r}")
    if scale not in ("fp32", "power_of_two", "e8m0", "two_level"):
        raise ValueError(f"unknown scale {scale!r}")
    if scale == "two_level" and format != "e2m1":
        raise ValueError(f"two-level scaling is defined for e2m1, not for {format!r}")
    if factor and scale in ("e8m0", "two_level"):
        raise ValueError(f"a factor (delayed scaling) is not defined for scale {scale!r}")


@np.errstate(all="ignore")
def operand(
    x,
    format,
    block,
    scale,
    rounding="nearest",
    hadamard=False,
    power_of_two=True,
    amax=None,
    factor=None,
    seed=0,
    tensor_id=0,
    count=0,
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize one GEMM operand, its contraction axis last.

    Args:
        x: float32 [rows, k].
        format: a key of `FORMATS`.
        block: (rows, k) of a block, None for a whole axis.
        scale: "fp32" (correctly rounded max / amax), "power_of_two", "e8m0" or "two_level".
        rounding: "nearest" or "stochastic"; the latter reads seed, tensor_id and count.
        hadamard: transform along k first.
        power_of_two: of two levels, whether S is one or Transformer Engine's.
        amax: used instead of the measured one, broadcast to the shape of the scales; two-level: the tensor's.
        factor: the e of delayed scaling; None and 0 mean unset.

    Returns:
        codes, uint8 [rows, kp], one an element, every NaN as 0x7F (E2M1: +6);
        scales, float32 [ceil(rows/br), ceil(kp/bk)], the decode scales, both levels multiplied.

    Exact: NaN and infinities make the scale of their block NaN (two levels with no amax given: every scale);
    blocks of zeros have scale 1 (E8M0 2^-127, two-level 0).
    """
    validate(format, scale, rounding, factor)
    x = np.ascontiguousarray(x, np.float32)
    if hadamard:
        x = hadamard_rows(x)
    factors, scales = block_scales(x, format, block, scale, power_of_two, amax, factor)
    codes = np.empty(x.shape, np.uint8)
    for at, (rows, columns) in blocks_of(x.shape, block):
        e = factors[at]
        for row in range(rows.start, rows.stop):
            for column in range(columns.start, columns.stop):
                u = None
                if rounding == "stochastic":
                    u = uniform(row * x.shape[1] + column, seed, tensor_id, count)
                codes[row, column] = round_to(x[row, column] * e, format, u)
    return codes, scales


# Delayed scaling


@np.errstate(all="ignore")
def history_step(
    history, factor, format_max, margin=0, algorithm="max", power_of_two=True
) -> tuple[list[float], float]:
    """Roll one column: [newest, oldest ... second newest] -> [0, older ... newest], and find its factor.

    Where history[0] is 0 both stay. Else a is the largest value ("max") or the newest ("most_recent") and the
    factor is e(a) * 2^-margin, limited to [2^-126, 2^100] (power_of_two=False: to normal numbers).
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"unknown algorithm {algorithm!r}")
    if largest_bits(np.float32(history[0])) == 0:
        return list(history), factor
    a = largest_bits(np.float32(history if algorithm == "max" else history[:1]))
    rolled = [0.0, *history[2:], history[0]] if len(history) > 1 else [0.0]
    e = factor_from_amax(a, format_max, "power_of_two" if power_of_two else "fp32")
    low, high = (2.0**-126, 2.0**100) if power_of_two else (float(SMALLEST_NORMAL), float(LARGEST))
    return rolled, float(hold(math.ldexp(float(e), -margin), low, high)) if np.isfinite(a) else 1.0


# Recipes


def _spec(format: str, block, scale: str, **more) -> dict:
    """The keyword arguments of `operand` for one operand."""
    return {"format": format, "block": block, "scale": scale, **more}


def _six(input, weight, grad_output) -> dict[str, dict | None]:
    """Specs of the six operands: both GEMMs that read a tensor quantize it with one spec, each along its own k."""
    names = ("fprop.a", "fprop.b", "dgrad.a", "dgrad.b", "wgrad.a", "wgrad.b")
    tensors = (input, weight, grad_output, weight, grad_output, input)
    return {name: None if spec is None else dict(spec) for name, spec in zip(names, tensors, strict=True)}


def _tensorwise() -> dict[str, dict | None]:
    """E4M3 forward, E5M2 gradients, one power of two a tensor."""
    e4m3 = _spec("e4m3", (None, None), "power_of_two")
    return _six(e4m3, e4m3, _spec("e5m2", (None, None), "power_of_two"))


def _rowwise() -> dict[str, dict | None]:
    """E4M3, one power of two a row of each operand as its GEMM reads it."""
    return _six(*[_spec("e4m3", (1, None), "power_of_two")] * 3)


def _rowwise_bf16_wgrad() -> dict[str, dict | None]:
    """Rowwise with the weight per tensor in dgrad and no quantization in wgrad."""
    weight = _spec("e4m3", (None, None), "power_of_two")
    return {**_rowwise(), "dgrad.b": weight, "wgrad.a": None, "wgrad.b": None}


def _blockwise() -> dict[str, dict | None]:
    """E4M3 in blocks of (1, 128), the weight's (128, 128)."""
    row = _spec("e4m3", (1, 128), "power_of_two")
    return _six(row, _spec("e4m3", (128, 128), "power_of_two"), row)


def _mxfp8() -> dict[str, dict | None]:
    """E4M3 in blocks of (1, 32) with E8M0 scales."""
    return _six(*[_spec("e4m3", (1, 32), "e8m0")] * 3)


def _mxfp6() -> dict[str, dict | None]:
    """E2M3 in blocks of (1, 32) with E8M0 scales, gradients in E3M2."""
    line = _spec("e2m3", (1, 32), "e8m0")
    return _six(line, line, {**line, "format": "e3m2"})


def _mxfp4() -> dict[str, dict | None]:
    """E2M1 in blocks of (1, 32) with E8M0 scales."""
    return _six(*[_spec("e2m1", (1, 32), "e8m0")] * 3)


def _nvfp4() -> dict[str, dict | None]:
    """E2M1, two levels; gradients rounded stochastically; Hadamard on both operands of wgrad."""
    row = _spec("e2m1", (1, 16), "two_level")
    six = _six(row, _spec("e2m1", (16, 16), "two_level"), {**row, "rounding": "stochastic"})
    six["wgrad.a"]["hadamard"] = six["wgrad.b"]["hadamard"] = True
    return six


RECIPES = {
    "bf16": lambda: _six(None, None, None),
    "delayed": _tensorwise,
    "tensorwise": _tensorwise,
    "rowwise": _rowwise,
    "rowwise_bf16_wgrad": _rowwise_bf16_wgrad,
    "blockwise": _blockwise,
    "mxfp8": _mxfp8,
    "mxfp6": _mxfp6,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}


def recipe_operands(name: str) -> dict[str, dict | None]:
    """The arguments of `operand` for the six operands of a recipe; None stays in high precision.

    `delayed` is given as its current-scaling equivalent; its factors come from `history_step`.
    """
    return RECIPES[name]()
