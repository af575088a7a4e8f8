"""Encoding and decoding of optimizer states, and Schedule-Free AdamW, in numpy; plain and slow, all other
implementations are compared with it.

    y = |x| / scale       code = nearest to y, or stochastically one of the two around y, so that the mean is y

Every rounded step of the formulas below is a single IEEE float32 operation whose inputs a compiler cannot fuse, so that
all frameworks agree bit for bit; products that enter a sum are exact.
"""

import math
from typing import NamedTuple

import numpy as np

from quaver.recipes.formats import Format
from quaver.reference import optimizer_state
from quaver.reference.numerics import decode as decode_format
from quaver.reference.numerics import encode as encode_format
from quaver.reference.numerics import round_to
from quaver.reference.optimizer_state import INTEGERS, StateCode, StateSpec, boundaries, levels

# ---- states ----

F = np.float32
#: Largest scale, whose reciprocal is normal; larger magnitudes saturate. The smallest scale is the smallest normal
#: number, and a block below it counts as zeros.
LARGEST_SCALE = F(2.0**126)
#: 1/3, by which every implementation multiplies, because not every compiler divides exactly.
THIRD = F(1 / 3)
#: Number of significant bits of random words.
NOISE_BITS = 15


def encode(x: np.ndarray, spec: StateSpec, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Encode a state; returns codes and scales.

    Exact; expanded codes are bounded, see `quaver.reference.optimizer_state`.

    Args:
        x: float32 [..., K]; nonnegative if the code has no sign.
        noise: integers below 2**15 of x's shape, if the spec is stochastic.

    Returns:
        Codes of x's shape: int8 for signed integer codes, else uint8; for the others float32, uint16 (bfloat16's bits)
        and float16. Scales: float32 [..., ceil(K / block)], or [] for a whole tensor; three numbers per block for
        expanded codes; None without scales. A block with a number that is not finite has scale NaN and codes 0.
    """
    x = np.asarray(x, F)
    u = None if not spec.stochastic else np.asarray(noise, np.int64)
    if spec.code == "float32":
        return x.copy(), None
    if spec.code == "bfloat16":
        return bfloat16_bits(x, u), None
    code = spec.of
    if code.kind == "expanded":
        assert spec.block is not None
        codes, unrounded = optimizer_state.encode(in_blocks(x, spec.block))
        return out_of_blocks(codes, x.shape), unrounded.reshape(
            *unrounded.shape[:-2], unrounded.shape[-2] * code.numbers
        )
    scale = scales(x, spec)
    spread = over_blocks(scale, x.shape, spec.block)
    usable = np.isfinite(spread) & (spread > 0)
    inverse = F(1) / np.where(usable, spread, F(1))
    x = np.where(usable, x, F(0))
    with np.errstate(over="ignore"):
        y = np.abs(x) * inverse
    if code.kind != "mitchell":
        y = np.minimum(y, F(code.largest))
    if code.kind == "dynamic":
        c = np.searchsorted(boundaries(code.signed), np.copysign(y, x), side="left")
        return c.astype(np.uint8), scale
    if code.kind == "float16":
        return np.copysign(y, x).astype(np.float16), scale
    c = _magnitude_codes(y, code, u)
    if spec.floor:
        c = np.where((x != 0) & usable, np.maximum(c, 1), c)
    return _signed(c, x, code), scale


def decode(codes: np.ndarray, scale: np.ndarray | None, spec: StateSpec) -> np.ndarray:
    """Decode codes to float32 values of the same shape."""
    if spec.code == "float32":
        return codes.copy()
    if spec.code == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(F)
    assert scale is not None
    if spec.of.kind == "expanded":
        assert spec.block is not None
        blocks = in_blocks(codes, spec.block)
        return out_of_blocks(
            optimizer_state.decode(blocks, scale.reshape(*blocks.shape[:-1], spec.of.numbers)), codes.shape
        )
    spread = over_blocks(scale, codes.shape, spec.block)
    with np.errstate(over="ignore"):
        return (table_values(codes, spec.of) * spread).astype(F)


def scales(x: np.ndarray, spec: StateSpec) -> np.ndarray:
    """Return the scale of each block, float32: at least its largest magnitude over the code's largest."""
    return scale_of(_amax(x, spec.block), spec)


