"""Parameters of parts are a block's own by other names: in state dicts, as attributes, after moves and copies."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quaver.torch.nn.mlp import LayerNormLinear
from quaver.torch.nn.parameter_names import AliasedParameters
from tests.close import assert_bitwise

NAMES = {
    "gamma": ("norm", "weight"),
    "beta": ("norm", "bias"),
    "matrix": ("linear", "weight"),
    "shift": ("linear", "b"),
}


class Block(AliasedParameters, LayerNormLinear):
    def __init__(self) -> None:
        super().__init__(16, 8)
        self.rename(NAMES, fixed=("linear",))


def test_names_are_those_of_the_block_and_values_those_of_its_parts() -> None:
    block: Any = Block()
    x = torch.randn(4, 16)
    # `b` is no parameter of the layer, whose own name for its bias stays.
    assert [name for name, _ in block.named_parameters()] == ["gamma", "beta", "matrix", "linear.bias"]
    assert set(block.state_dict()) == {"gamma", "beta", "matrix", "linear.bias"}
    block.matrix = nn.Parameter(torch.zeros(8, 16))
    assert block.matrix is block.linear.weight and not (block(x) - block.linear.bias).any()
    with pytest.raises(ValueError, match=r"Block.linear has the module's weight: replace the module itself"):
        block.linear = nn.Linear(16, 8)


@pytest.mark.parametrize("how", ["copy", "double", "state dict"])
def test_parameter_names_survive_copies_and_casts(how: str) -> None:
    block: Any = Block()
    other: Any = copy.deepcopy(block) if how == "copy" else Block()
    if how == "double":
        other = copy.deepcopy(block).double().float()
    elif how == "state dict":
        other.load_state_dict(block.state_dict())
    assert other.gamma is other.norm.weight and other.matrix is other.linear.weight
    x = torch.randn(4, 16)
    assert_bitwise(other(x).detach(), block(x).detach())
    state = block.state_dict()
    del state["gamma"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"gamma"'):
        other.load_state_dict(state)
