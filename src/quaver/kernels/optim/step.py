"""Optimizer step kernels: the update rules of `quaver.torch.optim.rules`, as the same operations in the same order."""

import triton
import triton.language as tl

from quaver.kernels.numerics import (
    NAN_BITS,
    combine_amaxes,
    decode_scale,
    decoded,
    encode_factor,
    flushed,
    magnitude_bits,
    philox,
    shared_exponent,
)
from quaver.kernels.optim.codes import (
    ACROSS,
    AMAX,
    BLOCKS_IN_ALL,
    COLUMNS,
    FACTOR,
    FIELDS,
    GRADIENT_SCALE,
    NONE,
    PLAIN,
    PROGRAMS,
    STEP,
    WEIGHT_SCALE,
    addresses_of,
    blocks_at,
    drawing_of,
    read,
    read_scales,
    read_state,
    read_weight,
    tile_at,
    write,
    write_state,
    write_weight,
)

# ---- update rules ----

#: Adam with decoupled weight decay, Adam with coupled decay, Lion, SGD, and SGD with Nesterov momentum.
ADAMW, ADAM, LION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SGD, NESTEROV = tl.constexpr(3), tl.constexpr(4)
#: Factor by which a bound is raised to cover float32 rounding, and the same for a decay, in units of 1.
_ABOVE, _ULPS = tl.constexpr(1.0 + 2.0**-20), tl.constexpr(2.0**-22)
#: Largest float32.
_LARGEST = tl.constexpr(2.0**128 - 2.0**104)
#: 1 + 1e-6 in float32.
_BEYOND = tl.constexpr(1.00000095367431640625)


@triton.jit
def averaged(old, new, share):
    """Return β old + (1 - β) new; share: 1 - β, or -β if β is below one half. Exact."""
    return (new - old) * share + tl.where(share > 0, old, new)


