"""Run one quantized layer: its error, the bytes that it saves for backward, and its implementations."""

import torch

import quaver
import quaver.torch as qt

torch.manual_seed(0)
layer = qt.Linear(256, 512, dtype=torch.bfloat16)
x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)

exact = layer(x)  # without a recipe, it computes as nn.Linear
for name in quaver.recipes.RECIPES:
    with qt.autocast(name):
        y = layer(x)
    y.sum().backward()
    error = ((y - exact).float().norm() / exact.float().norm()).item()
    print(f"{name:<20} differs from bf16 by {error:.4f} of its norm")

with qt.autocast("mxfp8"):
    print(qt.explain(layer, x))

operand = qt.quantize(x.detach(), quaver.recipes.mxfp8().fprop.a)
print(f"{operand.nbytes} bytes instead of {x.numel() * x.element_size()}")
