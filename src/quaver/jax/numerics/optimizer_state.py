"""Encode and decode 8-bit optimizer states in JAX arrays; bit-compatible with `quaver.reference.optim`.

XLA on a CPU flushes subnormals, which states contain often. So scales, products with them and comparisons with zero are
computed on the bits, and code values are looked up in tables. Products that enter a sum are exact, so that fusing them
changes nothing. Barriers keep XLA from rewriting the rest.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.numerics.quantized import copysign
from quaver.jax.numerics.rounding import INFINITY_BITS, SMALLEST_NORMAL_BITS, magnitude_bits, two_to_the, widen
from quaver.recipes.formats import E4M3, Format
from quaver.reference import optim, optimizer_state
from quaver.reference.optimizer_state import INTEGERS, StateCode, StateSpec, boundaries

F, W = np.float32, np.int32
LARGEST_SCALE_BITS = W(optim.LARGEST_SCALE.view(np.int32))
SCALE_DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "power_of_two": jnp.float32}


def encode(
    x: Array, spec: StateSpec, noise: Array | None = None, amax: Array | None = None
) -> tuple[Array, Array | None]:
    """Encode a state as codes and scales; see `quaver.reference.optim.encode`.

    Args:
        x: float32 [..., K]; not negative if the code is unsigned.
        spec: how to encode.
        noise: int32 below 2**15 of x's shape, if the spec is stochastic.
        amax: float32 [], amax of the whole tensor of which x is a part; only for one scale per tensor.
    Returns:
        Codes of x's shape (uint8, int8, or the dtype that the code names), and scales or None. Exact. Bounded for
        expanded codes: in float32, so that one code in a thousand differs by one.
    """
    code = spec.of
    if code.kind == "float32":
        return x, None
    if code.kind == "bfloat16":
        return _bfloat16(x, noise), None
    blocks = in_blocks(x, spec.block)
    if code.kind == "expanded":
        written, stored = _expanded(blocks)
        return out_of_blocks(written, x.shape), stored.reshape(*stored.shape[:-2], stored.shape[-2] * code.numbers)
    top = _largest(blocks, spec.block) if amax is None else magnitude_bits(amax)
    scale = scale_bits(top, spec)
    wide = jnp.expand_dims(scale, -1) if spec.block is not None else scale
    usable = (wide >= SMALLEST_NORMAL_BITS) & (wide <= LARGEST_SCALE_BITS)
    divisor = lax.optimization_barrier(_float_of_bits(jnp.where(usable, wide, W(0x3F800000))))
    inverse = lax.optimization_barrier(lax.div(lax.full_like(divisor, 1), divisor))
    blocks = jnp.where(usable, blocks, F(0))
    y = _product(blocks, inverse)
    if code.kind != "mitchell":
        y = jnp.minimum(y, F(code.largest))
    u = None if noise is None else in_blocks(noise, spec.block)
    codes = _codes(y, blocks, spec, u)
    return out_of_blocks(codes, x.shape), _float_of_bits(scale).astype(SCALE_DTYPES[spec.scale])


def decode(codes: Array, scale: Array | None, spec: StateSpec) -> Array:
    """Decode codes to float32 values of their shape. Exact; expanded codes within 1e-4 of each value."""
    code = spec.of
    if scale is None or not code.scaled:
        return widen(codes)
    values = in_blocks(codes, spec.block)
    if code.kind == "expanded":
        return out_of_blocks(_narrowed(values, scale.reshape(*values.shape[:-1], code.numbers)), codes.shape)
    wide = widen(scale)
    wide = jnp.expand_dims(wide, -1) if spec.block is not None else wide
    if code.kind == "float16":
        t = values.astype(jnp.float32)
    else:
        t = jnp.asarray(_values(code))[values.astype(jnp.int32) & W(0xFF)]
    return out_of_blocks(_scaled(t, wide), codes.shape)


def scale_bits(amax: Array, spec: StateSpec) -> Array:
    """Return the bits of the scale for each amax's bits: int32; those of NaN if the amax is not finite. Exact."""
    finite = amax < INFINITY_BITS
    largest = lax.optimization_barrier(jnp.full(amax.shape, spec.of.largest, jnp.float32))
    ratio = lax.div(_float_of_bits(jnp.where(finite, amax, W(0))), largest)
    bits = lax.bitcast_convert_type(lax.optimization_barrier(ratio), jnp.int32)
    if spec.scale == "bfloat16":
        bits = (bits + W(0xFFFF)) & W(~0xFFFF)
    elif spec.scale == "power_of_two":
        bits = (bits + W(0x7FFFFF)) & W(~0x7FFFFF)
    # A flushed ratio may be one that rounds up to the smallest scale.
    bits = jnp.clip(bits, SMALLEST_NORMAL_BITS, LARGEST_SCALE_BITS)
    bits = jnp.where(amax < W(_smallest_amax(spec)), W(0), bits)
    return jnp.where(finite, bits, W(0x7FC00000))


