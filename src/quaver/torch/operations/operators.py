"""The library's operators that a compiler does not look into: `define` registers one with torch."""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("quaver", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register torch.ops.quaver.NAME.

    Args:
        schema: "NAME(Tensor x, ...) -> Tensor", as torch.library takes it.
        run: what it does, on every device.
        fake: the same of shapes and dtypes alone.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{name}", fake, lib=_library)
