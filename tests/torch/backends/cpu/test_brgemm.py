"""float32 products of bf16 on a CPU: equal to float64's within float32's own error, in every layout."""

from typing import Any

import pytest
import torch

from quaver.torch.backends.cpu import brgemm as cpu_brgemm

available = pytest.mark.skipif(cpu_brgemm._functions() is None, reason="this CPU or this torch has no such block")


@available
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 64, 2), (3, 32, 10), (128, 64, 512), (130, 96, 514), (257, 192, 1030), (130, 64, 77), (200, 64, 4095)],
    ids=str,
)
def test_product_is_float64s_within_float32s_error(shape: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    if turned[0]:
        a = a.t().contiguous().t()
    if turned[1]:
        b = b.t().contiguous().t()
    y, exact = cpu_brgemm.product(a, b), a.double() @ b.double().t()
    assert y.dtype is torch.float32 and y.is_contiguous()
    assert (y - exact).norm() <= 5e-7 * exact.norm()


@available
def test_nan_infinity_and_an_outlier_stay_in_their_row() -> None:
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    a[3, 5], a[7, 1], a[9, 2] = torch.nan, torch.inf, 1e30
    y = cpu_brgemm.product(a, b)
    assert y[3].isnan().all() and y[7].isinf().all()
    others = [i for i in range(128) if i not in (3, 7)]
    torch.testing.assert_close(y[others], a[others].float() @ b.float().t(), rtol=1e-5, atol=1e-5)


def test_only_large_products_of_one_thread_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_brgemm, "_functions", lambda: (None, None))
    assert cpu_brgemm.takes(512, 512, 512)
    for shape in [(64, 512, 512), (512, 500, 512), (128, 128, 128)]:
        assert not cpu_brgemm.takes(*shape), shape
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not cpu_brgemm.takes(512, 512, 512)


def test_a_processor_without_bf16_instructions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert cpu_brgemm._functions.__wrapped__() is None


def test_memory_for_c_is_what_c_takes_it_for() -> None:
    good = torch.zeros(6, 4, dtype=torch.float32)
    assert cpu_brgemm.address(good, torch.float32, 24) == good.data_ptr()
    wrong = good.double(), good.to("meta"), good.t(), good[:, :3], torch.zeros(0, dtype=torch.float32)
    for t in wrong:
        with pytest.raises(ValueError, match=r"24 contiguous elements of torch\.float32 on the CPU"):
            cpu_brgemm.address(t, torch.float32, 24)


@available
def test_blocks_are_compiled_for_few_sizes_whatever_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = cpu_brgemm._functions()
    assert functions is not None
    sizes = set()

    def brgemm(*arguments: Any) -> None:
        sizes.add(arguments[:7])
        functions[0](*arguments)

    monkeypatch.setattr(cpu_brgemm, "_functions", lambda: (brgemm, functions[1]))
    w = torch.randn(64, 96).bfloat16()
    for tokens in range(128, 1500, 13):
        x, g = torch.randn(tokens, 96).bfloat16(), torch.randn(tokens, 64).bfloat16()
        cpu_brgemm.product(x, w)
        cpu_brgemm.product(g, w.t())
        cpu_brgemm.product(torch.randn(tokens, 128).bfloat16().t(), x.t())
    # Of wgrad: a last piece of 1 to 16 steps, the first or one that is added, and whole ones.
    assert len(sizes) <= 2 + 3 * 16, sorted(sizes)
