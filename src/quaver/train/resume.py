"""Resuming from a checkpoint: checks of its contents, and warnings if the options have changed."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from quaver.train import checkpoint
from quaver.train.checkpoint import CheckpointError, SavedCheckpoint
from quaver.train.config import TORCH_ADAMW, TrainConfig, lr_at
from quaver.train.learner import DistributedLearner, Learner, Tensors
from quaver.train.memory import parameters
from quaver.train.mesh import ProcessGroup
from quaver.train.model_config import MODELS

#: Options that change a run's losses. Changes of model, seed or text are errors and not listed here.
LOSS_OPTIONS = (
    *("recipe", "dtype", "batch", "sequence", "accumulate"),
    *("lr", "final_lr", "warmup", "weight_decay", "beta1", "beta2", "clip", "nudge"),
)
#: State entry with the layout of the optimizer states (`LAYOUT` in `quaver.torch.optim`), and its present value; a
#: missing entry means 1.
STATES, STATES_LAYOUT = "states", 2
#: AdamW's states of a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")


def resume_from(
    path: Path, trained: Learner, ranks: ProcessGroup, facts: dict[str, Any], config: TrainConfig, vocab: int
) -> int:
    """Resume from a checkpoint, whichever framework and however many ranks wrote it; returns its step.

    Warns: once, if options that change losses differ.
    Raises: CheckpointError if it is broken, incomplete or of another run; ValueError if it is beyond the run's steps,
    or is its last step and such options differ.
    """
    alone = ranks.number == 1
    saved = checkpoint.load(path, facts) if alone else checkpoint.checkpoint_outline(path, facts)
    if ranks.first and not alone:
        checkpoint.check_digests(path, saved.state)
    before = saved.state.get("config")
    before = before if isinstance(before, dict) else {}
    saved_optimizer = before.get("optimizer", TORCH_ADAMW)
    if saved_optimizer != config.optimizer:
        raise CheckpointError(
            f"the checkpoint {path} was made with --optimizer {saved_optimizer}, and this run has {config.optimizer}; "
            f"resume with --optimizer {saved_optimizer}, or give another --out"
        )
    changed = differences(before, config) | changed_steps(before, config, saved.step)
    own = MODELS[config.model].lr
    changes = ", ".join(
        f"{name} {option_text(name, getattr(config, name), own)} (was {was})" for name, was in changed.items()
    )
    check_steps(path, saved.step, config, changes)
    # Other optimizers validate their states themselves, because only they know codes and residuals.
    wrong = tensor_errors(saved, trained, config, vocab, "recipe" in changed) if config.optimizer == TORCH_ADAMW else []
    if config.optimizer != TORCH_ADAMW:
        if saved.state.get(STATES, 1) != STATES_LAYOUT:
            raise CheckpointError(
                f"the checkpoint {path} has optimizer states in a layout of another version of quaver; train that run "
                "again, or give another --out"
            )
        check_codes(path, saved, trained)
    try:
        if wrong:
            raise ValueError(wrong[0] + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
        if alone:
            trained.load(saved.model, saved.optimizer)
        else:
            ranks.wait()  # until the first rank has checked the digests
            cast(DistributedLearner, trained).read(path)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint {path} does not fit this model: {error}") from error
    if changed and ranks.first:
        warnings.warn(
            f"the run goes on from step {saved.step} with other options: {changes}; a run with either alone has other "
            "losses",
            stacklevel=2,
        )
    return saved.step


def stores_codes(path: Path, facts: dict[str, Any]) -> bool:
    """Return True if a checkpoint has matrices as codes; a resumed run keeps the same storage."""
    return has_scales(checkpoint.checkpoint_outline(path, facts).model)


def has_scales(names: Iterable[str]) -> bool:
    """True if any name is that of scales of a weight stored as codes."""
    return any(name.endswith(".weight_scale") for name in names)


def check_codes(path: Path, saved: SavedCheckpoint, trained: Learner) -> None:
    """Raise a CheckpointError if the checkpoint has matrices as codes but this run needs floats."""
    if has_scales(saved.model) and not has_scales(trained.names()):
        raise CheckpointError(
            f"the checkpoint {path} has matrices as codes, and a run with --tp, of recipes that change or of weights "
            "in four bits keeps them in bfloat16, as this one would: go on as the run began, or give another --out; "
            "with --optimizer exact all keep the same"
        )


def tensor_errors(
    saved: SavedCheckpoint, trained: Learner, config: TrainConfig, vocab: int, other_recipe: bool
) -> list[str]:
    """Return messages about tensors of a float32 checkpoint that do not fit the model."""
    shapes = parameters(MODELS[config.model], vocab)
    state = trained.names() - set(shapes)
    wrong = missing_tensors(saved, shapes, set() if other_recipe else state)
    if wrong or other_recipe:
        return wrong
    return [f"{name} is not part of the model" for name in saved.model if name not in {*shapes, *state}]


def check_steps(path: Path, step: int, config: TrainConfig, changed: str) -> None:
    """Raise a ValueError if the checkpoint is beyond the run's steps, or no step is left for changed options."""
    if step > config.steps:
        raise ValueError(f"{path} is beyond the {config.steps} steps of this run; give more --steps")
    if step == config.steps and changed:
        raise ValueError(
            f"{path} is the last of this run's {config.steps} steps, so none is left to train with other options: "
            f"{changed}; give more --steps, or another --out for a run with them from the beginning"
        )


