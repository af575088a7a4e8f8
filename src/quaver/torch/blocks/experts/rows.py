"""What experts multiply, made inside of their products: rows of tokens, and activations of their first products.

Neither is kept for backward in high precision. Tokens are quantized before they are laid out, where no scale reaches
over two rows: once for all k experts, and kept once, of which backward lays out the rows again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.blocks.experts.permutation import combined, take, take_quantized
from quaver.torch.blocks.prologues.activation import Activated
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops


def moves(spec: QuantSpec | None) -> bool:
    """Whether tokens quantized by a spec and then laid out are the rows, quantized group by group."""
    return spec is not None and spec.block[0] == 1 and spec.rounding == "nearest" and not spec.two_level


@dataclass(frozen=True)
class Tokens:
    """Rows of x [T, K], by the choice of which each row is, and by the row of each choice."""

    #: Choices of each token.
    k: int
    #: The weight's gradient is of the values of the codes; else it quantizes the tokens along its own axis.
    codes_alone: bool = False
    remakes: bool = True

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        tokens, sources, places = x
        assert tokens is not None and sources is not None
        if not moves(spec):
            return take(tokens, sources, self.k), (tokens, None, sources, places)
        q = ops.QUANTIZE(tokens if tokens.stride(1) == 1 else tokens.contiguous(), spec)
        kept = None if self.codes_alone else tokens
        return take_quantized(q, sources, self.k), (kept, q if kept is None else None, sources, places)

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        tokens, q, sources, _ = saved
        if tokens is not None:
            # What wgrad reuses of fprop is quantized by groups, and what it does not it quantizes itself.
            return take(tokens, sources, self.k)
        return take_quantized(q, sources, self.k)

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        tokens, _, sources, _ = saved
        return None if tokens is None else take(tokens, sources, self.k)

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        *_, places = saved
        return combined(g, places, self.k, None) if needs[0] else None, None, None


@dataclass(frozen=True)
class Activations:
    """What an activation makes of the first products: one tensor, whose gate and value lie side by side or by turns."""

    prologue: Activated
    #: Columns are gate, value, gate, value and so on, as gpt-oss has them.
    interleaved: bool = False

    @property
    def remakes(self) -> bool:
        return self.prologue.remakes

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return self.prologue.forward(*self._parts(*x))

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        return self.prologue.remake(saved)[0]

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        raise AssertionError("activations are made in high precision")

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        gradients = self.prologue.backward(g, saved)
        return (torch.stack(gradients, -1).flatten(1) if self.interleaved else gradients[0],)

    def _parts(self, *x: Tensor | None) -> tuple[Tensor | None, ...]:
        (u,) = x
        assert u is not None
        return (u[:, ::2], u[:, 1::2]) if self.interleaved else (u,)
