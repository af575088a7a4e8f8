"""Live bytes of tensors during an optimizer's step, counted by operations."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quaver.torch as qt
from quaver.torch.optim import AdamW
from quaver.train import config


class Live(TorchDispatchMode):
    """Count the bytes of live storages created by operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.seen:
                    self.seen.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int, bytes: int) -> None:
        self.seen.discard(key)
        self.now -= bytes


@contextmanager
def live() -> Iterator[Live]:
    mode = Live()
    with mode:
        yield mode


def layer(storage: str, recipe: str, shape: tuple[int, int]) -> nn.Sequential:
    """One matrix [out, in], with a weight stored as codes, in bfloat16 or in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    if storage == "codes":
        qt.quantize_weights(model, config.find_recipe(recipe))
    return model.bfloat16() if storage == "bfloat16" else model


def above(preset: str, recipe: str, shape: tuple[int, int]) -> int:
    """Peak bytes of a step above those that remain after it."""
    model = layer(config.find_optimizer(preset).weights(config.find_recipe(recipe), "bfloat16"), recipe, shape)
    optimizer = AdamW(model.parameters(), lr=1e-3, preset=preset)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(32, shape[1])).square().mean().backward()
        with live() as seen:
            optimizer.step()
    return seen.peak


def above_in_backward(preset: str, threshold: int | None, wide: int, deep: int) -> int:
    """Peak bytes of backward and step, with gradients, above those that remain.

    Args:
        threshold: bytes of gradients that may be pending; None steps after backward.
        wide, deep: side and number of the matrices.
    """
    storage = config.find_optimizer(preset).weights(config.find_recipe("tensorwise"), "bfloat16")
    model = nn.Sequential(*(layer(storage, "tensorwise", (wide, wide)) for _ in range(deep)))
    optimizer = AdamW(model.parameters(), lr=1e-3, preset=preset)
    if threshold is not None:
        optimizer.step_in_backward(outstanding_bytes=threshold)
    x = torch.randn(8, wide)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        with live() as seen:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return seen.peak
