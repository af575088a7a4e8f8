"""Only on a GPU: products of bf16 values are summed in float32 and rounded once, whatever torch's default allows."""

import pytest
import torch

from quaver.torch.backends.gpu.scaled_mm import FILLS, fills, narrow, wide

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
#: Outputs that just fill a GPU, with short sums and long ones: where a GEMM might still split a sum.
SHAPES = [(4096, 4096, 4096), (16384, 1024, 4096), (1024, 16384, 16384), (4096, 4096, 65536), (4096, 4112, 16384)]


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_that_fill_a_gpu_are_rounded_once(m: int, n: int, k: int, transposed: tuple[bool, bool]) -> None:
    assert fills(m, n) and not fills(m, FILLS // m - 1)
    x = torch.randn((k, m) if transposed[0] else (m, k), device=CARD).bfloat16()
    y = torch.randn((n, k) if transposed[1] else (k, n), device=CARD).bfloat16()
    x, y = x.t() if transposed[0] else x, y.t() if transposed[1] else y
    product = wide(x, y)
    for bias in (None, torch.randn(n, device=CARD).bfloat16()):
        once = (product if bias is None else product + bias.float()).bfloat16()
        # Sums in another order sometimes cross a tie; partial sums rounded to bf16 differ in every other element.
        assert (narrow(x, y, bias) != once).float().mean().item() < 0.01


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 65536), (512, 512, 32), (4096, 1024, 4096)])
def test_a_float32_product_is_within_its_bound(m: int, n: int, k: int) -> None:
    x, y = torch.randn(m, k, device=CARD).bfloat16(), torch.randn(k, n, device=CARD).bfloat16()
    exact = x.double() @ y.double()
    assert ((wide(x, y).double() - exact).norm() / exact.norm()).item() < 1e-6
