"""What selective checkpoints see of a layer: the product of each of its GEMMs, by one operation, and nothing else.

torch.utils.checkpoint's `create_selective_checkpoint_contexts` counts the operations of each kind in a forward, and
takes those of the recomputation for the same ones, one by one. Of a layer they would not be: between the two a weight's
codes are kept and plans are made.
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

#: The modes that such a checkpoint enters in a forward and in its recomputation. Without these names, or those of the
#: stack of modes, layers are seen whole, and torch refuses what they write over.
MODES = tuple(
    vars(checkpoint)[name]
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)
#: () to the number of modes that see the operations of this thread.
depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_stack: Callable[[], Sequence[Any]] = getattr(dispatching, "_get_current_dispatch_mode_stack", lambda: ())
_push: Callable[[Any], None] | None = getattr(dispatching, "_push_mode", None)
_pop: Callable[[], Any] | None = getattr(dispatching, "_pop_mode", None)


class _SelectionState(threading.local):
    #: All modes, the innermost first, while those of selective checkpoints see nothing of what runs.
    hidden: Sequence[Any] = ()
    #: Those that see the inside of an operation of which selective checkpoints see the outside.
    inside: Sequence[Any] = ()


_thread = _SelectionState()


def is_active() -> bool:
    """Whether a selective checkpoint sees what runs, eagerly, in this thread."""
    return depth() > 0 and _push is not None and _pop is not None and any(isinstance(m, MODES) for m in _stack())


def is_hidden() -> bool:
    """Whether this runs in a function that `unseen` made, under a selective checkpoint."""
    return bool(_thread.hidden)


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """A function of whose operations selective checkpoints see those alone that `seen` or `shown` runs; any other mode
    sees what it would see without a checkpoint."""

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if is_tracing() or not is_active():
            return function(*args, **options)
        modes = _stack()[::-1]
        with _instead(_others(modes), hidden=modes):
            return function(*args, **options)

    return run


def seen(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """function(*args), where it is hidden from selective checkpoints, seen by all modes."""
    with _instead(_thread.hidden):
        return function(*args, **options)


def shown(operator: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """operator(*args), where it is hidden from selective checkpoints, seen by those as one operation; other modes see
    what its kernel does in `inside`, if it runs."""
    modes = _thread.hidden
    with _instead([mode for mode in modes if isinstance(mode, MODES)], inside=_others(modes)):
        return operator(*args, **options)


@contextmanager
def inside() -> Iterator[None]:
    """In the kernel of an operator that may be `shown`: other modes see what runs."""
    if not _thread.inside:
        yield
        return
    with _instead(_thread.inside):
        yield


def _others(modes: Sequence[Any]) -> Sequence[Any]:
    return [mode for mode in modes if not isinstance(mode, MODES)]


@contextmanager
def _instead(modes: Sequence[Any], hidden: Sequence[Any] = (), inside: Sequence[Any] = ()) -> Iterator[None]:
    """Modes, the innermost first, in place of those that there are."""
    assert _push is not None and _pop is not None
    before, replaced = (_thread.hidden, _thread.inside), [_pop() for _ in range(depth())]
    _thread.hidden, _thread.inside = hidden, inside
    for mode in reversed(modes):
        _push(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop()
        for mode in reversed(replaced):
            _push(mode)
        _thread.hidden, _thread.inside = before
