"""A round of a program: its elements are read and moved by the rule, and their moments written."""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import decoded
from quaver.kernels.bits.philox import philox_of_two
from quaver.kernels.optim.keeping import PLAIN, read_weight
from quaver.kernels.optim.places import read, read_scales
from quaver.kernels.optim.rules import move
from quaver.kernels.optim.states import NONE, read_state, write_state
from quaver.kernels.optim.table import GRADIENT_SCALE


@triton.jit
def moved(
    row, addresses, places, before, factor, numbers,
    RULE: tl.constexpr, CLAMP: tl.constexpr, MAXIMIZE: tl.constexpr,
    FACTORED: tl.constexpr, GRADIENT_TYPE: tl.constexpr, GRADIENT_CODES: tl.constexpr,
    KEEPING: tl.constexpr, WEIGHT_TYPE: tl.constexpr, BESIDE_TYPE: tl.constexpr, CODES: tl.constexpr,
    FIRST_KIND: tl.constexpr, SECOND_KIND: tl.constexpr, EVEN: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """The weight and both moments after the step, and which updates were beyond their bound: [BLOCKS, 64] each.

    addresses: as `addresses_of` has them; places: as `blocks_at` and `tile_at`; numbers: as `numbers_of`.
    before: the scale of codes that are read, float32; factor: of gradients, if FACTORED. Exact.
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
    kept = read(weight_at, at, inside, WEIGHT_TYPE, EVEN)
    beside = kept
    if KEEPING != PLAIN:
        beside = read(beside_at, at, inside, BESIDE_TYPE, EVEN)
    w = read_weight(kept, beside, before, KEEPING, CODES)
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
    """Write both moments, which share their noise, to where they were read.

    drawing: as `drawing_of` has it, if anything is rounded at random.
    Returns the weight's noise, int32 below 2**15. Exact.
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
    """A random word of each element [BLOCKS, 64], uint32. at: of each element, or of the first of each block."""
    # Of the part's first element in the whole parameter.
    place, key, upper = drawing
    if EVEN:
        # Four neighbours have the words of one counter, each a half.
        four = tl.arange(0, 16)
        g = tl.expand_dims((place + at) >> 2, 1) + tl.expand_dims(four, 0)
        first, second = philox_of_two(g, upper, key)
        word = tl.join(first, second)
        word = tl.reshape(tl.join(word, _turned(word)), [BLOCKS, 64])
    else:
        e = place + at
        first, second = philox_of_two(e >> 2, upper, key)
        word = tl.where((e & 2) == 0, first, second)
        word = tl.where((e & 1) == 0, word, _turned(word))
    return word


@triton.jit
def _turned(word):
    """A word's halves the other way round."""
    return (word << 16) | (word >> 16)


@triton.jit
def _share(word, INDEX: tl.constexpr, NUMBER: tl.constexpr):
    """Noise of the code INDEX of NUMBER that share a word: int32 below 2**15."""
    return ((word >> (17 - 16 // NUMBER * INDEX)) & 0x7FFF).to(tl.int32)
