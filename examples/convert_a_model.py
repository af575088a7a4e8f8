"""Convert a model in place, by rules, and train it for a few steps."""

import torch
from torch import nn

import quaver
import quaver.torch as qt

torch.manual_seed(0)
model = nn.Sequential()
for i in range(4):
    model.add_module(f"block{i}", nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)))
model.add_module("head", nn.Linear(64, 10))

rules = quaver.Rules({"head": None, "block[03].*": "mxfp8", "*": quaver.recipes.nvfp4()})
print(qt.convert(model, rules))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, target = torch.randn(256, 64), torch.randint(10, (256,))
for step in range(20):
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:>2}  loss {loss.item():.4f}")

with qt.count(model) as counters:
    nn.functional.cross_entropy(model(x), target).backward()
print(counters)
print("reverted:", qt.revert(model))
