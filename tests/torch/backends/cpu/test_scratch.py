"""Memory that is written again and again reaches nobody: what was given before stays as it was."""

import threading

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.cpu import scratch
from quaver.torch.numerics.quantized import FLOAT8
from tests.close import assert_bitwise
from tests.operands import SPECS

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
    turned = qt.quantize(y.t(), spec)
    qt.matmul(turned, turned, torch.bfloat16)
    assert_bitwise(first.codes(), codes)
    assert_bitwise(first.scales(), scales)
    assert_bitwise(product, before)
    with qt.only("reference"):
        assert_bitwise(codes, qt.quantize(x, spec).codes())


def test_a_slot_is_one_memory_for_a_thread_and_another_for_the_next() -> None:
    held = scratch.room("test", SHAPE, torch.float32)
    again = scratch.room("test", SHAPE, torch.int32)
    assert again.data_ptr() == held.data_ptr() and again.is_contiguous() and again.shape == SHAPE
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(scratch.room("test", SHAPE, torch.int32).data_ptr()))
    thread.start()
    thread.join()
    assert others != [held.data_ptr()]


@pytest.mark.parametrize("size", [scratch.SMALLEST - 1, scratch.LARGEST + 1])
def test_little_and_much_is_not_held(size: int) -> None:
    first, second = (scratch.room("test", (size,), torch.uint8) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_memory_made_in_inference_mode_serves_training() -> None:
    layer = qt.Linear(256, 256, recipe=recipes.mxfp8())
    with torch.inference_mode():
        scratch._held.slots.clear()
        layer(torch.randn(256, 256))
    layer(torch.randn(256, 256, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.isnan().any()
