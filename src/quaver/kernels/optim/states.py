"""A moment of a program's blocks read and written by the kind of its code: `quaver.torch.optim.codes` inside a kernel.

A kind is a number, 0 where there is no such moment; scales of blocks are bfloat16.
"""

import triton
import triton.language as tl

from quaver.kernels.optim import codes, places

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
        value = places.read(address, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        value = places.read(address, at, inside, tl.bfloat16, EVEN).to(tl.float32)
    else:
        if KIND == SOFTSIGN:
            value = codes.decode_softsign(places.read(address, at, inside, tl.int8, EVEN))
        elif KIND == SIGNED_ROOT:
            value = codes.decode_root(places.read(address, at, inside, tl.int8, EVEN))
        elif KIND == ROOT:
            value = codes.decode_root(places.read(address, at, inside, tl.uint8, EVEN))
        elif KIND == E4M4:
            value = codes.decode_root_e4m4(places.read(address, at, inside, tl.uint8, EVEN))
        else:
            value = codes.decode_e4m3(places.read(address, at, inside, tl.uint8, EVEN), INTEGERS)
        value = value * places.read_scales(scales, number, there, tl.bfloat16, EVEN)
    return value


@triton.jit
def write_state(
    x, address, scales, noise, number, there, at, inside,
    KIND: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FLOOR: tl.constexpr,
    EVEN: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """A moment, float32 [BLOCKS, 64], which is not negative unless SIGNED; noise: as `codes` takes it. Exact."""
    if KIND == FLOAT32:
        places.write(address, x, at, inside, tl.float32, EVEN)
    elif KIND == BFLOAT16:
        narrow = codes.bfloat16_at_random(x, noise) if STOCHASTIC else x.to(tl.bfloat16)
        places.write(address, narrow, at, inside, tl.bfloat16, EVEN)
    else:
        LARGEST: tl.constexpr = 448.0 if KIND == E4M3 else (246016.0 if KIND == E4M4 else 1.0)
        bits = codes.scale_of(codes.block_amax(x, SIGNED), LARGEST)
        inverse, least = codes.inverse_of(bits)
        if KIND == SOFTSIGN:
            places.write(address, codes.encode_softsign(x, inverse), at, inside, tl.int8, EVEN)
        elif KIND == SIGNED_ROOT:
            code = codes.encode_root(x, inverse, least, noise, True, STOCHASTIC, FLOOR)
            places.write(address, code, at, inside, tl.int8, EVEN)
        elif KIND == ROOT:
            code = codes.encode_root(x, inverse, least, noise, False, STOCHASTIC, FLOOR)
            places.write(address, code, at, inside, tl.uint8, EVEN)
        elif KIND == E4M4:
            code = codes.encode_root_e4m4(x, inverse, least, noise, STOCHASTIC, FLOOR)
            places.write(address, code, at, inside, tl.uint8, EVEN)
        else:
            places.write(address, codes.encode_e4m3(x, inverse, INTEGERS), at, inside, tl.uint8, EVEN)
        scale = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        places.write_scales(scales, scale, number, there, tl.bfloat16, EVEN)
