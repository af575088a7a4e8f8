"""A language model with a mixture of experts, trained on Python's own source text in bf16 and MXFP8.

Each token goes to two of eight experts and through a shared one. A bias balances the experts instead of a loss.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt

DIM, HEADS, HIDDEN, LAYERS = 64, 4, 48, 2
TOKENS, BATCH, STEPS = 64, 4, 30
# DeepSeek-V3's router. The default is softmax, as in Mixtral.
MIXTURE = qt.MixtureConfig(experts=8, k=2, scores="sigmoid", balance_bias=True, shared=HIDDEN, return_routing=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(
            qt.TransformerLayer(
                DIM,
                HEADS,
                HIDDEN,
                mixture=MIXTURE,
                activation="swiglu",
                normalization="RMSNorm",
                bias=False,
                rope=qt.RotaryEmbedding(DIM // HEADS),
            )
            for _ in range(LAYERS)
        )
        self.norm = qt.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)  # torch's own layer, which stays in high precision

    def forward(self, ids: Tensor) -> tuple[Tensor, list[qt.Routing]]:
        x, routings = self.embedding(ids), []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings


def train(recipe: str, text: Tensor) -> tuple[list[float], list[float]]:
    """Losses, and of each step how many times its even share the busiest expert has."""
    torch.manual_seed(0)  # the same weights and batches for every recipe
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, busiest = [], []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - TOKENS, (BATCH, 1))
        batch = text[starts + torch.arange(TOKENS + 1)]
        # torch's autocast sets the dtype of GEMMs, Quaver's the quantization of their operands.
        with torch.autocast("cpu", torch.bfloat16), qt.autocast(recipe):
            logits, routings = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        losses.append(loss.item())
        # Layers add no loss of their own. Add losses of their routing here.
        (loss + sum(1e-3 * qt.z_loss(routing) for routing in routings)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts = [qt.token_counts(routing.indices, MIXTURE.experts) for routing in routings]
        for layer, of_layer in zip(model.layers, counts, strict=True):
            layer.mlp.router.update_bias(of_layer, rate=1e-2)
        busiest.append(max(float(each.max() / each.float().mean()) for each in counts))
    return losses, busiest


folder = Path(os.__file__).parent
text = torch.tensor(list(b"".join((folder / name).read_bytes() for name in ("argparse.py", "inspect.py", "ast.py"))))

runs = {recipe: train(recipe, text) for recipe in ("bf16", "mxfp8")}
for step in range(0, STEPS, 10):
    row = (f"{name} {losses[step]:.3f}, busiest {busiest[step]:.2f}" for name, (losses, busiest) in runs.items())
    print(f"step {step:>2}  " + "  ".join(row))
ends = {name: sum(losses[-10:]) / 10 for name, (losses, _) in runs.items()}
print("last ten steps: " + "  ".join(f"{name} {loss:.3f}" for name, loss in ends.items()))
assert abs(ends["mxfp8"] - ends["bf16"]) < 0.05
