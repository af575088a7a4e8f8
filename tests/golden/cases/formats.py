"""Codes and scales of every format and recipe, in numpy and torch."""

from collections.abc import Callable
from functools import partial

import torch

import quaver
import quaver.torch as qt
from quaver import recipes
from tests.golden.inputs import values
from tests.golden.names import find_module
from tests.golden.record import Record

#: Ragged, whole, and one row.
SHAPES = ((48, 96), (33, 130), (1, 64))

reference = find_module("quaver.reference")


def cases() -> dict[str, Callable[[Record], None]]:
    found: dict[str, Callable[[Record], None]] = {
        f"format {name}": partial(of_format, fmt) for name, fmt in quaver.FORMATS.items()
    }
    for name in recipes.RECIPES:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                text = f"recipe {name} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
                found[text] = partial(of_recipe, name, shape, dtype)
    return found


def of_format(fmt: quaver.Format, record: Record) -> None:
    x = values(64, 64, seed=1, hard=True)
    codes = reference.encode(x, fmt)
    record.exact(codes=codes, decoded=reference.decode(codes, fmt))


def of_recipe(name: str, shape: tuple[int, int], dtype: torch.dtype, record: Record) -> None:
    recipe = recipes.get(name)
    x = torch.from_numpy(values(*shape, seed=2, hard=dtype is torch.float32)).to(dtype)
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("a", "b"):
            spec = getattr(getattr(recipe, gemm), side)
            if spec is None:
                continue
            q = qt.quantize(x, spec, seed=3, count=5)
            record.exact(**{f"{gemm} {side} codes": q.data, f"{gemm} {side} decoded": qt.dequantize(q)})
            if isinstance(q.scale, torch.Tensor):
                record.exact(**{f"{gemm} {side} scale": q.scale})
