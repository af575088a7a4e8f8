"""A small Llama made of blocks, trained on Python's own source text in bf16 and in MXFP8."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt

DIM, HEADS, GROUPS, HIDDEN, LAYERS = 64, 4, 2, 176, 2
TOKENS, BATCH, STEPS = 32, 4, 40


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rope = qt.RotaryEmbedding(DIM // HEADS, theta=500_000.0)  # one for all layers: it has no parameters
        self.embedding = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(
            qt.TransformerLayer(
                DIM, HEADS, HIDDEN, groups=GROUPS, activation="swiglu", normalization="RMSNorm", bias=False, rope=rope
            )
            for _ in range(LAYERS)
        )
        self.norm = qt.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)  # torch's own layer, which stays in high precision

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(recipe: str, text: Tensor) -> list[float]:
    torch.manual_seed(0)  # the same weights and batches for every recipe
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - TOKENS, (BATCH, 1))
        batch = text[starts + torch.arange(TOKENS + 1)]
        # torch's autocast sets the dtype of GEMMs, Quaver's the quantization of their operands.
        with torch.autocast("cpu", torch.bfloat16), qt.autocast(recipe):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


folder = Path(os.__file__).parent
text = torch.tensor(list(b"".join((folder / name).read_bytes() for name in ("argparse.py", "inspect.py", "ast.py"))))

losses = {recipe: train(recipe, text) for recipe in ("bf16", "mxfp8")}
for step in range(0, STEPS, 10):
    print(f"step {step:>2}  " + "  ".join(f"{name} {of[step]:.3f}" for name, of in losses.items()))
ends = {name: sum(of[-10:]) / 10 for name, of in losses.items()}
print("last ten steps: " + "  ".join(f"{name} {loss:.3f}" for name, loss in ends.items()))
assert abs(ends["mxfp8"] - ends["bf16"]) < 0.05
