"""Test that the module passes its options to the function, drops only in training, and checks its heads."""

from typing import Any

import pytest
import torch

from quaver.torch.nn.attention import DotProductAttention, attention
from quaver.torch.nn.attention.dot_product import alibi_slopes
from tests.close import assert_bitwise
from tests.torch.nn.attention.cases import DV, D, H, mask_of, operands


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_type": "causal", "window": (2, 0), "scale": 0.3, "soft_cap": 2.0},
        {"mask_type": "padding_causal_bottom_right"},
        {"sinks": "off_by_one"},
    ],
)
def test_it_is_the_function_with_stored_options(options: dict[str, Any]) -> None:
    q, k, v = operands(5, 7)
    mask = mask_of(options.get("mask_type", "none"), 5, 7)
    module = DotProductAttention(H, (D, DV), groups=2, **options)
    assert_bitwise(module(q, k, v, mask=mask), attention(q, k, v, mask=mask, **options))
    assert not list(module.parameters()) and not module.state_dict()


def test_learnable_sinks_are_a_parameter_that_learns() -> None:
    module = DotProductAttention(H, (D, DV), groups=2, sinks="learnable", device="meta", dtype=torch.float32)
    assert module.sinks is not None and module.sinks.is_meta and list(module.state_dict()) == ["sinks"]
    module.to_empty(device="cpu")
    module.reset_parameters()
    q, k, v = operands(5, 7)
    y = module(q, k, v)
    assert_bitwise(y, attention(q, k, v, sinks="off_by_one"))
    y.sum().backward()
    assert module.sinks.grad is not None and module.sinks.grad.any()


def test_it_drops_in_training_only() -> None:
    q, k, v = operands(5, 7)
    module = DotProductAttention(H, (D, DV), groups=2, dropout=0.5)
    assert not torch.equal(module(q, k, v), attention(q, k, v))
    assert_bitwise(module.eval()(q, k, v), attention(q, k, v))


def test_slopes_of_alibi_fall_by_a_power_of_two() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    q, k, v = operands(5, 7)
    module = DotProductAttention(H, (D, DV), groups=2, mask_type="causal", alibi=True)
    assert_bitwise(module(q, k, v), attention(q, k, v, mask_type="causal", alibi_slopes=alibi_slopes(H)))


def test_slopes_equal_hugging_faces() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    for heads in (1, 4, 6, 12, 71):
        theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(alibi_slopes(heads), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"groups": 3}, "4 query heads cannot share 3 heads.*make the first number a multiple of the second"),
        ({"groups": 0}, "cannot share 0 heads"),
        ({"mask_type": "casual"}, "did you mean 'causal'"),
        ({"mask_type": "causal", "window": (1, 1)}, "looks ahead"),
        ({"layout": "bsh"}, "did you mean 'bshd'"),
        ({"sinks": "learned"}, "give None, 'off_by_one' or 'learnable'"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; give a positive number"),
        ({"window": 3}, "window is 3; give .left, right."),
        ({"dropout": -0.1}, "dropout is -0.1; give a probability"),
        ({"recipe": "mxfp9"}, "mxfp8"),
    ],
)
def test_bad_options_are_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DotProductAttention(H, D, **options)


def test_heads_other_than_its_own_are_refused() -> None:
    q, k, v = operands(5, 7)
    with pytest.raises(ValueError, match=r"v has shape \[2, 7, 2, 6\]; .*'bshd'.* with 2 heads of 8 features"):
        DotProductAttention(H, D, groups=2)(q, k, v)
