"""Test that table lookups equal arithmetic: codes to values, and values to codes."""

import math

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
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


#: Packed codes in blocks whose scales a byte has one of, and in blocks that end within a byte.
FEW_BITS = ["e2m1[1x16]:two_level", "e2m1[16x16]:two_level", "e2m1[3x5]:two_level", "e2m1[1x32]:e8m0", "e2m1[2x7]:e8m0"]


@pytest.mark.parametrize("shape", [(48, 64), (33, 50)])
@pytest.mark.parametrize("text", [*FEW_BITS, "e2m3[1x32]:e8m0", "e3m2[32x32]:e8m0", "e2m1[1x32]:power_of_two"])
def test_few_bits_decode_to_their_values_times_their_scales(
    text: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[Quantized] = []
    look_up = decode._look_up
    monkeypatch.setattr(decode, "_look_up", lambda q, *rest: looked_up.append(q) or look_up(q, *rest))  # type: ignore[func-returns-value]
    spec = QuantSpec.parse(text)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [1e-4], [0.0]]).repeat(
        16 if shape[0] == 48 else 11, 1
    )
    q = qt.quantize(x, spec)
    for operand in (q, q.T) if spec.transposable else (q,):
        for as_bf16 in (True, False):
            decoded = decode.decode(operand, as_bf16, False, "left")
            assert decoded is not None
            values, factor = decoded
            assert values.dtype is (torch.bfloat16 if as_bf16 else torch.float32) and isinstance(factor, float)
            assert_bitwise(values.float() * factor, operand.dequantize(), f"bf16 {as_bf16}")
    assert bool(looked_up) == (text not in ("e2m1[3x5]:two_level", "e2m1[2x7]:e8m0", "e2m1[1x32]:power_of_two"))
