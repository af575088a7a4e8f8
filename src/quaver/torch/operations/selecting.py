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


class _Thread(threading.local):
    #: The modes that see nothing of what runs, the innermost first.
    hidden: Sequence[Any] = ()


_thread = _Thread()


def is_active() -> bool:
    """Whether a selective checkpoint sees what runs, eagerly, in this thread."""
    return depth() > 0 and _push is not None and _pop is not None and any(isinstance(m, MODES) for m in _stack())


def is_hidden() -> bool:
    """Whether this runs in a function that `unseen` made, under a selective checkpoint."""
    return bool(_thread.hidden)


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """A function of whose operations selective checkpoints see those alone that `seen` runs."""

    @functools.wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.compiler.is_compiling() or not is_active():
            return function(*args, **options)
        with _without_modes():
            return function(*args, **options)

    return run


@contextmanager
def _without_modes() -> Iterator[None]:
    assert _push is not None and _pop is not None
    before, modes = _thread.hidden, [_pop() for _ in range(depth())]
    _thread.hidden = modes
    try:
        yield
    finally:
        _thread.hidden = before
        for mode in reversed(modes):
            _push(mode)


def seen(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """function(*args), seen by the modes from which it is hidden."""
    assert _push is not None and _pop is not None
    modes = _thread.hidden
    _thread.hidden = ()
    for mode in reversed(modes):
        _push(mode)
    try:
        return function(*args, **options)
    finally:
        for _ in modes:
            _pop()
        _thread.hidden = modes
