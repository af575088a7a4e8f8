import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from quaver.torch.conversion.export.operands import Reader
from quaver.train import run_training
from quaver.train.commands.cli import app
from quaver.train.generate import config_of, load_matching, newest_checkpoint, saved_recipe
from tests.train.conftest import MakeConfig


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of the files' weights in Hugging Face's own model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    reader = Reader(folder)
    state = {f"{prefix}weight": reader.decoded(prefix).dense() for prefix in reader.quantized()}
    plain = {name: value for name, value in load_file(folder / "model.safetensors").items() if name not in state}
    unquantized = {name: value for name, value in plain.items() if not re.search("_scale|weight_packed", name)}
    problems = model.load_state_dict({**unquantized, **state}, strict=False)
    assert not problems.unexpected_keys and set(problems.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


@pytest.mark.parametrize(
    ("model", "recipe"), [("nano", "mxfp8"), ("mistral-tiny", "delayed(history=4)"), ("qwen3-tiny", "rowwise")]
)
def test_a_run_is_exported_under_hugging_face_names(
    make_config: MakeConfig, tmp_path: Path, model: str, recipe: str
) -> None:
    run = run_training(make_config(model=model, recipe=recipe, dtype="float32", steps=3)).folder
    result = quaver("export", run, "--out", tmp_path / "served", "--check")
    assert result.exit_code == 0, result.output
    assert "0 from weights" in result.stdout and str(tmp_path / "served") in result.stdout
    from quaver.train.torch.learner import NextTokenLogits

    config = config_of(run)
    vocab = json.loads((tmp_path / "served" / "config.json").read_text())["vocab_size"]
    saved = load_matching(newest_checkpoint(run), config, 256)
    trainer = NextTokenLogits(config, saved_recipe(run, config), 256, saved, "none", 1).model
    ids = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = trainer(ids)
    ours = logits(tmp_path / "served", ids)
    assert ours.shape == (2, 24, vocab)
    # Inputs are quantized in the trainer's alone, and queries and keys of Qwen3 are divided by their norms.
    assert float((ours - theirs).norm() / theirs.norm()) < (0.2 if model == "qwen3-tiny" else 0.05)


def test_other_families_keep_the_trainers_names(make_config: MakeConfig, tmp_path: Path) -> None:
    run = run_training(make_config(model="falcon-tiny", recipe="mxfp8", steps=1)).folder
    result = quaver("export", run, "--out", tmp_path / "served", "--check", "--format", "modelopt")
    assert result.exit_code == 0, result.output
    assert "names are the trainer's own" in result.stdout and "0 from weights" in result.stdout
    assert "layers.0.attention.q_proj.weight" in load_file(tmp_path / "served" / "model.safetensors")


def test_bad_input_gives_a_clear_error(trained: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    quantized_run = run_training(make_config(model="nano", recipe="mxfp8", steps=1, out=str(tmp_path / "run"))).folder
    for arguments, sentence in (
        ((trained, "--out", tmp_path / "a"), "under bf16, which quantizes no weight"),
        ((quantized_run, "--out", tmp_path / "a", "--format", "vllm"), "no format of exported files 'vllm'"),
        ((tmp_path, "--out", tmp_path / "a"), "holds no run"),
        ((quantized_run, "--out", quantized_run), "already exists and is not empty"),
    ):
        result = quaver("export", *arguments)
        assert result.exit_code == 1 and sentence in result.stderr.replace("\n", " "), result.output
    assert not (tmp_path / "a").exists()
