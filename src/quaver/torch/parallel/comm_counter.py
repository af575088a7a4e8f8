"""`CommCounter`: count the bytes that this rank sends to others, and the time it waits for them.

fully_shard's traffic is counted through its own extension point: a custom all-gather and reduce-scatter, which are
removed at the end.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.parallel import comm as traffic
from quaver.torch.parallel.fsdp.torch_internals import (
    get_collectives,
    groups_with_collectives,
    replicas,
    set_collectives,
)
from quaver.torch.state.history import sync


class CommCounter(traffic.SentBytes):
    """Count the bytes that this rank sends to others, by kind, and the time it waits, while the context is active.

        with CommCounter(model) as traffic:
            loss = step(batch)
        print(traffic.bytes, traffic.seconds)

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
            fully_shard's stream does so beside the model's own. Gathers that are waited for later
            (`set_unshard_in_backward`, asynchronous unsharding) are counted without their time, and so are a pipeline
            schedule's waits on GPUs.
        waiting: the kind of traffic that this rank waits for now, or "".
        nonfinite: bool tensor [], True if a gradient of this rank, before any sum over ranks, had a NaN or an infinity
            since `forget`; None without `look` or before the first gradient.
    """

    def __init__(self, model: nn.Module | None = None, *, look: bool = False) -> None:
        super().__init__()
        self.model, self.look = model, look
        self.nonfinite: Tensor | None = None
        self._before: list[tuple[Any, Any, Any]] = []

    def forget(self) -> None:
        """Reset `nonfinite`."""
        self.nonfinite = None

    def __enter__(self) -> "CommCounter":
        if any(each is self for each in traffic.active.all):
            raise ValueError("this CommCounter is already counting; make another one")
        traffic.active.all += (self,)
        sync.watched.of_rows, sync.watched.by = _of_histories, _of_headers
        if self.model is not None:
            self._attach(self.model)
        return self

    def also(self, model: nn.Module) -> None:
        """Also count fully_shard's traffic of another model until the context ends."""
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
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
            traffic.count("weights", "gather", input_tensor, group, (self,))
            return call(output_tensor, input_tensor, group, async_op)
        with traffic.count_collective("weights", "gather", input_tensor, group, (self,)):
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
            traffic.count("gradients", "reduce", output_tensor, replicas(fsdp_group), (self,))
        with traffic.count_collective("gradients", "scatter", input_tensor, group, () if counts_itself else (self,)):
            return call(output_tensor, input_tensor, group, op, async_op)

    def __exit__(self, *_: object) -> None:
        for fsdp_group, gather, scatter in self._before:
            set_collectives(fsdp_group, gather, scatter)
        self._before.clear()
        traffic.active.all = tuple(each for each in traffic.active.all if each is not self)


def _of_histories(maxima: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("amaxes", "reduce", maxima, group)


def _of_headers(header: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("control", "reduce", header, group)


def _calling(comm: Any, call: Callable[..., Any]) -> Any:
    """Return a copy of a fully_shard collective whose calls go to `call`, with the original call as first argument.

    It has a subclass of the collective's class, which fully_shard looks at.
    """
    kind, counting = type(comm), copy.copy(comm)

    def through(self: Any, *args: Any, **keywords: Any) -> Any:
        return call(partial(kind.__call__, self), *args, **keywords)

    counting.__class__ = type(kind.__name__, (kind,), {"__call__": through, "__module__": kind.__module__})
    return counting
