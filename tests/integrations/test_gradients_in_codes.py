"""Trainers clip gradients that an optimizer stores as codes: they see all of them, and their norm."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quaver.torch import optim
from quaver.torch.optim.quantized_gradient import QuantizedGradient

pytestmark = pytest.mark.filterwarnings("default")
LARGEST, STEPS = 1e-2, 3


class Net(nn.Module):
    """Returns its loss, as a Trainer needs it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def data(count: int = 32) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(64, generator=torch.Generator().manual_seed(i))} for i in range(count)]


def norm_of(model: Any) -> float:
    return torch.cat([torch.empty(p.shape).copy_(p.grad).flatten() for p in model.parameters()]).norm().item()


def by_transformers(model: Any, optimizer: Any, accumulate: int, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
    given: dict[str, Any] = {"max_grad_norm": LARGEST, "gradient_accumulation_steps": accumulate, "max_steps": STEPS}
    given |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    args = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=4, **given)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = Trainer(model=model, args=args, train_dataset=data(), optimizers=(optimizer, scheduler))
    trainer.train()


def by_accelerate(model: Any, optimizer: Any, accumulate: int, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data(), batch_size=4))
    for batch, _ in zip(loader, range(STEPS * accumulate), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST)
            optimizer.step()
            optimizer.zero_grad()


def by_lightning(model: Any, optimizer: Any, accumulate: int, folder: Path) -> None:
    lightning: Any = pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    given: dict[str, Any] = {"gradient_clip_val": LARGEST, "accumulate_grad_batches": accumulate, "max_steps": STEPS}
    given |= {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    given |= {"enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = lightning.Trainer(**given)
    trainer.fit(Module(), torch.utils.data.DataLoader(data(), batch_size=4))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("train", [by_transformers, by_accelerate, by_lightning])
def test_a_trainers_clipping_is_exact(
    train: Any, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset="lean")
    clip, norms, clipped = nn.utils.clip_grad_norm_, list[tuple[float, float]](), list[float]()

    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert accumulate > 1 or type(model.layers[0].weight.grad) is QuantizedGradient
        before = norm_of(model)
        norms.append((before, clip(parameters, *args, **kwargs).item()))
        clipped.append(norm_of(model))
        return torch.tensor(norms[-1][1])

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", watched)
    before = model.layers[0].weight.detach().clone()
    train(model, optimizer, accumulate, tmp_path)
    assert len(norms) == len(clipped) == STEPS
    for want, norm in norms:
        assert norm == pytest.approx(want, rel=1e-5) and norm > LARGEST
    assert clipped == pytest.approx([LARGEST] * STEPS, rel=1e-3)
    assert not torch.equal(model.layers[0].weight, before)
