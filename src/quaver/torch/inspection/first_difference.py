"""`first_difference`: compare two checkpoints tensor by tensor."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.quantized_tensor import QuantizedTensor

#: Models, state dicts, and files or folders of them.
Checkpoint = nn.Module | Mapping[str, Any] | str | Path
#: File types that torch.load reads.
TORCH_FILES = (".pt", ".pth", ".bin")


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The first tensor that differs between two checkpoints."""

    name: str
    #: The difference in words.
    text: str
    #: Number of elements that differ, and the largest difference, absolute and relative to the largest magnitude; 0 if
    #: the tensors cannot be compared.
    count: int = 0
    largest: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    __repr__ = __str__


def first_difference(a: Checkpoint, b: Checkpoint) -> TensorDifference | None:
    """Return the first tensor that differs between two checkpoints, and by how much; None if all bits are equal.

        print(qt.first_difference("run-a/step-000100", "run-b/step-000100"))

    The order is that of `a`: of a model's modules, a state dict's keys, or names with numbers in numerical order for
    safetensors. Values that are not tensors are compared too.

    Args:
        a, b: models, state dicts (nested ones too), safetensors or torch files, or folders of such files.
    Raises:
        ValueError: a path has no checkpoint.
    """
    left, right = _tensors(a), _tensors(b)
    for name, read in left.items():
        if name not in right:
            return TensorDifference(name=name, text="missing in b")
        found = _difference(name, read(), right[name]())
        if found is not None:
            return found
    missing = next((name for name in right if name not in left), None)
    return None if missing is None else TensorDifference(name=missing, text="missing in a")


def _difference(name: str, a: Any, b: Any) -> TensorDifference | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        same = type(a) is type(b) and not isinstance(a, Tensor) and a == b
        return None if same else TensorDifference(name=name, text=f"{_short(a)} in a, {_short(b)} in b")
    for attribute in ("shape", "dtype"):
        one, other = getattr(a, attribute), getattr(b, attribute)
        if one != other:
            return TensorDifference(name=name, text=f"{attribute} {_short(one)} in a, {_short(other)} in b")
    a, b = (_plain(x) for x in (a, b))
    unequal = (_bits(a) != _bits(b)).any(-1).view(a.shape)
    if not unequal.any():
        return None
    count = int(unequal.sum())
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    difference = (x - y).abs()[unequal]
    largest, magnitude = float(difference.nan_to_num(torch.inf).amax()), float(x.abs().nan_to_num(0.0).amax())
    relative = largest / magnitude if magnitude else largest
    share = f"{count} of {a.numel()} elements differ, by at most {largest:.3g} ({relative:.2g} of the largest)"
    return TensorDifference(name=name, text=share, count=count, largest=largest, relative=relative)


def _plain(x: Tensor) -> Tensor:
    return (x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()).cpu()


def _bits(x: Tensor) -> Tensor:
    """Return the bytes of each element, [elements, bytes]."""
    return x.contiguous().view(-1, 1).view(torch.uint8)


def _short(value: Any) -> str:
    text = str(tuple(value)) if isinstance(value, torch.Size) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- reading ----


def _tensors(checkpoint: Checkpoint) -> dict[str, Callable[[], Any]]:
    """Return a function for each value that reads it."""
    if isinstance(checkpoint, nn.Module):
        checkpoint = checkpoint.state_dict()
    if isinstance(checkpoint, Mapping):
        return dict(_flattened(checkpoint, ""))
    path = Path(checkpoint)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".safetensors", *TORCH_FILES) and file.is_file()]
    if not files:
        raise ValueError(f"first_difference: {path} has no checkpoint; give a safetensors or torch file, or a folder")
    read = {file: _file(file) for file in files}
    # Files of several ranks, and model and optimizer, have the same names.
    times = Counter(name for tensors in read.values() for name in tensors)
    return {
        name if times[name] == 1 else f"{name} of {file.name}": value
        for file, tensors in read.items()
        for name, value in tensors.items()
    }


def _file(path: Path) -> dict[str, Callable[[], Any]]:
    if path.suffix in TORCH_FILES:
        return dict(_flattened(torch.load(path, map_location="cpu", weights_only=True), ""))
    from safetensors import safe_open

    opened = safe_open(path, framework="pt")
    return {name: _reader(opened, name) for name in sorted(opened.keys(), key=_numerically)}


def _reader(opened: Any, name: str) -> Callable[[], Any]:
    return lambda: opened.get_tensor(name)


def _numerically(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which layers.2 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _flattened(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Callable[[], Any]]]:
    flat: list[tuple[str, Callable[[], Any]]] = []
    for key, value in values.items():
        name = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            flat += _flattened(value, name)
        else:
            flat.append((name, lambda value=value: value))  # type: ignore[misc]
    return flat
