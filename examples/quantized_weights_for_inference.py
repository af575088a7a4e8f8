"""Store a model's weights only in eight or four bits, save them, and load them into an empty model."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import quaver.torch as qt

DIM, HIDDEN, CLASSES = 256, 1024, 10


class Classifier(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            qt.MLP(DIM, HIDDEN, "swiglu", normalization="RMSNorm", bias=False, device=device) for _ in range(2)
        )
        self.head = qt.Linear(DIM, CLASSES, device=device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x)
        return y


def size(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


torch.manual_seed(0)
model = Classifier()
x = torch.randn(64, DIM)
with torch.no_grad():
    exact = model(x)
print(f"float32: {size(model):,} bytes")

# 1. Quantize the weights of a model to eight or four bits in place, except the head's.
for recipe in ("mxfp8", "nvfp4"):
    small = Classifier()
    small.load_state_dict(model.state_dict())
    saved = qt.quantize_weights(small, recipe, skip=["head"])
    with torch.no_grad():
        error = (small(x) - exact).norm() / exact.norm()
    print(f"\n{recipe}: {size(small):,} bytes, relative error {error:.3f}\n{saved}")

# 2. The state dict holds codes and scales.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "small.pt"
    torch.save(small.state_dict(), path)
    print(f"\non disk: {path.stat().st_size:,} bytes")

    # 3. A model on meta loads them, so no weight exists in high precision.
    with qt.quantized_init("nvfp4"):
        loaded = Classifier("meta")
    loaded.head = qt.Linear(DIM, CLASSES, device="meta")
    loaded.load_state_dict(torch.load(path), assign=True)
with torch.no_grad(), qt.autocast("nvfp4"):
    y = loaded(x[:1])
print("one row at a time:", y.argmax().item(), "of float32:", exact[0].argmax().item())

# 4. Dequantize the weights.
print("dequantized:", qt.dequantize_weights(loaded))