def scale_of(amax: np.ndarray, spec: StateSpec) -> np.ndarray:
    """Return the scale for each largest magnitude, float32; NaN where that is not finite."""
    finite = np.isfinite(amax)
    with np.errstate(over="ignore"):
        ratio = np.where(finite, amax, F(0)) / F(spec.of.largest)
    bits = ratio.astype(F).view(np.uint32).astype(np.int64)
    if spec.scale == "bfloat16":
        bits = (bits + 0xFFFF) & ~0xFFFF
    elif spec.scale == "power_of_two":
        bits = (bits + 0x7FFFFF) & ~0x7FFFFF
    bits = np.where(bits < 0x00800000, 0, np.minimum(bits, LARGEST_SCALE.view(np.uint32).astype(np.int64)))
    return np.where(finite, bits.astype(np.uint32).view(F), F(np.nan))


def table_values(codes: np.ndarray, code: StateCode) -> np.ndarray:
    """Return the values of codes as multiples of their scale, float32."""
    if code.kind == "float16":
        return codes.astype(F)
    if code.kind == "dynamic":
        return levels(code.signed)[codes]
    if code.kind == "format":
        assert code.format is not None
        values = _format_values(codes, code.format)
        return values * values if code.root else values
    c = codes.astype(np.int64)
    if code.kind == "softsign":
        return c.astype(F) / (254 - np.abs(c)).astype(F)
    if code.kind == "mitchell":
        # 64 or 96 binades lower, so that the exponent field can be doubled or quadrupled, and zero stays zero.
        bits = np.ldexp(np.abs(c).astype(F), -32 * (code.halvings + 1)).view(np.uint32) << code.halvings
        return np.copysign(bits.view(F), np.sign(c)).astype(F)
    return np.sign(c).astype(F) * ((c * c).astype(F) * F(1 / code.top**2))


def _magnitude_codes(y: np.ndarray, code: StateCode, u: np.ndarray | None) -> np.ndarray:
    """Return int64 codes of y, float32 from 0 to the code's largest; noise u below 2**15 rounds stochastically."""
    if code.kind == "softsign":
        return _softsign(y, u)
    if code.kind == "root":
        return _root(y, code.top, u)
    if code.kind == "mitchell":
        return _mitchell(y, code.halvings, u)
    assert code.format is not None
    return _format_codes(y, code, code.format, u)


def _softsign(y: np.ndarray, u: np.ndarray | None) -> np.ndarray:
    # y = c / (254 - c), so c = 254 y / (1 + y).
    c = F(254) * (y / (F(1) + y))
    if u is None:
        return np.minimum(np.rint(c), F(127)).astype(np.int64)
    low = np.minimum(np.floor(c), F(126))
    # Between c and c + 1: y (254 - c)(253 - c) grows from c (253 - c) by 254.
    wide, narrow = F(254) - low, F(253) - low
    step = u.astype(F) * F(254 * 2.0**-NOISE_BITS)
    return (low + (y * (wide * narrow) > low * narrow + step)).astype(np.int64)


def _root(y: np.ndarray, top: int, u: np.ndarray | None) -> np.ndarray:
    # y = (c / top)², so c = √z.
    z = y * F(top * top)
    root = np.sqrt(z)
    if u is None:
        return np.minimum(np.rint(root), F(top)).astype(np.int64)
    low = np.minimum(np.floor(root), F(top - 1))
    # Between c and c + 1: z grows from c² by 2 c + 1.
    step = (F(2) * low + F(1)) * (u.astype(F) * F(2.0**-NOISE_BITS))
    return (low + (z > low * low + step)).astype(np.int64)


