"""The most memory that torch's allocator has given out at once, counted event by event on a CPU."""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: The name under which a trace has the moment between two steps.
BETWEEN = "between two steps"


@dataclass(frozen=True)
class Peak:
    """Bytes beyond those that were there before the first step."""

    #: At once in the second step, what the first has left behind included.
    bytes: int
    #: What a step leaves behind for the next.
    left: int


def peak(step: Callable[[], None]) -> Peak:
    """Of a step that follows another.

    Every block that torch's CPU allocator hands out or takes back is an event of one trace over both steps. The total
    that an event carries is of all traces of a process: blocks that one has seen come and none has seen go stay in it.
    So the total before the first event is taken off.
    """
    # torch.profiler's would make an object of each operation, which takes most of a small step's time.
    with profile(profile_memory=True) as trace:
        step()
        with record_function(BETWEEN):
            pass
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    blocks = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    before = _total(blocks[0]) - blocks[0]["args"]["Bytes"]
    between = next(event["ts"] for event in events if event.get("name") == BETWEEN)
    left = [_total(event) for event in blocks if event["ts"] < between][-1]
    most = max((_total(event) for event in blocks if event["ts"] >= between), default=left)
    return Peak(max(left, most) - before, left - before)


def _total(event: dict[str, Any]) -> int:
    total: int = event["args"]["Total Allocated"]
    return total


class WideProducts(TorchDispatchMode):
    """Products of bf16 matrices in float32, rounded once, in memory that is held beforehand.

    torch's own take ten times as long where the processor has no instructions for them. Results have the same shapes
    and dtypes, and memory for operands in float32 is no event of a step.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        #: Both operands and the result, each of so many elements at most.
        self.held = [torch.empty(elements, dtype=torch.float32) for _ in range(3)]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            # What a subclass of tensors calls inside comes here.
            return NotImplemented
        if function not in (aten.mm.default, aten.mm.out, aten.bmm.default):
            return function(*args, **kwargs)
        a, b = args
        shape = (*a.shape[:-1], b.shape[-1])
        most = max(a.numel(), b.numel(), math.prod(shape))
        if a.dtype is not torch.bfloat16 or b.dtype is not torch.bfloat16 or most > self.held[0].numel():
            return function(*args, **kwargs)
        left, right, product = (
            held[: math.prod(of)].view(of) for held, of in zip(self.held, (a.shape, b.shape, shape), strict=True)
        )
        torch.matmul(left.copy_(a), right.copy_(b), out=product)
        y = kwargs.get("out")
        return (a.new_empty(shape) if y is None else y).copy_(product)
