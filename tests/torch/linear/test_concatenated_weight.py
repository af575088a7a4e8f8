"""Test that a weight in several parameters computes like a whole one."""

from typing import Any

import pytest
import torch

import quaver.torch as qt
from quaver.torch.linear.linear import ConcatenatedWeight, divide
from tests.close import assert_bitwise


@pytest.mark.parametrize("recipe", [None, "mxfp8", "delayed"])
def test_a_divided_layer_has_the_bits_of_the_whole(recipe: str | None) -> None:
    whole: Any = qt.Linear(64, 96, recipe=recipe)
    parts: Any = qt.Linear(64, 96, recipe=recipe)
    parts.load_state_dict(whole.state_dict())
    names = divide(parts, {"query": 64, "key": 32})
    assert names == ["query_weight", "key_weight", "query_bias", "key_bias"] and isinstance(parts, ConcatenatedWeight)
    x = torch.randn(8, 64)
    for layer in (whole, parts):
        layer(x).square().sum().backward()
    assert_bitwise(whole(x).detach(), parts(x).detach())
    assert_bitwise(whole.weight.grad[:64], parts.query_weight.grad)


def test_a_row_split_that_does_not_fit_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="parameters_split has 3 rows and the weight 8"):
        divide(qt.Linear(8, 8), {"a": 3})
    assert divide(qt.Linear(8, 8), None) == ["weight", "bias"]
