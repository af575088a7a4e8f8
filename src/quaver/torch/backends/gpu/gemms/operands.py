"""How the operands of a scaled GEMM are handed over: data row by row, scales in the order of their kind.

What the kernels write is taken as it is; anything else, such as what was quantized by plain torch operations, is
brought into that layout first.

Source: torch's aten/src/ATen/native/cuda/ScaledBlas.cpp for the shapes and strides.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.backends.gpu.launching.device import why_no_kernels
from quaver.torch.numerics.quantized import Quantized, filled, pack, spread
from quaver.torch.numerics.swizzling import swizzle

#: Bytes that a row is a multiple of.
LINE = 16


def matrix(q: Quantized) -> Tensor:
    """The codes [rows, k] row by row, rows filled with zeros to a multiple of 16 bytes.

    A turned operand is transposed, and lies so from then on.
    """
    if q.turned:
        settle(q)
    codes = q.data
    rows, width = codes.shape
    length, whole = codes.stride(0), -(-width // LINE) * LINE
    if codes.stride(1) != 1 or length % LINE or codes.data_ptr() % LINE:
        codes = filled(codes, whole)
    elif whole != width:
        codes = codes.as_strided((rows, whole), (length, 1)) if _ends_in_zeros(codes, whole) else filled(codes, whole)
    return codes.view(torch.float4_e2m1fn_x2) if q.spec.format.packed else codes


def any_matrix(q: Quantized) -> Tensor:
    """The codes [rows, k] as they lie, for GEMMs that read them in either direction."""
    codes = q.data
    fits = q.turned and not (codes.shape[0] % LINE or codes.stride(0) % LINE or codes.data_ptr() % LINE)
    return codes.t() if fits and codes.stride(1) == 1 and codes.shape[1] % LINE == 0 else matrix(q)


def settle(q: Quantized) -> None:
    """Make an operand lie as it is read."""
    scale = q.plain_scale().t() if isinstance(q.scale, Tensor) else q.scale
    q.data = pack(q.codes()) if q.spec.format.packed else transpose(q.data)
    q.scale = scale
    q.turned = q.swizzled = False
    q.decoded = None


def transpose(codes: Tensor) -> Tensor:
    """Eight-bit codes [rows, k] to [k, rows], the rows filled with zeros."""
    if not why_no_kernels(codes.device):
        from quaver.torch.backends.gpu.quantizing import transposing as kernel

        return kernel.transpose(codes)
    rows = codes.shape[0]
    return filled(codes.t(), -(-rows // LINE) * LINE)[:, :rows]


def _ends_in_zeros(codes: Tensor, whole: int) -> bool:
    """True if zeros fill the ends of rows, as `Quantized` describes it."""
    room = codes.untyped_storage().nbytes() - codes.storage_offset()
    return codes.stride(0) == whole and room >= codes.shape[0] * whole


def scales(q: Quantized, kind: str, right: bool) -> list[Tensor]:
    """An operand's scales as a kind of GEMM takes them: `gpu.gemms.scaled_mm.Kind`. The operand is not turned."""
    if kind == "one":
        return [_one(q.device)]
    if kind == "nv":
        assert q.tensor_factor is not None
        return [_swizzled(q).view(torch.float8_e4m3fn), 1.0 / q.tensor_factor]
    if kind == "mx":
        return [_swizzled(q).view(torch.float8_e8m0fnu)]
    scale = q.scale
    if not isinstance(scale, Tensor):
        scale = torch.full((1, 1), scale, dtype=torch.float32, device=q.device)
    if kind == "row":
        rows = scale if scale.shape[0] == q.shape[0] else scale.expand(q.shape[0], 1)
        rows = rows if rows.is_contiguous() else rows.contiguous()
        if right:
            return [rows.view(1, -1)]
        # A stride along one column means nothing, but it is looked at.
        return [rows if rows.stride(1) == 1 else rows.view(-1).unsqueeze(1)]
    if kind == "1x128":
        return [by_columns(scale)]
    return [scale if kind == "tensor" else _squares(scale)]


def by_columns(scale: Tensor) -> Tensor:
    """[rows, blocks], strides (1, rows)."""
    rows, blocks = scale.shape
    if scale.stride(0) != 1 or (scale.stride(1) != rows and blocks > 1):
        scale = scale.t().contiguous()
    return scale.as_strided((rows, blocks), (1, rows))


def _squares(scale: Tensor) -> Tensor:
    """[blocks of rows, blocks of k] as [blocks of k rounded up to 4, blocks of rows], the first axis contiguous."""
    rows, blocks = scale.shape
    whole = -(-blocks // 4) * 4
    room = scale.untyped_storage().nbytes() // 4 - scale.storage_offset()
    if scale.stride(1) != 1 or scale.stride(0) != whole or room < rows * whole:
        scale = pad(scale, (0, whole - blocks)).contiguous()
    return scale.as_strided((whole, rows), (1, whole))


def _swizzled(q: Quantized) -> Tensor:
    assert isinstance(q.scale, Tensor)
    if q.swizzled:
        return q.scale
    scale = q.scale
    if scale.dtype is torch.float32:
        # Powers of two in wider blocks: the exponent field is the E8M0 code, of NaN too.
        codes = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        scale = codes.repeat_interleave(4, 1)[:, : -(-q.shape[1] // 32)]
    return swizzle(spread(scale, (q.spec.block[0], 1), (q.shape[0], scale.shape[1])))


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    one = _ones.get(device)
    if one is None:
        with torch.inference_mode(False):
            one = torch.ones((1, 1), dtype=torch.float32, device=device)
        if capture.capturing(device):
            # Memory of the graph, filled at each replay: of no use to anything else.
            return one
        if device.type == "cuda":
            # Other streams do not wait for this one.
            torch.cuda.current_stream(device).synchronize()
        # Another thread may have made one.
        one = _ones.setdefault(device, one)
    return one
