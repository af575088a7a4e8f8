"""Checkpoints: a folder `step-000100` with model.safetensors, optimizer.safetensors, state.json; no pickles.

The tensors' names, shapes and layout are PyTorch's, whichever framework wrote them; here they are numpy arrays.
A checkpoint is written to a hidden folder beside its place, flushed to the disk and then renamed: at every
moment the newest `step-*` folder is whole, whatever happens to the disk or the process.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quaver.train.config import reason

#: 2 since the norms of a layer are named with what they precede; 1 is refused.
FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint that could not be written or read; the message says what to do."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    # The optimizer step after which it was saved.
    step: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]


def all_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run's folder, or None."""
    return next(reversed(all_in(folder)), None)


def save(
    folder: Path,
    step: int,
    model: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    about: dict[str, Any],
    keep: int = 0,
) -> Path:
    """Write the state after `step` into `folder`; all but the `keep` newest checkpoints go (0: none goes).

    Args:
        about: what `load` shall find equal, and whatever else is worth knowing; JSON.
    Raises: CheckpointError if it cannot be written; the checkpoints before it stay.
    """
    target = folder / f"step-{step:06d}"
    partial = folder / f".{target.name}.partial"
    try:
        for left_over in folder.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)
        save_file(contiguous(model), partial / "model.safetensors")
        save_file(contiguous(optimizer), partial / "optimizer.safetensors")
        state = {"format": FORMAT, "step": step, **about}
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in [*partial.iterdir(), partial]:
            flush(path)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        last = latest(folder)
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not save step {step} in {folder}: {reason(error)}; {kept}; make room, then go on with --resume"
        ) from error
    if keep:
        for old in all_in(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def load(path: Path, about: dict[str, Any]) -> Saved:
    """What a checkpoint holds.

    Args:
        about: entries of the checkpoint's state that must be equal, such as the model's size and the text.
    Raises: CheckpointError if it is broken, another program's or another run's.
    """
    state = read_state(path)
    for key, value in about.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} {state.get(key)!r}, and this run has {value!r}; "
                "resume with the options and the text it was made with, or give another --out"
            )
    weights, moments = read_tensors(path / "model.safetensors"), read_tensors(path / "optimizer.safetensors")
    return Saved(int(state["step"]), weights, moments)


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        known = state["format"] == FORMAT and isinstance(state["step"], int)
    except OSError as error:
        raise CheckpointError(broken(path, f"state.json: {reason(error)}")) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(broken(path, "its state.json is not one that quaver wrote")) from error
    if not known:
        raise CheckpointError(
            f"{path} has checkpoint format {state['format']!r}, and this quaver reads {FORMAT}; train that run again"
        )
    return state


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(broken(path.parent, f"{path.name}: {reason(error)}")) from error


def broken(path: Path, why: str) -> str:
    return f"the checkpoint {path} is broken ({why}); delete that folder to go on from the one before it"


def contiguous(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each tensor row by row, as safetensors writes it."""
    return {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}


def flush(path: Path) -> None:
    """Have the system write a file, or a folder's entries where folders can be opened, to the disk."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
