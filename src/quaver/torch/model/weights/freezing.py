"""Weights that hold still: quantized once for many forwards without gradients, and over the steps of other weights."""

import threading
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quaver.torch.linear.layer import Quantizable
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.state import kept_weights


class frozen(ContextDecorator):
    """Inside, each layer of a module quantizes its weight once, with or without gradients and in inference mode.

        with torch.no_grad(), qt.frozen(model):
            for batch in batches:
                model(batch)

    It decorates a function, too: `@qt.frozen(model)` holds the weights during each call.

    For evaluation and generation, where a forward without gradients would quantize every weight anew, and for the base
    of a model whose adapters train. It may be nested and entered again, by several threads too; while one of them is
    inside, it serves all that call the module. Other modules are not served. At its end what it kept is dropped.

    A write that shows on the weight (its version, address or storage) is still seen inside; call
    `quaver.torch.refresh(module)` after others. Compiled code quantizes weights in every forward: `frozen` does nothing
    there, neither around a compiled module nor inside one.

    Args:
        module: any module; its `quaver.torch.Linear` and converted layers at the time of entering are held.
    Raises:
        TypeError: something else than a module.
        ValueError: from an optimizer that would step one of the weights inside.
    Exact: results are those without it.
    """

    def __init__(self, module: nn.Module) -> None:
        if not is_tracing() and not isinstance(module, nn.Module):
            raise TypeError(f"frozen holds the weights of a module still, and was given a {type(module).__name__}")
        self.module = module
        self._entered: list[list[Quantizable]] = []

    def _recreate_cm(self) -> "frozen":
        # A decorated function may run in several threads at once, each with the layers of its own entry.
        return frozen(self.module)

    def __enter__(self) -> "frozen":
        if is_tracing():
            return self
        layers = [module for module in self.module.modules() if isinstance(module, Quantizable)]
        for layer in layers:
            kept_weights.freeze(layer)
        with _lock:
            if not _hooked:
                _hooked.append(register_optimizer_step_pre_hook(_refuse_step))
            _held.append(layers)
            self._entered.append(layers)
        return self

    def __exit__(self, *_: object) -> None:
        if is_tracing():
            return
        with _lock:
            layers = self._entered.pop()
            # By identity: equal lists are those of another thread.
            at = next(i for i, held in enumerate(_held) if held is layers)
            del _held[at]
        for layer in layers:
            # One that was reverted meanwhile keeps nothing.
            if "_state" in layer.__dict__:
                kept_weights.thaw(layer)


_lock = threading.Lock()
#: The layers of each `frozen` that is open.
_held: list[list[Quantizable]] = []
_hooked: list[Any] = []


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer must not step what is said to hold still."""
    if not _held:
        return
    with _lock:
        held = {
            id(p): layer
            for layers in _held
            for layer in layers
            for p in layer._parameters.values()
            if p is not None and p.dim() > 1
        }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and id(p) in held:
                layer = held[id(p)]
                raise ValueError(
                    f"{type(optimizer).__name__} would step the weight of {_described(layer)}, which "
                    "quaver.torch.frozen holds still; step outside of it, or hold only the modules that do not train"
                )


def _described(layer: Quantizable) -> str:
    if isinstance(layer, nn.Linear):
        return f"Linear({layer.in_features} → {layer.out_features})"
    return layer.__dict__.get("qualified_name") or type(layer).__name__
