"""Building blocks of kernels: rotation, amaxes, scale factors, FP8 codes, Philox noise, swizzled scales and tiles.

The numbers equal those of `quaver.reference.numerics`.
"""

import triton
import triton.language as tl

# ---- Hadamard rotation on sixteen tensors, each with one element of every group ----

#: Bit j is set if element j changes its sign.
NEGATIVE = tl.constexpr(0b1101_0111_1110_1000)


@triton.jit
def rotate(v):
    """Rotate sixteen float32 tensors: signs, butterflies of stride 1, 2, 4 and 8, division by four. Exact."""
    y, out = transposed(v), ()
    for j in tl.static_range(16):
        out += (y[j] * 0.25,)
    return out


@triton.jit
def transposed(v):
    """Rotate without the division by four, for callers that apply it once per block: signs and butterflies. Exact."""
    y = ()
    for j in tl.static_range(16):
        if (NEGATIVE >> j) & 1:
            # Not -v, which is compiled to 0 - v and loses the sign of zero.
            y += (v[j] * -1.0,)
        else:
            y += (v[j],)
    y = butterflies(y, 1)
    y = butterflies(y, 2)
    y = butterflies(y, 4)
    return butterflies(y, 8)


@triton.jit
def butterflies(y, STRIDE: tl.constexpr):
    """Return a + b and a - b for elements STRIDE apart."""
    out = ()
    for j in tl.static_range(16):
        if (j // STRIDE) % 2 == 0:
            out += (y[j] + y[j + STRIDE],)  # type: ignore[assignment]
        else:
            out += (y[j - STRIDE] - y[j],)  # type: ignore[assignment]
    return out


# ---- amaxes, factors and codes on the bits of float32 ----
# A format is passed as compile-time numbers: MANTISSA bits, EMAX (exponent of its maximum) and TOP_MANTISSA (the 23
# bits after that maximum's leading one), as in `quaver.recipes.formats.Format`.

INFINITY_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
NAN_BITS = tl.constexpr(0x7FC00000)
#: Bounds of the exponent of an encode factor.
LOWEST, HIGHEST = tl.constexpr(-126), tl.constexpr(100)
#: Difference of the exponent biases of float32 and E4M3, as a factor.
E4M3_BIAS = tl.constexpr(2.0**120)


@triton.jit
def widened(v):
    """Convert loaded values to float32; bf16 by its bits, which saves an instruction per pair."""
    if v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def saturated(v, dtype: tl.constexpr):
    """Convert float32 values of codes times scales to bf16 or float32; exact, except that overflow becomes the largest
    number.

    NaN is preserved.
    """
    bits = v.to(tl.int32, bitcast=True)
    beyond = (bits & 0x7FFFFFFF) == INFINITY_BITS
    below: tl.constexpr = 0x10000 if dtype == tl.bfloat16 else 1
    return tl.where(beyond, bits - below, bits).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| for float32 x as int32; they are ordered NaN > infinity > finite."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of_runs(v, HALVINGS: tl.constexpr):
    """Return `magnitude_bits` of the maximum of every 2**HALVINGS neighbours of float32 v, flattened.

    A float maximum takes magnitudes and preserves NaN at no cost; an integer maximum would need a bit cleared in each
    element. Do not use it in a kernel where bytes change threads, which it may garble (triton-lang/triton#11111).
    """
    v = tl.abs(v)
    for _ in tl.static_range(HALVINGS):
        even, odd = tl.split(tl.reshape(v, [v.numel // 2, 2]))
        v = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    return v.to(tl.int32, bitcast=True)


@triton.jit
def flushed(bits):
    """Return amax bits with subnormals set to 0."""
    return tl.where(bits < SMALLEST_NORMAL_BITS, 0, bits)


@triton.jit
def exponent(bits, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr):
    """Return the largest p in bounds with amax × 2**p within the format, from amax's bits; 0 if amax is 0 or not
    finite.
    """
    p = (EMAX + 127) - ((bits + (0x7FFFFF - TOP_MANTISSA)) >> 23)
    p = tl.minimum(tl.maximum(p, LOWEST), HIGHEST)
    return tl.where((bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS), p, 0)


@triton.jit
def power_of_two(p):
    """Return float32 2**p for p in [-126, 127]."""
    return ((p + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def shared_exponent(bits, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr):
    """Return the E8M0 code of a scale, int32, and its encode factor 2**(127 - code), from the bits of an amax.

    An amax of 0 (or subnormal) gives code 0, one that is not finite gives 255; both have factor 1. Subnormals are far
    below half the smallest code, so all become zeros of their signs.
    """
    # The exponent stays at its bit position. No amax gives a factor below 2**-126, so one bound suffices.
    low: tl.constexpr = ((127 - HIGHEST + EMAX) << 23) - 0x7FFFFF + TOP_MANTISSA
    place = (tl.maximum(bits, low) + (0x7FFFFF - TOP_MANTISSA - (EMAX << 23))) & 0x7F800000
    # One comparison finds both kinds of amax without a factor; their exponent fields, 0 and 255, are the codes.
    usable = (bits - SMALLEST_NORMAL_BITS).to(tl.uint32, bitcast=True) < INFINITY_BITS - SMALLEST_NORMAL_BITS
    code = tl.where(usable, place, bits) >> 23
    return code, tl.where(usable, (254 << 23) - place, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def encode_factor(bits, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr):
    """Return the encode factor from the bits of an amax; 1 if it is 0 or not finite."""
    if POWER_OF_TWO:
        _, e = shared_exponent(bits, EMAX, TOP_MANTISSA)
    else:
        usable = (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)
        amax = tl.where(usable, bits, 0x3F800000).to(tl.float32, bitcast=True)
        ratio = tl.div_rn(amax * 0.0 + MAX, amax).to(tl.int32, bitcast=True)
        clamped = tl.minimum(tl.maximum(ratio, SMALLEST_NORMAL_BITS), INFINITY_BITS - 1)
        e = tl.where(usable, clamped, 0x3F800000).to(tl.float32, bitcast=True)
    return e


@triton.jit
def decode_scale(bits, e, POWER_OF_TWO: tl.constexpr):
    """Return 1 / e, or NaN if the amax with these bits is not finite."""
    if POWER_OF_TWO:
        # 2**-p by its exponent field, because a division is expensive and not IEEE on a GPU.
        inverse = 0x7F000000 - e.to(tl.int32, bitcast=True)
    else:
        inverse = tl.div_rn(e * 0.0 + 1.0, e).to(tl.int32, bitcast=True)
    return tl.where(bits < INFINITY_BITS, inverse, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def encode(y, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Encode float32 as FP8 codes, uint8: nearest even, saturating (infinities too); NaN is preserved.

    The cast saturates by itself; a clamp next to a transposed store is miscompiled (triton-lang/triton#11111). On sm_89
    Triton 3.6 casts through a truncated float16 (triton-lang/triton#11753), so INTEGERS = 1 rounds on the bits. Older
    GPUs have no E4M3 (triton-lang/triton#8929), so INTEGERS = 2 uses no FP8 dtype.
    """
    # Only branches of `if` and `else` are skipped by the compiler; code after a return is compiled too.
    if not INTEGERS:
        code = y.to(dtype).to(tl.uint8, bitcast=True)
    elif dtype == tl.float8e5:
        code = _encode_on_bits(y, 2, 15, 0x7B, 0x7F)
    elif INTEGERS == 2:
        code = _encode_on_bits(y, 3, 7, 0x7E, 0x7F)
    else:
        code = _to_odd_half(y).to(dtype).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def encode4(y0, y1, y2, y3, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Run `encode` on four rows."""
    c0, c1 = encode(y0, dtype, INTEGERS), encode(y1, dtype, INTEGERS)
    c2, c3 = encode(y2, dtype, INTEGERS), encode(y3, dtype, INTEGERS)
    return c0, c1, c2, c3


@triton.jit
def _to_odd_half(y):
    """Convert y to float16, rounded to odd, so that the following rounding to E4M3 is the only one.

    Below 2**-14, where float16 has fewer bits, E4M3 is 0; above float16's maximum it saturates.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
    odd", IEEE Transactions on Computers 57 (2008).
    """
    bits = y.to(tl.int32, bitcast=True)
    carried = (bits & 0x1FFF) + 0x1FFF
    return ((bits | carried) & -0x2000).to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def _encode_on_bits(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr, NAN_CODE: tl.constexpr):
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    normal = ((a + ((1 << (SHIFT - 1)) - 1) + ((a >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Adding 2**(24 - BIAS - MANTISSA), whose ulp is the smallest subnormal, leaves the code in the lowest bits.
    ONE: tl.constexpr = (24 - BIAS - MANTISSA + 127) << 23
    magic = tl.full(a.shape, ONE, tl.int32).to(tl.float32, bitcast=True)
    small = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - ONE
    code = tl.where(a < ((128 - BIAS) << 23), small, tl.minimum(normal, MAX_CODE))
    code = tl.where(a > 0x7F800000, NAN_CODE, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decoded(code, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Decode FP8 codes, uint8, to float32; INTEGERS as in `encode`. Exact; NaN is preserved."""
    if INTEGERS != 2:
        value = code.to(dtype, bitcast=True).to(tl.float32)
    elif dtype == tl.float8e5:
        # The upper byte of a float16.
        value = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        # Exponent and mantissa at their float32 positions, where subnormals remain subnormal, then corrected for the
        # bias.
        scaled = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * E4M3_BIAS
        wide = tl.where((bits & 0x7F) == 0x7F, NAN_BITS, scaled.to(tl.int32, bitcast=True))
        value = (wide | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def largest_bits4(x0, x1, x2, x3):
    """Return the elementwise maximum of `magnitude_bits` of four rows."""
    return tl.maximum(
        tl.maximum(magnitude_bits(x0), magnitude_bits(x1)), tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
    )


@triton.jit
def pack4(c0, c1, c2, c3):
    """Pack four uint8 codes into an int32, the first in the lowest byte; after transposition they are adjacent in a
    row.
    """
    low = c0.to(tl.int32) | (c1.to(tl.int32) << 8)
    return low | (c2.to(tl.int32) << 16) | (c3.to(tl.int32) << 24)


@triton.jit
def packed_codes(y0, y1, y2, y3, c0, c1, c2, c3, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    """Pack the codes of four rows into an int32, the first row in the lowest byte; y are the scaled rows, c their
    codes.

    Casting pairs of rows again takes fewer instructions than separating the bytes of pairs of columns.
    """
    if INTEGERS:
        return pack4(c0, c1, c2, c3)
    d0, d1 = tl.split(encode(tl.join(y0, y1), dtype, INTEGERS))
    d2, d3 = tl.split(encode(tl.join(y2, y3), dtype, INTEGERS))
    return pack4(d0, d1, d2, d3)


@triton.jit
def combine_amaxes(work, bits, programs):
    """Combine the amax bits of all programs of a launch; return (True in the last program to finish, the maximum).

    work: int32 [2], zero before and zero again after.
    """
    tl.atomic_max(work, bits, sem="relaxed")
    last = tl.atomic_add(work + 1, 1, sem="acq_rel") == programs - 1
    top = bits
    if last:
        top = tl.load(work, volatile=True)
        # All warps must have read before one clears it.
        tl.debug_barrier()
        tl.store(work, 0)
        tl.store(work + 1, 0)
    return last, top


@triton.jit
def store_amax(work, bits, programs, top, scale, e, SCALES: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Let the last program of a launch store the maximum of all amax bits in top; if SCALES also the decode scale of
    factor e.

    work: as in `combine_amaxes`.
    """
    last, largest = combine_amaxes(work, bits, programs)
    if last:
        tl.store(top, largest.to(tl.float32, bitcast=True))
        if SCALES:
            tl.store(scale, decode_scale(largest, e, POWER_OF_TWO))


# ---- noise of stochastic rounding, as in `quaver.reference.numerics` ----
# Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
#: Multiplier of two-word Philox.
M2 = tl.constexpr(0xD256D193)
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def product(a, m: tl.constexpr):
    """Return the high and low word of uint32 a times m; a GPU computes both by one instruction."""
    wide = a.to(tl.uint64) * m
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def whole_word(low, high):
    """Return the uint32 of two halves h, each passed as 2 h + 1: odd and small, so that no value triggers a
    specialization.
    """
    return (low.to(tl.uint32) >> 1) | ((high.to(tl.uint32) >> 1) << 16)


@triton.jit
def noise_stream(tensor_id, count, seed_low, seed_high):
    """Return the key and the upper counter word of one quantization's noise, uint32. Exact.

    They are two words of Philox4x32-10 at (0, 0, tensor id, count). tensor_id, seed_low, seed_high: 32 bits in an
    integer; count: any integer, of which the low 32 bits are used.
    """
    c2, c3 = tensor_id.to(tl.uint32), count.to(tl.uint32)
    c0, c1 = c2 * 0, c2 * 0
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = product(c0, M0)
        high1, low1 = product(c2, M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += W0
        k1 += W1
    return c0, c1


@triton.jit
def stream_at(count, id0, id1, seed0, seed1, seed2, seed3, STOCHASTIC: tl.constexpr):
    """Return `noise_stream` for a count in memory and halves of the tensor id and seed; zeros unless STOCHASTIC."""
    if STOCHASTIC:
        low, high = whole_word(seed0, seed1), whole_word(seed2, seed3)
        key, upper = noise_stream(whole_word(id0, id1), tl.load(count), low, high)
    else:
        key, upper = id0 * 0, id0 * 0
    return key, upper


@triton.jit
def philox(g, upper, key):
    """Return the two words of Philox2x32-10, uint32, for counters g, int64 of any shape. Exact.

    upper: uint32 xored into the counters' upper words; key: uint32.
    """
    c0, c1 = g.to(tl.uint32), (g >> 32).to(tl.uint32) ^ upper
    for _ in tl.static_range(10):
        high, low = product(c0, M2)
        c0, c1 = high ^ c1 ^ key, low
        key += W0
    return c0, c1


# ---- swizzle: the scale order 32_4_4 of Blackwell's GEMMs for narrow blocks ----
# Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout".


@triton.jit
def swizzled(row, block, across):
    """Return the byte offsets [BM, BK] of the scales of an operand's rows [BM] and blocks of k [BK].

    Tiles of 128 rows and 4 blocks are 512 bytes each, `across` of them side by side; in a tile the rows r, r + 32, r +
    64 and r + 96 are adjacent.
    """
    tile = (row // 128).to(tl.int64)[:, None] * across + (block // 4)[None, :]
    inside = ((row % 32) * 16 + (row % 128) // 32 * 4)[:, None] + (block % 4)[None, :]
    return tile * 512 + inside


# ---- tiles of a row-major matrix; EVEN: no tile crosses its edges ----


@triton.jit
def load_tile(x, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Load rows r and columns c of x [rows, columns] with row stride `stride` as float32 [BM, BN], zero outside x."""
    at = x + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        return widened(tl.load(at))
    return widened(tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < columns), other=0.0))


@triton.jit
def store_tile(y, v, r, c, rows, columns, stride, EVEN: tl.constexpr):
    """Store v [BM, BN] at rows r and columns c of y; nothing is written outside."""
    at = y + r[:, None].to(tl.int64) * stride + c[None, :]
    if EVEN:
        tl.store(at, v)
    else:
        tl.store(at, v, mask=(r[:, None] < rows) & (c[None, :] < columns))
