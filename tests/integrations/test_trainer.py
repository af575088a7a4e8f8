"""transformers' Trainer over converted models: a resumed run's losses are the uninterrupted run's, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import quaver.torch as qt
from quaver.integrations.huggingface import FILE, QuaverConfig, ScalingCallback
from tests.torch.conversion.families import tiny, tokens

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

STEPS, SAVED = 6, 3


class Text(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = tokens(i)[0]
        return {"input_ids": x, "labels": x}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        **{"max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "per_device_train_batch_size": 2},
        **{"learning_rate": 1e-2, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 5},
        **more,
    }
    return TrainingArguments(output_dir=str(folder), **given)


def train(
    model: Any, folder: Path, callbacks: list[TrainerCallback], resume: bool = False, **more: Any
) -> list[dict[str, float]]:
    trainer = Trainer(
        model=model, args=arguments(folder, **more), train_dataset=Text(), callbacks=[*callbacks], processing_class=None
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    return [row for row in trainer.state.log_history if "loss" in row]


def losses(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize("by", ["convert", "config"])
def test_a_resumed_run_has_the_uninterrupted_runs_losses(recipe: str, by: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "plain")

    def build() -> Any:
        if by == "config":
            return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=QuaverConfig(recipe))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        qt.convert(model, recipe)
        return model

    whole = train(build(), tmp_path / "run", [ScalingCallback(saturation=False)])
    assert (tmp_path / "run" / f"checkpoint-{SAVED}" / FILE).is_file()
    again = train(build(), tmp_path / "run", [ScalingCallback(saturation=False)], resume=True)
    assert len(whole) == STEPS and losses(again[-STEPS + SAVED :]) == losses(whole[SAVED:])
    # The state counts: without it the losses are others.
    without = train(build(), tmp_path / "run", [], resume=True) if by == "convert" else None
    assert without is None or losses(without[-STEPS + SAVED :]) != losses(whole[SAVED:])


def test_resuming_an_moe_model_requires_experts_made_from_the_checkpoint(tmp_path: Path) -> None:
    def build(folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder)
        qt.convert(model, "tensorwise")
        return model

    tiny("mixtral").save_pretrained(tmp_path / "plain")
    whole = train(build(tmp_path / "plain"), tmp_path / "run", [ScalingCallback(saturation=False)])
    with pytest.raises(
        ValueError, match=r"was saved with other weights in \d+ of \d+ parameters.*experts.*from_pretrained"
    ):
        train(build(tmp_path / "plain"), tmp_path / "run", [ScalingCallback(saturation=False)], resume=True)
    again = build(tmp_path / "run" / f"checkpoint-{SAVED}")
    rows = train(again, tmp_path / "run", [ScalingCallback(saturation=False)], resume=True)
    assert losses(rows[-STEPS + SAVED :]) == losses(whole[SAVED:])


def test_counting_saturation_is_logged_and_changes_no_loss(tmp_path: Path) -> None:
    runs = []
    for count in (False, True):
        model = tiny("llama")
        qt.convert(model, "delayed")
        runs.append(train(model, tmp_path / str(count), [ScalingCallback(saturation=count)], save_steps=STEPS))
    assert losses(runs[0]) == losses(runs[1])
    assert all(0 <= row["saturated_input"] <= 1 and "flushed_grad_output" in row for row in runs[1])
    assert not any("saturated_input" in row for row in runs[0])


def test_resuming_without_the_state_fails_before_a_step(tmp_path: Path) -> None:
    model = tiny("llama")
    qt.convert(model, "delayed")
    train(model, tmp_path, [])
    with pytest.raises(ValueError, match=r"resumes at step 3.*quaver_scaling.safetensors is not there"):
        train(model, tmp_path, [ScalingCallback()], resume=True)


def test_stored_weights_under_the_trainers_optimizer_are_refused_at_the_first_step(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "plain")
    config = QuaverConfig("mxfp8", weights="stored")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    with pytest.raises(ValueError, match="would write to the codes"):
        train(model, tmp_path / "run", [])


def test_a_checkpoint_of_a_converted_model_is_a_plain_folder(tmp_path: Path) -> None:
    model = tiny("llama")
    qt.convert(model, "delayed")
    train(model, tmp_path, [ScalingCallback(saturation=False)])
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{SAVED}", output_loading_info=True)
    assert not any(report.values())


def test_the_loss_block_is_replaced_in_mixed_precision(tmp_path: Path) -> None:
    """accelerate replaces the instance's forward by a wrapper of the class's, and the wrapper calls the block."""
    runs = []
    for loss in (False, True):
        model = tiny("llama")
        qt.convert(model, "mxfp8", blocks=qt.Blocks(norm=False, mlp=False, attention=False, loss=loss))
        logits: list[Any] = []
        model.register_forward_hook(lambda _m, _a, outputs, saved=logits: saved.append(outputs.logits))
        runs.append(train(model, tmp_path / str(loss), [], bf16=True, save_steps=STEPS))
        assert "forward" in model.__dict__
        assert len(logits) == STEPS and all((each is None) is loss for each in logits)
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 0.02 * theirs["loss"]


def test_trainer_reads_its_columns_off_a_model_with_the_block_of_the_loss(tmp_path: Path) -> None:
    plain, model = tiny("llama"), tiny("llama")
    qt.convert(model, "mxfp8", blocks=qt.Blocks(loss=True))
    columns = []
    for each in (plain, model):
        trainer = Trainer(model=each, args=arguments(tmp_path), train_dataset=Text())
        trainer._set_signature_columns_if_needed()
        columns.append(trainer._signature_columns)
    assert columns[0] == columns[1] and {"input_ids", "attention_mask", "labels"} <= {*columns[0]}
