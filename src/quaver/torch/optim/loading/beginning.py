"""`LazyStates`: optimizer states that are created at the first access, so that checkpoints load before a first step.

If `optimizer.state` is empty, torch.distributed.checkpoint creates states by a step with gradients of zeros. Here that
step would fail for weights stored as codes, since such a gradient has the parameter's dtype, and it would count as a
step. `LazyStates` is true even if it is empty, so that torch skips that step.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor


class LazyStates(defaultdict[Tensor, Any]):
    """The state of each parameter, created at the first access.

    Args:
        initial_state: a method of the optimizer that creates a parameter's state; only a weak reference is kept.
    """

    def __init__(self, initial_state: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__(dict)
        self._initial_state = WeakMethod(initial_state)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, p: Tensor) -> dict[str, Tensor]:
        initial_state = self._initial_state()
        assert initial_state is not None
        state = self[p] = initial_state(p)
        return state

    def __reduce__(self) -> Any:
        # A copy or pickle belongs to another optimizer, which wraps it again.
        return defaultdict, (dict,), None, None, iter(self.items())
