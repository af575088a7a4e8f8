"""An optimizer's step of many parameters in one launch: each gradient and state is read once and written once.

A table of addresses says where the tensors of each parameter lie, a second one which blocks of which parameter a
program takes. What changes from step to step is read on the device, so that a graph can hold the launch. The twin is
`quaver.torch.optim.stepping.pieces`, the bits are its.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import NAN_BITS, decode_scale, decoded, encode_factor, flushed, magnitude_bits, meet
from quaver.kernels.bits.philox import philox
from quaver.kernels.optim.keeping import PLAIN, read_weight, write_weight
from quaver.kernels.optim.places import blocks_at, read, read_scales, write
from quaver.kernels.optim.rules import LION, NESTEROV, SGD, adam, lion, reach, sgd
from quaver.kernels.optim.states import NONE, read_state, write_state

#: Columns of the table of parameters, each an int64: addresses, then numbers.
WEIGHT, WEIGHT_SCALE, BESIDE, FIRST, FIRST_SCALE, SECOND, SECOND_SCALE = (
    *(tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)),
    *(tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)),
)
GRADIENT, GRADIENT_SCALE, FACTOR, AMAX, STEP = (
    *(tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)),
)
COLUMNS, ACROSS, BLOCKS_IN_ALL, PROGRAMS, PLACE, NUMBER, SEED_LOW, SEED_HIGH = (
    *(tl.constexpr(12), tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)),
    *(tl.constexpr(16), tl.constexpr(17), tl.constexpr(18), tl.constexpr(19)),
)
FIELDS = tl.constexpr(20)
#: Elements that share a scale of a moment.
BLOCK = tl.constexpr(64)


@triton.jit
def _words(place, at, number, seed, count, EVEN: tl.constexpr, BLOCKS: tl.constexpr):
    """A random word of each element [BLOCKS, 64], uint32. place: the part's first element in the whole parameter."""
    seed_low, seed_high = seed
    if EVEN:
        # Four neighbours have the words of one counter.
        four = tl.arange(0, 16)
        g = tl.expand_dims((place + at) >> 2, 1) + tl.expand_dims(four, 0)
        w0, w1, w2, w3 = philox(g, number, count, seed_low, seed_high)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS, 64])
    else:
        e = place + at
        w0, w1, w2, w3 = philox(e >> 2, number, count, seed_low, seed_high)
        low, high = tl.where((e & 1) == 0, w0, w1), tl.where((e & 1) == 0, w2, w3)
        word = tl.where((e & 2) == 0, low, high)
    return word


@triton.jit
def _share(word, INDEX: tl.constexpr, NUMBER: tl.constexpr):
    """Noise of the code INDEX of NUMBER that share a word: int32 below 2**15."""
    if NUMBER <= 2:
        noise = ((word >> (17 if INDEX == 0 else 1)) & 0x7FFF).to(tl.int32)
    else:
        noise = (((word >> (22 if INDEX == 0 else (12 if INDEX == 1 else 2))) & 0x3FF) << 5).to(tl.int32) | 16
    return noise


