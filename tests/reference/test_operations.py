"""The numpy specification: what its own words promise, worked out another way."""

import numpy as np
import pytest

from quaver.recipes.formats import E2M1, E4M3
from quaver.recipes.spec import QuantSpec
from quaver.reference import Quantized, dequantize, matmul, quantize, spread
from quaver.reference.numerics import amax, decode, rotate, round_to
from tests.close import assert_bitwise, assert_close
from tests.operands import SPECS, nasty

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
MX = QuantSpec(E4M3, (1, 32), "e8m0")
NV = QuantSpec(E2M1, (1, 16), "two_level")
TENSOR = QuantSpec(E4M3)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_same(a: Quantized, b: Quantized, what: str = "") -> None:
    assert_bitwise(a.codes(), b.codes(), f"{what} codes")
    assert_bitwise(a.scales(), b.scales(), f"{what} scales")


@every_spec
def test_codes_scales_and_dequantize_tell_the_same_story(spec: QuantSpec) -> None:
    for name, x in nasty((19, 35)).items():
        q = quantize(x, spec)
        assert q.codes().shape == (19, spec.padded(35)) and q.codes().dtype == np.uint8
        assert q.scales().shape == spec.blocks(19, spec.padded(35)) and q.scales().dtype == np.float32
        with np.errstate(over="ignore"):
            values = decode(q.codes(), spec.format) * spread(q.scales(), spec.block, q.codes().shape)
        assert_bitwise(q.dequantize(), values, name)
        assert_bitwise(dequantize(q), values, name)


@every_spec
def test_the_error_of_an_element_is_at_most_one_step_of_its_block(spec: QuantSpec) -> None:
    x = normal(40, 64)
    q = quantize(x, spec)
    target = rotate(x) if spec.hadamard else x
    scaled = np.abs(target / spread(q.scales(), spec.block, target.shape))
    step = 2.0 ** (np.maximum(np.floor(np.log2(scaled + 1e-30)), spec.format.emin) - spec.format.mantissa_bits)
    allowed = step * (1.0 if spec.rounding == "stochastic" else 0.5) * 1.001
    # With two levels an E4M3 scale may be rounded down, and the largest elements saturate by that much.
    allowed += 2.0**-4 * scaled if spec.two_level else 0
    wrong = np.abs(scaled - np.abs(q.data)) > allowed
    assert not wrong.any(), f"{np.argwhere(wrong)[0]}: {scaled[wrong][0]} became {q.data[wrong][0]}"


@every_spec
@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (1, 1)])
def test_no_size_is_an_error(spec: QuantSpec, shape: tuple[int, int]) -> None:
    q = quantize(normal(*shape), spec)
    rows, k = shape
    assert q.codes().shape == (rows, spec.padded(k))
    assert q.scales().shape == spec.blocks(rows, spec.padded(k))
    assert matmul(q, q).shape == (rows, rows)