def _mitchell(y: np.ndarray, halvings: int, u: np.ndarray | None) -> np.ndarray:
    bits = (y.view(np.uint32) >> halvings) + np.uint32(32 * (halvings + 1) << 23)
    c = bits.view(F)
    if halvings == 1:
        # Codes 0, 1 and 2 have the values 0, 1/2 and 2, and Mitchell's line bends between them.
        with np.errstate(over="ignore"):
            twice = y * F(2)
            c = np.minimum(c, np.minimum(twice, (twice + F(2)) * THIRD))
    if u is not None:
        # From -1/2 up to 1/2, symmetric: values are on a line between two codes, so neither is favoured.
        c = c + (2 * u + 1 - 2**NOISE_BITS).astype(F) * F(2.0 ** -(NOISE_BITS + 1))
    return np.rint(c).astype(np.int64)


def _format_codes(y: np.ndarray, code: StateCode, fmt: Format, u: np.ndarray | None) -> np.ndarray:
    value = np.sqrt(y) if code.root else y
    if u is None:
        return _encode_unsigned(round_to(value, fmt), fmt)
    exponent = np.clip(np.frexp(value)[1] - 1, fmt.emin, fmt.emax)
    steps = np.ldexp(value, fmt.mantissa_bits - exponent)
    low = np.minimum(np.floor(steps), F(2 ** (fmt.mantissa_bits + 1) - 1))
    chance = u.astype(F) * F(2.0**-NOISE_BITS)
    if code.root:
        # For squares, in units of a squared step.
        square = np.ldexp(y, 2 * (fmt.mantissa_bits - exponent))
        up = square > low * low + (F(2) * low + F(1)) * chance
    else:
        up = steps > low + chance
    rounded = np.ldexp(low + up, exponent - fmt.mantissa_bits)
    return _encode_unsigned(np.minimum(rounded, F(fmt.max)).astype(F), fmt)


def _encode_unsigned(values: np.ndarray, fmt: Format) -> np.ndarray:
    if fmt.signed:
        return encode_format(values, fmt).astype(np.int64)
    return np.searchsorted(_unsigned(fmt), values)


def _format_values(codes: np.ndarray, fmt: Format) -> np.ndarray:
    return decode_format(codes, fmt) if fmt.signed else _unsigned(fmt)[codes]


def _unsigned(fmt: Format) -> np.ndarray:
    codes = np.arange(2**fmt.bits)
    fraction, exponent = codes % 2**fmt.mantissa_bits / 2.0**fmt.mantissa_bits, codes >> fmt.mantissa_bits
    return np.where(exponent == 0, np.ldexp(fraction, fmt.emin), np.ldexp(1.0 + fraction, exponent - fmt.bias)).astype(
        F
    )


def _signed(c: np.ndarray, x: np.ndarray, code: StateCode) -> np.ndarray:
    """Return codes of magnitudes with the sign of x."""
    negative = np.signbit(x) & (c > 0)
    if code.kind in INTEGERS:
        return np.where(negative, -c, c).astype(np.int8 if code.signed else np.uint8)
    if not code.signed:
        return c.astype(np.uint8)
    return (c | negative.astype(np.int64) << 7).astype(np.uint8)


def bfloat16_bits(x: np.ndarray, u: np.ndarray | None) -> np.ndarray:
    """Return bfloat16's bits of float32 x, uint16: nearest even, or stochastic; infinities and NaN stay."""
    bits = x.view(np.uint32).astype(np.int64)
    added = 0x7FFF + (bits >> 16 & 1) if u is None else u << 1
    rounded = (bits + added) >> 16
    unrounded = (bits >> 16) | np.where(np.isnan(x), 0x40, 0)
    return np.where(np.isfinite(x), rounded, unrounded).astype(np.uint16)


