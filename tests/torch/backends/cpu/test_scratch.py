"""Test that reused scratch memory is never visible: earlier results stay unchanged."""

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def test_a_slot_is_one_memory_for_a_thread_and_another_for_the_next() -> None:
    held = quantize.buffer("test", SHAPE, torch.float32)
    again = quantize.buffer("test", SHAPE, torch.int32)
    assert again.data_ptr() == held.data_ptr() and again.is_contiguous() and again.shape == SHAPE
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(quantize.buffer("test", SHAPE, torch.int32).data_ptr()))
    thread.start()
    thread.join()
    assert others != [held.data_ptr()]


@pytest.mark.parametrize("size", [quantize.SMALLEST - 1, quantize.LARGEST + 1])
def test_scratch_memory_is_cached_only_between_two_sizes(size: int) -> None:
    first, second = (quantize.buffer("test", (size,), torch.uint8) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


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


class Fresh(TorchDispatchMode):
    """The bytes of the largest memory that an operation has made for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = func(*args, **(kwargs or {}))
        for t in tree_leaves(results):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("transposed", [False, True])
def test_quantizing_a_large_tensor_allocates_only_its_codes(transposed: bool, name: str) -> None:
    x = torch.randn(2048, 1024 + 128)
    assert x.numel() * 4 > quantize.LARGEST
    given = x.t() if transposed else x
    qt.quantize(given, FP8[name])
    with Fresh() as fresh:
        q = qt.quantize(given, FP8[name])
    assert fresh.largest == math.prod(q.codes().shape)
