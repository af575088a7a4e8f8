"""Transformer Engine's names, each in the file that it has them in; no front end is imported before it is used."""

from importlib import import_module
from typing import Any

from quaver.compat.transformer_engine import common

__all__ = ["common", "jax", "pytorch"]


def __getattr__(name: str) -> Any:
    """A front end, imported when it is asked for."""
    if name in ("jax", "pytorch"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}; there are {', '.join(__all__)}")
