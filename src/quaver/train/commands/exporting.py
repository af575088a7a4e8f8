"""`quaver export`: the newest checkpoint of a run, under the recipe that it was saved under, as servers read it."""

import shutil
from pathlib import Path

import numpy as np

from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.huggingface import configuration, family, renamed
from quaver.train.configuration.sizes import MODELS
from quaver.train.data.batches import validation_batches
from quaver.train.data.tokens import load, open_tokenizer
from quaver.train.learning import frameworks
from quaver.train.running.generation import Vocabulary, config_of, in_force, newest, of_this_model


def export_run(run: Path, folder: Path, format: str, check: bool) -> list[str]:
    """Export a run, and its tokenizer beside it.

    Args:
        folder: a new one.
        format: as of `quaver.torch.export`.
        check: whether to compare the next token's distribution on a batch held out for validation, which also gives
            formats the scales of inputs that they store.
    Returns:
        What was written, in lines.
    Raises: ValueError for bad input, before anything is written.
    """
    config = config_of(run)
    recipe = in_force(run, config)
    if not recipe.quantizes:
        raise ValueError(
            f"{run} was trained under {recipe}, which quantizes no weight, so there are no codes to export; train one "
            f"that does, such as: quaver train --recipe mxfp8 --model {config.model}"
        )
    saved_tokenizer = run / "tokenizer.json"
    vocabulary = Vocabulary(None if config.tokens == "byte" else open_tokenizer(saved_tokenizer))
    frameworks.installed("torch", "quaver export")
    import torch

    from quaver.torch.model.weights.serving.exporting import export
    from quaver.train.learning.torch.decoding import Decoding

    sizes = MODELS[config.model]
    positions = max(sizes.positions, config.sequence)
    model = Decoding(
        config, recipe, vocabulary.size, of_this_model(newest(run), config, vocabulary.size), "none", 1
    ).model
    model.checkpoint_names = lambda name: renamed(name, sizes)  # type: ignore[assignment]
    model.checkpoint_config = {**configuration(sizes, vocabulary.size, positions), "dtype": config.dtype}  # type: ignore[assignment]
    inputs = _held_out(config, saved_tokenizer) if check else None
    given = None if inputs is None else torch.from_numpy(inputs).to(next(model.parameters()).device)
    with torch.autocast(
        given.device.type if given is not None else "cpu", torch.bfloat16, enabled=config.dtype == "bfloat16"
    ):
        result = export(model, folder, format=format, check=given, calibrate=given)
    if saved_tokenizer.exists():
        shutil.copy(saved_tokenizer, folder / "tokenizer.json")
    lines = str(result).splitlines()
    if not family(sizes):
        lines.append(f"{config.model} has no counterpart among Llama, Mistral and Qwen3: names are the trainer's own")
    return lines


def _held_out(config: TrainConfig, saved_tokenizer: Path) -> np.ndarray:
    """Tokens of the run's validation, int64 [B, S]."""
    tokens = load(config, saved_tokenizer if saved_tokenizer.exists() else None)
    return np.ascontiguousarray(validation_batches(tokens.validation, config)[0][:, :-1].astype(np.int64))
