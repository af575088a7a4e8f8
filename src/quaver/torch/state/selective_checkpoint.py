"""Support for selective checkpoints: they see the product of each GEMM of a layer as one operation, and nothing else.

torch.utils.checkpoint's `create_selective_checkpoint_contexts` counts the operations of each kind in a forward, and
matches those of the recomputation by their order. Inside a layer they would not match, because weights are cached and
plans are made in between.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatching
from torch.utils import checkpoint

from quaver.torch.numerics.rounding import is_tracing

P = ParamSpec("P")
T = TypeVar("T")

#: Modes that such a checkpoint enters in a forward and in its recomputation. If torch lacks these names, or those of
#: the mode stack, checkpoints see all operations of layers, and torch rejects in-place writes.
MODES = tuple(
    vars(checkpoint)[name]
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
#: Returns the number of dispatch modes active in this thread.
dispatch_mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_stack: Callable[[], Sequence[Any]] = getattr(dispatching, "_get_current_dispatch_mode_stack", lambda: ())
_push: Callable[[Any], None] | None = getattr(dispatching, "_push_mode", None)
_pop: Callable[[], Any] | None = getattr(dispatching, "_pop_mode", None)


class _SelectionState(threading.local):
    #: All modes, innermost first, while operations are hidden from selective checkpoints.
    hidden: Sequence[Any] = ()
    #: Other modes, which see the inside of an operation that selective checkpoints see as a whole.
    inside: Sequence[Any] = ()


thread = _SelectionState()


def is_active() -> bool:
    """Return True if a selective checkpoint observes this thread in eager mode."""
    if dispatch_mode_depth() == 0 or _push is None or _pop is None:
        return False
    return any(isinstance(m, MODES) for m in _stack())


def hide_from_policies(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that selective checkpoints see only operations of `seen` or `shown`; other modes see all."""

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if is_tracing() or not is_active():
            return function(*args, **options)
        modes = _stack()[::-1]
        with _instead(_others(modes), hidden=modes):
            return function(*args, **options)

    return run


def seen(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run function(*args) visibly for all modes, inside a hidden function."""
    with _instead(thread.hidden):
        return function(*args, **options)


def shown(operator: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run operator(*args) as one visible operation inside a hidden function.

    Other modes see the operations of its kernel within `inside`.
    """
    modes = thread.hidden
    with _instead([mode for mode in modes if isinstance(mode, MODES)], inside=_others(modes)):
        return operator(*args, **options)


@contextmanager
def inside() -> Iterator[None]:
    """Make operations visible to other modes in the kernel of a `shown` operator."""
    if not thread.inside:
        yield
        return
    with _instead(thread.inside):
        yield


def _others(modes: Sequence[Any]) -> Sequence[Any]:
    return [mode for mode in modes if not isinstance(mode, MODES)]


@contextmanager
def _instead(modes: Sequence[Any], hidden: Sequence[Any] = (), inside: Sequence[Any] = ()) -> Iterator[None]:
    """Replace the active modes by these, innermost first, while the context is open."""
    assert _push is not None and _pop is not None
    before, replaced = (thread.hidden, thread.inside), [_pop() for _ in range(dispatch_mode_depth())]
    thread.hidden, thread.inside = hidden, inside
    for mode in reversed(modes):
        _push(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop()
        for mode in reversed(replaced):
            _push(mode)
        thread.hidden, thread.inside = before
