"""First values of a layer are those of a function."""

from torch import nn

import quaver.torch as qt
from quaver.torch.conversion.quantized_weights import fill


def test_initial_values_may_come_from_a_function_with_stored_codes_too() -> None:
    layer = qt.Linear(64, 64)
    fill(layer, nn.init.ones_)
    assert (layer.weight == 1).all() and not layer.bias.any()
    with qt.quantized_init("mxfp8", keep_initial="cpu"):
        coded = qt.Linear(64, 64)
    fill(coded, nn.init.ones_)
    first = qt.initial_value(coded)
    assert isinstance(coded.weight, qt.QuantizedTensor) and (coded.weight.dequantize() == 1).all()
    assert first is not None and (first == 1).all()
