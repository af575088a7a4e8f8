"""Quantization to four and six bits on a CPU, in pieces that stay in its cache: two levels of scales, or E8M0's.

Rounding to nearest is one table look-up: the upper half of a float32, with its last bit set if anything lies below,
tells the code, sign and NaN included. A bf16 number times a power of two is one, which has no more to tell.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from quaver.core.numbers import rounding
from quaver.core.numbers.formats import E2M1, Format
from quaver.core.spec import Block, QuantSpec
from quaver.torch.backends.cpu.fp8 import blocked, largest_bits
from quaver.torch.numerics import reference
from quaver.torch.numerics.hadamard import rotate, turned_rotate
from quaver.torch.numerics.philox import QUIET, EagerNoise, turned_uniform, uniform
from quaver.torch.numerics.quantized import Given, Quantized, spread
from quaver.torch.numerics.rounding import INFINITY_BITS, encode_e2m1, flush

#: Elements worked on at once.
PIECE = 1 << 17


def reason_two_level(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Why this implementation does not take the call, or ""."""
    if not x.is_cpu:
        return "the tensor is not on a CPU"
    if not spec.two_level or spec.block[1] != 16:
        return "it is for E2M1 with two levels of scales in blocks of 16"
    return ""


def two_level(
    x: Tensor, spec: QuantSpec, amax: Given = None, factor: object = None, noise: EagerNoise = QUIET, parts: int = 1
) -> Quantized:
    """As `quaver.torch.numerics.reference.quantize`, bit for bit.

    Args:
        parts: into how many of as many rows x is divided, each with a tensor factor of its own: float32 [parts, 1].
    """
    if x.numel() == 0:
        return reference.quantize(x, spec, amax)
    shape = (x.shape[0], spec.padded(x.shape[1]))
    # A transpose is worked on as it lies, where its groups of 16 are whole lines, if that leaves no ragged block.
    turned = not x.is_contiguous() and x.stride(0) == 1 and spec.block[0] == 1 and shape[1] % 16 == 0
    x = x.t() if turned else x.contiguous()
    if spec.hadamard:
        turn = turned_rotate if turned else rotate
        x = torch.cat([turn(piece.float()) for piece in _pieces(x, spec)])
    block = spec.block[::-1] if turned else spec.block
    blocks = torch.cat([_largest(piece, block) for piece in _pieces(x, spec)])
    top = blocks.view(parts, -1).amax(1, keepdim=True)
    tensor = top if amax is None else reference.given_bits(amax, top)
    e, stored, tensor_factor = reference.two_levels(blocks.view(parts, -1), tensor, spec)
    e, stored = e.view_as(blocks), stored.view_as(blocks)
    data = _codes(x, e, spec, block, shape, noise, turned)
    if turned:
        data, stored = data.t().contiguous(), stored.t().contiguous()
    return Quantized(data, stored, spec, shape, False, tensor_factor, top.view(torch.float32))


