"""Checkpoints: a folder `step-000100` with model.safetensors, optimizer.safetensors and state.json; no pickles.

Names, shapes and layout of tensors are PyTorch's, whichever framework wrote them; here they are numpy arrays. With
several ranks, each writes its shards into a file of its own, `shard-*.safetensors`. A checkpoint is written to a hidden
folder, flushed to disk and then renamed; a deleted one is renamed first. So every `step-*` folder is complete at any
time, whatever happens to the disk or the process.

state.json has the SHA-256 of the other files and of itself, so that changed bits, or files of another step, are
detected.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from quaver.train import files as whole_file
from quaver.train.config import error_text

# ---- sharded tensors ----
# Tensors whose shards are in the files of several ranks, as torch.distributed.checkpoint writes safetensors.
#
# Each file's metadata has the offsets of its shards, so torch is not needed to assemble them.

#: Metadata key of a file: {name: {"saved_offsets": [...]}} as JSON.
WHERE = "DCP_SHARDING_INFO"
#: Stand-in for bfloat16, which numpy lacks: its bits under its name.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
#: Numpy dtypes by safetensors' names.
DTYPES: dict[str, Any] = {
    **{"BF16": BFLOAT16, "F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
    **{"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8},
}


class TensorPart(NamedTuple):
    """A shard of a tensor in a file."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def list_shards(files: Iterable[Path]) -> dict[str, list[TensorPart]]:
    """Return the shards of every tensor by name; a file without offsets has whole tensors.

    Raises: OSError, SafetensorError; ValueError for unknown dtypes or missing shards.
    """
    parts: dict[str, list[TensorPart]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            where = json.loads((file.metadata() or {}).get(WHERE, "{}"))
            for name in file.keys():  # noqa: SIM118 (safetensors' object is no mapping)
                one = file.get_slice(name)
                shape, kind = tuple(one.get_shape()), one.get_dtype()
                if kind not in DTYPES:
                    raise ValueError(f"{path.name}: {name!r} is of type {kind}")
                offsets = where.get(name, {}).get("saved_offsets") or [0] * len(shape)
                if len(offsets) != len(shape):
                    raise ValueError(f"{path.name}: {name!r} has {len(shape)} axes and offsets of {len(offsets)}")
                parts.setdefault(name, []).append(TensorPart(path, tuple(offsets), shape, np.dtype(DTYPES[kind])))
    for name, each in parts.items():
        if sum(math.prod(part.shape) for part in each) != math.prod(shape_of(each)):
            raise ValueError(f"the parts of {name!r} do not make a whole")
    return parts


def shape_of(parts: list[TensorPart]) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    ends = ([o + n for o, n in zip(part.offsets, part.shape, strict=True)] for part in parts)
    return tuple(map(max, zip(*ends, strict=True)))


def read_shapes(files: Iterable[Path]) -> dict[str, np.ndarray]:
    """Return every tensor's shape and dtype as a broadcast zero, without reading data or using memory."""
    return {
        name: np.broadcast_to(np.zeros((), each[0].dtype), shape_of(each)) for name, each in list_shards(files).items()
    }


def read_tensors_whole(files: Iterable[Path]) -> dict[str, np.ndarray]:
    """Read and assemble every tensor."""
    whole = {}
    for name, each in list_shards(files).items():
        whole[name] = np.empty(shape_of(each), each[0].dtype)
        for part in each:
            at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
            whole[name][at] = tensor(part.file, name, part)
    return whole


def tensor(path: Path, name: str, part: TensorPart) -> np.ndarray:
    """Read one shard from its file."""
    if part.dtype != BFLOAT16:
        with safe_open(path, framework="np") as file:
            own: np.ndarray = file.get_tensor(name)
            return own
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        begin, end = json.loads(raw.read(length))[name]["data_offsets"]
        raw.seek(8 + length + begin)
        return np.frombuffer(raw.read(end - begin), "<u2").astype(np.uint16).view(BFLOAT16).reshape(part.shape)


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write whole tensors into a file, row-major and wide dtypes first, as safetensors does."""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    header, end = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, value in ordered:
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for _, value in ordered:
            bits = value.view(np.uint16) if value.dtype == BFLOAT16 else value
            file.write(np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).tobytes())


# ---- checkpoints ----

#: Format version: 2 renamed the norms of a layer, 3 added digests; earlier ones are rejected.
FORMAT = 3
#: Format of a checkpoint of several ranks, which earlier versions cannot read.
SHARDED = 4
#: Files of a single process.
FILES = ("model.safetensors", "optimizer.safetensors")
#: Names of the ranks' files.
SHARD = re.compile(r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint could not be written or read; the message says what to do."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """Contents of a checkpoint."""

    # The optimizer step after which it was saved.
    step: int
    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    # Entries of its state.json.
    state: dict[str, Any]


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first."""
    numbered = [path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]{6,20}", path.name)]
    return sorted((path for path in numbered if path.is_dir()), key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def last_checkpoint_text(folder: Path) -> str:
    """Return a clause for messages that names the checkpoint from which a stopped run can resume."""
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
    """Write the state after `step` into `folder`, and delete all but the `keep` newest checkpoints (0 keeps all).

    Args:
        folder: the run's folder.
        step: number of the step.
        model, optimizer: tensors by name.
        facts: JSON entries that `load` compares, or that readers of the file need.
        keep: number of checkpoints to keep.
    Returns: the checkpoint's folder.
    Raises: CheckpointError if it cannot be written; earlier checkpoints remain.
    """
    with writing(folder, step, facts, keep) as partial:
        write(partial / "model.safetensors", model)
        write(partial / "optimizer.safetensors", optimizer)
    return folder / folder_name(step)


@contextmanager
def writing(folder: Path, step: int, facts: dict[str, Any], keep: int = 0) -> Iterator[Path]:
    """Yield a new folder for a checkpoint's tensors; at the end it gets its state.json and is renamed. See `save`."""
    target = folder / folder_name(step)
    partial = whole_file.partial_of(target)
    try:
        whole_file.delete_partial(folder)
        partial.mkdir()
        yield partial
        format = FORMAT if (partial / FILES[0]).exists() else SHARDED
        write_state(partial, {"format": format, "step": step, **facts})
        for path in [*partial.iterdir(), partial]:
            sync_to_disk(path)
        whole_file.delete_folder(target)
        os.replace(partial, target)
        sync_to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not save step {step} in {folder}: {error_text(error)}; {last_checkpoint_text(folder)}; fix this, "
            "for example by freeing disk space, then continue with --resume"
        ) from error
    if keep:
        with suppress(OSError):
            for old in list_checkpoints(folder)[:-keep]:
                whole_file.delete_folder(old)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json with the digests of the files in `folder`, and of itself."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    whole = state | {"files": {name: digest(folder / name) for name in names}}
    (folder / "state.json").write_text(state_text(whole | {"digest": own_digest(whole)}), encoding="utf-8")


def state_text(state: dict[str, Any]) -> str:
    return json.dumps(state, indent=1)


def own_digest(state: dict[str, Any]) -> str:
    """Return the SHA-256 of a state without its own digest."""
    others = {key: value for key, value in state.items() if key != "digest"}
    return hashlib.sha256(state_text(others).encode()).hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    whole_file.check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path, facts: dict[str, Any]) -> SavedCheckpoint:
    """Load a checkpoint as whole tensors, however many ranks wrote it.

    Args:
        path: the checkpoint's folder.
        facts: entries of its state that must match, such as the model's size and the text.
    Raises: CheckpointError if it is broken, or of another program or run.
    """
    state = read_matching_state(path, facts)
    check_digests(path, state)
    return read_tensors(path, state, read_tensors_whole)


