"""An optimizer's step of weights whose codes have scales of blocks, measured of what is written: `step` of these.

A program takes tiles of whole blocks. Where a block is more than it holds at once it goes over it twice: the first time
for the largest weight after the step, the second to write, reading from the caches.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    NAN_BITS,
    decode_scale,
    encode_factor,
    magnitude_bits,
    meet,
    shared_exponent,
)
from quaver.kernels.optim.keeping import write_weight
from quaver.kernels.optim.places import tile_at, write
from quaver.kernels.optim.rounds import moved, write_moments
from quaver.kernels.optim.rules import numbers_of
from quaver.kernels.optim.table import (
    ACROSS,
    BLOCKS_IN_ALL,
    COLUMNS,
    FACTOR,
    FIELDS,
    PROGRAMS,
    STEP,
    WEIGHT_SCALE,
    addresses_of,
    drawing_of,
)


@triton.jit
def step_of_blocks(
    chunks, table, scalars, work, keep, counts, parameters,
    BLOCKS: tl.constexpr, HIGH: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    KEEPING: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, WEIGHT_NOISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr,
):  # fmt: skip
    """Some tiles of one parameter a program: BLOCKS blocks of 64; or one tile, in so many rounds.

    chunks: int32 [programs, 3]: a parameter, the first of its tiles, and how many are taken; of one tile, its rounds.
    HIGH: rows that share a scale; 1 if EVEN. PAIRS: of 32 columns, E8M0, so that a block of 64 has two; else of 128,
    float32. Else as `step` takes it. Exact.
    """
    own = chunks + 3 * tl.program_id(0)
    parameter, first, rounds = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    row = table + FIELDS * parameter.to(tl.int64)
    goes = True
    if keep is not None:
        goes = tl.load(keep) != 0
        rounds = tl.where(goes, rounds, 0)
    columns, across = tl.load(row + COLUMNS), tl.load(row + ACROSS).to(tl.int32)
    rows = tl.load(row + BLOCKS_IN_ALL).to(tl.int32) // across
    addresses = addresses_of(row)
    numbers = numbers_of(scalars + parameter, parameters, RULE)
    step_at = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    count = tl.load(step_at) + 1.0
    drawing = drawing_of(row, count)
    factor = 1.0
    if FACTORED:
        factor = tl.load(tl.load(row + FACTOR).to(tl.pointer_type(tl.float32)))
    scales_at = tl.load(row + WEIGHT_SCALE)
    # Blocks of a row and rows that are taken at once, and whether blocks of the weight have more.
    WIDE: tl.constexpr = 1 if PAIRS else 2
    ROWS: tl.constexpr = BLOCKS // WIDE
    TWICE: tl.constexpr = HIGH > ROWS
    tiles = (across + (WIDE - 1)) // WIDE
    if TWICE:
        r, b = (first // tiles) * HIGH, (first % tiles) * WIDE
        before = _read(scales_at, r, b, 0, columns, HIGH, PAIRS)
        top = tl.zeros([BLOCKS, 64], tl.int32)
        for i in range(rounds):
            seen = tile_at(r + i * ROWS, b, columns, across, rows, BLOCKS, WIDE, EVEN)
            after, _, _, _ = moved(
                row, addresses, seen, before, factor, numbers, RULE, CLAMP, MAXIMIZE,
                FACTORED, GRADIENT_TYPE, GRADIENT_CODES, KEEPING, WEIGHT_TYPE, BESIDE_TYPE, True,
                FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
            )  # fmt: skip
            top = tl.maximum(top, _bits(after, seen[3], EVEN))
        bits0, bits1 = _largest(top, HIGH, PAIRS, BLOCKS)
        e = _factors(bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        # All warps have read the scales that are written now.
        tl.debug_barrier()
        if goes:
            _write(scales_at, r, b, 0, columns, bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    beyond = tl.zeros([], tl.int32)
    for i in range(rounds):
        if TWICE:
            places = tile_at(r + i * ROWS, b, columns, across, rows, BLOCKS, WIDE, EVEN)
        else:
            r, b = ((first + i) // tiles) * ROWS, ((first + i) % tiles) * WIDE
            places = tile_at(r, b, columns, across, rows, BLOCKS, WIDE, EVEN)
            before = _read(scales_at, r, b, places[0], columns, HIGH, PAIRS)
        w, m, v, held = moved(
            row, addresses, places, before, factor, numbers, RULE, CLAMP, MAXIMIZE,
            FACTORED, GRADIENT_TYPE, GRADIENT_CODES, KEEPING, WEIGHT_TYPE, BESIDE_TYPE, True,
            FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
        )  # fmt: skip
        at, inside = places[2], places[3]
        if counts is not None:
            beyond += tl.sum(tl.sum((held & inside).to(tl.int32), axis=1), axis=0)
        noise = write_moments(
            m, v, addresses, places, drawing, FIRST_KIND, FIRST_NOISE,
            SECOND_KIND, SECOND_NOISE, WEIGHT_NOISE, BLOCKS, EVEN,
        )  # fmt: skip
        if not TWICE:
            bits0, bits1 = _largest(_bits(w, inside, EVEN), HIGH, PAIRS, BLOCKS)
            e = _factors(bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
            # All warps have read the scales that are written now.
            tl.debug_barrier()
            _write(
                scales_at, r, b, places[0], columns, bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
            )
        kept, rest, _ = write_weight(w, e, noise, KEEPING, True, WEIGHT_TYPE, BESIDE_TYPE, WEIGHT_NOISE, INTEGERS)
        write(addresses[0], kept, at, inside, WEIGHT_TYPE, EVEN)
        write(addresses[1], rest, at, inside, BESIDE_TYPE, EVEN)
    # Another program may be the last: no warp of this one may then still read what that writes.
    tl.debug_barrier()
    if goes:
        if counts is not None:
            tl.atomic_add(counts + parameter, beyond.to(tl.int64), sem="relaxed")
        last, _ = meet(work + 2 * parameter, tl.zeros([], tl.int32), tl.load(row + PROGRAMS).to(tl.int32))
        if last:
            tl.store(step_at, count)


@triton.jit
def _bits(w, inside, EVEN: tl.constexpr):
    bits = magnitude_bits(w)
    return bits if EVEN else tl.where(inside, bits, 0)


@triton.jit
def _first(row, block, columns, HIGH: tl.constexpr, LONG: tl.constexpr):
    """The number of a tile's first scale."""
    return (row // HIGH).to(tl.int64) * ((columns + (LONG - 1)) // LONG) + block * 64 // LONG


@triton.jit
def _read(address, row, block, number, columns, HIGH: tl.constexpr, PAIRS: tl.constexpr):
    """Of a tile's elements the scales, float32 that is broadcast to [BLOCKS, 64]. number: of blocks, if HIGH is 1."""
    if HIGH == 1:
        # Both of a block at once.
        pair = tl.load(address.to(tl.pointer_type(tl.uint16)) + number).to(tl.int32)
        scale = _halves(tl.expand_dims(_value(pair & 255), 1), tl.expand_dims(_value(pair >> 8), 1))
    elif PAIRS:
        at = address.to(tl.pointer_type(tl.uint8)) + _first(row, block, columns, HIGH, 32)
        other = tl.load(at + 1, mask=block * 64 + 32 < columns, other=0)
        scale = _halves(_value(tl.load(at).to(tl.int32)), _value(other.to(tl.int32)))
    else:
        scale = tl.load(address.to(tl.pointer_type(tl.float32)) + _first(row, block, columns, HIGH, 128))
    return scale


@triton.jit
def _largest(bits, HIGH: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr):
    """The largest of both blocks of a tile, or of each row's both, or twice that of all. bits: int32 [BLOCKS, 64]."""
    if PAIRS:
        bits0, bits1 = tl.split(tl.max(tl.reshape(bits, [BLOCKS, 2, 32]), axis=2))
        if HIGH != 1:
            bits0, bits1 = tl.max(bits0, axis=0), tl.max(bits1, axis=0)
    else:
        bits0 = tl.max(tl.max(bits, axis=1), axis=0)
        bits1 = bits0
    return bits0, bits1


@triton.jit
def _factors(
    bits0, bits1, HIGH: tl.constexpr, PAIRS: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr,
    TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """From the bits of amaxes what codes are rounded from, as multiples of weights: broadcast to [BLOCKS, 64]."""
    if PAIRS:
        if HIGH == 1:
            bits0, bits1 = tl.expand_dims(bits0, 1), tl.expand_dims(bits1, 1)
        _, e0 = shared_exponent(bits0, EMAX, TOP_MANTISSA)
        _, e1 = shared_exponent(bits1, EMAX, TOP_MANTISSA)
        e = _halves(e0, e1)
    else:
        e = encode_factor(bits0, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
    return e


@triton.jit
def _write(
    address, row, block, number, columns, bits0, bits1, HIGH: tl.constexpr, PAIRS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """The scales of blocks with amaxes of these bits to where they were read."""
    if PAIRS:
        code0, _ = shared_exponent(bits0, EMAX, TOP_MANTISSA)
        code1, _ = shared_exponent(bits1, EMAX, TOP_MANTISSA)
        if HIGH == 1:
            tl.store(address.to(tl.pointer_type(tl.uint16)) + number, (code0 | (code1 << 8)).to(tl.uint16))
        else:
            at = address.to(tl.pointer_type(tl.uint8)) + _first(row, block, columns, HIGH, 32)
            tl.store(at, code0.to(tl.uint8))
            tl.store(at + 1, code1.to(tl.uint8), mask=block * 64 + 32 < columns)
    else:
        at = address.to(tl.pointer_type(tl.float32)) + _first(row, block, columns, HIGH, 128)
        e = encode_factor(bits0, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        tl.store(at, decode_scale(bits0, e, POWER_OF_TWO))


@triton.jit
def _halves(x, y):
    """x for the first 32 columns of a block of 64, y for the others."""
    return tl.where(tl.expand_dims(tl.arange(0, 64), 0) < 32, x, y)


@triton.jit
def _value(code):
    """float32 of an E8M0 code, int32."""
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, NAN_BITS, code << 23))
    return bits.to(tl.float32, bitcast=True)
