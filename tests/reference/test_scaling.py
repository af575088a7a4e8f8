"""amax and the factors that follow from it, against exact arithmetic around every power of two."""

import numpy as np
import pytest

from quaver.recipes.formats import E2M1, E4M3, E5M2, FORMATS, Format
from quaver.reference.numerics import (
    FACTOR_EXPONENTS,
    FLT_MAX,
    TENSOR_EXPONENTS,
    TWO_LEVEL_MAX,
    amax,
    block_factor,
    block_scale,
    encode_factor,
    exponent,
    magnitudes,
    tensor_factor,
)
from tests.close import assert_bitwise
from tests.pairs import alternating

SIGNED = [f for f in FORMATS.values() if f.signed]
#: (largest, bounds of the exponent).
SCALES = {f.name: (f.max, FACTOR_EXPONENTS) for f in SIGNED} | {"two-level": (TWO_LEVEL_MAX, TENSOR_EXPONENTS)}
TINY = np.float32(2.0**-126)


def edges(largest: float) -> np.ndarray:
    """Every power of two and every largest × power of two that float32 holds, each ± two ulps, and random others."""
    powers = 2.0 ** np.arange(-126, 128)
    with np.errstate(over="ignore"):
        marks = np.concatenate([powers, largest * powers / 2.0**8, largest * powers]).astype(np.float32)
    marks = marks[np.isfinite(marks) & (marks >= TINY)]
    near = [marks]
    for towards in (np.float32(0), np.float32(np.inf)):
        step = np.nextafter(marks, towards)
        near += [step, np.nextafter(step, towards)]
    rng = np.random.default_rng(0)
    random = rng.integers(0x00800000, 0x7F800000, 20000).astype(np.uint32).view(np.float32)
    every = np.unique(np.concatenate([*near, random, [TINY, FLT_MAX]]).astype(np.float32))
    return every[np.isfinite(every) & (every >= TINY)]


@pytest.mark.parametrize("name", SCALES)
def test_the_exponent_is_the_largest_that_does_not_saturate_and_is_clamped(name: str) -> None:
    largest, bounds = SCALES[name]
    a = edges(largest)
    p = exponent(a, largest, bounds)
    exact = a.astype(np.float64)  # a power of two times a float32 is exact in float64
    fits, next_fits = np.ldexp(exact, p) <= largest, np.ldexp(exact, p + 1) <= largest
    right = np.where(p == bounds[0], ~next_fits, np.where(p == bounds[1], fits, fits & ~next_fits))
    assert right.all(), f"amax {a[~right][0]!r}: p = {p[~right][0]}"
    assert p.min() >= bounds[0] and p.max() == bounds[1]
    assert p.dtype == np.int32


@pytest.mark.parametrize("name", SCALES)
def test_exponent_bounds_apply_only_when_the_rule_exceeds_them(name: str) -> None:
    largest, bounds = SCALES[name]
    top = np.float32(largest * 2.0 ** -bounds[1])
    assert exponent(np.nextafter(top, np.float32(1)), largest, bounds) == bounds[1] - 1
    for a in (top, TINY):
        assert exponent(np.asarray(a), largest, bounds) == bounds[1]
    lowest = int(exponent(np.asarray(FLT_MAX), largest, (-1000, 1000)))
    assert exponent(np.asarray(FLT_MAX), largest, bounds) == max(lowest, bounds[0])


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_factor_is_one_where_amax_is_zero_or_not_finite(value: float, power_of_two: bool) -> None:
    a = np.array([[value]], np.float32)
    for fmt in SIGNED:
        assert_bitwise(encode_factor(a, fmt, power_of_two), np.ones((1, 1), np.float32))
    assert_bitwise(tensor_factor(a, power_of_two), np.ones((1, 1), np.float32))


@pytest.mark.parametrize("fmt", SIGNED, ids=str)
def test_a_power_of_two_factor_is_two_to_the_exponent(fmt: Format) -> None:
    a = edges(fmt.max)
    assert_bitwise(encode_factor(a, fmt, True), np.ldexp(1.0, exponent(a, fmt.max)).astype(np.float32))


@pytest.mark.parametrize("fmt", SIGNED, ids=str)
def test_a_divided_factor_is_correctly_rounded_and_normal(fmt: Format) -> None:
    a = edges(fmt.max)
    quotient = np.clip(fmt.max / a.astype(np.float64), float(TINY), float(FLT_MAX)).astype(np.float32)
    assert_bitwise(encode_factor(a, fmt, False), quotient)


