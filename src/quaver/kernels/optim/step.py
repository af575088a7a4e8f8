"""An optimizer's step of many parameters in one launch: each gradient and state is read once and written once.

A table of addresses says where the tensors of each parameter lie, a second one which blocks of which parameter a
program takes. What changes from step to step is read on the device, so that a graph can hold the launch. The twin is
`quaver.torch.optim.stepping.pieces`, the bits are its.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import NAN_BITS, decode_scale, encode_factor, flushed, magnitude_bits, meet
from quaver.kernels.optim.keeping import PLAIN, write_weight
from quaver.kernels.optim.places import blocks_at, write
from quaver.kernels.optim.rounds import moved, write_moments
from quaver.kernels.optim.rules import numbers_of, reach
from quaver.kernels.optim.table import (
    ACROSS,
    AMAX,
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
def step(
    chunks, table, scalars, work, keep, counts, parameters,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    KEEPING: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, WEIGHT_NOISE: tl.constexpr,
    CODES: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr,
):  # fmt: skip
    """One chunk of one parameter a program.

    chunks: int32 [programs, 3]: a parameter, the first of its blocks, and how often BLOCKS of them are taken.
    table: int64 [parameters, FIELDS]. scalars: float32, of the rule, a row for each, `parameters` long.
    work: int32 [parameters, 2] of zeros, left as zeros. keep: bool [1], False leaves everything as it is; or None.
    counts: int64 [parameters], raised by how many updates were held to their bound; or None.
    Exact.
    """
    own = chunks + 3 * tl.program_id(0)
    parameter, first, rounds = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    row = table + FIELDS * parameter.to(tl.int64)
    goes = True
    if keep is not None:
        goes = tl.load(keep) != 0
        rounds = tl.where(goes, rounds, 0)
    columns, across = tl.load(row + COLUMNS), tl.load(row + ACROSS).to(tl.int32)
    blocks = tl.load(row + BLOCKS_IN_ALL).to(tl.int32)
    addresses = addresses_of(row)
    numbers = numbers_of(scalars + parameter, parameters, RULE)
    step_at = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    count = tl.load(step_at) + 1.0
    drawing = drawing_of(row, count)
    factor = 1.0
    if FACTORED:
        factor = tl.load(tl.load(row + FACTOR).to(tl.pointer_type(tl.float32)))
    before, e, scale, after = 1.0, 1.0, 1.0, 1.0
    if CODES:
        scale_at = tl.load(row + WEIGHT_SCALE).to(tl.pointer_type(tl.float32))
        amax_at = tl.load(row + AMAX).to(tl.pointer_type(tl.float32))
        before = tl.load(scale_at)
        most = reach(tl.load(amax_at), numbers[0], numbers[1], numbers[2], RULE)
        reached = flushed(magnitude_bits(most))
        e = encode_factor(reached, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        after = decode_scale(reached, e, POWER_OF_TWO)
        # Of the codes' own numbers, where the scale itself is NaN.
        scale = decode_scale(reached * 0, e, POWER_OF_TWO)
    beyond = tl.zeros([], tl.int32)
    top = tl.zeros([BLOCKS, 64] if CODES else [1, 1], tl.float32)
    for i in range(rounds):
        places = blocks_at(first + i * BLOCKS, columns, across, blocks, BLOCKS, EVEN)
        w, m, v, held = moved(
            row, addresses, places, before, factor, numbers, RULE, CLAMP, MAXIMIZE,
            FACTORED, GRADIENT_TYPE, GRADIENT_CODES, KEEPING, WEIGHT_TYPE, BESIDE_TYPE, CODES,
            FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
        )  # fmt: skip
        at, inside = places[2], places[3]
        if counts is not None:
            beyond += tl.sum(tl.sum((held & inside).to(tl.int32), axis=1), axis=0)
        noise = write_moments(
            m, v, addresses, places, drawing, FIRST_KIND, FIRST_NOISE,
            SECOND_KIND, SECOND_NOISE, WEIGHT_NOISE, BLOCKS, EVEN,
        )  # fmt: skip
        kept, beside, value = write_weight(
            w, e, noise, KEEPING, CODES, WEIGHT_TYPE, BESIDE_TYPE, WEIGHT_NOISE, INTEGERS
        )
        write(addresses[0], kept, at, inside, WEIGHT_TYPE, EVEN)
        if KEEPING != PLAIN:
            write(addresses[1], beside, at, inside, BESIDE_TYPE, EVEN)
        if CODES:
            # NaN where the weight is none, or infinite: its code is a number then.
            value = tl.fma(w, 0.0, value)
            value = value if EVEN else tl.where(inside, value, 0.0)
            top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    # Another program may be the last: no warp of this one may then still read what that writes.
    tl.debug_barrier()
    if goes:
        if counts is not None:
            tl.atomic_add(counts + parameter, beyond.to(tl.int64), sem="relaxed")
        bits = tl.max(tl.max(magnitude_bits(top), axis=1), axis=0)
        if CODES:
            stored = flushed(magnitude_bits(bits.to(tl.float32, bitcast=True) * scale))
            bits = tl.where((bits < 0x7F800000) & (reached < 0x7F800000), stored, NAN_BITS)
        last, largest = meet(work + 2 * parameter, bits, tl.load(row + PROGRAMS).to(tl.int32))
        if last:
            tl.store(step_at, count)
            if CODES:
                finite = largest < 0x7F800000
                tl.store(amax_at, largest.to(tl.float32, bitcast=True))
                tl.store(scale_at, tl.where(finite, after, largest.to(tl.float32, bitcast=True)))
