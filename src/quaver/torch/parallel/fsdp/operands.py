"""One rank's rows of a weight, quantized as they are in the whole weight, and the whole operand made of all ranks'.

Exact: the codes and scales of the whole weight. Codes and scales lie as the weight does, [N, K] and [rows of blocks,
blocks along K], for either side: so a rank's rows are bytes that follow the bytes of the rank before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching.written import CrossStream
from quaver.torch.numerics import reference
from quaver.torch.numerics.hadamard import rotate
from quaver.torch.numerics.quantized import Given, Quantized, pack, storage
from quaver.torch.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits
from quaver.torch.operations.functional import quantize
from quaver.torch.parallel.fsdp.cutting import Rows, Side, block_rows, cut_across, most_block_rows, pieces, straddling

#: In `Agreed`: the amax of the whole weight, of two-level scales and of a history.
WHOLE = -1
#: In `Agreed`: the amaxes of all rows of blocks, where `cut_across`.
ROWS = -2
#: Bits of amaxes that all ranks agreed on, int32: [blocks along K] by row of blocks, `WHOLE`'s [1], and `ROWS`'s [rows
#: of blocks].
Agreed = Mapping[int, Tensor]


class Part(NamedTuple):
    """What one rank sends of an operand, and what every rank knows of it."""

    #: uint8 [rows of a part, bytes of a row], filled up with zeros.
    codes: Tensor
    #: uint8 [rows of blocks, bytes of their scales], filled up with zeros; None where all ranks have the same scales.
    scales: Tensor | None
    #: The scales of all rows, as they lie, where these do not travel.
    common: Tensor | float | None
    #: Of two-level scales, `Quantized.tensor_factor`.
    tensor_factor: Tensor | None


def amaxes(x: Tensor, side: Side, rows: Rows, of_all: bool) -> dict[int, Tensor]:
    """This rank's part of the amaxes that ranks agree on, in the form of `Agreed`: the same keys and shapes on all.

    Args:
        x: its rows [n, K].
        of_all: whether the whole weight's is wanted, too.
    """
    spec, turned, width = side.spec, side.turned, side.columns(x.shape[1])
    bits = magnitude_bits(rotate(x.to(torch.float32)) if spec.hadamard and not turned else x.to(torch.float32))
    parts = {}
    if cut_across(rows, side):
        assert side.height is not None
        lines = bits.new_zeros(-(-rows.all // side.height))
        own = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=bits.device) // side.height
        if bits.numel():
            lines.scatter_reduce_(0, own, bits.amax(1), "amax")
        parts[ROWS] = _of_blocks(lines, 1)
    for block in () if ROWS in parts else straddling(rows, side.height):
        start, stop = (0, rows.all) if side.height is None else (block * side.height, (block + 1) * side.height)
        own = bits[max(0, start - rows.start) : max(0, min(stop, rows.stop) - rows.start)]
        parts[block] = _of_blocks(own.amax(0) if own.shape[0] else bits.new_zeros(width), side.width)
    if of_all and not (spec.per_tensor and parts):
        parts[WHOLE] = _of_blocks(bits.reshape(-1), None)
    return parts


def whole(agreed: Agreed) -> Tensor | None:
    """The amax of the whole weight, float32 [1, 1], where it was asked for."""
    bits = agreed.get(WHOLE, agreed.get(0))
    return None if bits is None or bits.numel() != 1 else bits.view(torch.float32).view(1, 1)


def part(x: Tensor, side: Side, rows: Rows, agreed: Agreed, factor: Given) -> Part:
    """This rank's part of an operand.

    Args:
        x: its rows [n, K], float32, bfloat16 or float16.
        factor: of delayed scaling, as `quantize` takes it.
    """
    spec, k = side.spec, x.shape[1]
    cut = pieces(rows, side.height)
    done = []
    for p in cut:
        piece = x[p.start - rows.start : p.stop - rows.start]
        done.append(_piece(piece, side, p.block, p.straddles, agreed, factor))
    bytes_of_row = -(-side.columns(k) // 2) if spec.format.packed else side.columns(k)
    codes = torch.zeros((rows.part, bytes_of_row), dtype=torch.uint8, device=x.device)
    for p, (data, _, _) in zip(cut, done, strict=True):
        codes[p.start - rows.start : p.stop - rows.start] = data
    if not done:
        # What scales all ranks have in common follows from what they agreed on, not from rows.
        done = [_piece(x.new_zeros((1, k)), side, 0, side.height is None or spec.two_level, agreed, factor)]
    tensor_factor = done[0][2]
    if side.height is None:
        return Part(codes, None, done[0][1], tensor_factor)
    shape = most_block_rows(rows, side.height), bytes_of_scales(side, k)
    scales = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    first = rows.start // side.height
    for p, (_, scale, _) in zip(cut, done, strict=False):
        assert isinstance(scale, Tensor)
        scales[p.block - first : p.block - first + scale.shape[0]] = scale.contiguous().view(torch.uint8)
    return Part(codes, scales, None, tensor_factor)


def _piece(
    x: Tensor, side: Side, block: int, straddles: bool, agreed: Agreed, factor: Given
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Codes and scales of whole blocks, or of a part of one row of blocks, and the tensor's factor."""
    spec = side.spec
    operand = x.t() if side.turned else x
    given = _given(side, block, straddles, agreed, x.shape[0])
    if spec.two_level and given is not None:
        wide = operand.to(torch.float32)
        tensor = agreed[WHOLE].view(torch.float32)
        q = reference.two_level(rotate(wide) if spec.hadamard else wide, spec, tensor, given)
    elif spec.two_level:
        q = quantize(operand, spec, agreed[WHOLE].view(torch.float32).view(1, 1))
    else:
        q = quantize(operand, spec, None if given is None else given.view(torch.float32), factor=factor)
    return *_as_the_weight(q, side), q.tensor_factor


