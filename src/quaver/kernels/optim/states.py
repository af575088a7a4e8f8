"""A moment of a program's blocks read and written by the kind of its code: `quaver.torch.optim.codes` inside a kernel.

A kind is a number, 0 where there is no such moment; scales of blocks are bfloat16.
"""

import triton
import triton.language as tl

from quaver.kernels.optim.codes import (
    bfloat16_at_random,
    block_amax,
    decode_mitchell,
    encode_mitchell,
    inverse_of,
    scale_of,
)
from quaver.kernels.optim.places import read, read_scales, write, write_scales

NONE, FLOAT32, BFLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: Kind "mitchell": int8 of one halving, uint8 of two.
INT8, UINT8 = tl.constexpr(3), tl.constexpr(4)
#: Their largest magnitudes.
_INT8_LARGEST, _UINT8_LARGEST = tl.constexpr(8063.876953125), tl.constexpr(528474240.0)


@triton.jit
def read_state(address, scales, number, there, at, inside, KIND: tl.constexpr, EVEN: tl.constexpr):
    """A moment, float32 [BLOCKS, 64]. Exact."""
    if KIND == FLOAT32:
        value = read(address, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        value = read(address, at, inside, tl.bfloat16, EVEN).to(tl.float32)
    else:
        if KIND == INT8:
            value = decode_mitchell(read(address, at, inside, tl.int8, EVEN), 1)
        else:
            value = decode_mitchell(read(address, at, inside, tl.uint8, EVEN), 2)
        value = value * read_scales(scales, number, there, tl.bfloat16, EVEN)
    return value


@triton.jit
def write_state(
    x, address, scales, noise, number, there, at, inside, KIND: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """A moment, float32 [BLOCKS, 64], which is not negative as UINT8; noise: as `codes` takes it. Exact."""
    if KIND == FLOAT32:
        write(address, x, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        narrow = bfloat16_at_random(x, noise) if STOCHASTIC else x.to(tl.bfloat16)
        write(address, narrow, at, inside, tl.bfloat16, EVEN)
    else:
        bits = scale_of(block_amax(x, KIND == INT8), _INT8_LARGEST if KIND == INT8 else _UINT8_LARGEST)
        inverse, least = inverse_of(bits)
        if KIND == INT8:
            write(address, encode_mitchell(x, inverse, least, noise, 1, True, STOCHASTIC), at, inside, tl.int8, EVEN)
        else:
            code = encode_mitchell(x, inverse, least, noise, 2, False, STOCHASTIC)
            write(address, code, at, inside, tl.uint8, EVEN)
        scale = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        write_scales(scales, scale, number, there, tl.bfloat16, EVEN)
