"""Operands that several products read are decoded once a call, and never read after they may have changed."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.cpu import decode as repeated
from quaver.torch.backends.cpu import gemm
from quaver.torch.linear.autograd import IDENTITY_INPUT
from quaver.torch.linear.fused_projections import project
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise

TOKENS, K, N = 192, 256, 320


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Quantized]:
    """Each operand that is decoded."""
    each: list[Quantized] = []
    decode = repeated.decode

    def counted(q: Quantized, *args: Any) -> Any:
        each.append(q)
        return decode(q, *args)

    monkeypatch.setattr(repeated, "decode", counted)
    monkeypatch.setattr(gemm, "decode", counted)
    return each


def layers(count: int, recipe: Any) -> list[qt.Linear]:
    torch.manual_seed(0)
    return [qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe) for _ in range(count)]


def run(modules: list[qt.Linear], x: Tensor, gs: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of the input and of the weights."""
    x = x.detach().clone().requires_grad_()
    outputs = project(IDENTITY_INPUT, (x,), modules)
    weights = [module.weight for module in modules]
    return [*outputs, *torch.autograd.grad(outputs, [x, *weights], gs)]


def tensors(count: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, K, generator=generator).bfloat16()
    return x, [torch.randn(TOKENS, N, generator=generator).bfloat16() for _ in range(count)]


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_marks_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gs = tensors(3)
    recipe = getattr(recipes, name)()
    torch.manual_seed(5)
    marked = run(layers(3, recipe), x, gs)
    monkeypatch.setattr(repeated, "cache_decoded", lambda *_: None)
    torch.manual_seed(5)
    for one, other in zip(marked, run(layers(3, recipe), x, gs), strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("count", [1, 3])
def test_each_operand_is_decoded_once_a_direction(count: int, decoded: list[Quantized]) -> None:
    x, gs = tensors(count)
    run(layers(count, recipes.tensorwise()), x, gs)
    # Forward: the input and the weights. Backward: gradients, weights, the input.
    assert len(decoded) == (1 + count) + (2 * count + 1)


def test_codes_written_between_two_calls_are_decoded_again() -> None:
    a, b = (qt.quantize(torch.randn(TOKENS, K), recipes.tensorwise().fprop.a) for _ in range(2))
    repeated.cache_decoded(a, repeated.INPUT)
    first = gemm.matmul(a, b, torch.bfloat16)
    assert_bitwise(gemm.matmul(a, b, torch.bfloat16), first)
    repeated.drop_decoded(a)
    a.data.view(torch.uint8).zero_()
    assert not gemm.matmul(a, b, torch.bfloat16).any()


def test_an_operand_evicted_from_the_decode_cache_is_decoded_again() -> None:
    spec = recipes.tensorwise().fprop.a
    assert spec is not None
    a, b, c = (qt.quantize(torch.randn(TOKENS, K), spec) for _ in range(3))
    expected = [gemm.matmul(q, c, torch.bfloat16) for q in (a, b)]
    of_transpose = gemm.matmul(a.T, b.T, torch.bfloat16)
    for q in (a, b):
        repeated.cache_decoded(q, repeated.INPUT)
        q.cached_transpose = None
    for _ in range(2):
        for q, y in zip((a, b), expected, strict=True):
            assert_bitwise(gemm.matmul(q, c, torch.bfloat16), y)
    # Both in one product: the left one's values must outlive decoding the right one.
    b.decode_cache_key = repeated.DecodeCacheKey(repeated.GRADIENT)
    assert_bitwise(gemm.matmul(a.T, b.T, torch.bfloat16), of_transpose)
    assert_bitwise(gemm.matmul(a, c, torch.bfloat16), expected[0])
    # Values in float32, which fp16 products read, are others.
    assert_bitwise(gemm.matmul(a, c, torch.float16), gemm.matmul(unmarked(a), c, torch.float16))


def unmarked(q: Quantized) -> Quantized:
    return Quantized(q.data, q.scale, q.spec, q.shape, q.transposed)


def test_a_thread_reads_its_own_decoded_values() -> None:
    a, b = (qt.quantize(torch.randn(TOKENS, K), recipes.tensorwise().fprop.a) for _ in range(2))
    repeated.cache_decoded(a, repeated.INPUT)
    expected = gemm.matmul(a, b, torch.bfloat16)
    results: list[Tensor] = []

    def other() -> None:
        c = qt.quantize(torch.randn(TOKENS, K), recipes.tensorwise().fprop.a)
        repeated.cache_decoded(c, repeated.INPUT)
        gemm.matmul(c, b, torch.bfloat16)
        results.append(gemm.matmul(a, b, torch.bfloat16))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert_bitwise(results[0], expected)
    assert_bitwise(gemm.matmul(a, b, torch.bfloat16), expected)


def test_no_operand_is_marked_once_a_forward_has_ended_or_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    cache_decoded = repeated.cache_decoded

    def recorded(q: Any, slot: str) -> None:
        cache_decoded(q, slot)
        if slot == repeated.INPUT:
            seen.append(q)

    monkeypatch.setattr(repeated, "cache_decoded", recorded)
    x, _ = tensors(2)
    modules = layers(2, recipes.tensorwise())
    project(IDENTITY_INPUT, (x.requires_grad_(),), modules)
    assert len(seen) == 1 and seen[0].decode_cache_key is None
    modules[1].weight = nn.Parameter(torch.randn(N, K + 2, dtype=torch.bfloat16))
    with pytest.raises(Exception):  # noqa: B017
        project(IDENTITY_INPUT, (x,), modules)
    assert all(q.decode_cache_key is None for q in seen)
