"""Models, losses and weights that tests of optimizers share."""

from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import layout, master_weights


def model_of(recipe: str = "tensorwise") -> Any:
    """Two layers with weights in codes, or in float32 under "none"."""
    torch.manual_seed(0)
    model = nn.Sequential(qt.Linear(160, 192), nn.GELU(), qt.Linear(192, 64))
    if recipe != "none":
        qt.quantize_weights(model, recipe)
    return model


def loss_of(model: Any, seed: int = 0) -> Tensor:
    x = torch.randn(32, 160, generator=torch.Generator().manual_seed(seed))
    with qt.autocast("tensorwise"):
        loss: Tensor = model(x.to(model[0].bias.dtype)).square().mean()
    return loss


def full_weight(optimizer: optim.Optimizer, p: Tensor) -> Tensor:
    """The weight with its residual, float32."""
    config = optimizer.config(p, optimizer.param_groups[0])
    tensors = layout.tensors_of_weight(p, config, optimizer.state[p])
    return master_weights.read(config.weight_format, tensors).view(p.shape)