def checkpoint_outline(path: Path, facts: dict[str, Any]) -> SavedCheckpoint:
    """Like `load`, but with shapes and dtypes only and without checking digests; see `read_shapes`.

    For a rank that reads its own shards later.
    """
    return read_tensors(path, read_matching_state(path, facts), read_shapes)


def read_matching_state(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state. Raises: CheckpointError if it is broken or of another run."""
    state = read_state(path)
    for key, value in facts.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"the checkpoint {path} was made with {key} {state.get(key)!r}, and this run has {value!r}; "
                "resume with the options and the text it was made with, or give another --out"
            )
    return state


def check_digests(path: Path, state: dict[str, Any]) -> None:
    """Raise a CheckpointError if a file differs from what was saved."""
    for name, expected in state["files"].items():
        check_digest(path, name, expected)


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's state.json. Raises: CheckpointError if it differs from what was saved under this name."""
    try:
        text = whole_file.read(path / "state.json")
        state = json.loads(text)
    except OSError as error:
        raise CheckpointError(broken_message(path, f"state.json: {error_text(error)}")) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(broken_message(path, "its state.json is not one that quaver wrote")) from error
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise CheckpointError(broken_message(path, "its state.json is not one that quaver wrote"))
    check_format(path, state["format"])
    if text != state_text(state) or state.get("digest") != own_digest(state):
        raise CheckpointError(broken_message(path, "its state.json is not the one that was saved: its SHA-256 differs"))
    if type(state.get("step")) is not int or not has_digests(state.get("files")):
        raise CheckpointError(broken_message(path, "its state.json lacks the step or a file's digest"))
    if path.name != folder_name(state["step"]):
        right = path.with_name(folder_name(state["step"]))
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
        actual = digest(path / name)
    except OSError as error:
        raise CheckpointError(broken_message(path, f"{name}: {error_text(error)}")) from error
    except ValueError as error:
        raise CheckpointError(broken_message(path, str(error))) from error
    if actual != expected:
        raise CheckpointError(broken_message(path, f"{name} is not the file that was saved: its SHA-256 differs"))


def read_tensors(
    path: Path, state: dict[str, Any], read: Callable[[list[Path]], dict[str, np.ndarray]]
) -> SavedCheckpoint:
    """Return a checkpoint's tensors by a reader function; names of optimizer tensors have the form
    `parameter/state`.
    """
    try:
        if set(state["files"]) == set(FILES):
            weights, moments = (read([path / name]) for name in FILES)
            return SavedCheckpoint(state["step"], weights, moments, state)
        tensors = read([path / name for name in state["files"]])
    except (OSError, SafetensorError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(broken_message(path, error_text(error))) from error
    moments = {name: tensor for name, tensor in tensors.items() if "/" in name}
    return SavedCheckpoint(state["step"], {n: t for n, t in tensors.items() if n not in moments}, moments, state)


def broken_message(path: Path, why: str) -> str:
    return f"the checkpoint {path} is broken ({why}); delete that folder to go on from the one before it"


def sync_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries where the system supports it, to disk."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
