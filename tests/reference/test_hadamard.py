"""The rotation is a fixed orthogonal matrix, applied in four stages."""

import numpy as np
import pytest

from quaver.reference.numerics import GROUP, SIGNS, rotate
from tests.close import assert_bitwise, assert_close


def matrix() -> np.ndarray:
    """y = x @ matrix: the signs, then Sylvester's matrix over four."""
    sylvester = np.array([[(-1) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)])
    return np.array(SIGNS)[:, None] * sylvester / 4


def test_it_is_the_matrix_of_signs_and_sylvester() -> None:
    assert_bitwise(rotate(np.eye(GROUP, dtype=np.float32)), matrix().astype(np.float32))
    x = np.random.default_rng(0).integers(-99, 99, size=(7, 48)).astype(np.float32)
    expected = (x.reshape(7, 3, GROUP).astype(np.float64) @ matrix()).reshape(7, 48)
    assert_bitwise(rotate(x), expected.astype(np.float32))  # integers: nothing is rounded


def test_it_is_orthogonal() -> None:
    m = rotate(np.eye(GROUP, dtype=np.float32)).astype(np.float64)
    assert_bitwise(m @ m.T, np.eye(GROUP))


@pytest.mark.parametrize("k", [1, 16, 40])
def test_the_product_of_two_rotated_operands_is_their_product(k: int) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(rows, k)).astype(np.float32) for rows in (5, 3))
    transposed = rotate(a).astype(np.float64) @ rotate(b).astype(np.float64).T
    assert_close(f"k {k}", transposed, a.astype(np.float64) @ b.astype(np.float64).T, 1e-6)


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17])
def test_the_tail_is_padded_with_zeros_that_stay(k: int) -> None:
    x = np.random.default_rng(2).normal(size=(3, k)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, -k % GROUP)))
    assert rotate(x).shape == padded.shape
    assert_bitwise(rotate(x), rotate(padded))


def test_a_nan_or_infinity_spoils_its_group_and_no_other() -> None:
    x = np.ones((2, 32), np.float32)
    x[0, 3], x[1, 20] = np.nan, np.inf
    spoiled = ~np.isfinite(rotate(x))
    assert_bitwise(spoiled, np.kron([[True, False], [False, True]], np.ones((1, GROUP))).astype(bool))


def test_stages_are_rounded_in_the_order_of_strides_1_2_4_8() -> None:
    x = (np.random.default_rng(3).normal(size=GROUP) * 10.0 ** np.arange(-8, 8)).astype(np.float32)
    y = [np.float32(s) * v for s, v in zip(SIGNS, x, strict=True)]
    for stride in (1, 2, 4, 8):
        y = [y[i] + y[i ^ stride] if not i & stride else y[i ^ stride] - y[i] for i in range(GROUP)]
    assert_bitwise(rotate(x[None]), np.float32([y]) * np.float32(0.25))
