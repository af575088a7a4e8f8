"""The one container of quantized data, and how its bytes are laid out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.recipes.formats import Format
from quaver.recipes.spec import Block, QuantSpec
from quaver.reference.numerics import NAN_CODE

# ---- swizzling -------------------------------------------------------------------------------------------
# The order in which Blackwell's GEMMs read the scales of narrow blocks: 32_4_4.
#
# Scales lie in tiles of 128 rows and 4 blocks of k, 512 bytes each; within a tile the rows r, r + 32, r + 64 and r + 96
# are neighbours, 16 bytes for their four blocks. Rows and blocks that a tile has too many are zero.
#
# Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout"; `torch.nn.functional.SwizzleType`.

ROWS, BLOCKS = 128, 4


def swizzle(scale: Tensor) -> Tensor:
    """uint8 scales [rows, blocks of k] to the flat order of the GEMM, padded with zeros. Exact."""
    rows, blocks = scale.shape
    filled = pad(scale, (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = filled.view(-1, 4, 32, filled.shape[1] // BLOCKS, BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """What `swizzle` put in order, [rows, blocks of k]. Exact."""
    across = -(-blocks // BLOCKS)
    tiles = flat.view(-1, across, 32, 4, BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, across * BLOCKS)[:rows, :blocks]


# ---- quantized -------------------------------------------------------------------------------------------

#: An amax or an encode factor that is given: on a device, on the host, or None where it is measured.
Given = Tensor | float | None
#: Formats that torch casts to.
#: A tensor without memory of its own, of a subclass that says what operations on it do; None where torch has none.
make_wrapper_subclass: Any = getattr(torch.Tensor, "_make_wrapper_subclass", None)
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def storage(fmt: Format) -> torch.dtype:
    """What holds codes: a float8 dtype of torch's, or a byte. Two E2M1 codes share one, the lower nibble being the even
    index of k."""
    return FLOAT8.get(fmt.name, torch.uint8)


@dataclass(slots=True, eq=False)
class Quantized:
    """A GEMM operand [rows, k] in eight or four bits: original ≈ data × scale.

    Always: rows and k count codes, the Hadamard's padding included; an infinity or NaN in the original makes its scale
    NaN; a `transposed` operand lies in memory as its transpose [k, rows], data and scales alike, so that transposing is
    free. Rows of eight-bit data that are k bytes long but lie k rounded up to 16 bytes apart end in zeros.
    """

    #: [rows, k] in a float8 dtype, uint8 [rows, ceil(k / 2)] for E2M1, uint8 [rows, k] for other formats; the transpose
    #: of that if turned.
    data: Tensor
    #: Decode scales of the blocks as data lie: float32, or uint8 exponents (E8M0), or uint8 E4M3 codes (two-level). A
    #: plain float where one scale serves the whole operand and lives on the host.
    scale: Tensor | float
    #: Of the operand [rows, k], turned or not.
    spec: QuantSpec
    #: (rows, k).
    shape: tuple[int, int]
    transposed: bool = False
    #: Two-level only: what the blocks' scales are divided by, float32 [1, 1], NaN for a tensor that is not finite. The
    #: quotient is one rounding, a stored reciprocal would make it two.
    tensor_factor: Tensor | None = None
    #: Largest magnitude measured, for a history; None where nothing was measured.
    amax: Given = None
    #: The data as a float32 matrix as they lie, remembered where that is small.
    decoded: Tensor | None = None
    #: The transpose, once it was asked for, or what was written as such beside the data.
    twin: "Quantized | None" = None
    #: Whether the scales, uint8, are in the order of `quaver.torch.numerics.quantized`: flat, and a row of them for
    #: every row of the data as they lie, which those of a block share.
    swizzled: bool = False
    #: Whether the kernel that measured `amax` has noted it in a history already.
    recorded_amax: bool = False
    #: What the kernel that quantized a matrix summed of it on the way: float32 [blocks of rows, columns], of the values
    #: as they were. The gradient of a bias is the sum of these.
    partial_sums: Tensor | None = None
    #: Of an operand on a CPU that a call reads more than once: `quaver.torch.backends.cpu.decode`.
    mark: object = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the data and scales."""
        tensors = [t for t in (self.data, self.scale, self.tensor_factor) if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def lying_block(self) -> Block:
        """The block as data lie in memory."""
        return self.spec.block[::-1] if self.transposed else self.spec.block

    @property
    def lying_shape(self) -> tuple[int, int]:
        """The shape as codes lie in memory."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def T(self) -> "Quantized":
        """The transpose [k, rows], of the same memory; only specs whose blocks are square have one."""
        assert self.spec.transposable
        twin = self.twin
        if twin is None:
            shape, transposed = (self.shape[1], self.shape[0]), not self.transposed
            twin = Quantized(
                self.data, self.scale, self.spec, shape, transposed, self.tensor_factor, self.amax, self.decoded
            )
            twin.swizzled, twin.mark = self.swizzled, self.mark
            self.twin = twin
        return twin

    def plain(self) -> "Quantized":
        """The same operand with nothing between its rows and its scales in their order: what is stored or shared."""
        scale = self.plain_scale().contiguous() if isinstance(self.scale, Tensor) else self.scale
        data = self.data.contiguous()
        return Quantized(data, scale, self.spec, self.shape, self.transposed, self.tensor_factor, self.amax)

    def upright(self) -> "Quantized":
        """`plain`, lying as its rows: what is taken row by row."""
        q = self.plain()
        if not q.transposed:
            return q
        codes = q.lying_codes().t()
        data = pack(codes) if q.spec.format.packed else codes.contiguous().view(q.data.dtype)
        scale = q.scale.t().contiguous() if isinstance(q.scale, Tensor) else q.scale
        return Quantized(data, scale, q.spec, q.shape, False, q.tensor_factor, q.amax)

    def codes(self) -> Tensor:
        """uint8 [rows, k], one code an element, every NaN as 0x7F."""
        codes = self.lying_codes()
        if self.data.is_floating_point():
            codes = torch.where(self.data.isnan(), torch.full_like(codes, NAN_CODE), codes)
        return codes.t() if self.transposed else codes

    def lying_codes(self) -> Tensor:
        """uint8, one code an element, as they lie and as they are stored."""
        if self.spec.format.packed:
            return unpack(self.data, self.lying_shape[1])
        return self.data.view(torch.uint8)

    def scales(self) -> Tensor:
        """float32 decode scales [blocks of rows, blocks of k], both levels multiplied."""
        scales = self.lying_scales()
        return scales.t() if self.transposed else scales

    def lying_scales(self) -> Tensor:
        """`scales()` as they lie in memory."""
        if not isinstance(self.scale, Tensor):
            return torch.full((1, 1), self.scale, dtype=torch.float32, device=self.device)
        scale = self.plain_scale() if self.swizzled else self.scale
        return decode_scales(scale, self.spec, self.tensor_factor)

    def plain_scale(self) -> Tensor:
        """The stored scales of the blocks as they lie, in the order of rows and columns."""
        assert isinstance(self.scale, Tensor)
        if not self.swizzled:
            return self.scale
        (rows, columns), (height, width) = self.lying_shape, self.lying_block
        assert height is not None and width is not None
        return unswizzle(self.scale, rows, -(-columns // width))[::height]

    def values(self) -> Tensor:
        """float32 [rows, k]: the data without the scales."""
        values = self.lying_values()
        return values.t() if self.transposed else values

    def lying_values(self) -> Tensor:
        """`values()` as they lie in memory."""
        if self.data.is_floating_point():
            return self.data.to(torch.float32)
        return values_of(self.lying_codes(), self.spec.format)

    def dequantize(self) -> Tensor:
        """float32 [rows, k]: data × scale. After a Hadamard these are the rotated values, as the GEMM sees them."""
        return self.values() * spread(self.scales(), self.spec.block, self.shape)


def decode_scales(scale: Tensor, spec: QuantSpec, tensor_factor: Tensor | None) -> Tensor:
    """Stored scales to float32 decode scales of the same shape."""
    if spec.scale == "e8m0":
        bits = scale.to(torch.int32)
        # Code 0 is 2**-127, whose float32 is subnormal: its mantissa holds the one bit. Code 255 is NaN.
        wide = torch.where(bits == 0, 0x00400000, torch.where(bits == 255, 0x7FC00000, bits << 23))
        return wide.view(torch.float32)
    if spec.two_level:
        assert tensor_factor is not None
        return scale.view(torch.float8_e4m3fn).to(torch.float32) / tensor_factor
    return scale


def spread(blocks: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One value a block to one an element; an axis with a single block stays 1 wide and broadcasts."""
    for dim in (0, 1):
        width = block[dim]
        if width is not None and width > 1 and blocks.shape[dim] > 0:
            blocks = blocks.repeat_interleave(min(width, shape[dim]), dim).narrow(dim, 0, shape[dim])
    return blocks


def filled(codes: Tensor, width: int) -> Tensor:
    """Eight-bit codes [rows, k] in rows `width` long, their ends zeros."""
    wide = torch.zeros((codes.shape[0], width), dtype=torch.uint8, device=codes.device)
    wide[:, : codes.shape[1]] = codes.view(torch.uint8)
    return wide.view(codes.dtype)


def pack(codes: Tensor) -> Tensor:
    """Two four-bit codes to a byte: [rows, k] to uint8 [rows, ceil(k / 2)]."""
    rows, k = codes.shape
    if k % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(rows, -1, 2) if codes.numel() else codes.new_empty((rows, (k + 1) // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Tensor, k: int) -> Tensor:
    """uint8 [rows, ceil(k / 2)] to one code an element, [rows, k]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, :k]


def values_of(codes: Tensor, fmt: Format) -> Tensor:
    """The values of a format's codes, float32 of their shape: their bits are moved to float32's places."""
    magnitude = codes.int() & (1 << fmt.bits - 1) - 1
    normal = (magnitude << 23 - fmt.mantissa_bits) + (127 - fmt.bias << 23)
    small = magnitude.to(torch.float32) * 2.0 ** (fmt.emin - fmt.mantissa_bits)
    value = torch.where(magnitude >> fmt.mantissa_bits == 0, small, normal.view(torch.float32))
    value = torch.where(magnitude > fmt.max_code, torch.nan, value)
    return torch.where(codes >> fmt.bits - 1 == 1, -value, value)


def of_host(scale: float) -> Tensor:
    """A scale of the host's as autograd may keep it beside the codes: a checkpoint that makes them again, by factors
    that may be others by then, makes it again with them."""
    return torch.scalar_tensor(scale, dtype=torch.float64, device="cpu")


def take_apart(value: Tensor | Quantized | float | None) -> tuple[list[Tensor | None], tuple[Any, ...] | None]:
    """The tensors of an operand or a scale, which autograd may keep, and what `put_together` needs besides."""
    if isinstance(value, float):
        return [of_host(value)], ()
    if not isinstance(value, Quantized):
        return [value], None
    scale = value.scale if isinstance(value.scale, Tensor) else of_host(value.scale)
    layout = value.spec, value.shape, value.transposed, scale is not value.scale, value.swizzled
    return [value.data, scale, value.tensor_factor], layout


def put_together(layout: tuple[Any, ...] | None, tensors: Sequence[Any]) -> Any:
    """What `take_apart` took apart."""
    if not layout:
        return tensors[0] if layout is None else tensors[0].item()
    spec, shape, transposed, on_host, swizzled = layout
    scale = tensors[1].item() if on_host else tensors[1]
    return Quantized(tensors[0], scale, spec, shape, transposed, tensors[2], swizzled=swizzled)
