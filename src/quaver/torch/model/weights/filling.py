"""First values of a linear layer by a function, as Megatron-LM's `init_method` gives them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.linear.grouped.layer import GroupedLinear
from quaver.torch.linear.layer import Linear
from quaver.torch.state.layer import state_of


@torch.no_grad()
def fill(layer: Linear | GroupedLinear, function: Callable[[Tensor], Any]) -> None:
    """Give a layer its first values: its weight by a function, which writes into what it is given; its bias 0.

    Args:
        layer: whose weight may exist only as codes; the function fills what they are made of, and what is kept of it
            is made anew.
        function: such as one of torch.nn.init; of matrices, one by one in a stack of them.
    """
    for name, p in layer._parameters.items():
        if p is None:
            continue
        if name.rstrip("0123456789").endswith("bias"):
            nn.init.zeros_(p)
            continue
        value = p if layer.weight_spec is None else torch.empty_like(p, dtype=layer.weight_dtype)
        for matrix in (value,) if isinstance(layer, Linear) else layer.matrices(value):
            function(matrix)
        if value is not p and not value.is_meta:
            layer.set_weight(value)
            if state_of(layer).initial is not None:
                state_of(layer).initial = value.cpu()
