"""Test that table lookups equal arithmetic: codes to values, and values to codes."""

import math

import pytest
import torch
from torch import Tensor

from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.cpu import decode, gemm, quantize
from quaver.torch.numerics.quantized import FLOAT8, Quantized
from tests.close import assert_bitwise
from tests.pairs import pairs

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def per_tensor(fmt: Format) -> QuantSpec:
    return QuantSpec(fmt, scale="power_of_two")


@FORMATS
@pytest.mark.parametrize(("rows", "transposed", "flushes"), pairs((1, 7, 2100), (False, True), (False, True)))
def test_all_codes_decode_to_their_values_times_a_scale(
    fmt: Format, rows: int, transposed: bool, flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_flushes_subnormals", lambda: flushes)
    codes = torch.arange(256, dtype=torch.uint8).expand(rows, 256).contiguous().view(FLOAT8[fmt.name])
    values = codes.float()
    finite = values.isfinite()
    for scale in (2.0**-70, 2.0**-50, 2.0**-3, 1.0, 2.0**6, 2.0**7, 0.7):
        for amax in (None, 1.0):
            q = Quantized(
                codes, scale, per_tensor(fmt), (256, rows) if transposed else (rows, 256), transposed, None, amax
            )
            for half in (False, True):
                decoded = decode.decode(q, half, False, "left")
                assert decoded is not None
                given, factor = decoded
                assert given.shape == q.shape and given.dtype is (torch.bfloat16 if half else torch.float32)
                assert isinstance(factor, float)
                given = (given.t() if transposed else given).float() * factor
                assert_bitwise(given[finite], (values * scale)[finite], f"scale {scale}, amax {amax}, half {half}")
                if fmt is E5M2 and amax is None:
                    # Codes from elsewhere may be infinite though their scale is finite.
                    assert_bitwise(given.isinf(), values.isinf())
                    assert given[values.isnan()].isnan().all()


def test_one_code_that_is_not_finite_is_seen_among_all_that_are() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(torch.float8_e5m2).float().isfinite()
    assert finite.sum() == 248
    rest = codes[finite]
    for code, expected in zip(codes, finite, strict=True):
        data = torch.cat([rest, code[None], rest]).view(1, -1).view(torch.float8_e5m2)
        q = Quantized(data, 1.0, per_tensor(E5M2), (1, data.shape[1]))
        assert decode._is_finite(q) is bool(expected), int(code)
    for amax, known in ((1.0, True), (math.inf, False), (math.nan, False)):
        assert decode._is_finite(Quantized(data, 1.0, per_tensor(E5M2), (1, 2), False, None, amax)) is known


def test_flushing_is_seen_by_pythons_own_arithmetic() -> None:
    assert not decode._flushes_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert decode._flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)
    assert not decode._flushes_subnormals()


@FORMATS
@pytest.mark.parametrize("exponent", [0, 1, 7, 8, 30, 99, 100])
def test_an_exponent_added_to_bits_is_a_product(fmt: Format, exponent: int) -> None:
    """All bf16 values that the format holds then, zeros and subnormals of both signs among them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = every.double() * 2.0**exponent
    x = every[exact.abs() <= fmt.max]
    assert 2.0**exponent <= quantize.LIFT and x.numel() * x.itemsize >= quantize.SMALLEST // 4
    given = quantize._lifted(x.view(-1, 1), exponent, fmt)
    expected = (x.double() * 2.0**exponent).float().to(FLOAT8[fmt.name])
    assert_bitwise(given.view(torch.uint8).flatten(), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scales", [(2.0**-50, 2.0**-50), (2.0**6, 2.0**6), (2.0**-37, 2.0**3), (2.0**-90, 2.0**-10)])
def test_a_scale_in_the_operand_gives_the_bits_of_one_on_the_product(
    scales: tuple[float, float], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def operand(fmt: Format, rows: int, scale: float) -> Quantized:
        # Products of the smallest codes beside some of large ones.
        x = torch.randn(rows, 130, generator=generator).mul_(2.0).exp_().clamp_(max=fmt.max).mul_(2.0**-fmt.emax)
        x *= torch.randn(rows, 130, generator=generator).sign()
        return Quantized(x.to(FLOAT8[fmt.name]), scale, per_tensor(fmt), (rows, 130))

    a, b = operand(E5M2, 160, scales[0]), operand(E4M3, 128, scales[1])

    def product() -> Tensor:
        return gemm.matmul(a, b, dtype)

    folded = product()
    monkeypatch.setattr(decode, "FOLD", (1, 0))
    assert_bitwise(folded, product())
    assert math.prod(folded.shape) > 0 and folded.isfinite().any()
