"""Scales and bias are applied to a product as in plain torch, with one rounding."""

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu.emulation import fold, round_two
from quaver.torch.backends.gpu.scaled_mm import rescale
from tests.kernels.compare import DEVICE
from tests.operands import nasty

SHAPES = [(16, 256), (5, 7), (33, 300)]


def same(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype is expected.dtype
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_and_bias_are_folded_in_as_in_plain_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    for name in ("normal", "wide", "NaN", "infinity"):
        y = torch.from_numpy(nasty(shape)[name]).to(DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(1)
        bias = torch.randn(columns, generator=generator, device=DEVICE)
        tall = torch.randn(rows, 1, generator=generator, device=DEVICE).mul_(50).exp2_()
        wide = torch.randn(1, columns, generator=generator, device=DEVICE).mul_(50).exp2_()
        tall[-1], wide[0, 0] = torch.nan, 2.0**100
        one = torch.full((1, 1), 2.0**-90, device=DEVICE)
        for a, b in ((tall, wide), (one, wide), (tall, one)):
            expected = rescale(y.clone(), a, b)
            same(fold(y, dtype, None, a, b), expected.to(dtype))
            same(fold(y, dtype, bias.bfloat16(), a, b), (expected + bias.bfloat16().float()).to(dtype))
        same(fold(y, dtype, bias), (y + bias).to(dtype))
        same(fold(y, dtype), y.to(dtype))


@pytest.mark.parametrize("sizes", [((64, 64), (64, 128)), ((3, 5), (70, 90)), ((64, 64), (1, 1))], ids=str)
def test_two_products_are_rounded_by_one_launch(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    a, b = (torch.from_numpy(nasty(size)["wide"]).to(DEVICE) for size in sizes)
    for dtype in (torch.bfloat16, torch.float16):
        ours = round_two(a, b, dtype)
        for one, x in zip(ours, (a, b), strict=True):
            same(one, x.to(dtype))
