"""Observers of quantized layers: what `quaver.torch.count` and `quaver.torch.inspect` see.

Without one, a layer only checks `active.observers`. That attribute is process-wide instead of thread-local, because
on a GPU backward runs in another thread than forward. With one, forwards run by the general plan, which has the same
bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.numerics.quantized import Quantized


class ObservedGemm(NamedTuple):
    """Operands and result of one GEMM of a layer."""

    layer: nn.Module
    #: "fprop", "dgrad" or "wgrad".
    name: str
    #: Operands [m, k] and [n, k] before quantization, and the bias [n] or None.
    a: Tensor
    b: Tensor
    bias: Tensor | None
    #: The result [m, n].
    y: Tensor
    #: Both operands as the GEMM read them; None where they are not quantized, or exist only in the layout of a kernel.
    quantized: tuple[Quantized | None, Quantized | None]
    #: Name of the layer's weight parameter.
    parameter: str = "weight"
    #: Index of the expert in a layer with several; else None.
    group: int | None = None

    def exact(self) -> Tensor:
        """Return a @ b.T + bias in float32, outside of autograd and autocast."""
        with torch.no_grad(), torch.autocast(self.a.device.type, enabled=False):
            product = self.a.float() @ self.b.float().t()
            return product if self.bias is None else product.add_(self.bias)


class Observer:
    """Receives operands and results of quantized GEMMs and attention while active.

    It must not change them, unless it means to change the training: a result may be overwritten in place.
    """

    #: True if `observe_gemm` is defined. All ranks must then observe the same steps, because operands that are sharded
    #: over tokens are gathered for it.
    measures_gemms = False
    #: True to receive operands and results of forwards that checkpointing recomputes too.
    sees_recomputation = False

    def observe_operand(
        self, layer: nn.Module, recipe: Recipe, operand: str, x: Tensor, q: Quantized, parameter: str = "weight"
    ) -> None:
        """Receive a quantized operand of a layer.

        Args:
            layer: layer of the GEMM.
            recipe: recipe of the call.
            operand: "input", "weight" or "grad_output"; with ".T" its transpose, quantized for another GEMM; x and q
                are then transposed.
            x: the operand before quantization and before any Hadamard rotation, [rows, k].
            q: the same, quantized.
            parameter: name of the layer's weight parameter.
        """

    def observe_gemm(self, gemm: ObservedGemm) -> None:
        """Receive the operands and the result of a GEMM."""

    def attention_recipe(self, core: nn.Module, recipe: Recipe | None) -> Recipe | None:
        """Return the recipe by which a `DotProductAttention` runs that would be quantized by `recipe`."""
        return recipe

    def observe_attention(
        self, core: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any], y: Tensor
    ) -> None:
        """Receive a call of quantized attention.

        Args:
            core: the `DotProductAttention`.
            qkv: q, k and v; nothing else reads these tensors, so that their gradients are those of this call.
            options: keyword arguments of `core.attend`.
            y: the output.
        """


class _Active:
    observers: tuple[Observer, ...] = ()

    @property
    def sees_recomputation(self) -> bool:
        return any(each.sees_recomputation for each in self.observers)


active = _Active()


def measures_gemms() -> bool:
    """Return True if an active observer takes the results of GEMMs."""
    return any(each.measures_gemms for each in active.observers)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Context with one more active observer; contexts may end in any order."""
    active.observers += (observer,)
    try:
        yield
    finally:
        active.observers = tuple(each for each in active.observers if each is not observer)