def _amax(x: np.ndarray, block: int | None) -> np.ndarray:
    """Return the largest magnitudes of blocks; NaN counts above infinity."""
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    if block is None:
        return bits.max(initial=np.uint32(0)).astype(np.uint32).view(F)
    return in_blocks(bits, block).max(-1, initial=np.uint32(0)).view(F)


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """Reshape [..., K] to [..., ceil(K / block), block], padded with zeros."""
    x = x if x.ndim else x.reshape(1)
    short = -x.shape[-1] % block
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def out_of_blocks(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshape [..., blocks, block] to an array of this shape, without the padding."""
    flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return flat[..., : shape[-1] if shape else 1].reshape(shape)


def over_blocks(scale: np.ndarray, shape: tuple[int, ...], block: int | None) -> np.ndarray:
    """Return each element's scale."""
    if block is None:
        return np.broadcast_to(scale, shape)
    spread = np.repeat(scale, block, -1)[..., : shape[-1] if shape else 1]
    return spread.reshape(shape)


# ---- bounds: how far one step can move a weight, used to clamp updates and predict scales ----
# Adam: with m and v the averages of gradients and of their squares, the Cauchy-Schwarz inequality gives for exact
# states
#
#     |m̂ / √v̂| ≤ U_t = (1 - β1) / √(1 - β2) √((1 - rᵗ) / (1 - r)) √(1 - β2ᵗ) / (1 - β1ᵗ),     r = β1² / β2 < 1
#
# A clamp at U_t changes nothing in exact arithmetic, and removes steps that are large only because v was rounded to
# zero. A weight of at most A is then at most (1 - lr wd) A + lr U_t after the step.


def adam(step: float, beta1: float, beta2: float) -> float:
    """Return U_t of step 1, 2, ...; infinite if β1² ≥ β2, which has no such bound. Accurate to 1e-12."""
    if beta1**2 >= beta2:
        return math.inf
    if beta2 == 1:
        return math.inf
    ratio = beta1**2 / beta2
    grown = (1 - ratio**step) / (1 - ratio)
    return (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(grown * (1 - beta2**step)) / (1 - beta1**step)


def adam_limit(beta1: float, beta2: float) -> float:
    """Return the limit of U_t for many steps: 1.165 for (0.9, 0.95), 7.27 for (0.9, 0.999)."""
    if beta1**2 >= beta2 or beta2 == 1:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


# ---- schedule-free ----


class ScheduleFreeState(NamedTuple):
    """State of Schedule-Free AdamW for one parameter, in float64."""

    #: The weight at which gradients are taken.
    y: np.ndarray
    #: z - y, where z is the iterate without momentum.
    u: np.ndarray
    #: Moving average of squared gradients.
    v: np.ndarray
    step: int = 0
    lr_max: float = 0.0
    weight_sum: float = 0.0

    def average(self, beta1: float) -> np.ndarray:
        """Return x, the weighted average of all z."""
        return self.y - (1 - beta1) / beta1 * self.u


def schedule_free_adamw(
    state: ScheduleFreeState,
    gradient: np.ndarray,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> ScheduleFreeState:
    """Return the state after a step. Source: Defazio et al., "The Road Less Scheduled", arXiv:2405.15682."""
    y, u, v, t, (beta1, beta2) = state.y, state.u, state.v, state.step + 1, betas
    lr = lr * min(1.0, t / max(warmup_steps, 1))
    lr_max = max(lr, state.lr_max)
    weight = t**r * lr_max**weight_lr_power
    weight_sum = state.weight_sum + weight
    c = weight / weight_sum if weight_sum else 0.0
    v = beta2 * v + (1 - beta2) * gradient**2
    direction = gradient / (np.sqrt(v / (1 - beta2**t)) + eps) + weight_decay * y
    z = y + u - lr * direction
    x = (1 - c) * state.average(beta1) + c * z
    y = (1 - beta1) * z + beta1 * x
    return ScheduleFreeState(y, z - y, v, t, lr_max, weight_sum)
