"""What a program of an optimizer's step reads of its parameter: a row of a table of int64."""

import triton
import triton.language as tl

from quaver.kernels.bits.philox import philox

#: Columns of the table of parameters: addresses, then numbers.
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


@triton.jit
def addresses_of(row):
    """Those that every round reads: the weight, what is beside it, the gradient, and codes and scale of each moment."""
    weight, beside, gradient = tl.load(row + WEIGHT), tl.load(row + BESIDE), tl.load(row + GRADIENT)
    first, first_scale = tl.load(row + FIRST), tl.load(row + FIRST_SCALE)
    second, second_scale = tl.load(row + SECOND), tl.load(row + SECOND_SCALE)
    return weight, beside, gradient, first, first_scale, second, second_scale


@triton.jit
def drawing_of(row, count):
    """Where the part begins in the whole, and what random words are keyed by: a key and an upper word, uint32.

    count: of steps, float32.
    """
    seed_low, seed_high = tl.load(row + SEED_LOW), tl.load(row + SEED_HIGH)
    number = tl.load(row + NUMBER)
    key, upper, _, _ = philox(number * 0, number, count.to(tl.int64), seed_low, seed_high)
    return tl.load(row + PLACE), key, upper
