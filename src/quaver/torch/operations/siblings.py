"""One quantization for layers of the very same tensor, such as q, k and v of a model, or gate and up.

Each thread knows which tensor it quantized last and what became of it. A layer that is given that very tensor next,
unwritten and by an equal spec, takes what there is, and backward keeps it once. The tensor is held weakly, and where
it dies what became of it is freed. Only what autograd has computed is taken so: a tensor that a program holds and
fills, such as a buffer of inputs, may be written in ways that leave no trace (`.numpy()`, a CUDA graph replayed). A
tensor of autograd's may be another one's memory too: `torch.compile(mode="reduce-overhead")` returns the same object in
each step, with the same version, whose graph node alone is new. So the node is marked, and only a marked one counts.
"""

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quaver.core.spec import Recipe


class Quantization(weakref.ref[Tensor]):
    """What a tensor, to which this refers weakly, was quantized to, and by what that is recognized."""

    __slots__ = ("by", "facts", "mark", "operands")

    #: The version and address of the tensor, the factor, the stream and whatever else must be the same.
    facts: tuple[Any, ...]
    #: What quantized it: a recipe, or a decided step.
    by: Any
    #: What fprop reads, and what wgrad reads where that is another quantization, None before it is needed. None once
    #: the tensor has died.
    operands: Any
    #: What the tensor's graph node has under `MARK`.
    mark: object


#: A key of a graph node's metadata.
MARK = "quaver.torch.operations.siblings"


class _Thread(threading.local):
    #: The last one.
    last: Quantization | None = None


thread = _Thread()


def lookup(x: Tensor, facts: tuple[Any, ...], by: Any, like: Callable[[Any, Any], bool]) -> Quantization | None:
    """The quantization of this very tensor, if it was this thread's last, by the same or by what is like it, and
    nothing has changed since."""
    last = thread.last
    if last is None or last() is not x or last.facts != facts:
        return None
    node: Any = x.grad_fn
    if node is None or node.metadata.get(MARK) is not last.mark:
        return None
    return last if last.by is by or like(last.by, by) else None


def remember(x: Tensor, facts: tuple[Any, ...], by: Any, operands: Any) -> Quantization:
    """Note what this thread has quantized last: a tensor that has a graph node."""
    last = thread.last = Quantization(x, free)
    last.facts, last.by, last.operands, last.mark = facts, by, operands, object()
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[MARK] = last.mark
    return last


#: Of a `Quantization` whose tensor has died, in whichever thread.
free = operator.methodcaller("__setattr__", "operands", None)


def alike(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes quantize an input alike, for fprop and for wgrad, and lay out what they write alike."""
    return (
        one.fprop.a == other.fprop.a
        and one.wgrad.b == other.wgrad.b
        and one.dequantized_backward is other.dequantized_backward
        and one.delayed is other.delayed is None
        and _per_tensor(one) == _per_tensor(other)
    )


def _per_tensor(recipe: Recipe) -> bool:
    return all(spec is not None and spec.per_tensor for spec in recipe.operands().values())