def in_blocks(x: Array, block: int | None) -> Array:
    """Reshape [..., K] to [..., ceil(K / block), block], zero-padded; returns x itself if there is one scale per
    tensor.
    """
    if block is None:
        return x
    x = x if x.ndim else x.reshape(1)
    short = -x.shape[-1] % block
    if short:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def out_of_blocks(x: Array, shape: tuple[int, ...]) -> Array:
    if x.shape == shape:
        return x
    flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return flat[..., : shape[-1] if shape else 1].reshape(shape)


@cache
def _smallest_amax(spec: StateSpec) -> int:
    """Return the bits of the smallest amax with a nonzero scale; a block with a smaller one is encoded as zeros."""
    low, high = 0, int(INFINITY_BITS) - 1
    while low < high:
        middle = (low + high) // 2
        amax = np.array([middle], np.uint32).view(F)
        low, high = (low, middle) if optim.scale_of(amax, spec)[0] > 0 else (middle + 1, high)
    return low


@cache
def _values(code: StateCode) -> np.ndarray:
    """Return the value of each byte: float32 [256]."""
    every = np.arange(256).astype(np.uint8)
    signed = code.signed and code.kind in INTEGERS
    return optim.table_values(every.view(np.int8) if signed else every, code).astype(F)


def _largest(blocks: Array, block: int | None) -> Array:
    """Return the bits of each block's amax: int32; NaN's are larger than infinity's."""
    return magnitude_bits(blocks).max(None if block is None else -1, initial=W(0))


def _product(x: Array, inverse: Array) -> Array:
    """Return |x| × inverse for a normal inverse: float32, with subnormal products replaced by the smallest normal
    number.

    This changes no code: all these products are far below half a step, and above zero.
    """
    bits = magnitude_bits(x)
    # A subnormal equals its bits times 2**-149; as a float the bits are normal, so they are not flushed.
    small = bits < SMALLEST_NORMAL_BITS
    factor = jnp.where(small, lax.bitcast_convert_type(bits.astype(jnp.float32), jnp.int32), bits)
    binade = _binade(factor) - jnp.where(small, W(149), W(0))
    inverse_bits = lax.bitcast_convert_type(inverse, jnp.int32)
    p = lax.bitcast_convert_type(_mantissa(factor) * _mantissa(inverse_bits), jnp.int32)
    e = _binade(p) + binade + _binade(inverse_bits)
    p = p & W(0x7FFFFF)
    normal = _float_of_bits(p | (jnp.clip(e, W(-126), W(127)) + W(127)) << W(23))
    normal = jnp.where(e > W(127), F(np.inf), normal)
    nothing = (bits == W(0)) | (e < W(-150)) | ((e == W(-150)) & (p == W(0)))
    return jnp.where(nothing, F(0), jnp.where(e < W(-126), F(2.0**-126), normal))


def _binade(bits: Array) -> Array:
    return ((bits >> W(23)) & W(0xFF)) - W(127)


def _mantissa(bits: Array) -> Array:
    """Return the mantissa in [1, 2) of a normal number."""
    return _float_of_bits((bits & W(0x7FFFFF)) | W(0x3F800000))


