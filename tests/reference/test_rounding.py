"""round_to: all bf16 values against ml_dtypes, every midpoint, and rounding at random against its own definition."""

import ml_dtypes
import numpy as np
import pytest

from quaver import reference
from quaver.recipes.formats import E8M0, FORMATS, Format
from quaver.reference.numerics import NAN_CODE, encode, magnitudes, round_to, uniform
from tests.close import assert_bitwise
from tests.recipes.test_formats import KNOWN, PEERS

SIGNED = [f for f in FORMATS.values() if f.signed]
U5M3 = Format(name="u5m3", bits=8, exponent_bits=5, mantissa_bits=3, bias=15, max=114688.0, signed=False)
BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
signed = pytest.mark.parametrize("fmt", SIGNED, ids=str)


def grid(fmt: Format) -> np.ndarray:
    """Every finite magnitude, ascending."""
    return magnitudes(fmt)[np.isfinite(magnitudes(fmt))]


def float32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("fmt", KNOWN, ids=str)
def test_every_code_decodes_to_its_value_and_back(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = reference.decode(codes, fmt)
    peer = codes.view(PEERS[fmt.name]).astype(np.float32)
    assert_bitwise(values, np.where(np.isinf(peer), np.float32(np.nan), peer))  # E5M2's infinity is never produced.
    finite = ~np.isnan(values)
    assert_bitwise(reference.encode(values, fmt)[finite], codes[finite])
    assert_bitwise(reference.decode(reference.encode(values, fmt), fmt), values)


@pytest.mark.parametrize("fmt", [f for f in KNOWN if f.signed], ids=str)
def test_every_bf16_value_rounds_as_in_ml_dtypes(fmt: Format) -> None:
    numbers = BF16[~np.isnan(BF16)]
    peer = np.clip(numbers, -fmt.max, fmt.max).astype(PEERS[fmt.name])
    assert_bitwise(round_to(numbers, fmt), peer.astype(np.float32))
    assert_bitwise(encode(round_to(numbers, fmt), fmt), peer.view(np.uint8))


@signed
def test_a_midpoint_goes_to_the_even_code_and_an_ulp_decides(fmt: Format) -> None:
    low, high = grid(fmt)[:-1], grid(fmt)[1:]
    middle = ((low.astype(np.float64) + high) / 2).astype(np.float32)
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    for sign in (np.float32(1), np.float32(-1)):
        assert_bitwise(round_to(sign * middle, fmt), sign * even, "at the midpoint")
        assert_bitwise(round_to(sign * np.nextafter(middle, np.float32(0)), fmt), sign * low, "an ulp below")
        assert_bitwise(round_to(sign * np.nextafter(middle, np.float32(np.inf)), fmt), sign * high, "an ulp above")


def test_every_normal_bf16_value_rounds_to_e8m0_as_in_ml_dtypes() -> None:
    # Zero, infinities and negative numbers are NaN there, and subnormal float32 are rounded as if code 0 were zero.
    numbers = BF16[(BF16 >= 2.0**-126) & (BF16 <= 2.0**127)]
    assert_bitwise(encode(round_to(numbers, E8M0), E8M0), numbers.astype(PEERS["e8m0"]).view(np.uint8))


@pytest.mark.parametrize("fmt", [E8M0, U5M3], ids=str)
def test_a_format_without_a_sign_rounds_magnitudes(fmt: Format) -> None:
    x = float32(0, -0.0, 1e-45, -3, 1.5, 3e38, np.inf, -np.inf)
    smallest = 2.0**-127 if fmt is E8M0 else 0.0
    expected = float32(smallest, smallest, smallest, *((4, 2) if fmt is E8M0 else (3, 1.5)), *[fmt.max] * 3)
    assert_bitwise(round_to(x, fmt), expected)
    values = reference.decode(np.arange(256), fmt)
    assert_bitwise(round_to(values, fmt), values)
    assert_bitwise(encode(values, fmt), np.arange(256, dtype=np.uint8))
    half = np.float32(1.5) * np.float32(2.0**-127)
    assert_bitwise(round_to(float32(half, half), E8M0, float32(0.49, 0.5)), float32(2.0**-126, 2.0**-127))


@signed
def test_grid_values_stay_unchanged(fmt: Format) -> None:
    values = np.concatenate([grid(fmt), -grid(fmt)])
    assert_bitwise(round_to(values, fmt), values)


@signed
def test_too_large_and_infinite_become_the_largest(fmt: Format) -> None:
    step = grid(fmt)[-1] - grid(fmt)[-2]
    beyond = float32(fmt.max, np.nextafter(np.float32(fmt.max), np.float32(np.inf)), fmt.max + step / 2, 3.4e38, np.inf)
    assert_bitwise(round_to(beyond, fmt), np.full(5, fmt.max, np.float32))
    assert_bitwise(round_to(-beyond, fmt), np.full(5, -fmt.max, np.float32))


@signed
def test_nan_stays_nan_or_becomes_the_largest_where_the_format_has_none(fmt: Format) -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    expected = np.full(4, np.nan if fmt.has_nan else fmt.max, np.float32)
    assert_bitwise(round_to(nans, fmt), expected)
    code = NAN_CODE if fmt.has_nan else len(grid(fmt)) - 1
    assert_bitwise(encode(round_to(nans, fmt), fmt), np.full(4, code, np.uint8))
    assert_bitwise(round_to(nans, fmt, np.zeros(4, np.float32)), expected, "rounded at random")


@signed
def test_the_sign_of_zero_survives_also_when_a_value_rounds_to_zero(fmt: Format) -> None:
    tiny = float32(0.0, 1e-45, 2.0**-127, grid(fmt)[1] / 4)
    zeros = np.zeros(4, np.float32)
    for u in (None, np.full(4, 1 - 2.0**-24, np.float32)):
        assert_bitwise(round_to(tiny, fmt, u), zeros)
        assert_bitwise(round_to(-tiny, fmt, u), -zeros)


@signed
def test_stochastic_rounding_goes_up_exactly_when_u_is_below_the_fraction(fmt: Format) -> None:
    low, high = grid(fmt)[:-1], grid(fmt)[1:]
    ulp = np.float32(2.0**-24)
    for fraction in (0.25, 0.5, 0.8125):
        x = (low + np.float32(fraction) * (high - low)).astype(np.float32)
        for u, expected in ((0.0, high), (fraction - ulp, high), (fraction, low), (1 - ulp, low)):
            noise = np.full(len(x), u, np.float32)
            assert_bitwise(round_to(x, fmt, noise), expected, f"fraction {fraction}, u {u}")
            assert_bitwise(round_to(-x, fmt, noise), -expected, f"minus, fraction {fraction}, u {u}")


@signed
def test_stochastic_rounding_leaves_grid_values_and_saturated_values_unchanged(fmt: Format) -> None:
    for u in (0.0, 0.5, 1 - 2.0**-24):
        noise = np.full(len(grid(fmt)), u, np.float32)
        assert_bitwise(round_to(grid(fmt), fmt, noise), grid(fmt), f"u {u}")
        assert_bitwise(round_to(float32(np.inf, -1e30), fmt, noise[:2]), float32(fmt.max, -fmt.max), f"u {u}")


@signed
def test_over_all_sixteen_bits_of_noise_the_mean_is_within_2_to_the_minus_17_of_a_step(fmt: Format) -> None:
    u = (np.arange(1 << 16, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
    low, high = grid(fmt)[:-1], grid(fmt)[1:]
    for fraction in (2.0**-17, 2.0**-16, 0.3, 0.5, 1 - 2.0**-17):
        for x, step in zip((low + np.float32(fraction) * (high - low))[::7], (high - low)[::7], strict=True):
            mean = round_to(np.full(1 << 16, x), fmt, u).astype(np.float64).mean()
            assert abs(mean - x) <= 2.0**-17 * step, f"{x}: mean {mean}"


@signed
def test_at_random_the_mean_is_the_value_within_three_sigma(fmt: Format) -> None:
    draws = 1 << 14
    low, high = grid(fmt)[:-1], grid(fmt)[1:]
    x = (low + np.float32(0.3) * (high - low)).astype(np.float32)
    u = uniform(len(x), draws, seed=11, tensor_id=5, count=0)
    got = round_to(np.repeat(x[:, None], draws, 1), fmt, u).astype(np.float64).mean(1)
    step = (high - low).astype(np.float64)
    f = (x - low) / step
    sigmas = (got - x) / (step * np.sqrt(f * (1 - f) / draws))
    # Of n grid intervals a few are beyond three sigma; their mean square is 1 within three of its own.
    assert abs(np.mean(sigmas) * np.sqrt(len(x))) < 3, f"biased by {np.mean(sigmas):.3f} sigma over {len(x)} intervals"
    assert abs(np.mean(sigmas**2) - 1) < 3 * np.sqrt(2 / len(x))
    assert np.abs(sigmas).max() < 4.5, (
        f"interval {np.abs(sigmas).argmax()}: {sigmas[np.abs(sigmas).argmax()]:.2f} sigma"
    )
