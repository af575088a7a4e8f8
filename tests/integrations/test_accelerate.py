"""accelerate over a recipe, in its bf16 and in its own fp8: losses are a plain loop's, bit for bit."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.conversion.matchers.linears import kind_of
from quaver.torch.linear.linear import Quantizable
from tests.torch.conversion.families import tiny, tokens

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

import accelerate  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

from quaver.integrations.accelerate import HOOK, QuaverAccelerator, check_hook  # noqa: E402

STEPS, SAVED = 6, 3
RECIPE = recipes.delayed(history=3, algorithm="most_recent")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate keeps one state a process; a Trainer's is one too."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def accelerator_of(mixed: str, recipe: Any = RECIPE, **more: Any) -> Any:
    if mixed == "fp8":
        return QuaverAccelerator(cpu=True, mixed_precision="fp8", recipe=recipe, **more)
    return accelerate.Accelerator(cpu=True, mixed_precision=mixed, **more)


def batches(steps: int = STEPS, micro: int = 1) -> list[list[Tensor]]:
    return [[tokens(micro * i + j) for j in range(micro)] for i in range(steps)]


def plain(model: Any, recipe: Any, micro: int = 1) -> list[float]:
    qt.convert(model, recipe)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for batch in batches(micro=micro):
        for x in batch:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=x, labels=x).loss
            losses.append(loss.item())
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(accelerator: Any, model: Any, optimizer: Any, steps: list[list[Tensor]]) -> list[float]:
    losses = []
    for batch in steps:
        for x in batch:
            with accelerator.accumulate(model):
                loss = model(input_ids=x, labels=x).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("mixed", ["bf16", "fp8"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("recipe", [RECIPE, "mxfp8"], ids=str)
def test_losses_match_a_plain_loop(mixed: str, micro: int, recipe: Any) -> None:
    model = tiny("llama")
    alone = copy.deepcopy(model)
    accelerator = accelerator_of(mixed, recipe, gradient_accumulation_steps=micro)
    if mixed == "bf16":
        qt.convert(model, recipe)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    assert sum(isinstance(part, Quantizable) for part in model.modules()) == 14
    assert run(accelerator, model, optimizer, batches(micro=micro)) == plain(alone, recipe, micro)


@pytest.mark.parametrize("mixed", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_resumed_run_has_the_uninterrupted_runs_losses(mixed: str, recipe: str, tmp_path: Path) -> None:
    runs = []
    for part in ("whole", "resumed"):
        torch.manual_seed(0)
        model = tiny("llama")
        accelerator = accelerator_of(mixed, recipe)
        if mixed == "bf16":
            qt.convert(model, recipe)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        if part == "whole":
            run(accelerator, model, optimizer, batches()[:SAVED])
            accelerator.save_state(str(tmp_path))
        else:
            accelerator.load_state(str(tmp_path))
        runs.append(run(accelerator, model, optimizer, batches()[SAVED:]))
        with contextlib.suppress(ValueError):
            accelerator.free_memory()
    assert runs[0] == runs[1] and len(runs[0]) == STEPS - SAVED


def test_two_models_with_two_optimizers_train_as_each_alone() -> None:
    models = [tiny("llama"), tiny("qwen2")]
    alone = [copy.deepcopy(model) for model in models]
    accelerator = accelerator_of("fp8")
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    losses: list[list[float]] = [[], []]
    for i in range(STEPS):
        x = tokens(i)
        both = [model(input_ids=x, labels=x).loss for model in prepared[:2]]
        for loss, optimizer, recorded in zip(both, prepared[2:], losses, strict=True):
            recorded.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert losses == [plain(model, RECIPE) for model in alone]


def test_options_match_convert_and_a_converted_model_is_left_unchanged() -> None:
    accelerator = accelerator_of("fp8", skip=["*.down_proj"], head=True)
    model = accelerator.prepare(tiny("llama"))
    kinds = {name: isinstance(part, Quantizable) for name, part in model.named_modules()}
    assert kinds["lm_head"] and kinds["model.layers.0.mlp.up_proj"] and not kinds["model.layers.0.mlp.down_proj"]
    own = tiny("llama")
    qt.convert(own, "mxfp8")
    own = accelerator.prepare(own)
    assert {str(part.recipe) for part in own.modules() if isinstance(part, Quantizable)} == {"mxfp8"}


def test_without_fp8_nothing_is_converted() -> None:
    model = QuaverAccelerator(cpu=True, mixed_precision="bf16", recipe="delayed").prepare(tiny("llama"))
    assert not any(isinstance(part, Quantizable) for part in model.modules())


def test_the_hook_of_this_version_is_the_known_one() -> None:
    check_hook(accelerate.Accelerator)


def test_a_version_without_the_hook_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(accelerate.Accelerator, HOOK)
    with pytest.raises(ValueError, match=r"has no _prepare_ao.*call quaver\.torch\.convert.*mixed_precision='bf16'"):
        accelerator_of("fp8")
    monkeypatch.setattr(accelerate.Accelerator, HOOK, lambda self, model, config: model, raising=False)
    with pytest.raises(ValueError, match="has no _prepare_ao"):
        accelerator_of("fp8")


def test_a_version_that_has_torchao_convert_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def torchaos(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for part in model.modules():
            for name, layer in part.named_children():
                if kind_of(layer) is not None:
                    setattr(part, name, nn.Linear(1, 1))
        return model

    accelerator = accelerator_of("fp8")
    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", torchaos)
    with pytest.raises(ValueError, match="replaced converted layers of LlamaForCausalLM"):
        accelerator.prepare(tiny("llama"))


def test_another_library_that_accelerate_would_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(ValueError, match=r"would use MSAMP for FP8; leave its recipe out"):
        accelerator_of("fp8")