def _scaled(t: Array, scale: Array) -> Array:
    """Return t × scale for normal numbers or zeros, including subnormal products."""
    whole = t * scale
    bits_t, bits_s = (lax.bitcast_convert_type(one, jnp.int32) for one in jnp.broadcast_arrays(t, scale))
    e = _binade(bits_t) + _binade(bits_s)
    # 48-bit product of both mantissas, with the lowest 21 bits collapsed to one sticky bit.
    (a1, a0), (b1, b0) = (_halves(bits) for bits in (bits_t, bits_s))
    middle = a1 * b0 + a0 * b1
    low = a0 * b0 + ((middle & W(0xFFF)) << W(12))
    high = a1 * b1 + (middle >> W(12)) + (low >> W(24))
    joined = (low & W(0x1FFFFF)) != W(0)
    q = (high << W(3)) | ((low & W(0xFFFFFF)) >> W(21)) | joined.astype(jnp.int32)
    # Round in steps of 2**-149.
    n = jnp.clip(W(-103 - 21) - e, W(2), W(30))
    count, rest, half = q >> n, q & ((W(1) << n) - W(1)), W(1) << (n - W(1))
    count = count + ((rest > half) | ((rest == half) & ((count & W(1)) == W(1)))).astype(jnp.int32)
    # A subnormal's bits are its number of steps.
    tiny = (e <= W(-127)) & (magnitude_bits(t) != W(0)) & (bits_s != W(0))
    return jnp.where(tiny, _float_of_bits(count | (bits_t & W(-0x80000000))), whole)


def _halves(bits: Array) -> tuple[Array, Array]:
    mantissa = (bits & W(0x7FFFFF)) | W(0x800000)
    return mantissa >> W(12), mantissa & W(0xFFF)


def _codes(y: Array, x: Array, spec: StateSpec, u: Array | None) -> Array:
    code = spec.of
    if code.kind == "dynamic":
        edges = jnp.asarray(boundaries(code.signed))
        return jnp.searchsorted(edges, copysign(y, x)).astype(jnp.uint8)
    if code.kind == "float16":
        return copysign(y, x).astype(jnp.float16)
    if code.kind == "softsign":
        c = _softsign(y, u)
    elif code.kind == "root":
        c = _root(y, code.top, u)
    elif code.kind == "mitchell":
        c = _mitchell(y, code.halvings, u)
    else:
        assert code.format is not None
        c = _format(y, code, code.format, u)
    if spec.floor:
        c = jnp.where(magnitude_bits(x) != W(0), jnp.maximum(c, W(1)), c)
    negative = (lax.bitcast_convert_type(x, jnp.int32) < W(0)) & (c > W(0))
    if not code.signed:
        return c.astype(jnp.uint8)
    if code.kind == "format":
        return (c | jnp.where(negative, W(0x80), W(0))).astype(jnp.uint8)
    return jnp.where(negative, -c, c).astype(jnp.int8)


def _softsign(y: Array, u: Array | None) -> Array:
    c = lax.optimization_barrier(F(254) * lax.optimization_barrier(lax.div(y, y + F(1))))
    if u is None:
        return jnp.minimum(_nearest(c), F(127)).astype(jnp.int32)
    low = jnp.minimum(jnp.floor(c), F(126))
    wide, narrow = F(254) - low, F(253) - low
    step = u.astype(jnp.float32) * F(254 * 2.0**-optim.NOISE_BITS)
    reached = lax.optimization_barrier(y * (wide * narrow))
    return low.astype(jnp.int32) + (reached > low * narrow + step).astype(jnp.int32)


def _root(y: Array, top: int, u: Array | None) -> Array:
    z = lax.optimization_barrier(y * F(top * top))
    root = jnp.sqrt(z)
    if u is None:
        return jnp.minimum(_nearest(root), F(top)).astype(jnp.int32)
    low = jnp.minimum(jnp.floor(root), F(top - 1))
    step = (F(2) * low + F(1)) * (u.astype(jnp.float32) * F(2.0**-optim.NOISE_BITS))
    return low.astype(jnp.int32) + (z > low * low + step).astype(jnp.int32)


def _mitchell(y: Array, halvings: int, u: Array | None) -> Array:
    bits = (lax.bitcast_convert_type(y, jnp.int32) >> W(halvings)) + W(32 * (halvings + 1) << 23)
    c = _float_of_bits(bits)
    if halvings == 1:
        # Linear from code 0 to 1, and from 1 to 2.
        twice = y * F(2)
        c = jnp.minimum(c, jnp.minimum(twice, (twice + F(2)) * optim.THIRD))
    if u is not None:
        shift = (W(2) * u.astype(jnp.int32) + W(1 - 2**optim.NOISE_BITS)).astype(jnp.float32)
        c = c + shift * F(2.0 ** -(optim.NOISE_BITS + 1))
    return _nearest(c).astype(jnp.int32)


