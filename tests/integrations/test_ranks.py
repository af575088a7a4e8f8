"""transformers' Trainer, accelerate and Lightning on two gloo ranks under delayed scaling: all have the same scales."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny, tokens

for library in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(library, reason=f"{library} is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

STEPS, SAVED = 4, 2
RECIPE = recipes.delayed(history=3, algorithm="most_recent")


def with_history(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if getattr(layer, "history", None) is not None]


def assert_scales(model: nn.Module, case: str) -> None:
    """Every rank quantizes by the same."""
    layers = with_history(model)
    assert layers, case
    assert_bitwise(*two_ranks.gathered(torch.stack([layer.factor for layer in layers])), case)


def rows(model: nn.Module) -> list[Tensor]:
    """The amaxes that each rank recorded last."""
    return two_ranks.gathered(torch.stack([layer.history[0] for layer in with_history(model)]))


def data(step: int) -> Tensor:
    return tokens(2 * step + int(os.environ["RANK"]))


def by_accelerate(rank: int) -> None:
    from quaver.integrations.accelerate import QuaverAccelerator

    folder = two_ranks.folder() / "accelerate"

    def train(steps: range, resumed: bool) -> list[float]:
        accelerator = QuaverAccelerator(cpu=True, mixed_precision="fp8", recipe=RECIPE)
        model = tiny("llama")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        if resumed:
            accelerator.load_state(folder)
        losses = []
        for step in steps:
            loss = model(input_ids=data(step), labels=data(step)).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            assert_scales(model, f"accelerate, step {step}")
            if step + 1 == SAVED and not resumed:
                assert not torch.equal(*rows(model)), "ranks have recorded the same: this tests nothing"
                accelerator.save_state(folder)
                assert_bitwise(*rows(model), "what accelerate saves")
        return losses

    whole = train(range(STEPS), False)
    assert train(range(SAVED, STEPS), True) == whole[SAVED:]


def by_trainer(rank: int) -> None:
    from transformers import TrainerCallback

    from quaver.integrations.huggingface import ScalingCallback
    from tests.integrations.test_trainer import losses, train

    class See(TrainerCallback):  # type: ignore[misc]
        saves = 0

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert_scales(model, f"Trainer, step {state.global_step}")

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.saves += 1
            assert_bitwise(*rows(model), "what a Trainer saves")

    def losses_of_model(resumed: bool) -> list[Any]:
        model = tiny("llama")
        qt.convert(model, RECIPE)
        see = See()
        done = train(model, two_ranks.folder() / "trainer", [ScalingCallback(), see], resume=resumed)
        assert see.saves
        return losses(done)

    whole = losses_of_model(False)
    assert losses_of_model(True)[-3:] == whole[3:]


def by_lightning(rank: int) -> None:
    import lightning

    from quaver.integrations.lightning import SCALING, QuaverPrecision
    from tests.integrations.test_lightning import Model

    class Watched(Model):
        def on_train_batch_end(self, *args: Any) -> None:
            assert_scales(self, "Lightning")

    def trainer(steps: int) -> Any:
        options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        options |= {"enable_checkpointing": False, "use_distributed_sampler": False, "strategy": "ddp", "devices": 2}
        options |= {"accelerator": "cpu", "default_root_dir": two_ranks.folder(), "max_steps": steps}
        return lightning.Trainer(plugins=[QuaverPrecision(RECIPE, "32-true")], **options)

    def batches() -> Any:
        return torch.utils.data.DataLoader(torch.cat([data(step) for step in range(STEPS)]), batch_size=2)

    first, file = Watched(), two_ranks.folder() / "lightning.ckpt"
    begun = trainer(SAVED)
    begun.fit(first, batches())
    begun.save_checkpoint(file)
    assert_bitwise(*rows(first), "what Lightning saves")
    saved = torch.load(file, weights_only=False)
    assert any(SCALING in str(key) or SCALING in str(value)[:4000] for key, value in saved.items())


CASES = [by_accelerate, by_trainer, by_lightning]


@pytest.mark.ranks
def test_two_ranks_agree_under_delayed_scaling(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    ranks = {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": sys.argv[3]}
    # The variables of torchrun; the ranks are connected before any library reads them.
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "TORCHELASTIC_RUN_ID": "of this test"}
    two_ranks.main(CASES)