def differences(before: Mapping[str, Any], config: TrainConfig) -> dict[str, str]:
    """Return the earlier value, as text, of every option in COUNT that differs now."""
    own = MODELS[config.model].lr

    def meant(name: str, value: Any) -> Any:
        return own if name == "lr" and value == 0 else value

    return {
        name: option_text(name, before[name], own)
        for name in LOSS_OPTIONS
        if name in before and meant(name, before[name]) != meant(name, getattr(config, name))
    }


def changed_steps(before: Mapping[str, Any], config: TrainConfig, step: int) -> dict[str, str]:
    """Return the earlier number of steps if the checkpoint's learning rate or recipe depends on it."""
    steps = before.get("steps", config.steps)
    if steps == config.steps or step == config.steps:  # no step is left
        return {}
    other_rate = lr_at(step, replace(config, steps=steps)) != lr_at(step, config)
    return {"steps": repr(steps)} if other_rate or "%" in config.recipe else {}


def option_text(name: str, value: Any, own: float) -> str:
    """Return an option's value as text, with the meaning of a special 0."""
    stands_for = {"lr": f"{own!r}, the model's own", "clip": "none"}
    return stands_for[name] if value == 0 and name in stands_for else repr(value)


def missing_tensors(saved: SavedCheckpoint, shapes: Mapping[str, tuple[int, ...]], state: set[str]) -> list[str]:
    """Return messages about missing tensors, wrong shapes or dtypes, and unknown optimizer states in a checkpoint."""
    moments = {f"{name}/{key}": shape for name, shape in shapes.items() for key in MOMENTS}
    updates: dict[str, tuple[int, ...]] = {f"{name}/step": () for name in shapes}
    wrong = [f"{name} is missing" for name in sorted(state) if name not in saved.model]
    wrong += shape_errors("the model", saved.model, shapes)
    wrong += shape_errors("the optimizer", saved.optimizer, moments | updates)
    wrong += [f"{name} is not part of the optimizer" for name in saved.optimizer if name not in moments | updates]
    return wrong


def shape_errors(whose: str, saved: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return messages about tensors that are missing, or not float32 of the expected shape."""
    wrong = []
    for name, shape in shapes.items():
        if name not in saved:
            wrong.append(f"{name} is missing in {whose}")
        elif saved[name].shape != shape or saved[name].dtype != np.float32:
            wrong.append(f"{name} is {saved[name].dtype} {saved[name].shape}, where {whose} has float32 {shape}")
    return wrong
