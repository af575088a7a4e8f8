"""`Quantized`, the container of a quantized operand, and the layouts of its codes and scales."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.recipes.formats import Format
from quaver.recipes.spec import Block, QuantSpec
from quaver.reference.numerics import NAN_CODE

# ---- swizzling: the scale order 32_4_4 of Blackwell's GEMMs for narrow blocks ----
# Scales are stored in tiles of 128 rows and 4 blocks of k, 512 bytes each. Within a tile the rows r, r + 32, r + 64 and
# r + 96 are adjacent, with 16 bytes for their four blocks. Padding rows and blocks of a tile are zero.
#
# Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout"; `torch.nn.functional.SwizzleType`.

ROWS, BLOCKS = 128, 4


def swizzle(scale: Tensor) -> Tensor:
    """Reorder uint8 scales [rows, blocks of k] to the flat order of the GEMM, padded with zeros."""
    rows, blocks = scale.shape
    filled = pad(scale, (0, -blocks % BLOCKS, 0, -rows % ROWS))
    tiles = filled.view(-1, 4, 32, filled.shape[1] // BLOCKS, BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo `swizzle`; returns [rows, blocks of k]."""
    across = -(-blocks // BLOCKS)
    tiles = flat.view(-1, across, 32, 4, BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, across * BLOCKS)[:rows, :blocks]


# ---- quantized operands ----

#: A given amax or encode factor: a device tensor, a float on the host, or None to measure it.
ScalarOverride = Tensor | float | None
#: Create a tensor subclass without memory of its own; None if torch lacks it.
make_wrapper_subclass: Any = getattr(torch.Tensor, "_make_wrapper_subclass", None)
#: `__torch_function__` of a subclass whose operations return what `__torch_dispatch__` returns, unchanged.
no_torch_function: Any = torch._C._disabled_torch_function_impl
#: torch's dtypes of the FP8 formats.
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def storage(fmt: Format) -> torch.dtype:
    """Return the dtype of stored codes: a float8 dtype, or uint8. A byte holds two E2M1 codes, the lower nibble has the
    even index of k.
    """
    return FLOAT8.get(fmt.name, torch.uint8)


@dataclass(slots=True, eq=False)
class Quantized:
    """GEMM operand [rows, k] in eight or four bits: original ≈ data × scale.

    Invariants: rows and k count codes, including the padding of a Hadamard rotation. An infinity or NaN in the original
    makes its scale NaN. A `transposed` operand is stored as its transpose [k, rows], data and scales, so that
    transposing is free. If rows of k eight-bit codes have a stride of k rounded up to 16, the padding is zero.
    """

    #: [rows, k] in a float8 dtype, uint8 [rows, ceil(k / 2)] for E2M1, uint8 [rows, k] for other formats; the transpose
    #: of that if `transposed`.
    data: Tensor
    #: Decode scales of the blocks in the storage order of data: float32, uint8 exponents (E8M0), or uint8 E4M3 codes
    #: (two-level). A float if a single scale is on the host.
    scale: Tensor | float
    #: Spec of the operand [rows, k], whether stored transposed or not.
    spec: QuantSpec
    #: (rows, k).
    shape: tuple[int, int]
    transposed: bool = False
    #: Two-level scales only: divisor of the blocks' scales, float32 [1, 1], NaN if the tensor is not finite. A quotient
    #: is rounded once; a stored reciprocal would round twice.
    tensor_factor: Tensor | None = None
    #: Measured amax for a scaling history; None if it was not measured.
    amax: ScalarOverride = None
    #: Cached float32 values in storage order, for small operands.
    decoded: Tensor | None = None
    #: The transpose, created on first use or written together with the data.
    cached_transpose: "Quantized | None" = None
    #: True if the uint8 scales are in the order of `swizzle`: flat, with a row for every stored row of data; rows of a
    #: block share its scale.
    swizzled: bool = False
    #: True if the kernel that measured `amax` has already recorded it in a history.
    recorded_amax: bool = False
    #: Sums of the original matrix from the quantization kernel, float32 [blocks of rows, columns]; their sum is a bias
    #: gradient.
    partial_sums: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        tensors = [t for t in (self.data, self.scale, self.tensor_factor) if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def stored_block(self) -> Block:
        """Block shape in storage order."""
        return self.spec.block[::-1] if self.transposed else self.spec.block

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of the codes in storage order."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def T(self) -> "Quantized":
        """Transpose [k, rows] that shares the memory; only specs with square blocks have one."""
        assert self.spec.transposable
        cached_transpose = self.cached_transpose
        if cached_transpose is None:
            shape, transposed = (self.shape[1], self.shape[0]), not self.transposed
            cached_transpose = Quantized(
                self.data, self.scale, self.spec, shape, transposed, self.tensor_factor, self.amax, self.decoded
            )
            cached_transpose.swizzled = self.swizzled
            self.cached_transpose = cached_transpose
        return cached_transpose

    def plain(self) -> "Quantized":
        """Return the operand with contiguous data and unswizzled scales, for storing or sharing."""
        scale = self.plain_scale().contiguous() if isinstance(self.scale, Tensor) else self.scale
        data = self.data.contiguous()
        return Quantized(data, scale, self.spec, self.shape, self.transposed, self.tensor_factor, self.amax)

    def upright(self) -> "Quantized":
        """Return `plain` with row-major storage."""
        q = self.plain()
        if not q.transposed:
            return q
        codes = q.stored_codes().t()
        data = pack(codes) if q.spec.format.packed else codes.contiguous().view(q.data.dtype)
        scale = q.scale.t().contiguous() if isinstance(q.scale, Tensor) else q.scale
        return Quantized(data, scale, q.spec, q.shape, False, q.tensor_factor, q.amax)

    def codes(self) -> Tensor:
        """Return uint8 codes [rows, k], one per element, with every NaN as 0x7F."""
        codes = self.stored_codes()
        if self.data.is_floating_point():
            codes = torch.where(self.data.isnan(), torch.full_like(codes, NAN_CODE), codes)
        return codes.t() if self.transposed else codes

    def stored_codes(self) -> Tensor:
        """Return the stored uint8 codes, one per element, in storage order."""
        if self.spec.format.packed:
            return unpack(self.data, self.stored_shape[1])
        return self.data.view(torch.uint8)

    def scales(self) -> Tensor:
        """Return float32 decode scales [blocks of rows, blocks of k], with both levels multiplied."""
        scales = self.stored_scales()
        return scales.t() if self.transposed else scales

    def stored_scales(self) -> Tensor:
        """Return `scales()` in storage order."""
        if not isinstance(self.scale, Tensor):
            return torch.full((1, 1), self.scale, dtype=torch.float32, device=self.device)
        scale = self.plain_scale() if self.swizzled else self.scale
        return decode_scales(scale, self.spec, self.tensor_factor)

    def plain_scale(self) -> Tensor:
        """Return the stored scales of the blocks in storage order, unswizzled."""
        assert isinstance(self.scale, Tensor)
        if not self.swizzled:
            return self.scale
        (rows, columns), (height, width) = self.stored_shape, self.stored_block
        assert height is not None and width is not None
        return unswizzle(self.scale, rows, -(-columns // width))[::height]

    def values(self) -> Tensor:
        """Return the values without scales, float32 [rows, k]."""
        values = self.stored_values()
        return values.t() if self.transposed else values

    def stored_values(self) -> Tensor:
        """Return `values()` in storage order."""
        if self.data.is_floating_point():
            return self.data.to(torch.float32)
        return values_of(self.stored_codes(), self.spec.format)

    def dequantize(self) -> Tensor:
        """Return data × scale, float32 [rows, k]; after a Hadamard rotation these are the rotated values that the GEMM
        uses.
        """
        return self.values() * spread(self.scales(), self.spec.block, self.shape)


def decode_scales(scale: Tensor, spec: QuantSpec, tensor_factor: Tensor | None) -> Tensor:
    """Convert stored scales to float32 decode scales of the same shape."""
    if spec.scale == "e8m0":
        bits = scale.to(torch.int32)
        # Code 0 is 2**-127, a subnormal float32 with the top mantissa bit set. Code 255 is NaN.
        wide = torch.where(bits == 0, 0x00400000, torch.where(bits == 255, 0x7FC00000, bits << 23))
        return wide.view(torch.float32)
    if spec.two_level:
        assert tensor_factor is not None
        return scale.view(torch.float8_e4m3fn).to(torch.float32) / tensor_factor
    return scale


def spread(blocks: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """Expand one value per block to one per element; an axis with a single block stays 1 and broadcasts."""
    for dim in (0, 1):
        width = block[dim]
        if width is not None and width > 1 and blocks.shape[dim] > 0:
            blocks = blocks.repeat_interleave(min(width, shape[dim]), dim)
            if blocks.shape[dim] != shape[dim]:
                # Inductor 2.13 loses a partial last block where it divides an index by the width in a fused loop. A
                # strided view makes it write whole blocks to memory first.
                size = (*blocks.shape[:dim], shape[dim], *blocks.shape[dim + 1 :])
                blocks = blocks.as_strided(size, blocks.stride())
    return blocks


def filled(codes: Tensor, width: int) -> Tensor:
    """Copy eight-bit codes [rows, k] to rows of length `width`, padded with zeros."""
    wide = torch.zeros((codes.shape[0], width), dtype=torch.uint8, device=codes.device)
    wide[:, : codes.shape[1]] = codes.view(torch.uint8)
    return wide.view(codes.dtype)


def pack(codes: Tensor) -> Tensor:
    """Pack two four-bit codes to a byte: [rows, k] to uint8 [rows, ceil(k / 2)]."""
    rows, k = codes.shape
    if k % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.contiguous().view(rows, -1, 2) if codes.numel() else codes.new_empty((rows, (k + 1) // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(packed: Tensor, k: int) -> Tensor:
    """Unpack uint8 [rows, ceil(k / 2)] to one code per element, [rows, k]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, :k]


def values_of(codes: Tensor, fmt: Format) -> Tensor:
    """Decode codes of a format to float32 values of the same shape, by moving their bits."""
    magnitude = codes.int() & (1 << fmt.bits - 1) - 1
    normal = (magnitude << 23 - fmt.mantissa_bits) + (127 - fmt.bias << 23)
    small = magnitude.to(torch.float32) * 2.0 ** (fmt.emin - fmt.mantissa_bits)
    value = torch.where(magnitude >> fmt.mantissa_bits == 0, small, normal.view(torch.float32))
    value = torch.where(magnitude > fmt.max_code, torch.nan, value)
    return torch.where(codes >> fmt.bits - 1 == 1, -value, value)


def of_host(scale: float) -> Tensor:
    """Return a host scale as a tensor that autograd can save with the codes.

    A checkpoint that recomputes the codes, perhaps with other factors, then recomputes the scale too.
    """
    return torch.scalar_tensor(scale, dtype=torch.float64, device="cpu")


def split_operand(value: Tensor | Quantized | float | None) -> tuple[list[Tensor | None], tuple[Any, ...] | None]:
    """Split an operand or a scale into tensors that autograd can save, and the layout for `rebuild_operand`."""
    if isinstance(value, float):
        return [of_host(value)], ()
    if not isinstance(value, Quantized):
        return [value], None
    scale = value.scale if isinstance(value.scale, Tensor) else of_host(value.scale)
    layout = value.spec, value.shape, value.transposed, scale is not value.scale, value.swizzled
    return [value.data, scale, value.tensor_factor], layout


def rebuild_operand(layout: tuple[Any, ...] | None, tensors: Sequence[Any]) -> Any:
    """Rebuild the value that `split_operand` has split."""
    if not layout:
        return tensors[0] if layout is None else tensors[0].item()
    spec, shape, transposed, on_host, swizzled = layout
    scale = tensors[1].item() if on_host else tensors[1]
    return Quantized(tensors[0], scale, spec, shape, transposed, tensors[2], swizzled=swizzled)