def test_a_divided_tensor_factor_stops_at_the_largest_float() -> None:
    a = edges(TWO_LEVEL_MAX)
    quotient = np.minimum(TWO_LEVEL_MAX / a.astype(np.float64), float(FLT_MAX)).astype(np.float32)
    assert_bitwise(tensor_factor(a, False), quotient)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_e8m0_code_is_amax_times_the_rounded_reciprocal_rounded_up(fmt: Format) -> None:
    a = edges(fmt.max)
    code = 127 - exponent(a, fmt.max)
    product = a * np.float32(1 / fmt.max)
    bits = product.view(np.uint32).astype(np.int64)
    up = (bits >> 23) + (bits & 0x7FFFFF != 0)
    inside = (up >= 127 - FACTOR_EXPONENTS[1]) & (up <= 127 - FACTOR_EXPONENTS[0]) & (product >= TINY)
    wrong = inside & (code != up)
    assert not wrong.any(), f"amax {a[wrong][0]!r}: code {code[wrong][0]}, rounded up {up[wrong][0]}"
    assert inside.sum() > len(a) * 0.8
    assert code.min() == 27 and code.max() <= 253


SHAPES = [(4, 6), (5, 7), (1, 1), (33, 17), (0, 3), (3, 0), (0, 0)]
BLOCKS = [(None, None), (1, None), (1, 4), (4, 4), (16, 32), (None, 1)]


@pytest.mark.parametrize(("shape", "block"), alternating(SHAPES, BLOCKS, [(33, 17)]))
def test_amax_is_the_largest_magnitude_of_every_block_partial_ones_too(
    shape: tuple[int, int], block: tuple[int | None, int | None]
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows, columns = (
        [slice(None)] if b is None else [slice(i, i + b) for i in range(0, n, b)]
        for n, b in zip(shape, block, strict=True)
    )
    expected = np.array([[np.abs(x[r, c]).max(initial=0) for c in columns] for r in rows], np.float32)
    assert_bitwise(amax(x, block), expected.reshape(len(rows), len(columns)))


def test_amax_orders_nan_over_infinity_over_finite_and_counts_subnormals_as_zero() -> None:
    x = np.array([[-np.nan, np.inf], [-np.inf, 3e38], [-2.0, 1.0], [1e-39, -1e-45], [-TINY, 1e-39]], np.float32)
    assert_bitwise(amax(x, (1, None))[:, 0], np.array([np.nan, np.inf, 2.0, 0.0, TINY], np.float32))


def test_a_block_scale_is_e4m3_of_a_sixth_of_the_scaled_amax() -> None:
    a, factor = np.array([[6.0, 0.0, 1e-9, 1e9, np.nan, np.inf]], np.float32), np.float32(64)
    expected = np.array([[64.0, 0.0, 0.0, 448.0, np.nan, 448.0]], np.float32)
    assert_bitwise(block_scale(a, np.array([[factor]])), expected)


def test_the_largest_element_of_a_tensor_gets_a_block_scale_within_e4m3() -> None:
    a = edges(TWO_LEVEL_MAX)
    with np.errstate(over="raise", invalid="raise"):
        exponents = exponent(a, TWO_LEVEL_MAX, TENSOR_EXPONENTS)
        small = block_scale(a, tensor_factor(a, True))
    free = (exponents > TENSOR_EXPONENTS[0]) & (exponents < TENSOR_EXPONENTS[1])
    assert small[free].min() >= 208 and small.max() <= E4M3.max  # within a factor 2 (and a rounding) of the top


def test_under_a_power_of_two_a_block_factor_is_that_times_a_rounded_reciprocal() -> None:
    scales = magnitudes(E4M3)[:127]
    for factor in (np.float32(1), np.float32(2.0**100), np.float32(2.0**-117)):
        reciprocals = (1 / scales[1:].astype(np.float64)).astype(np.float32)
        expected = np.concatenate([[np.float32(0)], factor * reciprocals])
        assert_bitwise(block_factor(scales, factor), expected.astype(np.float32))


def test_a_block_factor_that_would_overflow_is_the_largest_float() -> None:
    assert block_factor(magnitudes(E4M3)[1:2], FLT_MAX) == FLT_MAX


def test_the_two_level_maximum_is_the_product_of_both_formats_largest() -> None:
    assert E4M3.max * E2M1.max == TWO_LEVEL_MAX
