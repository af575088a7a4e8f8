"""Checkpoints: a folder `step-000100` with model.safetensors, optimizer.safetensors, state.json; no pickles.

The tensors' names, shapes and layout are PyTorch's, whichever framework wrote them; here they are numpy arrays.
Where several ranks trained, each has written its part of them into a file of its own, `shard-*.safetensors`.
A checkpoint is written to a hidden folder beside its place, flushed to the disk and then renamed; one that goes is
renamed first: at every moment every `step-*` folder is whole, whatever happens to the disk or the process.

state.json holds the SHA-256 of the other files and of itself, so that no bit changes unseen between writing and
reading, and no file of another step is taken for this one's.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from quaver.train.configuration.config import reason
from quaver.train.files import whole_file
from quaver.train.records import parts

#: 2 since the norms of a layer are named with what they precede, 3 since digests are kept; earlier ones are refused.
FORMAT = 3
#: Of a checkpoint that several ranks wrote, which earlier versions cannot read.
SHARDED = 4
#: The files of a single process.
FILES = ("model.safetensors", "optimizer.safetensors")
#: The names of the ranks' files.
SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")


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
    with writing(folder, step, facts, keep) as partial:
        parts.write(partial / "model.safetensors", model)
        parts.write(partial / "optimizer.safetensors", optimizer)
    return folder / name_of(step)


@contextmanager
def writing(folder: Path, step: int, facts: dict[str, Any], keep: int = 0) -> Iterator[Path]:
    """A new folder to write a checkpoint's tensors into, which is sealed and takes its place at the end; see `save`."""
    target = folder / name_of(step)
    partial = whole_file.partial_of(target)
    try:
        whole_file.clear(folder)
        partial.mkdir()
        yield partial
        format = FORMAT if (partial / FILES[0]).exists() else SHARDED
        seal(partial, {"format": format, "step": step, **facts})
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


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with the digests of the files in `folder`, and of itself."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    whole = state | {"files": {name: digest(folder / name) for name in names}}
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
    """What a checkpoint holds, whole, however many ranks wrote it.

    Args:
        facts: entries of the checkpoint's state that must be equal, such as the model's size and the text.
    Raises: CheckpointError if it is broken, another program's or another run's.
    """
    state = checked(path, facts)
    check_digests(path, state)
    return read_tensors(path, state, parts.joined)


def outline(path: Path, facts: dict[str, Any]) -> Saved:
    """As `load`, but of every tensor its shape and type alone, and no file's digest is looked at; see `parts.outline`.

    For a rank that will read its own part.
    """
    return read_tensors(path, checked(path, facts), parts.outline)


def checked(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state. Raises: CheckpointError if it is broken or another run's."""
    state = read_state(path)
    for key, value in facts.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} {state.get(key)!r}, and this run has {value!r}; "
                "resume with the options and the text it was made with, or give another --out"
            )
    return state


def check_digests(path: Path, state: dict[str, Any]) -> None:
    """Raise a CheckpointError if a file is not the one that was saved."""
    for name, expected in state["files"].items():
        check_digest(path, name, expected)


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
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        return False
    return set(files) == set(FILES) or (bool(files) and all(map(SHARD.fullmatch, files)))


def check_format(path: Path, format: int) -> None:
    if format not in (FORMAT, SHARDED):
        when = "an earlier" if format < FORMAT else "a later"
        way = "train that run again, or go on with that version" if format < FORMAT else "go on with that version"
        raise CheckpointError(
            f"the checkpoint {path} has format {format}, of {when} version of quaver; this one reads formats {FORMAT} "
            f"and {SHARDED}: {way}"
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


def read_tensors(path: Path, state: dict[str, Any], read: Callable[[list[Path]], dict[str, np.ndarray]]) -> Saved:
    """A checkpoint's tensors as `read` gives them; those of the optimizer are named `parameter/what`."""
    try:
        if set(state["files"]) == set(FILES):
            weights, moments = (read([path / name]) for name in FILES)
            return Saved(state["step"], weights, moments, state)
        tensors = read([path / name for name in state["files"]])
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(broken(path, reason(error))) from error
    moments = {name: tensor for name, tensor in tensors.items() if "/" in name}
    return Saved(state["step"], {n: t for n, t in tensors.items() if n not in moments}, moments, state)


def broken(path: Path, why: str) -> str:
    return f"the checkpoint {path} is broken ({why}); delete that folder to go on from the one before it"


def flush(path: Path) -> None:
    """Have the system write a file, or a folder's entries where folders can be opened, to the disk."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
