"""The states of parameters that have not stepped yet, where a state dict is asked for or filled before the first step.

torch.distributed.checkpoint makes states by a step with gradients of zeros. Such a gradient has the parameter's dtype,
which codes refuse, and the step counts as one. It does so where `optimizer.state` is false as a condition; this one
never is, and begins a state when that is asked for.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor


class States(defaultdict[Tensor, Any]):
    """What an optimizer keeps, by parameter."""

    def __init__(self, first: Callable[[Tensor], dict[str, Tensor]]) -> None:
        """Begin.

        Args:
            first: a method that gives a parameter's first state. Its object, which has these states, is not kept alive.
        """
        super().__init__(dict)
        self._first = WeakMethod(first)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, p: Tensor) -> dict[str, Tensor]:
        first = self._first()
        assert first is not None
        self[p] = first(p)
        state: dict[str, Tensor] = self[p]
        return state

    def __reduce__(self) -> Any:
        # A copy belongs to another optimizer.
        return defaultdict, (dict,), None, None, iter(self.items())
