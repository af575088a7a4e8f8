"""What a rule is: the weight and the moments after a step, from what they were and the gradient."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Stepped(NamedTuple):
    """What a step gives, float32 of the weight's shape."""

    weight: Tensor
    moments: tuple[Tensor, ...]
    #: Elements whose update was beyond the rule's bound and was held to it, bool; None if nothing is held.
    clamped: Tensor | None = None


class Rule(Protocol):
    """A formula. Instances are equal if they compute the same, so that compiled code is shared.

    Scalars are float32 tensors of no dimension: a learning rate that changes compiles nothing anew.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Of the moments, as torch's optimizer of this rule has them in its state."""

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each moment, whether it has negative elements, as Adam's first has."""

    @property
    def bounded(self) -> bool:
        """Whether `reach` says what no weight exceeds."""

    @property
    def whole(self) -> bool:
        """Whether a step needs all of a matrix at once."""

    def scalars(self, group: Mapping[str, Any], steps: Tensor) -> tuple[Tensor, ...]:
        """The numbers of a step, each float32 [parameters].

        Args:
            group: options, by torch's names.
            steps: float64 [parameters], 1 at the first step.
        """

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> Stepped:
        """A step. All tensors are float32 of one shape; none is written to."""

    @property
    def asks(self) -> bool:
        """Whether `reach` asks for the largest gradient and moments."""

    def reach(self, amax: Tensor, scalars: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        """What no weight exceeds after the step, of a bounded rule.

        Args:
            amax: the largest of the weights before the step, float32 of any shape.
            others: the largest of the gradient and of each moment before the step, float32 [], if the rule asks.
        """
