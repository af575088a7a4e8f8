"""bf16 products of codes on a CPU, on processors that multiply bf16 and on those that do not."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.recipes import RECIPES
from quaver.torch.backends.cpu import gemm
from quaver.torch.operations.ops import QUANTIZE
from tests.close import assert_bitwise


class Dtypes(TorchDispatchMode):
    """Of what `mm` and `addmm` multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen |= {x.dtype for x in args}
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_bf16_products_are_one_rounding_from_the_exact_ones(
    name: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "multiplies_bf16", lambda: multiplies)
    spec, dtype = RECIPES[name]().fprop, torch.bfloat16
    assert spec.a is not None and spec.b is not None
    a, b = QUANTIZE(torch.randn(130, 160).to(dtype), spec.a), QUANTIZE(torch.randn(144, 160).to(dtype), spec.b)
    with Dtypes() as multiplied:
        y = gemm.matmul(a, b, dtype)
    assert multiplied.seen == {dtype if multiplies else torch.float32}
    exact = a.dequantize().double() @ b.dequantize().double().t()
    assert y.dtype is dtype and ((y - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    # It lies in no memory that the next product writes.
    before = y.clone()
    gemm.matmul(a, QUANTIZE(torch.randn(144, 160).to(dtype), spec.b), dtype)
    assert_bitwise(y, before, name)
