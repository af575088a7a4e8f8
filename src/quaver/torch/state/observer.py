"""Observers of quantized layers: what `quaver.torch.count` and `quaver.torch.inspect` see.

Without one, a layer only checks `active.observers`. That attribute is process-wide instead of thread-local, because
on a GPU backward runs in another thread than forward. With one, forwards run by the general plan, which has the same
bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.numerics.quantized import Quantized

#: Operands of a GEMM, each None if it is not known as a `Quantized`.
QuantizedPair = tuple[Quantized | None, Quantized | None]


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

    def observe_gemm(
        self,
        layer: nn.Module,
        gemm: str,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        y: Tensor,
        parameter: str = "weight",
        group: int | None = None,
        quantized: QuantizedPair = (None, None),
    ) -> None:
        """Receive the result of a GEMM, and its operands before quantization.

        Args:
            layer: layer of the GEMM.
            gemm: "fprop", "dgrad" or "wgrad".
            a, b, bias: operands [m, k] and [n, k], and the bias [n] or None.
            y: the result [m, n].
            parameter: name of the layer's weight parameter.
            group: index of the expert in a layer with several; else None.
            quantized: both operands as the GEMM read them; None where they are not quantized, or exist only in the
                layout of a kernel.
        """

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
