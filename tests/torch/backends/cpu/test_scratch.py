"""Test that reused scratch memory is never visible: earlier results stay unchanged."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.cpu import quantize
from quaver.torch.numerics.quantized import FLOAT8
from tests.close import assert_bitwise
from tests.operands import SPECS, nasty
from tests.pairs import case_name, pairs

#: Large enough to be held.
SHAPE = 256, 192
FP8 = {name: spec for name, spec in SPECS.items() if spec.format.name in FLOAT8}


def operand(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FP8)
def test_operands_and_products_outlive_the_next_ones(name: str, dtype: torch.dtype) -> None:
    spec = FP8[name]
    x, y = (operand(seed, dtype) for seed in range(2))
    first = qt.quantize(x, spec)
    product = qt.matmul(first, first)
    codes, scales, before = first.codes().clone(), first.scales().clone(), product.clone()
    transposed = qt.quantize(y.t(), spec)
    qt.matmul(transposed, transposed, torch.bfloat16)
    assert_bitwise(first.codes(), codes)
    assert_bitwise(first.scales(), scales)
    assert_bitwise(product, before)
    with qt.only("reference"):
        assert_bitwise(codes, qt.quantize(x, spec).codes())


def test_memory_made_in_inference_mode_is_usable_in_training() -> None:
    layer = qt.Linear(256, 256, recipe=recipes.mxfp8())
    with torch.inference_mode():
        quantize._scratch.slots.clear()
        layer(torch.randn(256, 256))
    layer(torch.randn(256, 256, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.isnan().any()


@pytest.mark.parametrize(
    ("shape", "name", "dtype"),
    pairs(((259, 321), (1, 70_000), (2, 40_001)), FP8, (torch.float32, torch.bfloat16, torch.float16)),
    ids=case_name,
)
def test_operands_are_the_same_piece_by_piece(
    shape: tuple[int, int], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "PIECE", 5000)
    hard = nasty(shape)
    for kind in ("normal", "NaN", "-infinity", "wide") if shape[0] == 259 else ("normal",):
        x = torch.from_numpy(hard[kind]).to(dtype)
        for side, given in (("as it lies", x), ("transposed", x.t())):
            q = qt.quantize(given, FP8[name])
            with qt.only("reference"):
                expected = qt.quantize(given, FP8[name])
            assert_bitwise(q.codes(), expected.codes(), f"{kind}, {side}")
            assert_bitwise(q.scales(), expected.scales(), f"scales, {kind}, {side}")
