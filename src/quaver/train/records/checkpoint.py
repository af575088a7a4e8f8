"""Checkpoints: a folder `step-000100` with model.safetensors, optimizer.safetensors, state.json; no pickles.

The tensors' names, shapes and layout are PyTorch's, whichever framework wrote them; here they are numpy arrays.
A checkpoint is written to a hidden folder beside its place, flushed to the disk and then renamed; one that goes is
renamed first: at every moment every `step-*` folder is whole, whatever happens to the disk or the process.

state.json holds the SHA-256 of the other two files and of itself, so that no bit changes unseen between writing and
reading, and no file of another step is taken for this one's.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quaver.train.configuration.config import reason
from quaver.train.files import whole_file

#: 2 since the norms of a layer are named with what they precede, 3 since digests are kept; earlier ones are refused.
FORMAT = 3
#: The files whose digests the state holds.
FILES = ("model.safetensors", "optimizer.safetensors")
#: What tensors of a checkpoint may be, as safetensors calls it: the types that numpy has.
DTYPES = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}


class CheckpointError(ValueError):
    """A checkpoint that could not be written or read; the message says what to do."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    # The optimizer step after which it was saved.
    step: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    # The entries of its state.json.
    state: dict[str, Any]


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def all_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first."""
    numbered = [path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]{6,20}", path.name)]
    return sorted((path for path in numbered if path.is_dir()), key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a run's folder, or None."""
    return next(reversed(all_in(folder)), None)


def last_good(folder: Path) -> str:
    """A clause for a message: what a run that stopped can go on from."""
    last = latest(folder)
    return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"


def save(
    folder: Path,
    step: int,
    model: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    facts: dict[str, Any],
    keep: int = 0,
) -> Path:
    """Write the state after `step` into `folder`; all but the `keep` newest checkpoints go (0: none goes).

    Args:
        facts: entries that `load` compares, and others that a reader of the file wants; JSON.
    Raises: CheckpointError if it cannot be written; the checkpoints before it stay.
    """
    target = folder / name_of(step)
    partial = whole_file.partial_of(target)
    try:
        whole_file.clear(folder)
        partial.mkdir()
        save_file(contiguous(model), partial / "model.safetensors")
        save_file(contiguous(optimizer), partial / "optimizer.safetensors")
        seal(partial, {"format": FORMAT, "step": step, **facts})
        for path in [*partial.iterdir(), partial]:
            flush(path)
        whole_file.put_away(target)
        os.replace(partial, target)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not save step {step} in {folder}: {reason(error)}; {last_good(folder)}; mend that, such as by "
            "making room, then go on with --resume"
        ) from error
    if keep:
        with suppress(OSError):
            for old in all_in(folder)[:-keep]:
                whole_file.put_away(old)
    return target


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with the digests of the files in `folder`, and of itself."""
    whole = state | {"files": {name: digest(folder / name) for name in FILES}}
    (folder / "state.json").write_text(rendered(whole | {"digest": own_digest(whole)}), encoding="utf-8")


def rendered(state: dict[str, Any]) -> str:
    return json.dumps(state, indent=1)


def own_digest(state: dict[str, Any]) -> str:
    """SHA-256 of what a state says but for its own digest."""
    said = {key: value for key, value in state.items() if key != "digest"}
    return hashlib.sha256(rendered(said).encode()).hexdigest()


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    whole_file.check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path, facts: dict[str, Any]) -> Saved:
    """What a checkpoint holds.

    Args:
        facts: entries of the checkpoint's state that must be equal, such as the model's size and the text.
    Raises: CheckpointError if it is broken, another program's or another run's.
    """
    state = read_state(path)
    for key, value in facts.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} {state.get(key)!r}, and this run has {value!r}; "
                "resume with the options and the text it was made with, or give another --out"
            )
    for name in FILES:
        check_digest(path, name, state["files"][name])
    weights, moments = (read_tensors(path / name) for name in FILES)
    return Saved(state["step"], weights, moments, state)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint's state.json says. Raises: CheckpointError if that is not what was saved under this name."""
    try:
        text = whole_file.read(path / "state.json")
        state = json.loads(text)
    except OSError as error:
        raise CheckpointError(broken(path, f"state.json: {reason(error)}")) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(broken(path, "its state.json is not one that quaver wrote")) from error
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise CheckpointError(broken(path, "its state.json is not one that quaver wrote"))
    check_format(path, state["format"])
    if text != rendered(state) or state.get("digest") != own_digest(state):
        raise CheckpointError(broken(path, "its state.json is not the one that was saved: its SHA-256 differs"))
    if type(state.get("step")) is not int or not has_digests(state.get("files")):
        raise CheckpointError(broken(path, "its state.json lacks the step or a file's digest"))
    if path.name != name_of(state["step"]):
        right = path.with_name(name_of(state["step"]))
        raise CheckpointError(f"the folder {path} holds the checkpoint of step {state['step']}; rename it to {right}")
    return state


def has_digests(files: object) -> bool:
    return isinstance(files, dict) and all(isinstance(files.get(name), str) for name in FILES)


def check_format(path: Path, format: int) -> None:
    if format != FORMAT:
        when = "an earlier" if format < FORMAT else "a later"
        way = "train that run again, or go on with that version" if format < FORMAT else "go on with that version"
        raise CheckpointError(
            f"the checkpoint {path} has format {format}, of {when} version of quaver; this one reads format {FORMAT}: "
            f"{way}"
        )


def check_digest(path: Path, name: str, expected: str) -> None:
    try:
        given = digest(path / name)
    except OSError as error:
        raise CheckpointError(broken(path, f"{name}: {reason(error)}")) from error
    except ValueError as error:
        raise CheckpointError(broken(path, str(error))) from error
    if given != expected:
        raise CheckpointError(broken(path, f"{name} is not the file that was saved: its SHA-256 differs"))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            for name in names:
                if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                    raise CheckpointError(broken(path.parent, f"{path.name}: {name!r} is of type {dtype}"))
            return {name: file.get_tensor(name) for name in names}
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
