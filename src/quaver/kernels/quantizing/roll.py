"""Delayed scaling's state of a whole model in one launch, and one amax noted in it.

A table of addresses says where the histories and factors lie, so that they may be buffers of their layers and move with
them. Source of the scheme: Transformer Engine's delayed scaling; the numbers are `quaver.core.reference.history`'s.
"""

import triton
import triton.language as tl

from quaver.kernels.bits.numbers import (
    HIGHEST,
    INFINITY_BITS,
    LOWEST,
    SMALLEST_NORMAL_BITS,
    encode_factor,
    exponent,
    flushed,
    magnitude_bits,
    power_of_two,
)


@triton.jit
def _factor(
    bits, margin, POWER_OF_TWO: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr, MAX: tl.constexpr
):
    """The encode factor of a window whose amax has these bits, times 2**-margin, held within bounds."""
    if POWER_OF_TWO:
        p = exponent(bits, EMAX, TOP_MANTISSA) - margin
        return power_of_two(tl.minimum(tl.maximum(p, LOWEST), HIGHEST))
    e = encode_factor(bits, POWER_OF_TWO, EMAX, TOP_MANTISSA, MAX).to(tl.int32, bitcast=True)
    # The margin moves the exponent field; what would leave it becomes the smallest normal number or the largest.
    field = (e >> 23) - margin
    moved = tl.where(field > 254, INFINITY_BITS - 1, (field << 23) | (e & 0x7FFFFF))
    return tl.where(field < 1, SMALLEST_NORMAL_BITS, moved).to(tl.float32, bitcast=True)


@triton.jit
def roll(
    table, factors, length, step, column_step, margin,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    POWER0: tl.constexpr, EMAX0: tl.constexpr, TOP0: tl.constexpr, MAX0: tl.constexpr,
    POWER1: tl.constexpr, EMAX1: tl.constexpr, TOP1: tl.constexpr, MAX1: tl.constexpr,
    POWER2: tl.constexpr, EMAX2: tl.constexpr, TOP2: tl.constexpr, MAX2: tl.constexpr,
):  # fmt: skip
    """One layer (axis 0) and one of its three columns (axis 1) a program.

    table: int64 [layers, 2], the addresses of history float32 [length, 3] and factor float32 [3], contiguous.
    factors: float32 [layers, 3], a copy of all factors as they then are.
    step, column_step: from a value of a history to the next of its column, and to the next column. BLOCK ≥ length.
    LARGEST: the factor follows the largest of the window, else the newest. Exact.
    """
    layer = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    history = tl.load(table + 2 * layer).to(tl.pointer_type(tl.float32)) + column * column_step
    factor = tl.load(table + 2 * layer + 1).to(tl.pointer_type(tl.float32)) + column
    newest = tl.load(history)
    e = tl.load(factor)
    if newest > 0.0:
        i = tl.arange(0, BLOCK)
        # One place down: row i takes row i + 1, the last one what row 0 recorded, and row 0 nothing.
        following = tl.load(history + (i + 1) * step, mask=i + 1 < length, other=0.0)
        top = magnitude_bits(newest)
        if LARGEST:
            top = tl.maximum(top, tl.max(magnitude_bits(following), 0))
        bits = flushed(top)
        e0 = _factor(bits, margin, POWER0, EMAX0, TOP0, MAX0)
        e1 = _factor(bits, margin, POWER1, EMAX1, TOP1, MAX1)
        e2 = _factor(bits, margin, POWER2, EMAX2, TOP2, MAX2)
        e = tl.where(column == 0, e0, tl.where(column == 1, e1, e2))
        rolled = tl.where(i == length - 1, newest, following)
        # All threads have read before one writes.
        tl.debug_barrier()
        tl.store(history + i * step, tl.where(i == 0, 0.0, rolled), mask=i < length)
        tl.store(factor, e)
    tl.store(factors + 3 * layer + column, e)


@triton.jit
def note(history, top, at):
    """history[at] = the larger of itself and top, both float32; infinities and NaN are not noted. One program."""
    bits = magnitude_bits(tl.load(top))
    here = history + at
    known = tl.load(here)
    tl.store(here, tl.where(bits < INFINITY_BITS, tl.maximum(known, bits.to(tl.float32, bitcast=True)), known))
