"""Lightning: a recipe as a Precision plugin. Needs pip install -e '.[integrations]'."""

import logging

import lightning
import torch
from torch import Tensor, nn

from quaver.integrations.lightning import QuaverPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


torch.manual_seed(0)
x = torch.randn(1024, 64)
y = (x @ torch.randn(64, 16)).argmax(1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)

model = Classifier()
trainer = lightning.Trainer(
    plugins=[QuaverPrecision("delayed", "bf16-mixed")],
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, data)
print(f"loss {model.losses[0]:.2f} → {model.losses[-1]:.2f}, {model.net[0]}")
