"""Where a program's elements lie in a parameter, by addresses of a table: blocks of 64 along its rows, some at a time.

EVEN: rows are whole blocks, a program's blocks are all there, and addresses are multiples of 16 bytes; all that is
asked for lies in one run then. Else each block is looked for by its row, and what is beyond a row or the parameter is
zero.
"""

import triton
import triton.language as tl


@triton.jit
def blocks_at(first, columns, across, blocks, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """The blocks first, first + 1, ...: their numbers [BLOCKS] and which of them are there, offsets of their elements
    [BLOCKS, 64] and which of these are, and the numbers of the scales that pairs of blocks share, [BLOCKS].

    columns: of the parameter; across: its blocks in a row; blocks: in all.
    """
    i, k = tl.arange(0, BLOCKS), tl.arange(0, 64)
    if EVEN:
        number = first.to(tl.int64) + i
        there = tl.full([BLOCKS], True, tl.int1)
        at = (first.to(tl.int64) * 64) + (tl.expand_dims(i * 64, 1) + tl.expand_dims(k, 0))
        inside = tl.full([BLOCKS, 64], True, tl.int1)
        pair = (first >> 1).to(tl.int64) + (i >> 1)
    else:
        b = first + i
        number, there = b.to(tl.int64), b < blocks
        row, block = (b // across).to(tl.int64), b % across
        column = tl.expand_dims(block * 64, 1) + tl.expand_dims(k, 0)
        at = tl.expand_dims(row * columns, 1) + column
        inside = tl.expand_dims(there, 1) & (column < columns)
        pair = row * ((across + 1) >> 1) + (block >> 1)
    return number, there, at, inside, pair


@triton.jit
def read(address, at, inside, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Elements of the tensor at an address, int64."""
    if EVEN:
        x = tl.load(tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + at)
    else:
        x = tl.load(address.to(tl.pointer_type(dtype)) + at, mask=inside, other=0)
    return x


@triton.jit
def write(address, x, at, inside, dtype: tl.constexpr, EVEN: tl.constexpr):
    """x to the same place."""
    if EVEN:
        tl.store(tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + at, x)
    else:
        tl.store(address.to(tl.pointer_type(dtype)) + at, x, mask=inside)


@triton.jit
def read_scales(address, number, there, dtype: tl.constexpr, EVEN: tl.constexpr):
    """A number a block, as float32 [BLOCKS, 1]."""
    if EVEN:
        scale = tl.load(address.to(tl.pointer_type(dtype)) + number)
    else:
        scale = tl.load(address.to(tl.pointer_type(dtype)) + number, mask=there, other=0)
    return tl.expand_dims(scale.to(tl.float32), 1)


@triton.jit
def write_scales(address, scale, number, there, dtype: tl.constexpr, EVEN: tl.constexpr):
    """scale [BLOCKS] to the same place."""
    if EVEN:
        tl.store(address.to(tl.pointer_type(dtype)) + number, scale)
    else:
        tl.store(address.to(tl.pointer_type(dtype)) + number, scale, mask=there)


@triton.jit
def tile_at(row, block, columns, across, rows, BLOCKS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """What `blocks_at` gives, of BLOCKS / WIDE rows from `row` on, and of WIDE blocks of each from `block` on."""
    i, k = tl.arange(0, BLOCKS), tl.arange(0, 64)
    r, b = row + i // WIDE, block + i % WIDE
    number = r.to(tl.int64) * across + b
    if EVEN:
        there = tl.full([BLOCKS], True, tl.int1)
        inside = tl.full([BLOCKS, 64], True, tl.int1)
        at = tl.expand_dims(number * 64, 1) + tl.expand_dims(k, 0)
    else:
        there = (r < rows) & (b < across)
        column = tl.expand_dims(b * 64, 1) + tl.expand_dims(k, 0)
        inside = tl.expand_dims(there, 1) & (column < columns)
        at = tl.expand_dims(r.to(tl.int64) * columns, 1) + column
    return number, there, at, inside, r.to(tl.int64) * ((across + 1) >> 1) + (b >> 1)