@every_spec
def test_a_partial_block_has_its_own_scale(spec: QuantSpec) -> None:
    if None in spec.block or spec.two_level or spec.hadamard or spec.rounding == "stochastic":
        return
    (br, bk), x = spec.block, normal(*(b + b // 2 + 1 for b in spec.block))
    whole = quantize(x, spec)
    for i in (0, 1):
        for j in (0, 1):
            part = x[i * br : (i + 1) * br, j * bk : (j + 1) * bk]
            q = quantize(part, spec)
            assert_bitwise(whole.codes()[i * br : (i + 1) * br, j * bk : (j + 1) * bk], q.codes(), f"block {i}, {j}")
            assert whole.scales()[i, j] == q.scales()[0, 0]


@every_spec
def test_a_zero_operand_dequantizes_to_zeros_of_its_signs(spec: QuantSpec) -> None:
    x = np.array([[0.0, -0.0] * 20] * 3, np.float32)
    q = quantize(x, spec)
    assert_bitwise(q.dequantize(), np.copysign(np.float32(0), rotate(x) if spec.hadamard else x))
    expected = {"e8m0": 2.0**-127}.get(spec.scale, 0.0 if spec.two_level else 1.0)
    assert_bitwise(q.scales(), np.full(q.scales().shape, expected, np.float32))


@every_spec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_has_scale_nan_and_spoils_no_other(spec: QuantSpec, value: float) -> None:
    x = normal(130, 260)
    x[129, 259] = value
    nan = np.isnan(quantize(x, spec).scales())
    expected = np.zeros_like(nan)
    expected[-1, -1] = True
    if spec.two_level:
        expected[:] = True  # the tensor's factor is not finite
    assert_bitwise(nan, expected)


@every_spec
def test_a_given_amax_does_not_make_an_infinity_finite(spec: QuantSpec) -> None:
    x = normal(130, 260)
    x[129, 259] = np.inf
    given = amax(normal(130, spec.padded(260)), (None, None) if spec.two_level else spec.block)
    expected = np.zeros(spec.blocks(130, spec.padded(260)), bool)
    expected[-1, -1] = True
    assert_bitwise(np.isnan(quantize(x, spec, given).scales()), expected)


@every_spec
def test_giving_the_measured_amax_changes_nothing(spec: QuantSpec) -> None:
    for name, x in nasty((37, 70)).items():
        rotated = rotate(x) if spec.hadamard else x
        measured = amax(rotated, (None, None) if spec.two_level else spec.block)
        assert_same(quantize(x, spec, measured), quantize(x, spec), name)


def test_a_given_amax_has_no_sign_and_is_zero_when_subnormal() -> None:
    x = normal(4, 64)
    minus = np.full((4, 2), -3.0, np.float32)
    assert_same(quantize(x, MX, minus), quantize(x, MX, -minus))
    assert_same(quantize(x, MX, minus * np.float32(1e-39)), quantize(x, MX, minus * 0))


def test_a_given_amax_scales_and_larger_values_saturate() -> None:
    x = np.array([[1.0, -100.0, 1e30]], np.float32)
    q = quantize(x, TENSOR, np.array([[1.75]], np.float32))
    assert_bitwise(q.scales(), np.array([[2.0**-8]], np.float32))
    assert_bitwise(q.dequantize(), np.array([[1.0, -1.75, 1.75]], np.float32))


def test_a_factor_is_used_unchanged_and_zero_is_unset() -> None:
    x = normal(3, 5)
    q = quantize(x, TENSOR, factor=4.0)
    assert_bitwise(q.scales(), np.array([[0.25]], np.float32))
    assert_bitwise(q.data, round_to(x * np.float32(4), E4M3))
    assert_same(quantize(x, TENSOR, factor=0.0), quantize(x, TENSOR))
    x[0, 0] = np.nan
    assert np.isnan(quantize(x, TENSOR, factor=4.0).scales()).all()


def test_two_levels_are_the_formula() -> None:
    x = normal(4, 32) * np.float32(1e-3)
    s = np.float32(2.0 ** np.floor(np.log2(2688 / np.abs(x).max())))
    q = quantize(x, NV)
    for i in range(4):
        for j in range(2):
            part = x[i, 16 * j : 16 * (j + 1)]
            block = round_to(np.abs(part).max() * (s * np.float32(1 / 6)), E4M3)
            assert q.scales()[i, j] == np.float32(block / s)
            data = round_to(part * (s * (np.float32(1) / block)), E2M1)
            assert_bitwise(q.data[i, 16 * j : 16 * (j + 1)], data, f"block {i}, {j}")


def test_two_level_blocks_are_measured_despite_a_given_amax() -> None:
    x = normal(4, 32)
    ordinary, larger = quantize(x, NV), quantize(x, NV, np.array([[np.abs(x).max() * 2]], np.float32))
    # A tensor factor of half the size halves the E4M3 codes, not the product of both levels.
    assert_same(larger, ordinary)


def test_a_unit_scale_measures_nothing() -> None:
    spec = QuantSpec(E4M3, (1, 32), "unit")
    q = quantize(np.array([[1000.0, 0.3, np.inf]], np.float32), spec)
    assert_bitwise(q.scales(), np.ones((1, 1), np.float32))
    assert_bitwise(q.data, np.array([[448.0, 0.3125, 448.0]], np.float32))


@every_spec
def test_shards_with_the_reduced_amax_equal_the_whole(spec: QuantSpec) -> None:
    if spec.rounding == "stochastic":
        return  # a shard's noise depends on its position in the whole tensor, which is not known here
    x = normal(256, 512) * 10.0 ** np.random.default_rng(1).uniform(-3, 3, (256, 1)).astype(np.float32)
    whole = quantize(x, spec)
    for axis, half in ((0, 128), (1, 256)):
        parts = np.split(x, 2, axis)
        shared = None in spec.block or spec.two_level
        given: list[np.ndarray | None] = [None, None]
        if shared:
            block = (None, None) if spec.two_level else spec.block
            local = [amax(rotate(p) if spec.hadamard else p, block) for p in parts]
            # An axis that a block spans is reduced over the shards of that axis; along the other each has its own.
            spans = spec.two_level or spec.block[axis] is None
            given = [np.maximum(*local)] * 2 if spans else list(local)
        for i, (part, top) in enumerate(zip(parts, given, strict=True)):
            q = quantize(part, spec, top)
            cut = slice(i * half, (i + 1) * half)
            at = (cut, slice(None)) if axis == 0 else (slice(None), cut)
            assert_bitwise(whole.codes()[at], q.codes(), f"axis {axis}, shard {i}, codes")
            scales = whole.scales()
            if spec.block[axis] is not None:
                scales = np.split(scales, 2, axis)[i]
            assert_bitwise(scales, q.scales(), f"axis {axis}, shard {i}, scales")


def test_stochastic_noise_follows_seed_tensor_and_count() -> None:
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    x = normal(16, 64)
    same = {"seed": 1, "tensor_id": 2, "count": 3}
    codes = quantize(x, spec, **same).codes()  # type: ignore[arg-type]
    assert_bitwise(quantize(x, spec, **same).codes(), codes)  # type: ignore[arg-type]
    for other in ({"seed": 2}, {"tensor_id": 3}, {"count": 4}):
        assert (quantize(x, spec, **same | other).codes() != codes).any(), f"{other} changed nothing"  # type: ignore[arg-type]


def test_stochastic_rounding_is_unbiased_over_counts() -> None:
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    x = normal(8, 64)
    draws = np.stack([quantize(x, spec, count=n).dequantize() for n in range(400)]).astype(np.float64)
    step = 2.0 * spread(quantize(x, spec).scales(), spec.block, x.shape)  # the widest step of E2M1
    # What an E4M3 scale rounded down made saturate is not part of the claim.
    inside = np.abs(x) <= 6 * step / 2
    off = np.abs(draws.mean(0) - x)[inside] / (step[inside] * 0.5 / np.sqrt(400))
    assert off.max() < 4.5, f"{off.max():.1f} sigma"


def test_stochastic_rounding_takes_subnormals_for_zero() -> None:
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    x = np.full((64, 16), 2.0**-100, np.float32)
    x[:, 1:] = -1e-39
    assert_bitwise(quantize(x, spec).codes()[:, 1:], np.full((64, 15), 8, np.uint8))  # minus zero


def test_quantizing_a_quantized_of_the_same_spec_returns_it_and_of_another_is_refused() -> None:
    q = quantize(normal(4, 64), MX)
    assert quantize(q, MX) is q
    with pytest.raises(ValueError, match=r"e4m3\[1x32\]:e8m0 and e2m1\[1x16\]:two_level was asked for; dequantize"):
        quantize(q, NV)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_operands_that_are_no_matrices_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is a matrix"):
        quantize(np.zeros(shape, np.float32), MX)


@every_spec
def test_matmul_is_the_product_of_the_dequantized_operands_and_the_bias(spec: QuantSpec) -> None:
    a, b, bias = quantize(normal(5, 48), spec), quantize(normal(7, 48, seed=1), spec), normal(7, seed=2)[:7]
    expected = np.zeros((5, 7))
    for i in range(5):
        for j in range(7):
            expected[i, j] = np.dot(a.dequantize()[i].astype(np.float64), b.dequantize()[j].astype(np.float64))
    assert_close("product", matmul(a, b), expected, 1e-14)
    assert_close("with bias", matmul(a, b, bias), expected + bias, 1e-14)
    assert matmul(a, b).dtype == np.float64


def test_matmul_takes_unquantized_operands_too() -> None:
    a, b = normal(3, 8), normal(2, 8, seed=1)
    assert_close("unquantized", matmul(a, b), a.astype(np.float64) @ b.T.astype(np.float64), 1e-15)
