"""A stand-in for `torch.nn.functional.scaled_mm` on a GPU: it checks what CUDA's checks, and multiplies in float64.

Written from torch's aten/src/ATen/native/cuda/ScaledBlas.cpp, so that layouts are right before a GPU sees them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from quaver.recipes.formats import E2M1
from quaver.torch.numerics.quantized import unpack, unswizzle, values_of

T = ScalingType
#: For tests that multiply by torch's own scaled GEMM on a CPU.
torchs_own = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has scaled GEMMs for GPUs alone",
)


def reads_transposes(arch: int) -> bool:
    """From Blackwell on, but for consumers' cards, for which pytorch/pytorch#198126 reports what Hopper wants."""
    return arch >= 100 and arch != 120


def stand_in(arch: int, calls: list[list[str]], either: bool | None = None) -> Any:
    """The function for one architecture; each call adds the names of its kinds to `calls`.

    Args:
        either: whether GEMMs with one scale a tensor read transposes; None for what is known of the architecture.
    """
    either = reads_transposes(arch) if either is None else either

    def scaled_mm(
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        kind_a: list[ScalingType],
        scale_b: list[Tensor],
        kind_b: list[ScalingType],
        swizzle_a: list[SwizzleType] | None = None,
        swizzle_b: list[SwizzleType] | None = None,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        contraction: Any = (),
        fast: bool = False,
    ) -> Tensor:
        pair = kind_a[0].name, kind_b[0].name
        check_matrices(a, b, either and pair == ("TensorWise", "TensorWise"), fast)
        check_bias(bias, dtype)
        check_kinds(kind_a, kind_b, arch, dtype)
        if pair[0].startswith("BlockWise") and torch.float8_e5m2 in (a.dtype, b.dtype):
            raise ValueError("Invalid scaling configuration")
        n = b.shape[1]
        assert n % 16 == 0, "mat2 must be divisible by 16"
        x = values(a, scale_a, kind_a[0], swizzle_a, False)
        y = values(b.t(), scale_b, kind_b[0], swizzle_b, True)
        z = x @ y.t()
        calls.append([*pair, "fast" * fast])
        return (z if bias is None else z + bias.double()).float().to(dtype)

    return scaled_mm


def check_matrices(a: Tensor, b: Tensor, either: bool, fast: bool) -> None:
    packed = 2 if a.dtype is torch.float4_e2m1fn_x2 else 1
    assert a.shape[1] == b.shape[0]
    if a.shape[1] * packed % 16:
        raise ValueError("Expected trailing dimension of mat1 to be divisible by 16")
    for name, t in (("a", a), ("b", b.t())):
        rowwise = t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0
        other = t.stride(0) == 1 and t.stride(1) * t.element_size() % 16 == 0 and t.shape[0] % 16 == 0
        if not rowwise and not (other and either):
            raise RuntimeError(f"Only multiplication of row-major and column-major matrices is supported ({name})")
        assert t.data_ptr() % 16 == 0
    if a.dtype is b.dtype is torch.float8_e5m2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
    assert not (fast and packed == 2), "fast accumulation of four bits"


def check_bias(bias: Tensor | None, dtype: torch.dtype) -> None:
    if bias is None:
        return
    if dtype is torch.float32:
        raise ValueError("Bias is not supported when out_dtype is set to Float32")
    assert bias.dtype is dtype and bias.dtype in (torch.bfloat16, torch.float16)


def check_kinds(kind_a: list[ScalingType], kind_b: list[ScalingType], arch: int, dtype: torch.dtype) -> None:
    pair = kind_a[0], kind_b[0]
    if pair == (T.RowWise, T.RowWise) and arch != 90 and dtype is torch.float32:
        raise ValueError("Only bf16 and fp16 high precision output types are supported for row-wise scaling.")
    blocks = {(T.BlockWise1x128, T.BlockWise128x128), (T.BlockWise128x128, T.BlockWise1x128)}
    blocks |= {(T.BlockWise1x128, T.BlockWise1x128)}
    if pair in blocks and arch != 90:
        raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")
    narrow = {(T.BlockWise1x32, T.BlockWise1x32), (T.BlockWise1x16, T.BlockWise1x16)}
    assert pair in blocks | narrow | {(T.TensorWise, T.TensorWise), (T.RowWise, T.RowWise)}, "Invalid scaling"
    assert pair not in narrow or arch >= 100


def values(m: Tensor, scale: list[Tensor], kind: ScalingType, swizzle: Any, right: bool) -> Tensor:
    """[rows, k] in float64, from data row by row and scales as their kind has them."""
    first = scale[0]
    rows, k = m.shape
    if kind is T.BlockWise1x16:
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE] and len(scale) == 2
        assert first.dtype is torch.float8_e4m3fn and first.numel() == -(-rows // 128) * 128 * -(-k * 2 // 64) * 4
        x = values_of(unpack(m.view(torch.uint8), k * 2), E2M1)
        s = unswizzle(first.view(torch.uint8), rows, -(-k * 2 // 16)).view(torch.float8_e4m3fn).double()
        assert scale[1].dtype is torch.float32 and scale[1].numel() == 1
        return x.double() * s.repeat_interleave(16, 1)[:, : k * 2] * scale[1].double()
    x = m.double()
    if kind is T.BlockWise1x32:
        assert swizzle == [SwizzleType.SWIZZLE_32_4_4] and first.is_contiguous()
        assert first.dtype is torch.float8_e8m0fnu and first.numel() == -(-rows // 128) * 128 * -(-k // 128) * 4
        s = unswizzle(first.view(torch.uint8), rows, -(-k // 32)).view(torch.float8_e8m0fnu).double()
        return x * s.repeat_interleave(32, 1)[:, :k]
    assert first.dtype is torch.float32
    if kind is T.TensorWise:
        assert first.numel() == 1
        return x * first.double()
    if kind is T.RowWise:
        assert first.shape == ((1, rows) if right else (rows, 1)) and first.is_contiguous()
        return x * first.view(rows, 1).double()
    blocks = -(-k // 128)
    if kind is T.BlockWise1x128:
        assert first.shape == (rows, blocks) and first.stride() == (1, rows)
        return x * first.double().repeat_interleave(128, 1)[:, :k]
    whole = -(-blocks // 4) * 4
    assert first.shape == (whole, -(-rows // 128)) and first.stride() == (1, whole)
    s = first.t()[:, :blocks].double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    return x * s
