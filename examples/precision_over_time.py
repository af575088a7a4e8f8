"""A training loop whose recipe follows the learning rate: NVFP4, then bf16 when the rate is below a tenth."""

import json

import torch
from torch import nn

import quaver
import quaver.torch as qt

STEPS, PEAK = 60, 3e-3
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 16))
qt.convert(model, "nvfp4", skip=["4"])

optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=STEPS)
# Also: "nvfp4 until 85%, bf16" with steps=, or "mxfp8 until 10, nvfp4 until loss<0.5, bf16", which reads record_loss.
schedule = quaver.recipes.schedule("nvfp4 until lr<10%, bf16", peak=PEAK)

x, target = torch.randn(256, 64), torch.randint(16, (256,))
for step in range(1, STEPS + 1):
    part = schedule.part
    recipe = schedule.at(step, lr=rates.get_last_lr()[0])
    if schedule.part != part:
        qt.convert(model, recipe, skip=["4"])  # in place; with qt.autocast(recipe) no call is needed
        print(f"from step {step} on: {recipe}")
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rates.step()
    schedule.record_loss(loss.item())
    if step % 10 == 0:
        print(f"step {step:>2}  loss {loss.item():.4f}  {recipe.name}")

# Save it with model and optimizer. `load_state_dict` continues with the same recipe.
print(json.dumps(schedule.state_dict()))
