"""Tensors that lie in parts over the files of several ranks, as torch.distributed.checkpoint writes safetensors.

Each file's metadata say where in the whole each of its parts begins; nothing of torch is needed to put them together.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

#: The entry of a file's metadata: {name: {"saved_offsets": [...]}} as JSON.
WHERE = "DCP_SHARDING_INFO"
#: bfloat16, which numpy has not: its bits under its name.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
#: The types of tensors, as safetensors calls them.
DTYPES: dict[str, Any] = {
    **{"BF16": BFLOAT16, "F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
    **{"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8},
}


class Part(NamedTuple):
    """A part of a tensor in a file."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def listed(files: Iterable[Path]) -> dict[str, list[Part]]:
    """The parts of every tensor, by its name; a file without offsets has whole tensors.

    Raises: OSError, SafetensorError; ValueError where parts are of an unknown type, or are not all there.
    """
    parts: dict[str, list[Part]] = {}
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
                parts.setdefault(name, []).append(Part(path, tuple(offsets), shape, np.dtype(DTYPES[kind])))
    for name, each in parts.items():
        if sum(math.prod(part.shape) for part in each) != math.prod(shape_of(each)):
            raise ValueError(f"the parts of {name!r} do not make a whole")
    return parts


def shape_of(parts: list[Part]) -> tuple[int, ...]:
    """Of the whole tensor."""
    ends = ([o + n for o, n in zip(part.offsets, part.shape, strict=True)] for part in parts)
    return tuple(map(max, zip(*ends, strict=True)))


def outline(files: Iterable[Path]) -> dict[str, np.ndarray]:
    """Every tensor's shape and type as an array of one zero, which is read nowhere and takes no memory."""
    return {name: np.broadcast_to(np.zeros((), each[0].dtype), shape_of(each)) for name, each in listed(files).items()}


def joined(files: Iterable[Path]) -> dict[str, np.ndarray]:
    """Every tensor whole."""
    whole = {}
    for name, each in listed(files).items():
        whole[name] = np.empty(shape_of(each), each[0].dtype)
        for part in each:
            at = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
            whole[name][at] = tensor(part.file, name, part)
    return whole


def tensor(path: Path, name: str, part: Part) -> np.ndarray:
    """A tensor of a file."""
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
    """Write whole tensors into a file, row by row, those of wide types first, as safetensors lays them out."""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    header, end = {}, 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, value in ordered:
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for _, value in ordered:
            bits = value.view(np.uint16) if value.dtype == BFLOAT16 else value
            file.write(np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).tobytes())