def _given(side: Side, block: int, straddles: bool, agreed: Agreed, rows: int) -> Tensor | None:
    """The bits of amaxes that ranks agreed on for rows from a row of blocks on, in the operand's shape; or None."""
    lines = agreed.get(ROWS)
    if lines is not None and lines.numel():
        assert side.height is not None
        of_rows = lines[block : block + -(-rows // side.height)]
        return of_rows.view((1, -1) if side.turned else (-1, 1))
    given = agreed.get(block) if straddles else None
    return None if given is None else given.view((-1, 1) if side.turned else (1, -1))


def _as_the_weight(q: Quantized, side: Side) -> tuple[Tensor, Tensor | float]:
    """Codes as bytes and the stored scales, as the weight lies."""
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if q.turned == side.turned:
        return q.data.view(torch.uint8), scale
    codes = q.lying_codes().t()
    if side.spec.format.packed:
        codes = pack(codes)
    return codes, scale.t() if isinstance(scale, Tensor) else scale


def _of_blocks(line: Tensor, width: int | None) -> Tensor:
    """The largest of each block of a row's bits; those of subnormals count as 0, as `reference.block_bits` has it."""
    if width is None or not line.numel():
        top = line.amax().view(1) if line.numel() else line.new_zeros(0 if width else 1)
    else:
        top = torch.nn.functional.pad(line, (0, -line.numel() % width)).view(-1, width).amax(1)
    return torch.where(top < SMALLEST_NORMAL_BITS, 0, top)


def _in_bytes(side: Side) -> bool:
    """Whether a stored scale is a byte, not a float32."""
    return side.spec.scale == "e8m0" or side.spec.two_level


def bytes_of_scales(side: Side, k: int) -> int:
    """Bytes of the scales of one row of blocks."""
    return side.blocks(k) * (1 if _in_bytes(side) else 4)


def room(side: Side, rows: Rows, k: int) -> tuple[int, int] | None:
    """The shape of the bytes of scales where those of all ranks do not follow one another in what is gathered."""
    if side.height is None or rows.part % side.height == 0 or rows.part >= rows.all:
        return None
    return -(-rows.all // side.height), bytes_of_scales(side, k)


@dataclass(frozen=True)
class Joint:
    """How the parts of all ranks lie in what was gathered."""

    side: Side
    shape: tuple[int, int]
    rows: Rows
    own: Part
    #: The largest magnitude of the weight, where it is known.
    amax: Tensor | None
    #: All of these, which another stream may have written.
    written: Sequence[CrossStream] = ()

    def operand(self, gathered: Sequence[Tensor], place: Tensor | None = None) -> Quantized:
        """The whole operand, a view of what was gathered.

        Args:
            gathered: codes of all ranks, one after the other, and their scales if they travel.
            place: uint8 in the shape of `room`, where scales are put in order; None takes a new one.
        """
        for each in self.written:
            each.wait()
        side, own, n = self.side, self.own, self.rows.all
        data = gathered[0].view(-1, own.codes.shape[1])[:n].view(storage(side.spec.format))
        scale = own.common
        if own.scales is not None:
            scale = self._scales(gathered[1].view(-1, own.scales.shape[1]), place)
        shape = self.shape[::-1] if side.turned else self.shape
        return Quantized(data, scale, side.spec, shape, side.turned, own.tensor_factor, self.amax)  # type: ignore[arg-type]

    def _scales(self, every: Tensor, place: Tensor | None) -> Tensor:
        height, most = self.side.height, every.shape[0] // self.rows.ranks
        assert height is not None
        shape = room(self.side, self.rows, self.shape[1])
        if shape is None:
            placed = every[: -(-self.rows.all // height)]
        else:
            placed = torch.empty(shape, dtype=torch.uint8, device=every.device) if place is None else place
            for rank in range(self.rows.ranks):
                blocks = block_rows(self.rows.on(rank), height)
                placed[blocks.start : blocks.stop] = every[rank * most : rank * most + len(blocks)]
        return placed if _in_bytes(self.side) else placed.view(torch.float32)
