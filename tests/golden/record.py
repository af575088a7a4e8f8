"""Collect what a case gives under names, as arrays."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


class Record:
    """What the cases of one run gave."""

    def __init__(self) -> None:
        #: Arrays by "case: name" that are equal on every processor.
        self.fixed: dict[str, np.ndarray] = {}
        #: Arrays that follow a sum, whose order the processor and the version of torch decide.
        self.sums: dict[str, np.ndarray] = {}
        self.case = ""

    def exact(self, **values: Any) -> None:
        """Note codes, scales, amaxes, counters, texts and bytes."""
        for name, value in values.items():
            self._note(self.fixed, name, value)

    def sum(self, **values: Any) -> None:
        """Note outputs, gradients and all that follows a product."""
        for name, value in values.items():
            self._note(self.sums, name, value)

    def keys(self, state: Mapping[str, Any], name: str = "keys") -> None:
        """Note the names, shapes and dtypes of a state dict, nested ones included."""
        self.exact(**{name: "\n".join(_lines(state))})

    def _note(self, into: dict[str, np.ndarray], name: str, value: Any) -> None:
        key = f"{self.case}: {name}"
        assert key not in self.fixed and key not in self.sums, f"{key} is noted twice"
        into[key] = array(value)


def array(value: Any) -> np.ndarray:
    """Bits of an array, a tensor, a text or bytes, as an array of a plain dtype."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if type(value).__module__.partition(".")[0] in ("torch", "quaver"):
        import torch

        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        value = value.cpu().contiguous()
        plain = {1: torch.uint8, 2: torch.int16}.get(value.element_size())
        if plain is not None and value.dtype.is_floating_point:
            value = value.view(plain)
        return np.array(value.numpy())
    value = np.asarray(value)
    if value.dtype.kind == "V" or value.dtype.name.startswith(("float8", "bfloat16", "float4", "float6")):
        value = value.view(f"u{value.dtype.itemsize}")
    return value


def digest(value: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bits."""
    head = f"{value.dtype.str} {value.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()[:32]


def _lines(state: Any, prefix: str = "") -> Iterable[str]:
    if isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from _lines(state[key], f"{prefix}/{key}")
    elif hasattr(state, "shape"):
        yield f"{prefix} {tuple(state.shape)} {state.dtype}"
    elif isinstance(state, list | tuple) and any(hasattr(each, "shape") or isinstance(each, Mapping) for each in state):
        for number, each in enumerate(state):
            yield from _lines(each, f"{prefix}/{number}")
    else:
        yield f"{prefix} {type(state).__name__}"
