"""Lightning over a recipe: delayed scaling's losses are a plain loop's, and a resumed run's the uninterrupted one's."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear.linear import Quantizable
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny, tokens

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

import lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from quaver.integrations.lightning import SCALING, QuaverPrecision  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

STEPS, SAVED = 6, 3
RECIPE = recipes.delayed(history=3, algorithm="most_recent")


def batches(count: int = 4 * STEPS) -> Tensor:
    return torch.cat([tokens(i) for i in range(count)])


class Model(lightning.LightningModule):
    """Calls a part of itself in training_step, as most do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.m = tiny("llama")
        self.losses: list[float] = []
        self.rate = 1e-2

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.m(input_ids=x, labels=x).loss
        return loss

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, number: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.m.parameters(), self.rate)


def fit(model: Any, plugin: Any, folder: Path | None = None, resume: Any = None, **more: Any) -> Any:
    given: dict[str, Any] = {"max_steps": STEPS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    given |= {"enable_model_summary": False, "max_epochs": 1, "devices": 1, "num_sanity_val_steps": 0, **more}
    if folder is None:
        given["enable_checkpointing"] = False
    else:
        given["callbacks"] = [ModelCheckpoint(folder, every_n_train_steps=SAVED, save_top_k=-1, filename="{step}")]
    trainer = lightning.Trainer(plugins=[plugin], default_root_dir=folder, **given)
    data = torch.utils.data.DataLoader(batches(), batch_size=2)
    trainer.fit(model, data, data if "limit_val_batches" in more else None, ckpt_path=resume)
    return trainer


def plain(model: Model, precision: str, accumulate: int = 1, clip: float | None = None) -> list[float]:
    """The training loop of Lightning over a manually converted module, called once per batch."""
    qt.convert(model, RECIPE)
    optimizer: Any = model.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    data = iter(torch.utils.data.DataLoader(batches(), batch_size=2))
    losses = []
    model.forward = model.loss  # type: ignore[method-assign]
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for _ in range(STEPS):
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=dtype, enabled=precision != "32-true", cache_enabled=False):
                loss = model(next(data))
            losses.append(loss.item())
            scaler.scale(loss / accumulate).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_match_a_plain_loop(precision: str, accumulate: int) -> None:
    model = Model()
    alone = copy.deepcopy(model)
    more = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "limit_val_batches": 2}
    fit(model, QuaverPrecision(RECIPE, precision), val_check_interval=2 * accumulate, **more)
    assert model.losses == plain(alone, precision, accumulate, clip=0.5)
    for name, value in alone.state_dict().items():
        assert name in model.state_dict() or name.rpartition(".")[2] in ("history", "factor")
        if name in model.state_dict():
            assert_bitwise(model.state_dict()[name], value, name)
    # The histories count: without them the losses are current scaling's.
    other = Model()
    fit(other, QuaverPrecision("tensorwise", precision), **more)
    assert other.losses != model.losses


def test_lightnings_own_precision_over_a_converted_module_trains_the_same() -> None:
    """Steps end by themselves: the module's forward, whose hook would end them, is not called."""
    model = Model()
    alone = copy.deepcopy(model)
    qt.convert(model, RECIPE)
    fit(model, MixedPrecision("bf16-mixed", "cpu"), accumulate_grad_batches=2)
    assert model.losses == plain(alone, "bf16-mixed", 2)


class ByStep(Model):
    """Data by step number: Lightning restarts the batches of an epoch when a run resumes."""

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return super().training_step(tokens(self.global_step), number)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_resumed_run_has_the_uninterrupted_runs_losses(recipe: str, tmp_path: Path) -> None:
    whole, again, without = ByStep(), ByStep(1), ByStep(1)
    fit(whole, QuaverPrecision(recipe), tmp_path)
    saved = tmp_path / f"step={SAVED}.ckpt"
    fit(again, QuaverPrecision(recipe), tmp_path / "again", resume=saved)
    assert len(whole.losses) == STEPS and again.losses == whole.losses[SAVED:]
    loaded = torch.load(saved, weights_only=False)
    assert all(value.any() for value in loaded["QuaverPrecision"][SCALING].values())
    del loaded["QuaverPrecision"][SCALING]
    torch.save(loaded, tmp_path / "without.ckpt")
    fit(without, QuaverPrecision(recipe), tmp_path / "without", resume=tmp_path / "without.ckpt")
    assert without.losses != again.losses


