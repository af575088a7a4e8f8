"""Where the rows of a grouped product come from: given, as numbers or as codes, or made within its autograd function.

What makes them may quantize tokens before it moves them: rows then arrive as codes, of which no copy in high precision
exists, and go to fprop as they are. The gradient that it takes back is of the rows in high precision, as if none of
them had been quantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, put_together, take_apart


class Rows(Protocol):
    """How rows are made, outside of autograd; one object may serve many calls, and equal ones are one to a compiler.

    Its methods are called with as many tensors as it takes, None among them.
    """

    @property
    def remakes(self) -> bool:
        """True if backward makes the rows again, so that nothing of them is kept but what `forward` saves."""

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        """The rows [T, K], those of group 0 first, and what the other methods need of them: tensors, operands or None.

        Args:
            spec: fprop's of its input; None where that is not quantized.
        Returns:
            Rows quantized by this spec, or in high precision, which are then quantized group by group.
        """

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        """The rows once more, bit for bit."""

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        """Of rows that are codes the same in high precision, from which wgrad's operand is quantized where it is
        another one than fprop's; None quantizes the values of the codes once more."""

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of what it took, of the gradient g [T, K] of the rows in high precision.

        Args:
            needs: whether each is needed.
        """


@dataclass(frozen=True)
class Given:
    """Rows in high precision that are there already."""

    remakes: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        (value,) = x
        assert value is not None
        return value, ()

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("what is given is kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        raise AssertionError("rows in high precision are their own")

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (g,)


GIVEN = Given()


@dataclass(frozen=True)
class Codes:
    """Rows that are given as codes, with the tensors of which they are put together; they have no gradient."""

    layout: tuple[Any, ...]
    remakes: bool = False

    @staticmethod
    def of(q: Quantized) -> "tuple[Codes, list[Tensor | None]]":
        tensors, layout = take_apart(q.plain())
        assert layout is not None
        return Codes(layout), tensors

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return put_together(self.layout, x), ()

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("what is given is kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return (None,) * len(needs)
