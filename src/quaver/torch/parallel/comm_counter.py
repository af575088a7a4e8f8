"""`CommCounter`: count the bytes that this rank sends to others, and the time it waits for them.

fully_shard's traffic is counted through its own extension point: a custom all-gather and reduce-scatter, which are
removed at the end.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.parallel import comm as traffic
from quaver.torch.parallel.fsdp.torch_internals import Collectives, collectives
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
        self._before: list[tuple[Collectives, Any, Any]] = []

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
        for fsdp_group in collectives(model):
            gather, scatter = fsdp_group.all_gather, fsdp_group.reduce_scatter
            self._before.append((fsdp_group, gather, scatter))
            fsdp_group.all_gather = _as(gather, _gathering(_kind(gather)), self, fsdp_group)
            fsdp_group.reduce_scatter = _as(scatter, _scattering(_kind(scatter)), self, fsdp_group)

    def __exit__(self, *_: object) -> None:
        for fsdp_group, gather, scatter in self._before:
            fsdp_group.all_gather, fsdp_group.reduce_scatter = gather, scatter
        self._before.clear()
        traffic.active.all = tuple(each for each in traffic.active.all if each is not self)

    def _see(self, gradient: Tensor) -> None:
        if self.look and gradient.numel():
            # A single pass with no sum that could overflow.
            bad = ~torch.linalg.vector_norm(gradient, float("inf")).isfinite()
            self.nonfinite = bad if self.nonfinite is None else self.nonfinite | bad


def _of_histories(maxima: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("amaxes", "reduce", maxima, group)


def _of_headers(header: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.count_collective("control", "reduce", header, group)


def _as(comm: Any, kind: type, owner: CommCounter, fsdp_group: Collectives) -> Any:
    """Copy a fully_shard collective and change its class to one that counts."""
    counting = copy.copy(comm)
    counting.__class__ = kind
    counting.owner, counting.fsdp_group = owner, fsdp_group
    return counting


@cache
def _gathering(kind: Any) -> type:
    """Return a subclass of an all-gather class that counts its traffic."""

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        owner = (self.owner,)
        if async_op:
            traffic.count("weights", "gather", input_tensor, group, owner)
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)
        with traffic.count_collective("weights", "gather", input_tensor, group, owner):
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)

    return _derived(kind, call)


@cache
def _scattering(kind: Any) -> type:
    """Return a subclass of a reduce-scatter class that counts its traffic and checks gradients for NaN and infinity."""
    counts_itself = getattr(kind, "counts_itself", False)

    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        owner = (self.owner,)
        self.owner._see(input_tensor)
        if self.fsdp_group.replicas is not None:
            traffic.count("gradients", "reduce", output_tensor, self.fsdp_group.replicas, owner)
        with traffic.count_collective("gradients", "scatter", input_tensor, group, () if counts_itself else owner):
            return kind.__call__(self, output_tensor, input_tensor, group, op, async_op)

    return _derived(kind, call)


def _derived(kind: Any, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _kind(x: Any) -> Any:
    return type(x)
