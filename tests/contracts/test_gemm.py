"""The GEMM's error is bounded: in float32 1e-6 relative RMS of float64 on the same operands; bf16 rounds that once."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver import reference
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import GemmSpec, QuantSpec
from quaver.torch.backends.cpu.decode import decodes_exactly_to_bf16
from quaver.torch.numerics.reference import double
from tests.close import assert_bitwise, assert_close
from tests.operands import GEMMS, MAGNITUDES, factors
from tests.pairs import pairs

every_gemm = pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
SIZES = [(8, 16, 8), (100, 300, 70), (192, 512, 256), (1, 2000, 130), (130, 2000, 1), (3, 4000, 90)]


def operands(magnitude: str, gemm: GemmSpec, m: int, k: int, n: int) -> tuple[qt.Quantized, qt.Quantized]:
    """a [m, k] and b [n, k]; every other size as transposed views."""
    pair = []
    for x, spec in zip(factors(magnitude, m, k, n), (gemm.a, gemm.b), strict=True):
        assert spec is not None
        t = torch.from_numpy(x)
        pair.append(qt.quantize(t.t().contiguous().t() if k == 300 else t, spec, seed=1))
    return pair[0], pair[1]


def exact(a: qt.Quantized, b: qt.Quantized) -> torch.Tensor:
    return double(a) @ double(b).t()


@every_gemm
def test_float32_output_is_within_1e_6_of_float64(gemm: GemmSpec) -> None:
    # The next size for the next magnitude or GEMM, so that all of them occur with each size.
    for position, magnitude in enumerate(MAGNITUDES, list(GEMMS.values()).index(gemm)):
        m, k, n = SIZES[position % len(SIZES)]
        a, b = operands(magnitude, gemm, m, k, n)
        y, case = exact(a, b), f"{magnitude}, m {m}, k {k}, n {n}"
        assert_close(case, qt.matmul(a, b), y.float(), 1e-6)
        # A bias of ordinary size would hide small products, so it has their magnitude.
        bias = torch.randn(n) * y.abs().amax().clamp(1e-30, 1e30).float()
        assert_close(f"{case}, bias", qt.matmul(a, b, bias=bias), (y + bias.double()).float(), 1e-6)


@every_gemm
def test_half_precision_output_is_float64_rounded_once(gemm: GemmSpec) -> None:
    position = list(GEMMS.values()).index(gemm)
    for at, magnitude in enumerate(("normal", "rows spread", "zeros", "one outlier")[position % 2 :: 2]):
        wrong, total = {torch.bfloat16: 0, torch.float16: 0}, 0
        # Two sizes for each of two magnitudes; others for the GEMM after the next.
        for m, k, n in SIZES[(position // 2 + at) % 3 :: 3]:
            a, b = operands(magnitude, gemm, m, k, n)
            y, bias = exact(a, b), torch.randn(n)
            total += 2 * m * n
            for dtype in wrong:
                # Through float32: rounded twice only if float32 is a tie, once in 2**16.
                plain, biased = y.float().to(dtype), (y + bias.double()).float().to(dtype)
                wrong[dtype] += int((qt.matmul(a, b, dtype) != plain).sum())
                got = qt.matmul(a, b, dtype, bias)
                assert got.dtype == dtype
                wrong[dtype] += int((got != biased).sum())
        # float16 is eight times finer.
        assert wrong[torch.bfloat16] <= 1e-3 * total and wrong[torch.float16] <= 8e-3 * total, f"{magnitude}: {wrong}"


@every_gemm
def test_torch_products_equal_numpy_products(gemm: GemmSpec) -> None:
    assert gemm.a is not None and gemm.b is not None
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=(rows, 70)).astype(np.float32) for rows in (33, 20))
    bias = rng.normal(size=20).astype(np.float32)
    expected = reference.matmul(reference.quantize(a, gemm.a), reference.quantize(b, gemm.b), bias)
    pair = qt.quantize(torch.from_numpy(a), gemm.a), qt.quantize(torch.from_numpy(b), gemm.b)
    assert_close("with bias", qt.matmul(*pair, bias=torch.from_numpy(bias)), expected, 1e-6)
    with qt.only("reference"):
        assert_close("plain", qt.matmul(*pair, bias=torch.from_numpy(bias)), expected, 1e-6)


def touched(spec: QuantSpec, rows: int) -> torch.Tensor:
    """Rows that share a block with an infinity or NaN in row 0."""
    hit = torch.zeros(rows, dtype=torch.bool)
    hit[: rows if spec.two_level or spec.block[0] is None else spec.block[0]] = True
    return hit


@pytest.mark.parametrize(
    ("name", "value", "dtype", "k"),
    pairs(
        GEMMS,
        [float("nan"), float("inf"), float("-inf")],
        [torch.float32, torch.bfloat16, torch.float16],
        [40, 512],
    ),
)
def test_nonfinite_values_make_only_the_products_of_their_block_nan(
    name: str, value: float, dtype: torch.dtype, k: int
) -> None:
    gemm = GEMMS[name]
    assert gemm.a is not None and gemm.b is not None
    a, b = torch.randn(150, k), torch.randn(140, k)
    clean = qt.quantize(a, gemm.a), qt.quantize(b, gemm.b)
    assert qt.matmul(*clean, dtype).isfinite().all()
    a[0, k - 1] = b[0, 3] = value
    bad_a, bad_b = qt.quantize(a, gemm.a), qt.quantize(b, gemm.b)
    rows, columns = touched(gemm.a, 150)[:, None].expand(150, 140), touched(gemm.b, 140).expand(150, 140)
    assert_bitwise(qt.matmul(bad_a, clean[1], dtype).isnan(), rows, "in a")
    assert_bitwise(qt.matmul(clean[0], bad_b, dtype).isnan(), columns, "in b")
    assert_bitwise(qt.matmul(bad_a, bad_b, dtype, torch.randn(140)).isnan(), rows | columns, "in both, with bias")


@every_gemm
def test_an_empty_gemm_is_zeros_or_the_bias(gemm: GemmSpec) -> None:
    assert gemm.a is not None and gemm.b is not None
    for m, k, n in ((0, 16, 8), (8, 16, 0), (8, 0, 4), (0, 0, 0)):
        a, b = qt.quantize(torch.randn(m, k), gemm.a), qt.quantize(torch.randn(n, k), gemm.b)
        bias = torch.randn(n)
        assert_bitwise(qt.matmul(a, b), torch.zeros(m, n), f"m {m}, k {k}, n {n}")
        assert_bitwise(qt.matmul(a, b, bias=bias), bias.expand(m, n), f"m {m}, k {k}, n {n}, bias")


def test_threads_never_see_the_precision_of_float32_products_change() -> None:
    before, seen = torch.backends.mkldnn.matmul.fp32_precision, set()
    some = [operands("normal", gemm, 100, 512, 256) for gemm in list(GEMMS.values())[:4]]

    def multiply() -> None:
        for _ in range(10):
            for pair in some:
                qt.matmul(*pair)

    threads = [threading.Thread(target=multiply) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        time.sleep(0.0001)
    assert seen | {torch.backends.mkldnn.matmul.fp32_precision} == {before}


@pytest.fixture
def rounded_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.mkldnn.matmul.fp32_precision = before[1]


@every_gemm
@pytest.mark.usefixtures("rounded_products")
def test_a_process_that_lets_torch_round_float32_products_gets_the_same_precision(gemm: GemmSpec) -> None:
    for m in (3, 100):
        a, b = operands("normal", gemm, m, 512, 256)
        y = qt.matmul(a, b)
        assert_close(f"m {m}", y, exact(a, b), 1e-6)
        if not (decodes_exactly_to_bf16(a) and decodes_exactly_to_bf16(b)):
            # Independent of the processor's support for the setting: bf16 could not represent the values.
            with qt.only("reference"):
                assert_bitwise(y, qt.matmul(a, b), f"m {m}")


@every_gemm
def test_a_product_is_stored_row_major(gemm: GemmSpec) -> None:
    # The caller views the result in another shape. Alternate, so that each size occurs with every other GEMM.
    sizes = [*SIZES, (100, 64, 2), (2, 64, 100), (300, 4000, 4), (100, 4096, 1)]
    position = list(GEMMS.values()).index(gemm)
    for at, (m, k, n) in enumerate(sizes[position % 2 :: 2], position // 2):
        a, b = operands("normal", gemm, m, k, n)
        # Alternately with and without a bias, over dtypes, sizes and every other GEMM.
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16), at):
            y = qt.matmul(a, b, dtype, torch.ones(n) if number % 2 else None)
            assert y.is_contiguous(), f"m {m}, k {k}, n {n}, {dtype}: strides {y.stride()}"


def test_operands_that_do_not_share_k_and_odd_dtypes_are_refused() -> None:
    gemm = next(iter(GEMMS.values()))
    a, b = operands("normal", gemm, 4, 16, 4)[0], operands("normal", gemm, 4, 32, 4)[1]
    with pytest.raises(ValueError, match="k must agree"):
        qt.matmul(a, b)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        qt.matmul(a, a, torch.float64)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        qt.quantize(torch.zeros(2, 2, dtype=torch.float64), gemm.a)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [(2, None), (3, None), (5, 4), (None, 4)])
def test_scales_of_several_rows_reach_their_rows_in_a_small_product(block: tuple[int | None, int | None]) -> None:
    spec = QuantSpec(E4M3, block)
    a, b = qt.quantize(torch.randn(24, 32), spec), qt.quantize(torch.randn(48, 32), spec)
    assert_close(f"blocks of {block}", qt.matmul(a, b), exact(a, b).float(), 1e-6)
