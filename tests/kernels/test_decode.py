"""Decoded operands equal data × scale, in float32 and in bfloat16, from every layout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quaver import E4M3, QuantSpec
from quaver.torch.backends.gpu.decode import decode, holds
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized, spread, swizzle
from quaver.torch.operations import ops
from tests.kernels.compare import DEVICE
from tests.operands import SPECS, nasty

WITH_KERNELS = [label for label, spec in SPECS.items() if spec.format.packed or spec.format.name in FLOAT8]

SHAPES = [(64, 128), (70, 45)]
HALF = torch.bfloat16


def layouts(x: Tensor, spec: QuantSpec) -> list[Quantized]:
    """An operand as quantized, as a view of its transpose, and with swizzled scales."""
    q = reference.quantize(x, spec)
    operands = [q]
    if spec.transposable:
        operands.append(q.T)
    if spec.scale == "e8m0" or spec.two_level:
        assert isinstance(q.scale, Tensor)
        rows = spread(q.scale, (spec.block[0], 1), (q.shape[0], q.scale.shape[1]))
        operands.append(Quantized(q.data, swizzle(rows), spec, q.shape, False, q.tensor_factor, swizzled=True))
    return operands


def assert_equal(decoded: Tensor, expected: Tensor) -> None:
    assert decoded.shape == expected.shape
    torch.testing.assert_close(decoded.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("label", WITH_KERNELS)
def test_values_are_data_times_scale(label: str, shape: tuple[int, int]) -> None:
    spec = SPECS[label]
    operands = nasty(shape)
    for name in ("wide", "NaN"):
        for q in layouts(torch.from_numpy(operands[name]).to(DEVICE), spec):
            assert_equal(decode(q, torch.float32), q.dequantize())
            if holds(spec, HALF):
                assert_equal(decode(q, HALF), q.dequantize())


@pytest.mark.parametrize("label", WITH_KERNELS)
def test_outer_scales_can_stay_outside(label: str) -> None:
    spec = SPECS[label]
    x = torch.from_numpy(nasty((48, 96))["normal"]).to(DEVICE)
    if not holds(spec, HALF, outer=False):
        return
    for q in layouts(x, spec):
        inner = decode(q, HALF, outer=False).float()
        if spec.two_level:
            assert_equal(inner, replace(q, tensor_factor=torch.ones(1, 1, device=DEVICE)).dequantize())
        elif spec.block[1] is None:
            assert_equal(inner, q.values())
        else:
            assert_equal(inner, q.dequantize())


def test_formats_beyond_bfloat16_are_refused() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    for spec in (QuantSpec(E4M3, scale="fp32"), QuantSpec(E4M3, (1, 128), "fp32")):
        with pytest.raises(ValueError, match="decode to float32"):
            decode(reference.quantize(x, spec))
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        decode(reference.quantize(x, QuantSpec(E4M3)), torch.float16)
    with pytest.raises(ValueError, match="blocks of a divisor"):
        decode(reference.quantize(x, QuantSpec(E4M3, (1, 48))))


def test_an_empty_operand_is_empty() -> None:
    q = reference.quantize(torch.empty(0, 8, device=DEVICE), QuantSpec(E4M3, (1, 32), "e8m0"))
    assert decode(q).shape == (0, 8)


def test_columns_between_others_are_found() -> None:
    """Rows with a stride larger than their length."""
    q = reference.quantize(torch.from_numpy(nasty((16, 64))["normal"]).to(DEVICE), QuantSpec(E4M3, (1, 32), "e8m0"))
    buffer = torch.full((16, 80), 0x7F, dtype=torch.uint8, device=DEVICE)
    buffer[:, :64] = q.data.view(torch.uint8)
    spaced = Quantized(buffer.view(q.data.dtype)[:, :64], q.scale, q.spec, q.shape)
    assert_equal(decode(spaced), q.dequantize())


@pytest.mark.parametrize("label", SPECS)
def test_dequantized_values_are_rounded_once_in_every_dtype(label: str) -> None:
    x = torch.from_numpy(nasty((48, 96))["NaN"]).to(DEVICE)
    for q in layouts(x, SPECS[label]):
        with ops.only("triton"):
            decoded = [ops.DEQUANTIZE(q, dtype) for dtype in (torch.float64, *ops.DTYPES)]
        for values in decoded:
            assert torch.equal(values.isnan(), q.dequantize().isnan())
            torch.testing.assert_close(values, q.dequantize().to(values.dtype), rtol=0, atol=0, equal_nan=True)