@triton.jit
def adam(
    w, g, m, v, share1, share2, eps, lr, decay, grow1, grow2, limit,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Run an Adam step; return the weight, both moments, and where an update exceeded its bound. Exact."""
    if MAXIMIZE:
        # Not `-g`, which is 0 - g in Triton and gives +0 for +0.
        g = g * -1.0
    if RULE == ADAM:
        g = g + w * decay
    m = averaged(m, g, share1)
    # abs gives NaN a sign as on a GPU, above all numbers.
    # The square is clamped: an infinite one would give infinity minus infinity, NaN, at the next step.
    v = averaged(v, tl.minimum(tl.abs(g * g), _LARGEST, propagate_nan=tl.PropagateNan.ALL), share2)
    update = tl.div_rn(m * grow1, tl.sqrt_rn(v) * grow2 + eps)
    beyond = tl.abs(update) > limit * _BEYOND
    if CLAMP:
        update = tl.maximum(update, -limit, propagate_nan=tl.PropagateNan.ALL)
        update = tl.minimum(update, limit, propagate_nan=tl.PropagateNan.ALL)
    if RULE == ADAMW:
        w = w - w * decay
    return w - update * lr, m, v, beyond


@triton.jit
def lion(w, g, m, share1, share2, lr, decay, MAXIMIZE: tl.constexpr):
    """Run a Lion step; return the weight and the moment. Exact."""
    if MAXIMIZE:
        # Not `-g`, which is 0 - g in Triton and gives +0 for +0.
        g = g * -1.0
    mixed = averaged(m, g, share1)
    sign = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, tl.where(mixed == mixed, 0.0, mixed)))
    return (w - w * decay) - sign * lr, averaged(m, g, share2)


@triton.jit
def sgd(w, g, m, lr, decay, momentum, new, RULE: tl.constexpr, MOMENTUM: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Run an SGD step; return the weight, and the moment if there is one, else the m passed in. Exact."""
    if MAXIMIZE:
        # Not `-g`, which is 0 - g in Triton and gives +0 for +0.
        g = g * -1.0
    g = g + w * decay
    update = g
    if MOMENTUM:
        m = m * momentum + g * new
        update = g + m * momentum if RULE == NESTEROV else m
    return w - update * lr, m


@triton.jit
def reach(amax, lr, decay, limit, RULE: tl.constexpr):
    """Return an upper bound of weights after a step, if they are at most `amax` before, float32. Exact."""
    decay_factor = tl.abs(1.0 - decay) + tl.abs(decay) * _ULPS
    if RULE == LION:
        most = amax * decay_factor + tl.abs(lr)
    elif RULE == ADAMW:
        most = amax * decay_factor + tl.abs(lr) * limit
    else:
        most = amax + tl.abs(lr) * limit
    return most * _ABOVE


@triton.jit
def numbers_of(at, parameters, RULE: tl.constexpr):
    """Load the rule's scalars, float32 at distance `parameters`: learning rate, decay, bound of updates, then further
    ones.
    """
    if (RULE == SGD) | (RULE == NESTEROV):
        lr, decay = tl.load(at), tl.load(at + parameters)
        numbers = lr, decay, lr, tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
    elif RULE == LION:
        share1, share2 = tl.load(at), tl.load(at + parameters)
        lr, decay = tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
        numbers = lr, decay, lr, share1, share2
    else:
        share1, share2 = tl.load(at), tl.load(at + parameters)
        eps, lr = tl.load(at + 2 * parameters), tl.load(at + 3 * parameters)
        decay, grow1 = tl.load(at + 4 * parameters), tl.load(at + 5 * parameters)
        grow2, limit = tl.load(at + 6 * parameters), tl.load(at + 7 * parameters)
        numbers = lr, decay, limit, share1, share2, eps, grow1, grow2  # type: ignore[assignment]
    return numbers


@triton.jit
def move(w, g, m, v, numbers, RULE: tl.constexpr, MOMENTUM: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr):
    """Run the step of a rule; return the weight, both moments (unchanged if unused), and where an Adam update was
    clamped.

    Exact.
    """
    old = w
    if (RULE == SGD) | (RULE == NESTEROV):
        lr, decay, _, momentum, new = numbers
        w, m = sgd(w, g, m, lr, decay, momentum, new, RULE, MOMENTUM, MAXIMIZE)
    elif RULE == LION:
        lr, decay, _, share1, share2 = numbers
        w, m = lion(w, g, m, share1, share2, lr, decay, MAXIMIZE)
    else:
        lr, decay, limit, share1, share2, eps, grow1, grow2 = numbers
        w, m, v, old = adam(w, g, m, v, share1, share2, eps, lr, decay, grow1, grow2, limit, RULE, CLAMP, MAXIMIZE)
    return w, m, v, old


# ---- rounds: read elements, apply the rule, write moments ----


@triton.jit
def moved(
    row, addresses, places, before, factor, numbers,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    MASTER_FORMAT: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, CODES: tl.constexpr,
    FIRST_KIND: tl.constexpr, SECOND_KIND: tl.constexpr, EVEN: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Return the weight and both moments after the step, and which updates exceeded their bound: [BLOCKS, 64] each.
    Exact.

    addresses: from `addresses_of`; places: from `blocks_at` or `tile_at`; numbers: from `numbers_of`. before: scale of
    the stored codes, float32; factor: of gradients, if FACTORED.
    """
    weight_at, beside_at, gradient_at, first_at, first_scale_at, second_at, second_scale_at = addresses
    here, there, at, inside, pair = places
    g = read(gradient_at, at, inside, GRADIENT_TYPE, EVEN)
    if GRADIENT_CODES:
        gradient_scale = read_scales(tl.load(row + GRADIENT_SCALE), pair, there, tl.bfloat16, EVEN)
        g = decoded(g, tl.float8e4nv, INTEGERS) * gradient_scale
    else:
        g = g.to(tl.float32)
    if FACTORED:
        g = g * factor
    old_code = read(weight_at, at, inside, WEIGHT_TYPE, EVEN)
    beside = old_code
    if MASTER_FORMAT != PLAIN:
        beside = read(beside_at, at, inside, BESIDE_TYPE, EVEN)
    w = read_weight(old_code, beside, before, MASTER_FORMAT, CODES)
    m, v = w, w
    if FIRST_KIND != NONE:
        m = read_state(first_at, first_scale_at, here, there, at, inside, FIRST_KIND, EVEN)
    if SECOND_KIND != NONE:
        v = read_state(second_at, second_scale_at, here, there, at, inside, SECOND_KIND, EVEN)
    return move(w, g, m, v, numbers, RULE, FIRST_KIND != NONE, CLAMP, MAXIMIZE)


@triton.jit
def write_moments(
    m, v, addresses, places, drawing,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr,
    WEIGHT_NOISE: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write both moments, which share their noise, to where they were read; return the weight's noise, int32 below
    2**15.

    drawing: from `drawing_of`, if anything is rounded stochastically. Exact.
    """
    _, _, _, first_at, first_scale_at, second_at, second_scale_at = addresses
    here, there, at, inside, _ = places
    DRAWS: tl.constexpr = (1 if FIRST_NOISE or SECOND_NOISE else 0) + (1 if WEIGHT_NOISE else 0)
    if DRAWS > 0:
        start = here * 64 if EVEN else at
        word = _words(start, drawing, EVEN, BLOCKS)
        noise = _share(word, 0, DRAWS)
        of_weight = _share(word, DRAWS - 1, DRAWS)
    else:
        noise, of_weight = 0, 0
    if FIRST_KIND != NONE:
        write_state(
            m, first_at, first_scale_at, noise, here, there, at, inside,
            FIRST_KIND, FIRST_NOISE, EVEN,
        )  # fmt: skip
    if SECOND_KIND != NONE:
        write_state(
            v, second_at, second_scale_at, noise, here, there, at, inside,
            SECOND_KIND, SECOND_NOISE, EVEN,
        )  # fmt: skip
    return of_weight


@triton.jit
def _words(at, drawing, EVEN: tl.constexpr, BLOCKS: tl.constexpr):
    """Return a random word of each element [BLOCKS, 64], uint32. at: offset of each element, or of the first of each
    block.
    """
    # place is the offset of the shard's first element in the whole parameter.
    place, key, upper = drawing
    if EVEN:
        # Four neighbours share the two words of one counter, half a word each.
        four = tl.arange(0, 16)
        g = tl.expand_dims((place + at) >> 2, 1) + tl.expand_dims(four, 0)
        first, second = philox(g, upper, key)
        word = tl.join(first, second)
        word = tl.reshape(tl.join(word, _rotated(word)), [BLOCKS, 64])
    else:
        e = place + at
        first, second = philox(e >> 2, upper, key)
        word = tl.where((e & 2) == 0, first, second)
        word = tl.where((e & 1) == 0, word, _rotated(word))
    return word


@triton.jit
def _rotated(word):
    """Swap the halves of a word."""
    return (word << 16) | (word >> 16)


@triton.jit
def _share(word, INDEX: tl.constexpr, NUMBER: tl.constexpr):
    """Return the noise of code INDEX of NUMBER codes that share a word: int32 below 2**15."""
    return ((word >> (17 - 16 // NUMBER * INDEX)) & 0x7FFF).to(tl.int32)


# ---- step: many parameters in one launch; each gradient and state is read once and written once ----
# A table has the addresses of each parameter's tensors, a second one the blocks of a parameter that each program
# processes. Values that change from step to step are read on the device, so that a CUDA graph can contain the launch.
# The bits equal those of `quaver.torch.optim.step`.


@triton.jit
def step(
    chunks, table, scalars, work, keep, counts, parameters,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    MASTER_FORMAT: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, WEIGHT_NOISE: tl.constexpr,
    CODES: tl.constexpr, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr,
):  # fmt: skip
    """Step one chunk of one parameter per program. Exact.

    chunks: int32 [programs, 3]: parameter, first block, and number of rounds of BLOCKS blocks. table: int64
    [parameters, FIELDS]. scalars: float32 of the rule, one row of length `parameters` each. work: int32 [parameters, 2]
    of zeros, left as zeros. keep: bool [1], False leaves everything unchanged; or None. counts: int64 [parameters],
    increased by the number of clamped updates; or None.
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
        # Scale of the finite codes, even if the stored scale becomes NaN.
        scale = decode_scale(reached * 0, e, POWER_OF_TWO)
    beyond = tl.zeros([], tl.int32)
    top = tl.zeros([BLOCKS, 64] if CODES else [1, 1], tl.float32)
    for i in range(rounds):
        places = blocks_at(first + i * BLOCKS, columns, across, blocks, BLOCKS, EVEN)
        w, m, v, is_clamped = moved(
            row, addresses, places, before, factor, numbers, RULE, CLAMP, MAXIMIZE,
            FACTORED, GRADIENT_TYPE, GRADIENT_CODES, MASTER_FORMAT, WEIGHT_TYPE, BESIDE_TYPE, CODES,
            FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
        )  # fmt: skip
        at, inside = places[2], places[3]
        if counts is not None:
            beyond += tl.sum(tl.sum((is_clamped & inside).to(tl.int32), axis=1), axis=0)
        noise = write_moments(
            m, v, addresses, places, drawing, FIRST_KIND, FIRST_NOISE,
            SECOND_KIND, SECOND_NOISE, WEIGHT_NOISE, BLOCKS, EVEN,
        )  # fmt: skip
        written, beside, value = write_weight(
            w, e, noise, MASTER_FORMAT, CODES, WEIGHT_TYPE, BESIDE_TYPE, WEIGHT_NOISE, INTEGERS
        )
        write(addresses[0], written, at, inside, WEIGHT_TYPE, EVEN)
        if MASTER_FORMAT != PLAIN:
            write(addresses[1], beside, at, inside, BESIDE_TYPE, EVEN)
        if CODES:
            # Make it NaN if the weight is NaN or infinite, because its code is a finite number then.
            value = tl.fma(w, 0.0, value)
            value = value if EVEN else tl.where(inside, value, 0.0)
            top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    # Another program may be the last to finish: all warps of this one must have read what it overwrites.
    tl.debug_barrier()
    if goes:
        if counts is not None:
            tl.atomic_add(counts + parameter, beyond.to(tl.int64), sem="relaxed")
        bits = tl.max(tl.max(magnitude_bits(top), axis=1), axis=0)
        if CODES:
            stored = flushed(magnitude_bits(bits.to(tl.float32, bitcast=True) * scale))
            bits = tl.where((bits < 0x7F800000) & (reached < 0x7F800000), stored, NAN_BITS)
        last, largest = combine_amaxes(work + 2 * parameter, bits, tl.load(row + PROGRAMS).to(tl.int32))
        if last:
            tl.store(step_at, count)
            if CODES:
                finite = largest < 0x7F800000
                tl.store(amax_at, largest.to(tl.float32, bitcast=True))
                tl.store(scale_at, tl.where(finite, after, largest.to(tl.float32, bitcast=True)))


# ---- step of weights with block scales, measured from the written weights ----
# A program processes tiles of whole blocks. If a block exceeds a round, the program passes over it twice: first for the
# amax after the step, then to write, reading from the caches.


@triton.jit
def step_of_blocks(
    chunks, table, scalars, work, keep, counts, parameters,
    BLOCKS: tl.constexpr, HIGH: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    MASTER_FORMAT: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, WEIGHT_NOISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr,
    MAX: tl.constexpr, INTEGERS: tl.constexpr,
    FIRST_KIND: tl.constexpr, FIRST_NOISE: tl.constexpr,
    SECOND_KIND: tl.constexpr, SECOND_NOISE: tl.constexpr,
):  # fmt: skip
    """Step several tiles of BLOCKS blocks of 64 of one parameter per program, or one tile in several rounds. Exact.

    chunks: int32 [programs, 3]: parameter, first tile, and number of tiles, or of rounds of one tile. HIGH: rows that
    share a scale; 1 if EVEN. PAIRS: scales are E8M0 per 32 columns, so that a block of 64 has two; else float32 per
    128. Other arguments as in `step`.
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
    # Blocks of a row and rows per round, and whether scale blocks of the weight exceed a round.
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
                FACTORED, GRADIENT_TYPE, GRADIENT_CODES, MASTER_FORMAT, WEIGHT_TYPE, BESIDE_TYPE, True,
                FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
            )  # fmt: skip
            top = tl.maximum(top, _bits(after, seen[3], EVEN))
        bits0, bits1 = _largest(top, HIGH, PAIRS, BLOCKS)
        e = _factors(bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
        # All warps must have read the scales before they are overwritten.
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
        w, m, v, reached = moved(
            row, addresses, places, before, factor, numbers, RULE, CLAMP, MAXIMIZE,
            FACTORED, GRADIENT_TYPE, GRADIENT_CODES, MASTER_FORMAT, WEIGHT_TYPE, BESIDE_TYPE, True,
            FIRST_KIND, SECOND_KIND, EVEN, INTEGERS,
        )  # fmt: skip
        at, inside = places[2], places[3]
        if counts is not None:
            beyond += tl.sum(tl.sum((reached & inside).to(tl.int32), axis=1), axis=0)
        noise = write_moments(
            m, v, addresses, places, drawing, FIRST_KIND, FIRST_NOISE,
            SECOND_KIND, SECOND_NOISE, WEIGHT_NOISE, BLOCKS, EVEN,
        )  # fmt: skip
        if not TWICE:
            bits0, bits1 = _largest(_bits(w, inside, EVEN), HIGH, PAIRS, BLOCKS)
            e = _factors(bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX)
            # All warps must have read the scales before they are overwritten.
            tl.debug_barrier()
            _write(
                scales_at, r, b, places[0], columns, bits0, bits1, HIGH, PAIRS, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX
            )
        stored, rest, _ = write_weight(
            w, e, noise, MASTER_FORMAT, True, WEIGHT_TYPE, BESIDE_TYPE, WEIGHT_NOISE, INTEGERS
        )
        write(addresses[0], stored, at, inside, WEIGHT_TYPE, EVEN)
        write(addresses[1], rest, at, inside, BESIDE_TYPE, EVEN)
    # Another program may be the last to finish: all warps of this one must have read what it overwrites.
    tl.debug_barrier()
    if goes:
        if counts is not None:
            tl.atomic_add(counts + parameter, beyond.to(tl.int64), sem="relaxed")
        last, _ = combine_amaxes(work + 2 * parameter, tl.zeros([], tl.int32), tl.load(row + PROGRAMS).to(tl.int32))
        if last:
            tl.store(step_at, count)


@triton.jit
def _bits(w, inside, EVEN: tl.constexpr):
    bits = magnitude_bits(w)
    return bits if EVEN else tl.where(inside, bits, 0)


@triton.jit
def _first(row, block, columns, HIGH: tl.constexpr, LONG: tl.constexpr):
    """Return the index of a tile's first scale."""
    return (row // HIGH).to(tl.int64) * ((columns + (LONG - 1)) // LONG) + block * 64 // LONG


@triton.jit
def _read(address, row, block, number, columns, HIGH: tl.constexpr, PAIRS: tl.constexpr):
    """Load the scales of a tile's elements, float32 broadcastable to [BLOCKS, 64]. number: of blocks, if HIGH is 1."""
    if HIGH == 1:
        # Both scales of a block at once.
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
    """Return the maxima of both halves of a tile, or of each row's halves, or twice the overall maximum.

    bits: int32 [BLOCKS, 64].
    """
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
    """Return encode factors, broadcastable to [BLOCKS, 64], from the bits of amaxes."""
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
    """Store the scales of blocks with these amax bits where they were read."""
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
    """Return x for the first 32 columns of a block of 64, y for the others."""
    return tl.where(tl.expand_dims(tl.arange(0, 64), 0) < 32, x, y)


@triton.jit
def _value(code):
    """Return the float32 of an E8M0 code, int32."""
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, NAN_BITS, code << 23))
    return bits.to(tl.float32, bitcast=True)
