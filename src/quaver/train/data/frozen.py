"""Tokens of a text in a file: what a comparison reads once, so that every run of it trains on the very same.

A text may change while runs go on (`--text .` is a working tree). The file holds both parts, what was asked for when
they were read, and a digest that is checked whenever they are read again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quaver.train.files import whole_file

NAME = "text.safetensors"


@dataclass(frozen=True)
class Parts:
    """Token ids of both parts of a text, 1-D and unsigned."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Names this very data, so that no run goes on with another text: the beginning of a SHA-256."""
        parts = [np.ascontiguousarray(part) for part in (self.train, self.validation)]
        whole = hashlib.sha256(json.dumps([[str(part.dtype), part.size] for part in parts]).encode())
        for part in parts:
            whole.update(part.data)
        return whole.hexdigest()[:16]


@dataclass(frozen=True)
class Frozen(Parts):
    """What such a file holds."""

    # Of the tokenizer that made them; "" for bytes.
    tokenizer: str
    # The options that they were read by.
    asked: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 of all that it holds."""
        return hashlib.sha256(json.dumps([self.fingerprint, self.tokenizer, self.asked]).encode()).hexdigest()


def is_one(text: tuple[str, ...]) -> bool:
    """Whether the option `text` names such a file."""
    return len(text) == 1 and text[0].endswith(".safetensors")


def write(path: Path, frozen: Frozen) -> None:
    said = {"tokenizer": frozen.tokenizer, "asked": json.dumps(frozen.asked), "digest": frozen.digest}
    with whole_file.replacing(path) as partial:
        save_file({"train": frozen.train, "validation": frozen.validation}, partial, metadata=said)


def read(path: Path) -> Frozen:
    """Raises: ValueError if the file is none of these, or not as it was written."""
    whole_file.check_file(path)
    if not path.exists():
        raise ValueError(f"there is no text file {path}; --text takes files and folders that exist")
    try:
        with safe_open(path, framework="np") as file:
            said: Mapping[str, str] = file.metadata() or {}
            parts = {name: file.get_tensor(name) for name in ("train", "validation")}
        frozen = Frozen(**parts, tokenizer=said["tokenizer"], asked=json.loads(said["asked"]))
        if any(part.ndim != 1 or part.dtype not in (np.uint8, np.uint32) for part in parts.values()):
            raise ValueError("its parts are no token ids")
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a text that quaver compare wrote ({error}); --text takes text files"
        ) from error
    if frozen.digest != said.get("digest"):
        raise ValueError(f"{path} is not as it was written: its SHA-256 differs; begin again in another --out")
    return frozen