def _pieces(x: Tensor, spec: QuantSpec) -> tuple[Tensor, ...]:
    """Lines in cache-sized pieces, cut between blocks and groups."""
    step = max(spec.block[0] or 1, 16)
    return x.split(max(1, PIECE // max(x.shape[1], 1) // step) * step)


def _largest(piece: Tensor, block: Block) -> Tensor:
    view, dims = blocked(piece if piece.dtype is not torch.float16 else piece.float(), block)
    return largest_bits(view, dims)


def _codes(
    x: Tensor, e: Tensor, spec: QuantSpec, block: Block, shape: tuple[int, int], noise: EagerNoise, turned: bool
) -> Tensor:
    """Packed codes as x lies: two neighbours along k to a byte, k being the first axis if turned."""
    lines, columns = x.shape
    data = x.new_empty((lines // 2, columns) if turned else (lines, (columns + 1) // 2), dtype=torch.uint8)
    height, at = block[0] or lines, 0
    for piece in _pieces(x, spec):
        count = piece.shape[0]
        piece = piece.float()
        u = None
        if spec.rounding == "stochastic":
            piece = flush(piece)
            if turned:
                u = turned_uniform(shape[0], shape[1], *noise, at, count)
            else:
                u = uniform(count, columns, *noise, x.device, at)
        y = piece * spread(e[at // height : -(-(at + count) // height)], block, (count, columns))
        codes = _nearest(y, E2M1) if u is None else encode_e2m1(y, u)
        if turned:
            data[at // 2 : (at + count) // 2] = codes[0::2] | codes[1::2] << 4
        else:
            data[at : at + count] = _pack(codes)
        at += count
    return data


def reason_e8m0(x: Tensor, spec: QuantSpec, *_: object) -> str:
    """Why this implementation does not take the call, or ""."""
    if not x.is_cpu:
        return "the tensor is not on a CPU"
    if spec.scale != "e8m0" or spec.hadamard or spec.rounding != "nearest" or spec.format.bits > 6:
        return "it is for nearest rounding to six bits or fewer with E8M0 scales"
    return "" if spec.block[0] == 1 and spec.block[1] is not None else "it is for blocks along rows"


def e8m0(x: Tensor, spec: QuantSpec, amax: Given = None, factor: Given = None, noise: object = QUIET) -> Quantized:
    """As `quaver.torch.numerics.reference.quantize`, bit for bit."""
    if x.numel() == 0 or amax is not None or factor is not None:
        return reference.quantize(x, spec, amax, factor)
    x, (rows, k), fmt = x.detach(), x.shape, spec.format
    _, nk = spec.blocks(rows, k)
    data = torch.empty((rows, (k + 1) // 2 if fmt.packed else k), dtype=torch.uint8, device="cpu")
    scale = torch.empty((rows, nk), dtype=torch.uint8, device="cpu")
    measured = torch.empty((rows, nk), dtype=torch.int32, device="cpu")
    at, step = 0, max(1, PIECE // k)
    for piece in x.split(step):
        part = slice(at, at + len(piece))
        view, dims = blocked(piece.float() if x.dtype is torch.float16 else piece, spec.block)
        bits = largest_bits(view, dims)
        e = reference.factors(bits, spec)
        scale[part] = reference.stored_scale(bits, bits < INFINITY_BITS, e, spec)
        measured[part] = bits
        codes = _of_blocks(view, torch.where(bits == 0, 0.0, e).unsqueeze(2), fmt).view(len(piece), -1)[:, :k]
        data[part] = _pack(codes) if fmt.packed else codes
        at += step
    return Quantized(data, scale, spec, (rows, k), False, None, measured.view(torch.float32))


def _of_blocks(view: Tensor, e: Tensor, fmt: Format) -> Tensor:
    """Blocks times their factors as codes, one a byte."""
    if view.dtype is torch.float32:
        return _nearest(view * e, fmt)
    # What leaves bf16's normal numbers lies far below the smallest code, whichever way it is rounded.
    index = (view * e.to(view.dtype)).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return _table(fmt).index_select(0, index.view(-1)).view(view.shape)


@cache
def _table(fmt: Format) -> Tensor:
    """The code of each bf16 number in a format of at most eight bits, by its bits: uint8 [65536]."""
    values = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(rounding.encode(rounding.round_to(values, fmt), fmt))


def _nearest(y: Tensor, fmt: Format) -> Tensor:
    """float32 to codes, one a byte; ties to even, saturating, NaN to the largest."""
    bits = y.view(torch.int32)
    index = (bits >> 16).bitwise_and_(0xFFFF)
    index |= (bits & 0xFFFF) != 0
    return _table(fmt).index_select(0, index.view(-1)).view(y.shape)


def _pack(codes: Tensor) -> Tensor:
    """Two codes to a byte, the lower nibble first."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(torch.int16)
    return (pairs & 15 | pairs >> 4).to(torch.uint8)
