"""A folder of safetensors with their index and JSON files beside them, which appears whole or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor


def safetensors_torch() -> ModuleType:
    """safetensors' functions of torch tensors.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to.
    """
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        sentence = "exported files are safetensors, which is not installed: pip install 'quaver[serving]'"
        raise ModuleNotFoundError(sentence, name="safetensors") from error
    return safetensors.torch


class Writing:
    """A folder that is being written.

    Args:
        folder: which is there and empty.
        limit: bytes that a file of tensors has at most, unless one tensor alone has more.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.save = safetensors_torch().save_file
        self.files: list[Path] = []
        self.held: dict[str, Tensor] = {}
        self.where: dict[str, int] = {}
        self.bytes = 0
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor up; a file is written once it is full."""
        if name in self.where:
            raise ValueError(f"two tensors of this model have the name {name!r} in its checkpoint")
        size = tensor.numel() * tensor.element_size()
        if self.held and self.bytes + size > self.limit:
            self._flush()
        # What shares memory with another tensor is written for each.
        self.held[name] = tensor.detach().cpu().contiguous().clone()
        self.where[name] = len(self.files)
        self.bytes += size
        self.total += size

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self.files)}.safetensors"
        self.save(self.held, path, metadata={"format": "pt"})
        self.files.append(path)
        self.held, self.bytes = {}, 0

    def close(self) -> None:
        """Write what is left, and give the files their names."""
        self._flush()
        count = len(self.files)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        )
        for path, name in zip(self.files, names, strict=True):
            path.rename(self.folder / name)
        if count > 1:
            weight_map = {name: names[number] for name, number in self.where.items()}
            self.json(
                "model.safetensors.index.json", {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            )

    def json(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(folder: Path, limit: int) -> Iterator[Writing]:
    """A new folder to write into, which takes its place at the end; after an error nothing of it is left.

    Raises:
        ValueError: the folder is there and holds something, is no folder, or cannot be written.
    """
    check_place(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); give a folder that can be") from error
    try:
        result = Writing(partial, limit)
        yield result
        result.close()
        os.replace(partial, folder)
    except OSError as error:
        raise ValueError(f"{folder} could not be written ({error.strerror}); make room, or give another") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Refuse a place that is taken.

    Raises:
        ValueError: with what is there.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is there and not empty; give a new folder, or remove that one first")
    elif folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is there and is no folder; give a new one")
