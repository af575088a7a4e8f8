"""Products with few rows or columns are decoded slice by slice and stay within the bound of every other product."""

import pytest
import torch

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import GemmSpec
from quaver.torch.backends.cpu import gemm as cpu_gemm
from quaver.torch.backends.cpu import gemm as narrow
from quaver.torch.numerics.reference import double
from tests.close import assert_bitwise, assert_close
from tests.operands import GEMMS, MAGNITUDES, factors

every_gemm = pytest.mark.parametrize("gemm", GEMMS.values(), ids=GEMMS)
#: Rows, k and columns: slices that end between blocks, sums of several pieces, one long row.
SHAPES = [(1, 1500, 300), (300, 1500, 1), (4, 1000, 170), (1, 5000, 1), (2, 33, 400)]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "SLICE", 1 << 15)
    monkeypatch.setattr(cpu_gemm, "SMALL", 0)


def operands(
    gemm: GemmSpec, m: int, k: int, n: int, magnitude: str, transposed: bool
) -> tuple[qt.Quantized, qt.Quantized]:
    """a [m, k] and b [n, k], optionally quantized from transposed views."""
    a, b = map(torch.from_numpy, factors(magnitude, m, k, n))
    assert gemm.a is not None and gemm.b is not None
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    return qt.quantize(a, gemm.a), qt.quantize(b, gemm.b)


# Every other magnitude, with the next GEMM the others: five in a row still meet the five shapes.
@pytest.mark.parametrize(
    ("name", "magnitude", "transposed"),
    [
        (name, magnitude, bool((g + m) // 2 % 2))
        for g, name in enumerate(GEMMS)
        for m, magnitude in enumerate(MAGNITUDES)
        if (g + m) % 2 == 0
    ],
)
def test_narrow_products_are_within_1e_6_of_float64(name: str, magnitude: str, transposed: bool) -> None:
    """Every GEMM and every magnitude occurs with every shape, alternating over the cases."""
    m, k, n = SHAPES[(list(GEMMS).index(name) + list(MAGNITUDES).index(magnitude)) % len(SHAPES)]
    a, b = operands(GEMMS[name], m, k, n, magnitude, transposed)
    exact = double(a) @ double(b).t()
    assert_close(f"m {m}, k {k}, n {n}", qt.matmul(a, b), exact.float(), 1e-6)
    bias = torch.randn(n) * exact.abs().amax().clamp(1e-30, 1e30).float()
    assert_close("with bias", qt.matmul(a, b, bias=bias), (exact + bias.double()).float(), 1e-6)


@every_gemm
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_reach_the_same_rows_as_in_float64(gemm: GemmSpec, value: float) -> None:
    assert gemm.a is not None and gemm.b is not None
    x, w = torch.randn(1, 1500), torch.randn(300, 1500)
    w[131, 7] = value
    a, b = qt.quantize(x, gemm.a), qt.quantize(w, gemm.b)
    expected = (double(a) @ double(b).t()).isnan()
    assert expected.any()
    assert_bitwise(qt.matmul(a, b).isnan(), expected)
    assert_bitwise(qt.matmul(b, a).isnan(), expected.t()) if gemm.a == gemm.b else None


def test_scales_too_far_apart_for_float32_are_multiplied_in_float64() -> None:
    spec = recipes.mxfp8().fprop.a
    assert spec is not None
    w = torch.randn(64, 2048)
    w[:, :32] *= 1e-30
    x = torch.randn(2, 2048)
    x[:, :32] *= 1e30
    a, b = qt.quantize(x, spec), qt.quantize(w, spec)
    assert_close("far apart", qt.matmul(a, b), (double(a) @ double(b).t()).float(), 1e-6)


@pytest.mark.parametrize("rows", [5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_rows_with_a_large_operand_use_the_same_path(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemm, "NARROW_LARGE", (16, 1 << 14))
    gemm = next(iter(GEMMS.values()))
    a, b = operands(gemm, rows, 400, 100, "one outlier", False)
    exact = (double(a) @ double(b).t()).float()
    assert_close("product", qt.matmul(a, b, dtype), exact.to(dtype), 1e-6 if dtype is torch.float32 else 1e-4)
