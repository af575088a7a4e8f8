"""Train a hybrid of Mamba-2 and attention on Python's own source text in bf16 and MXFP8, then generate text."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt

DIM, HIDDEN = 64, 176
TOKENS, BATCH, STEPS = 64, 4, 40


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.mixers = nn.ModuleList(qt.Mamba2Layer(DIM, head_dim=16, state=32, hidden=HIDDEN) for _ in range(2))
        # One attention layer for two state-space layers. States depend on the order of tokens, so no rope is needed.
        self.attention = qt.TransformerLayer(DIM, 4, HIDDEN, activation="swiglu", normalization="RMSNorm", bias=False)
        self.norm = qt.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)  # torch's own layer, which stays in high precision

    def forward(self, ids: Tensor, states: qt.StateCache | None = None, keys: qt.KVCache | None = None) -> Tensor:
        x = self.mixers[0](self.embedding(ids), cache=states, layer=0)
        x = self.attention(x, cache=keys, layer=0)
        x = self.mixers[1](x, cache=states, layer=1)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(recipe: str, text: Tensor) -> tuple[Hybrid, list[float]]:
    torch.manual_seed(0)  # the same weights and batches for every recipe
    model = Hybrid()
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
    return model, losses


folder = Path(os.__file__).parent
text = torch.tensor(list(b"".join((folder / name).read_bytes() for name in ("argparse.py", "inspect.py", "ast.py"))))

runs = {recipe: train(recipe, text) for recipe in ("bf16", "mxfp8")}
for step in range(0, STEPS, 10):
    print(f"step {step:>2}  " + "  ".join(f"{name} {losses[step]:.3f}" for name, (_, losses) in runs.items()))
ends = {name: sum(losses[-10:]) / 10 for name, (_, losses) in runs.items()}
print("last ten steps: " + "  ".join(f"{name} {loss:.3f}" for name, loss in ends.items()))
assert abs(ends["mxfp8"] - ends["bf16"]) < 0.05

# The size of the states does not depend on the length of the text; the keys grow.
model, states, keys = runs["mxfp8"][0], qt.StateCache(layers=2), qt.KVCache(layers=1, capacity=64)
token, written = text[:16][None], []
with torch.no_grad(), qt.frozen(model):
    for _ in range(24):
        token = model(token, states, keys)[:, -1:].argmax(-1)
        written.append(int(token))
print("and it writes: " + repr(bytes(written).decode(errors="replace")))