def test_a_checkpoint_has_the_names_of_the_unconverted_module(tmp_path: Path) -> None:
    model = Model()
    names = list(model.state_dict())
    trainer = fit(model, QuaverPrecision("delayed"), tmp_path)
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only=weights_only)
        assert list(torch.load(tmp_path / "own.ckpt", weights_only=False)["state_dict"]) == names
        loaded = Model.load_from_checkpoint(tmp_path / "own.ckpt", map_location="cpu")
        assert_bitwise(loaded.m.lm_head.weight, model.m.lm_head.weight)
    assert any("history" in name for name, _ in model.named_buffers())


def test_options_match_convert_and_a_converted_module_is_left_unchanged() -> None:
    model = Model()
    fit(model, QuaverPrecision("mxfp8", skip=["*.down_proj"], head=True), max_steps=1)
    kinds = {name: isinstance(part, Quantizable) for name, part in model.named_modules()}
    assert kinds["m.lm_head"] and kinds["m.model.layers.0.mlp.up_proj"] and not kinds["m.model.layers.0.mlp.down_proj"]
    fit(model, QuaverPrecision("delayed"), max_steps=1)
    assert str(model.m.lm_head.recipe) == "mxfp8"


class Twice(Model):
    """Runs itself, or a part of itself, twice in a training step."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.m = nn.Linear(16, 16)
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.m(x)
        return y

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        call = self if self.own else self.m
        x = torch.full((8, 16), 1.0 + number)
        return (call(x) + call(10 * x)).square().mean()


@pytest.mark.parametrize("own", [False, True], ids=["a part", "its own forward"])
def test_a_training_step_of_several_forwards_is_one_step(own: bool) -> None:
    model = Twice(own)
    fit(model, QuaverPrecision(RECIPE, "32-true"), max_steps=3)
    assert model.m.history[:, 0].tolist() == [30.0, 10.0, 20.0]
    # The module's own hook is where it was: in a plain loop it ends a step at each forward.
    for value in (2.0, 3.0):
        model(torch.full((8, 16), value))
    assert model.m.history[:, 0].tolist() == [3.0, 30.0, 2.0]


class Adversaries(Model):
    """Two models with two manual optimizers: each is called twice per step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = (nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.g.parameters(), 0.1), torch.optim.SGD(self.d.parameters(), 0.1)

    def training_step(self, batch: Tensor, number: int) -> None:
        adversaries(self.g, self.d, batch, *self.optimizers(), self.manual_backward, self.losses.append)


def adversaries(
    g: nn.Module,
    d: nn.Module,
    batch: Tensor,
    g_optimizer: Any,
    d_optimizer: Any,
    backward: Callable[..., None],
    note: Any,
) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(int(batch[0, 0])))
    loss = d(x).mean() - d(g(x).detach()).mean()
    d_optimizer.zero_grad()
    backward(loss)
    d_optimizer.step()
    note(loss.item())
    loss = d(g(x)).square().mean()
    g_optimizer.zero_grad()
    backward(loss)
    g_optimizer.step()
    note(loss.item())


def test_manual_optimization_with_two_optimizers_rolls_histories_like_autocast() -> None:
    model = Adversaries()
    alone = copy.deepcopy(model)
    fit(model, QuaverPrecision(RECIPE, "32-true"), max_steps=2 * STEPS)
    qt.convert(alone, RECIPE)
    optimizers, losses = alone.configure_optimizers(), list[float]()
    for batch in torch.utils.data.DataLoader(batches(2 * STEPS), batch_size=2):
        # One autocast for each of the two backwards.
        adversaries_in_steps(alone, batch, optimizers, losses)
    assert model.losses == losses[: len(model.losses)] and len(model.losses) == 2 * STEPS
    history = next(m for m in model.g.modules() if isinstance(m, Quantizable)).history
    assert history.any(0).all()


def adversaries_in_steps(model: Any, batch: Tensor, optimizers: Any, losses: list[float]) -> None:
    g, d = model.g, model.d
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(int(batch[0, 0])))
    with qt.autocast(RECIPE):
        loss = d(x).mean() - d(g(x).detach()).mean()
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    losses.append(loss.item())
    with qt.autocast(RECIPE):
        loss = d(g(x)).square().mean()
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    losses.append(loss.item())


def test_an_unsupported_precision_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"has 32-true, bf16-mixed, 16-mixed\. To keep weights in bfloat16, cast"):
        QuaverPrecision("delayed", "bf16-true")
    with pytest.raises(ValueError, match="no recipe 'mxfp9'"):
        QuaverPrecision("mxfp9")
