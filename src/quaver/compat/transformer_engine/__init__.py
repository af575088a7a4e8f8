"""Transformer Engine's API under its own package names; `pytorch` and `jax` are imported at first use."""

from importlib import import_module
from typing import Any

from quaver.compat.transformer_engine import common

__all__ = ["common", "jax", "pytorch"]


def __getattr__(name: str) -> Any:
    """Import the front end `jax` or `pytorch` at first access."""
    if name in ("jax", "pytorch"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
