"""Arguments of the wrong type raise before anything is changed."""

from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt

CALLS: dict[str, Any] = {
    "convert": lambda model: qt.convert(model, "mxfp8"),
    "revert": qt.revert,
    "count": lambda model: qt.count(model).__enter__(),
    "frozen": qt.frozen,
    "refresh": qt.refresh,
    "quantize_weights": lambda model: qt.quantize_weights(model, "mxfp8"),
    "dequantize_weights": qt.dequantize_weights,
    "plain_state_dict": qt.plain_state_dict,
    "scaling_state_dict": qt.scaling_state_dict,
    "load_scaling_state_dict": lambda model: qt.load_scaling_state_dict(model, {}),
    "export": lambda model: qt.export(model, "folder"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("model", ["model", 3, None, [nn.Linear(2, 2)]], ids=str)
def test_non_modules_raise_a_type_error(name: str, model: Any) -> None:
    with pytest.raises(TypeError, match=f"(?s){name}.* a {type(model).__name__}"):
        CALLS[name](model)


def test_every_function_accepts_recipes_with_options_in_their_text() -> None:
    x, text = torch.randn(4, 32), "mxfp8(weight_2d=True)"
    model = nn.Sequential(qt.Linear(32, 32, recipe=text))
    expected = model(x)
    plain = nn.Sequential(nn.Linear(32, 32))
    plain.load_state_dict(model.state_dict())
    with qt.autocast(text):
        layer = qt.Linear(32, 32)
        layer.load_state_dict(model[0].state_dict())
        assert torch.equal(layer(x), expected)
    for recipe in (text, {"*": text}):
        qt.convert(plain, recipe)
        assert torch.equal(plain(x), expected)
    with qt.quantized_init(text):
        assert qt.Linear(32, 32).weight_spec.block == (32, 32)


def test_a_swish_activation_is_called_silu() -> None:
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        qt.MLP(32, 64, activation="Swish")
