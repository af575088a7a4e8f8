"""Test that table lookups equal arithmetic: codes to values, and values to codes."""

import math

import pytest
import torch
from torch import Tensor

from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.cpu import decode, gemm
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


def test_flushing_is_seen_by_pythons_own_arithmetic() -> None:
    assert not decode._flushes_subnormals()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        assert decode._flushes_subnormals()
    finally:
        torch.set_flush_denormal(False)
    assert not decode._flushes_subnormals()


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
