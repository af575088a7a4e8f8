"""A moment of a program's blocks read and written by the kind of its code: `quaver.torch.optim.codes` inside a kernel.

A kind is a number, 0 where there is no such moment; scales of blocks are bfloat16.
"""

import triton
import triton.language as tl

from quaver.kernels.optim.codes import (
    bfloat16_at_random,
    block_amax,
    decode_e4m3,
    decode_root,
    decode_root_e4m4,
    decode_softsign,
    encode_e4m3,
    encode_root,
    encode_root_e4m4,
    encode_softsign,
    inverse_of,
    scale_of,
)
from quaver.kernels.optim.places import read, read_scales, write, write_scales

NONE, FLOAT32, BFLOAT16, SOFTSIGN, SIGNED_ROOT, ROOT, E4M4, E4M3 = (
    *(tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)),
    *(tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)),
)


@triton.jit
def read_state(
    address, scales, number, there, at, inside, KIND: tl.constexpr, EVEN: tl.constexpr, INTEGERS: tl.constexpr
):
    """A moment, float32 [BLOCKS, 64]. Exact."""
    if KIND == FLOAT32:
        value = read(address, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        value = read(address, at, inside, tl.bfloat16, EVEN).to(tl.float32)
    else:
        if KIND == SOFTSIGN:
            value = decode_softsign(read(address, at, inside, tl.int8, EVEN))
        elif KIND == SIGNED_ROOT:
            value = decode_root(read(address, at, inside, tl.int8, EVEN))
        elif KIND == ROOT:
            value = decode_root(read(address, at, inside, tl.uint8, EVEN))
        elif KIND == E4M4:
            value = decode_root_e4m4(read(address, at, inside, tl.uint8, EVEN))
        else:
            value = decode_e4m3(read(address, at, inside, tl.uint8, EVEN), INTEGERS)
        value = value * read_scales(scales, number, there, tl.bfloat16, EVEN)
    return value


@triton.jit
def write_state(
    x, address, scales, noise, number, there, at, inside,
    KIND: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FLOOR: tl.constexpr,
    EVEN: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """A moment, float32 [BLOCKS, 64], which is not negative unless SIGNED; noise: as `codes` takes it. Exact."""
    if KIND == FLOAT32:
        write(address, x, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        narrow = bfloat16_at_random(x, noise) if STOCHASTIC else x.to(tl.bfloat16)
        write(address, narrow, at, inside, tl.bfloat16, EVEN)
    else:
        LARGEST: tl.constexpr = 448.0 if KIND == E4M3 else (246016.0 if KIND == E4M4 else 1.0)
        bits = scale_of(block_amax(x, SIGNED), LARGEST)
        inverse, least = inverse_of(bits)
        if KIND == SOFTSIGN:
            write(address, encode_softsign(x, inverse), at, inside, tl.int8, EVEN)
        elif KIND == SIGNED_ROOT:
            code = encode_root(x, inverse, least, noise, True, STOCHASTIC, FLOOR)
            write(address, code, at, inside, tl.int8, EVEN)
        elif KIND == ROOT:
            code = encode_root(x, inverse, least, noise, False, STOCHASTIC, FLOOR)
            write(address, code, at, inside, tl.uint8, EVEN)
        elif KIND == E4M4:
            code = encode_root_e4m4(x, inverse, least, noise, STOCHASTIC, FLOOR)
            write(address, code, at, inside, tl.uint8, EVEN)
        else:
            write(address, encode_e4m3(x, inverse, INTEGERS), at, inside, tl.uint8, EVEN)
        scale = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        write_scales(scales, scale, number, there, tl.bfloat16, EVEN)
