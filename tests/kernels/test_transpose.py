"""Test that codes and their contiguous transpose hold the same bytes."""

import pytest
import torch

from quaver import E4M3, QuantSpec
from quaver.torch.backends.gpu import quantize as gpu
from quaver.torch.backends.gpu.scaled_mm import transpose_in_place
from quaver.torch.numerics import reference
from tests.kernels.compare import DEVICE, assert_padded, assert_same
from tests.pairs import alternating

SHAPES = [(128, 128), (5, 7), (130, 65), (33, 272), (1, 16), (16, 1), (257, 20)]


def every_byte(rows: int, k: int) -> torch.Tensor:
    return (torch.arange(rows * k, device=DEVICE) * 37 % 256).to(torch.uint8).view(rows, k)


@pytest.mark.parametrize(
    ("shape", "layout"), alternating(SHAPES, ["padded", "dense", "offset", "gaps", "transpose"], [(130, 65)]), ids=str
)
def test_bytes_are_transposed_and_rows_padded_with_zeros(shape: tuple[int, int], layout: str) -> None:
    rows, k = shape
    codes = every_byte(rows, k)
    base = torch.full((rows + 1, -(-k // 16) * 16 + 32), 0xAB, dtype=torch.uint8, device=DEVICE)
    buffer = {
        "padded": base[:rows, : -(-k // 16) * 16].contiguous()[:, :k],
        "dense": torch.empty_like(codes),
        "offset": base[1:, 3 : 3 + k],
        "gaps": base[:rows, 16 : 16 + k],
        "transpose": torch.empty((k, rows), dtype=torch.uint8, device=DEVICE).t(),
    }[layout]
    buffer.copy_(codes)
    transposed = gpu.transpose(buffer.view(torch.float8_e4m3fn))
    assert transposed.dtype == torch.float8_e4m3fn
    assert torch.equal(transposed.view(torch.uint8), codes.t())
    stride = transposed.stride(0)
    assert stride == -(-rows // 16) * 16
    whole = transposed.view(torch.uint8).as_strided((k, stride), (stride, 1))
    assert not whole[:, rows:].any()


@pytest.mark.parametrize("block", [(None, None), (128, 128)], ids=str)
def test_an_operand_in_square_blocks_is_transposed_with_its_scales(block: tuple[int | None, int | None]) -> None:
    x = torch.randn(150, 70, device=DEVICE)
    spec = QuantSpec(E4M3, block)
    q = gpu.quantize(x, spec).T
    transpose_in_place(q)
    assert_same(q, reference.quantize(x.t(), spec))
    assert_padded(q)
    assert not q.transposed


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_an_empty_operand_transposes_to_an_empty_one(shape: tuple[int, int]) -> None:
    assert gpu.transpose(torch.empty(shape, dtype=torch.float8_e5m2, device=DEVICE)).shape == shape[::-1]
