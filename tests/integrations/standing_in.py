"""Programs of users of Transformer Engine and torchao, each in a process of its own: losses of a library over names of
ours, and of a plain loop over our recipe.

python -m tests.integrations.standing_in accelerate
"""

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quaver
import quaver.compat
import quaver.torch as qt

STEPS = 4
HISTORY = 3


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 32, generator=draw) * (1 + i), torch.randn(16, 32, generator=draw)) for i in range(STEPS)]


def plain(recipe: Any, autocast: bool, norm: bool = True) -> list[float]:
    """Losses of our own layers, perhaps under torch.autocast, perhaps with our norm."""
    net = model()
    if norm:
        # As there, it returns its input's dtype, where torch's returns float32 under torch.autocast.
        net[1] = qt.LayerNorm(64)
    qt.convert(net, recipe, head=True)
    optimizer, losses = torch.optim.AdamW(net.parameters(), 1e-2), []
    for x, target in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = net(x)
        loss = nn.functional.mse_loss(y.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerate_losses(handler: Any) -> list[float]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-2))
    assert {type(net[i]).__module__.partition(".")[0] for i in (0, 3)} == {"quaver"}
    losses = []
    for x, target in batches():
        loss = nn.functional.mse_loss(net(x), target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.state._reset_state(True)
    return losses


def accelerate() -> None:
    from accelerate.utils import TERecipeKwargs

    ours = quaver.recipes.delayed(history=HISTORY, algorithm="max", power_of_two=False)
    losses = accelerate_losses(TERecipeKwargs(fp8_format="HYBRID", amax_history_len=HISTORY, amax_compute_algo="max"))
    check(losses, plain(ours, autocast=True))
    losses = accelerate_losses(TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=None))
    check(losses, plain("mxfp8", autocast=True))


def accelerate_torchao() -> None:
    import torchao.float8
    from accelerate.utils import AORecipeKwargs

    assert "quaver" in torchao.float8.__file__
    losses = accelerate_losses(AORecipeKwargs(module_filter_func=lambda module, name: True))
    check(losses, plain(quaver.recipes.tensorwise(power_of_two=False), autocast=True, norm=False))


def lightning() -> None:
    import lightning
    from lightning.pytorch.plugins import TransformerEnginePrecision

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    recipe = {"fp8_format": "HYBRID", "amax_history_len": HISTORY, "amax_compute_algo": "max"}
    plugin = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=recipe)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "max_steps": STEPS, "max_epochs": 1, "accelerator": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(plugins=[plugin], default_root_dir=folder, **quiet)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        trainer.fit(Module(), loader)
    ours = quaver.recipes.delayed(history=HISTORY, algorithm="max", power_of_two=False)
    check(losses, plain(ours, autocast=False))


def peft() -> None:
    import transformer_engine.pytorch as te
    from peft import LoraConfig, get_peft_model

    net = nn.Sequential(te.Linear(32, 64), nn.GELU(), te.Linear(64, 32))
    wrapped = get_peft_model(net, LoraConfig(target_modules=["0", "2"]))
    assert type(wrapped.base_model.model[0]).__name__ == "TeLinear"
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], 1e-2)
    before = copy.deepcopy({name: p.detach() for name, p in net.named_parameters() if "base_layer" in name})
    losses = []
    x, target = batches()[0]
    for _ in range(STEPS):
        with te.fp8_autocast():
            loss = nn.functional.mse_loss(wrapped(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in net.named_parameters():
        assert name not in before or torch.equal(p, before[name])


def check(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == STEPS and losses == expected, f"{losses} where a plain loop has {expected}"


PROGRAMS: dict[str, Callable[[], None]] = {
    "accelerate": accelerate,
    "accelerate_torchao": accelerate_torchao,
    "lightning": lightning,
    "peft": peft,
}

if __name__ == "__main__":
    # Of the libraries themselves.
    warnings.simplefilter("default")
    quaver.compat.install("torchao" if sys.argv[1].endswith("torchao") else "transformer_engine")
    PROGRAMS[sys.argv[1]]()
