"""`CommCounter`: count the bytes that this rank sends to others, and the time it waits for them.

Collectives report to the counters that are active; without any, that costs one attribute look-up. fully_shard's traffic
is counted through its own extension point: a custom all-gather and reduce-scatter, which are removed at the end.
"""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.torch.parallel.fsdp.torch_internals import (
    get_collectives,
    groups_with_collectives,
    replicas,
    set_collectives,
)
from quaver.torch.state.history import sync

Kind = Literal["weights", "gradients", "activations", "keys_values", "amaxes", "control"]
#: Kinds of traffic. "keys_values" is everything that context-parallel attention sends; "control" is small values that
#: ranks agree on, such as a mean loss.
KINDS: tuple[Kind, ...] = ("weights", "gradients", "activations", "keys_values", "amaxes", "control")
#: Communication pattern: all-gather, reduce-scatter, all-reduce, all-to-all, or point-to-point.
CommPattern = Literal["gather", "scatter", "reduce", "exchange", "send"]


class CommCounter:
    """Count the bytes that this rank sends to others, by kind, and the time it waits, while the context is active.

        with CommCounter(model) as traffic:
            loss = step(batch)
        print(bytes, seconds)

    Kinds are "weights", "gradients", "activations", "keys_values", "amaxes" and "control". It counts what Quaver and
    fully_shard send. It does not count torch's own tensor parallelism, pipelines not made by `pipeline_stage`, or
    DistributedDataParallel without `quantize_gradients`. The context may be entered again to continue counting, and
    different counters may be nested.

    Args:
        model: model with fully_shard on all or some modules; None if nothing is sharded.
        look: set `nonfinite`, at the cost of reading each gradient once more.
    Attributes:
        bytes: Counter by kind of bytes sent to other ranks, assuming the algorithm that sends fewest. If each of R
            ranks contributes n bytes, an all-gather sends (R - 1) n, a reduce-scatter or all-to-all (R - 1) n / R, and
            an all-reduce twice that.
        calls: Counter of collectives by kind.
        seconds: seconds spent waiting for collectives. For GPU tensors, time that the collective's stream stood still;
            fully_shard's stream does so while the model's own runs. Gathers that are waited for later
            (`set_unshard_in_backward`, asynchronous unsharding) are counted without their time, and so are a pipeline
            schedule's waits on GPUs.
        nonfinite: bool tensor [], True if a gradient of this rank, before any sum over ranks, had a NaN or an infinity
            since `forget`; None without `look` or before the first gradient.
    """

    def __init__(self, model: nn.Module | None = None, *, look: bool = False) -> None:
        self.model, self.look = model, look
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.nonfinite: Tensor | None = None
        self._before: list[tuple[Any, Any, Any]] = []
        self._waited = 0.0
        #: CUDA events at the beginning and the end of each wait.
        self._events: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Seconds spent waiting for collectives: host time for CPU tensors, stream time for GPU tensors."""
        for begin, end in self._events:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._waited

    def forget(self) -> None:
        """Reset `nonfinite`."""
        self.nonfinite = None

    def __enter__(self) -> "CommCounter":
        if any(each is self for each in active.all):
            raise ValueError("this CommCounter is already counting; make another one")
        active.all += (self,)
        sync.watched.reduction = _count_reduction
        if self.model is not None:
            self.also(self.model)
        return self

    def also(self, model: nn.Module) -> None:
        """Also count fully_shard's traffic of another model until the context ends."""
        for fsdp_group in groups_with_collectives(model):
            gather, scatter = get_collectives(fsdp_group)
            self._before.append((fsdp_group, gather, scatter))
            set_collectives(
                fsdp_group,
                _calling(gather, self._gather),
                _calling(scatter, partial(self._scatter, fsdp_group, getattr(scatter, "counts_itself", False))),
            )

    def _gather(
        self, call: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if async_op:
            count("weights", "gather", input_tensor, group, (self,))
            return call(output_tensor, input_tensor, group, async_op)
        with count_collective("weights", "gather", input_tensor, group, (self,)):
            return call(output_tensor, input_tensor, group, async_op)

    def _scatter(
        self,
        fsdp_group: Any,
        counts_itself: bool,
        call: Any,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.look and input_tensor.numel():
            # A single pass with no sum that could overflow.
            bad = ~torch.linalg.vector_norm(input_tensor, float("inf")).isfinite()
            self.nonfinite = bad if self.nonfinite is None else self.nonfinite | bad
        if replicas(fsdp_group) is not None:
            count("gradients", "reduce", output_tensor, replicas(fsdp_group), (self,))
        with count_collective("gradients", "scatter", input_tensor, group, () if counts_itself else (self,)):
            return call(output_tensor, input_tensor, group, op, async_op)

    def __exit__(self, *_: object) -> None:
        for fsdp_group, gather, scatter in self._before:
            set_collectives(fsdp_group, gather, scatter)
        self._before.clear()
        active.all = tuple(each for each in active.all if each is not self)


class _ActiveCounters:
    """The counters that are active now: of the process, not of a thread, because on a GPU backward has its own."""

    all: tuple[CommCounter, ...] = ()


active = _ActiveCounters()


def sent(pattern: CommPattern, size: int, ranks: int) -> int:
    """Return the bytes that one rank sends, assuming the algorithm that sends fewest.

    Args:
        pattern: communication pattern.
        size: bytes of this rank's shard for "gather"; bytes of this rank's whole input for every other pattern.
        ranks: size of the process group.
    """
    if pattern == "gather":
        return size * (ranks - 1)
    return size if pattern == "send" else (1 + (pattern == "reduce")) * size * (ranks - 1) // ranks


def count(kind: Kind, pattern: CommPattern, x: Tensor, group: Any, by: tuple[CommCounter, ...]) -> None:
    """Add a collective's bytes and one call to the counters, without timing it.

    Args:
        kind: kind of traffic.
        pattern: communication pattern.
        x: tensor that is sent; its size is interpreted as in `sent`.
        group: process group; None is the default one.
        by: counters to update.
    """
    size = sent(pattern, x.numel() * x.element_size(), dist.get_world_size(group)) if by else 0
    for each in by:
        each.bytes[kind] += size
        each.calls[kind] += 1


def count_collective(
    kind: Kind, pattern: CommPattern, x: Tensor, group: Any = None, by: tuple[CommCounter, ...] | None = None
) -> AbstractContextManager[Any]:
    """Return a context manager that counts a collective and times the block, in which the collective is waited for.

    Args:
        kind, pattern, x, group: as in `count`.
        by: counters to update; None means all active ones.
    """
    by = active.all if by is None else by
    count(kind, pattern, x, group, by)
    return waiting(x, by)


def count_async(
    kind: Kind, pattern: CommPattern, x: Tensor, group: Any, work: Any, result: Any = None
) -> Callable[[], Any]:
    """Count an asynchronous collective that has started.

    Args:
        kind, pattern, x, group: as in `count`.
        work: torch's work handle, or a list of handles.
        result: what the collective writes to.
    Returns:
        A function that waits and returns `result`.
    """
    by = active.all
    count(kind, pattern, x, group, by)

    def wait() -> Any:
        with waiting(x, by):
            for each in work if isinstance(work, list) else [work]:
                each.wait()
        return result

    return wait


def waiting(x: Tensor, by: tuple[CommCounter, ...] | None = None) -> AbstractContextManager[Any]:
    """Return a context manager that records its block as time spent waiting for x from another rank."""
    by = active.all if by is None else by
    return _timed(x, by) if by else nullcontext()


@contextmanager
def _timed(x: Tensor, by: tuple[CommCounter, ...]) -> Iterator[None]:
    event, begun = _event(x), time.perf_counter()
    yield
    seconds, end = time.perf_counter() - begun, _event(x)
    for each in by:
        if event is None:
            each._waited += seconds
        else:
            each._events.append((event, end))


def _event(x: Tensor) -> Any:
    """Record a CUDA event; None for a CPU tensor."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _count_reduction(kind: Kind, x: Tensor, group: Any) -> AbstractContextManager[Any]:
    return count_collective(kind, "reduce", x, group)


def _calling(comm: Any, call: Callable[..., Any]) -> Any:
    """Return a copy of a fully_shard collective whose calls go to `call`, with the original call as first argument.

    It has a subclass of the collective's class, which fully_shard looks at.
    """
    kind, counting = type(comm), copy.copy(comm)

    def through(self: Any, *args: Any, **keywords: Any) -> Any:
        return call(partial(kind.__call__, self), *args, **keywords)

    counting.__class__ = type(kind.__name__, (kind,), {"__call__": through, "__module__": kind.__module__})
    return counting