def _format(y: Array, code: StateCode, fmt: Format, u: Array | None) -> Array:
    value = jnp.sqrt(y) if code.root else y
    e = jnp.clip(_binade(lax.bitcast_convert_type(value, jnp.int32)), W(fmt.emin), W(fmt.emax))
    inverse = two_to_the(W(fmt.mantissa_bits) - e)
    steps = value * inverse
    if u is None:
        whole = _nearest(steps)
    else:
        low = jnp.minimum(jnp.floor(steps), F(2 ** (fmt.mantissa_bits + 1) - 1))
        chance = u.astype(jnp.float32) * F(2.0**-optim.NOISE_BITS)
        if code.root:
            up = y * inverse * inverse > low * low + (F(2) * low + F(1)) * chance
        else:
            up = steps > low + chance
        whole = low + up.astype(jnp.float32)
    codes = whole.astype(jnp.int32) + ((e - W(fmt.emin)) << W(fmt.mantissa_bits))
    return jnp.minimum(codes, W(fmt.max_code))


def _nearest(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _bfloat16(x: Array, noise: Array | None) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    added = (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)
    if noise is not None:
        added = noise.astype(jnp.uint32) << np.uint32(1)
    top = magnitude_bits(x)
    stored = jnp.where(top > INFINITY_BITS, bits | np.uint32(0x400000), bits)
    rounded = jnp.where(top < INFINITY_BITS, bits + added, stored) >> np.uint32(16)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)


def _expanded(blocks: Array) -> tuple[Array, Array]:
    """Return codes of blocks in expanded format, and their k, c and S; see `quaver.reference.optimizer_state`.

    Logarithms are computed on the mantissas.
    """
    bits = magnitude_bits(blocks)
    counted = bits >= SMALLEST_NORMAL_BITS
    top = bits.max(-1, keepdims=True, initial=W(0))
    usable = (top >= SMALLEST_NORMAL_BITS) & (top < INFINITY_BITS)
    largest = jnp.where(usable, top, W(0x3F800000))
    low = jnp.where(counted, bits, INFINITY_BITS).min(-1, keepdims=True, initial=INFINITY_BITS)
    smallest = jnp.where(usable, low, W(0x3F800000))
    spread = jnp.maximum(_log2_ratio(largest, smallest), F(optimizer_state.REACH / optimizer_state.MOST))
    k = jnp.floor(F(optimizer_state.PARTS * optimizer_state.REACH) / spread) * F(1 / optimizer_state.PARTS)
    k = jnp.maximum(k, F(optimizer_state.LEAST))
    # c = √(largest × smallest): halve the exponent of the product, and leave its lowest bit to the mantissa.
    e = _binade(largest) + _binade(smallest)
    c = jnp.sqrt(_mantissa(largest) * _mantissa(smallest) * two_to_the(e & W(1))) * two_to_the(e >> W(1))
    c_bits = lax.bitcast_convert_type(c, jnp.int32)
    s = jnp.exp2(k * _log2_ratio(largest, c_bits)) / F(E4M3.max)
    power = jnp.exp2(k * _log2_ratio(jnp.where(counted, bits, W(0x3F800000)), c_bits)) / s
    y = jnp.minimum(jnp.where(counted & usable, power, F(0)), F(E4M3.max))
    codes = _format(y, StateSpec(code="e4m3").of, E4M3, None)
    negative = (lax.bitcast_convert_type(blocks, jnp.int32) < W(0)) & (codes > W(0))
    stored = jnp.concatenate([k, jnp.where(usable, c, F(1)), jnp.where(usable, s, F(0))], -1)
    stored = jnp.where(top < INFINITY_BITS, stored, F(np.nan))
    return (codes | jnp.where(negative, W(0x80), W(0))).astype(jnp.uint8), stored


def _log2_ratio(a: Array, b: Array) -> Array:
    """Return log2 of a ratio from the bits of both numbers, accurate for large and small ratios."""
    return jnp.log2(_mantissa(a) / _mantissa(b)) + (_binade(a) - _binade(b)).astype(jnp.float32)


def _narrowed(codes: Array, stored: Array) -> Array:
    k, c, s = (stored[..., i : i + 1] for i in range(optimizer_state.NUMBERS))
    values = jnp.asarray(_values(StateSpec(code="e4m3").of))[codes.astype(jnp.int32)]
    reached = jnp.abs(values) * s
    some = reached > F(0)
    x = jnp.exp2(jnp.log2(jnp.where(some, reached, F(1))) / k) * c
    x = jnp.where(some, x, jnp.where(jnp.isnan(s), F(np.nan), F(0)))
    return copysign(x, values)


def _float_of_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
