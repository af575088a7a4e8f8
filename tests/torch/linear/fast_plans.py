"""Which plan ran a layer's call, and how to run every call by the general one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from quaver.torch.linear import linear as linear_module
from quaver.torch.linear.plan import LinearCall


def by_fast_plan(y: Tensor) -> bool:
    """Return True if the layer that computed y used a fast plan, False if it used the general plan."""
    node = y.grad_fn
    assert node is not None
    while node.name().startswith("View"):
        node = node.next_functions[0][0]
        assert node is not None
    assert node.name() == "LinearFunctionBackward"
    call = node.constants[0]  # type: ignore[attr-defined]
    if isinstance(call, LinearCall):
        return call.plan.operations is None
    setup = call[0]
    return bool(setup.calls)


@contextmanager
def general_plans() -> Iterator[None]:
    """Use the general plan for every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "make_plan", lambda *_: None)
        patch.setattr(linear_module, "plans", {})
        yield
