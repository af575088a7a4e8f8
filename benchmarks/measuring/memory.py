"""Peak memory of torch's allocator, on a CPU computed from a trace, and bytes that autograd saves."""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile, record_function

#: The name under which a trace has the moment between two steps.
BETWEEN = "between two steps"


@dataclass(frozen=True)
class Peak:
    """Bytes in addition to those allocated before the first step."""

    #: At once in the second step, what the first has left behind included.
    bytes: int
    #: Bytes that remain allocated after a step.
    left: int


def peak(step: Callable[[], None]) -> Peak:
    """Return the peak memory of a step that follows another.

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


@contextmanager
def saved_for_backward(parameters: Iterable[Tensor] = ()) -> Iterator[dict[int, Tensor]]:
    """Tensors that autograd saves meanwhile, one for each storage, by address; parameters and their views are not.

    The tensors are alive until the dict is not: an address that is used again would count once.

    Args:
        parameters: tensors that do not count besides `nn.Parameter`s.
    """
    others = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in others and not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            saved.setdefault(address, tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def kept_bytes(run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes that autograd saves for backward; each storage counts once, parameters do not count."""
    with saved_for_backward() as saved:
        y = run(x.detach().clone().requires_grad_())
    assert y.requires_grad
    return bytes_of(saved.values())


def _total(event: dict[str, Any]) -> int:
    total: int = event["args"]["Total Allocated"]
    return total
