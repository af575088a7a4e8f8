"""accelerate: mixed_precision="fp8" with a Quaver recipe. Needs pip install -e '.[integrations]'."""

import torch
from torch import nn

from quaver.integrations.accelerate import QuaverAccelerator

torch.manual_seed(0)
x = torch.randn(1024, 64)
y = (x @ torch.randn(64, 16)).argmax(1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

accelerator = QuaverAccelerator(cpu=True, mixed_precision="fp8", recipe="mxfp8", gradient_accumulation_steps=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for _ in range(4):
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}, {accelerator.unwrap_model(model)[0]}")
