"""The comparisons themselves can fail, and say where."""

import numpy as np
import pytest
import torch

from tests.close import assert_bitwise, assert_close, decibels


def test_bitwise_names_the_first_wrong_element_and_both_values() -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    b = torch.tensor([[1.0, 2.0], [3.5, 5.0]])
    with pytest.raises(AssertionError, match=r"^scales: element \(1, 0\) is 3\.0 .*, expected 3\.5 .*; 2 of 4 differ"):
        assert_bitwise(a, b, "scales")


def test_bitwise_distinguishes_minus_zero_from_zero_but_not_nans() -> None:
    with pytest.raises(AssertionError, match=r"is -0\.0 \(bits 0x80000000\), expected 0\.0"):
        assert_bitwise(np.float32([-0.0]), np.float32([0.0]))
    assert_bitwise(np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32), np.float32([np.nan, np.nan]))


@pytest.mark.parametrize(
    "b",
    [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bfloat16), np.zeros(2)],
    ids=["longer", "two dimensions", "bfloat16", "numpy"],
)
def test_bitwise_compares_types_and_shapes(b: object) -> None:
    assert_bitwise(torch.zeros(2), np.zeros(2, np.float32))
    with pytest.raises(AssertionError, match=r"shape|dtype"):
        assert_bitwise(torch.zeros(2), b)


def test_close_is_relative_at_every_magnitude() -> None:
    for unit in (1e-300, 1.0, 1e300):
        right = np.array([3.0, 4.0]) * unit
        assert_close("near", right * (1 + 1e-7), right, 1e-6)
        with pytest.raises(AssertionError, match=r"far: relative RMS 1\.00e-05, allowed 1e-06; furthest at \(1,\)"):
            assert_close("far", right * (1 + 1e-5), right, 1e-6)


@pytest.mark.parametrize("got, right", [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (1e-9, 0.0)])
def test_close_requires_nonfinite_values_and_zeros_at_the_same_positions(got: float, right: float) -> None:
    assert_close("same", np.array([right]), np.array([right]), 1e-6)
    with pytest.raises(AssertionError, match="expected"):
        assert_close("other", np.array([got]), np.array([right]), 1e-6)


def test_decibels_are_twenty_for_a_tenth() -> None:
    exact = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    assert decibels(exact, exact * 1.1).tolist() == pytest.approx([20, 20])
