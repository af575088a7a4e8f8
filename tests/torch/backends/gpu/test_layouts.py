"""Test that consumers of stored quantized data get the expected layout, whatever kernels write."""

import pytest
import torch

import quaver.torch as qt
from quaver.recipes.spec import QuantSpec
from quaver.torch.nn.attention.backends import quantize_heads
from quaver.torch.numerics.quantized import FLOAT8
from quaver.torch.operations import ops
from tests.operands import SPECS

NEAREST = {name: spec for name, spec in SPECS.items() if spec.rounding == "nearest"}
EIGHT_BITS = {name: spec for name, spec in NEAREST.items() if spec.format.name in FLOAT8}


@pytest.mark.parametrize("name", NEAREST)
@pytest.mark.parametrize("shape", [(33, 40), (130, 272)], ids=str)
def test_a_plain_operand_is_returned_unchanged(name: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    with qt.only("triton"):
        q = ops.QUANTIZE(x, SPECS[name])
    expected, plain = ops.QUANTIZE(x, SPECS[name]), q.plain()
    for operand in (q, plain):
        assert torch.equal(operand.codes(), expected.codes()) and torch.equal(operand.scales(), expected.scales())
    assert plain.data.is_contiguous() and not plain.swizzled
    assert isinstance(plain.scale, float) or plain.scale.shape == SPECS[name].blocks(shape[0], q.shape[1])


def _in_heads(spec: QuantSpec) -> bool:
    return not spec.hadamard and (spec.per_tensor or spec.block[0] == 1)


@pytest.mark.parametrize("name", [name for name, spec in EIGHT_BITS.items() if _in_heads(spec)])
def test_attention_operands_match_a_cpu(name: str) -> None:
    x = torch.randn(2, 3, 20, 24)
    expected = quantize_heads(x, SPECS[name])
    with qt.only("triton"):
        heads = quantize_heads(x, SPECS[name])
    assert torch.equal(heads.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(heads.scale, expected.scale)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_weight_of_codes_matches_a_cpu(recipe: str) -> None:
    torch.manual_seed(0)
    with qt.quantized_init(recipe):
        expected = qt.Linear(40, 24)
    torch.manual_seed(0)
    with qt.only("triton"), qt.quantized_init(recipe):
        layer = qt.Linear(40, 24)
    for name, value in expected.state_dict().items():
        other = layer.state_dict()[name]
        assert other.shape == value.shape and torch.equal(other.view(torch.uint8), value.view(torch.uint8)), name
