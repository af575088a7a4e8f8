"""Operands that several products of one call of a layer read, each decoded once.

Query, key and value projections read one input, and a layer's two products in backward one gradient. Who calls them
marks that operand; its values then stay in a slot of `scratch` until the next marked operand takes it. The mark is of
one object in one call: codes that outlive a call, such as a weight's, may be written in between, and bear none.
"""

import threading
from typing import Any

from torch import Tensor

from quaver.torch.backends.cpu import scratch
from quaver.torch.backends.cpu.decoding import decode
from quaver.torch.numerics.quantized import Quantized

#: Slots, of a layer's input and of the gradient of its output.
INPUT, GRADIENT = "input", "gradient"


class Mark:
    """Says that an operand, and its transpose that shares the mark, will be read again in this call, by this thread."""

    __slots__ = ("half", "slot", "values")

    def __init__(self, slot: str) -> None:
        self.slot = slot
        #: As they lie, in bf16 or float32, and what the product is to be multiplied by.
        self.values: tuple[Tensor, float] | None = None
        self.half = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.of: dict[str, Mark] = {}
        #: Codes of which operands are put together anew for each product, and their mark.
        self.codes: tuple[Tensor, Mark] | None = None


thread = _Thread()


def mark(q: Any, slot: str) -> None:
    """Mark a large operand on a CPU, or the codes of which `mark_of` marks this thread's operands; nothing else."""
    data = q.data if isinstance(q, Quantized) else q
    if data is None or not data.is_cpu or data.numel() * 2 < scratch.SMALLEST:
        return
    if data is q:
        thread.codes = data, Mark(slot)
    else:
        q.mark = Mark(slot)


def unmark(q: Any) -> None:
    """End the call, which an operand and codes outlive."""
    if isinstance(q, Quantized):
        q.mark = None
    else:
        thread.codes = None


def mark_of(codes: Tensor) -> Mark | None:
    """The mark of codes in this thread's call."""
    marked = thread.codes
    return marked[1] if marked is not None and marked[0] is codes else None


def values_of(q: Quantized, half: bool, tiny: bool, slot: str) -> tuple[Tensor, Tensor | float] | None:
    """`decode`, or what it gave before; a slot of its own is for operands that bear no mark."""
    own = q.mark
    if own is None or tiny:
        return decode(q, half, tiny, slot)
    assert isinstance(own, Mark)
    if own.values is not None and own.half is half and thread.of.get(own.slot) is own:
        values, factor = own.values
        return values.t() if q.turned else values, factor
    # Whose values lie there loses them.
    thread.of.pop(own.slot, None)
    result = decode(q, half, tiny, own.slot)
    if result is not None and isinstance(result[1], float) and result[0].nbytes <= scratch.LARGEST:
        values = result[0].t() if q.turned else result[0]
        own.values, own.half = (values, result[1]), half
        thread.of[own.slot] = own
    return result