@triton.jit
def step(
    chunks, table, scalars, work, keep, counts, parameters,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    KEEPING: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, WEIGHT_NOISE: tl.constexpr,
    CODES: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr, FIRST_FLOOR: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr, SECOND_FLOOR: tl.constexpr,
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
    weight_at, gradient_at = tl.load(row + WEIGHT), tl.load(row + GRADIENT)
    first_at, first_scale_at = tl.load(row + FIRST), tl.load(row + FIRST_SCALE)
    number = scalars + parameter
    BY_GRADIENT: tl.constexpr = (RULE == SGD) | (RULE == NESTEROV)
    HAS_SECOND: tl.constexpr = SECOND_KIND != NONE
    if BY_GRADIENT:
        lr, decay = tl.load(number), tl.load(number + parameters)
        momentum, new = tl.load(number + 2 * parameters), tl.load(number + 3 * parameters)
        limit = lr
    elif RULE == LION:
        new1, new2 = tl.load(number), tl.load(number + parameters)
        lr, decay = tl.load(number + 2 * parameters), tl.load(number + 3 * parameters)
        limit = lr
    else:
        new1, new2 = tl.load(number), tl.load(number + parameters)
        eps, lr = tl.load(number + 2 * parameters), tl.load(number + 3 * parameters)
        decay, grow1 = tl.load(number + 4 * parameters), tl.load(number + 5 * parameters)
        grow2, limit = tl.load(number + 6 * parameters), tl.load(number + 7 * parameters)
        second_at, second_scale_at = tl.load(row + SECOND), tl.load(row + SECOND_SCALE)
    step_at = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    count = tl.load(step_at) + 1.0
    DRAWS: tl.constexpr = (1 if FIRST_NOISE else 0) + (1 if SECOND_NOISE else 0) + (1 if WEIGHT_NOISE else 0)
    if DRAWS > 0:
        place, name = tl.load(row + PLACE), tl.load(row + NUMBER)
        seed = tl.load(row + SEED_LOW), tl.load(row + SEED_HIGH)
    if FACTORED:
        factor = tl.load(tl.load(row + FACTOR).to(tl.pointer_type(tl.float32)))
    if KEEPING != PLAIN:
        beside_at = tl.load(row + BESIDE)
    before, e, scale, after = 1.0, 1.0, 1.0, 1.0
    if CODES:
        scale_at = tl.load(row + WEIGHT_SCALE).to(tl.pointer_type(tl.float32))
        amax_at = tl.load(row + AMAX).to(tl.pointer_type(tl.float32))
        before = tl.load(scale_at)
        reached = flushed(magnitude_bits(reach(tl.load(amax_at), lr, decay, limit, RULE)))
        e = encode_factor(reached, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        after = decode_scale(reached, e, POWER_OF_TWO)
        # Of the codes' own numbers, where the scale itself is NaN.
        scale = decode_scale(reached * 0, e, POWER_OF_TWO)
    beyond = tl.zeros([], tl.int32)
    top = tl.zeros([BLOCKS, 64] if CODES else [1, 1], tl.float32)
    for i in range(rounds):
        here, there, at, inside, pair = blocks_at(first + i * BLOCKS, columns, across, blocks, BLOCKS, EVEN)
        g = read(gradient_at, at, inside, GRADIENT_TYPE, EVEN)
        if GRADIENT_CODES:
            gradient_scale = read_scales(tl.load(row + GRADIENT_SCALE), pair, there, tl.bfloat16, EVEN)
            g = decoded(g, tl.float8e4nv, INTEGERS) * gradient_scale
        else:
            g = g.to(tl.float32)
        if FACTORED:
            g = g * factor
        kept = read(weight_at, at, inside, WEIGHT_TYPE, EVEN)
        beside = kept
        if KEEPING != PLAIN:
            beside = read(beside_at, at, inside, BESIDE_TYPE, EVEN)
        w = read_weight(kept, beside, before, KEEPING, CODES, INTEGERS)
        m = w
        if FIRST_KIND != NONE:
            m = read_state(first_at, first_scale_at, here, there, at, inside, FIRST_KIND, EVEN, INTEGERS)
        if BY_GRADIENT:
            w, m = sgd(w, g, m, lr, decay, momentum, new, RULE, FIRST_KIND != NONE, MAXIMIZE)
        elif RULE == LION:
            w, m = lion(w, g, m, new1, new2, lr, decay, MAXIMIZE)
        else:
            v = read_state(second_at, second_scale_at, here, there, at, inside, SECOND_KIND, EVEN, INTEGERS)
            w, m, v, held = adam(w, g, m, v, new1, new2, eps, lr, decay, grow1, grow2, limit, RULE, CLAMP, MAXIMIZE)
            if counts is not None:
                beyond += tl.sum(tl.sum((held & inside).to(tl.int32), axis=1), axis=0)
        if DRAWS > 0:
            start = here * 64 if EVEN else at
            word = _words(place, start, name, seed, count.to(tl.int64), EVEN, BLOCKS)
            noise1 = _share(word, 0, DRAWS)
            noise2 = _share(word, 1 if FIRST_NOISE else 0, DRAWS)
            noise3 = _share(word, DRAWS - 1, DRAWS)
        else:
            noise1, noise2, noise3 = 0, 0, 0
        if FIRST_KIND != NONE:
            write_state(
                m, first_at, first_scale_at, noise1, here, there, at, inside,
                FIRST_KIND, True, FIRST_NOISE, FIRST_FLOOR, EVEN, INTEGERS,
            )  # fmt: skip
        if HAS_SECOND:
            write_state(
                v, second_at, second_scale_at, noise2, here, there, at, inside,
                SECOND_KIND, False, SECOND_NOISE, SECOND_FLOOR, EVEN, INTEGERS,
            )  # fmt: skip
        kept, beside, value = write_weight(
            w, e, scale, noise3, POWER_OF_TWO, KEEPING, CODES, WEIGHT_TYPE, BESIDE_TYPE, WEIGHT_NOISE, INTEGERS
        )
        write(weight_at, kept, at, inside, WEIGHT_TYPE, EVEN)
        if KEEPING != PLAIN:
            write(beside_at, beside, at, inside, BESIDE_TYPE, EVEN)
        if CODES:
            # NaN where the weight is none, or infinite: its code is a number then.
            value = tl.fma(w, 0.0, value)
            value = value if EVEN else tl.where(inside, value, 0.0)
            top = tl.maximum(top, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
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
