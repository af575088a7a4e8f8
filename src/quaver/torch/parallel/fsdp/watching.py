"""`Traffic`: what a training step sends between ranks, for any loop.

fully_shard sends by itself; it is asked to count by its own seam, a custom all-gather and reduce-scatter, which are
taken back at the end.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.parallel import traffic
from quaver.torch.parallel.fsdp.units import Collectives, collectives
from quaver.torch.state.history import agreement, rolling


class Traffic(traffic.Sent):
    """What this rank sends to others while this is entered, by kind, and how long it waits.

        with Traffic(model) as traffic:
            loss = step(batch)
        print(traffic.bytes, traffic.seconds)

    Kinds are "weights", "gradients", "activations", "keys_values", "amaxes" and "control". Counted is what this library
    sends, and what fully_shard does: not what torch's own tensor parallelism, pipelines that `stage` has not made, or
    DistributedDataParallel without `quantize_gradients` send. May be entered again, and then goes on; may be nested.

    Args:
        model: sharded by fully_shard, wholly or in part; None if nothing is.
        look: whether `nonfinite` is kept, which reads each gradient once more.
    Attributes:
        bytes: Counter by kind: what goes to other ranks, by the algorithms that send fewest. Where each of R ranks
            gives n bytes, an all-gather sends (R - 1) n, a reduce-scatter and an all-to-all (R - 1) n / R, an
            all-reduce twice that.
        calls: Counter of collectives by kind.
        seconds: of waiting for others and for what they send. Of a GPU's tensors, those that the stream of a collective
            stood still; fully_shard's stream does so beside the model's own. A gather that is waited for later
            (`set_unshard_in_backward`, asynchronous unsharding) is counted without its time, and so is what a
            pipeline's schedule waits for on GPUs.
        waiting: the kind that this rank waits for now, or "".
        nonfinite: bool tensor []: whether a gradient of this rank, before any sum over ranks, had a NaN or an infinity
            since `forget`; None without `look` or before the first.
    """

    def __init__(self, model: nn.Module | None = None, *, look: bool = False) -> None:
        super().__init__()
        self.model, self.look = model, look
        self.nonfinite: Tensor | None = None
        self._before: list[tuple[Collectives, Any, Any]] = []

    def forget(self) -> None:
        """Begin to look at gradients anew."""
        self.nonfinite = None

    def __enter__(self) -> "Traffic":
        if any(each is self for each in traffic.active.all):
            raise ValueError("this Traffic counts already, and would count twice; make another one")
        traffic.active.all += (self,)
        rolling.watched.by, agreement.watched.by = _of_histories, _of_headers
        if self.model is not None:
            self._attach(self.model)
        return self

    def also(self, model: nn.Module) -> None:
        """Count what fully_shard sends of another model, too, while this is entered."""
        self._attach(model)

    def _attach(self, model: nn.Module) -> None:
        for unit in collectives(model):
            gather, scatter = unit.all_gather, unit.reduce_scatter
            self._before.append((unit, gather, scatter))
            unit.all_gather = _as(gather, _gathering(_kind(gather)), self, unit)
            unit.reduce_scatter = _as(scatter, _scattering(_kind(scatter)), self, unit)

    def __exit__(self, *_: object) -> None:
        for unit, gather, scatter in self._before:
            unit.all_gather, unit.reduce_scatter = gather, scatter
        self._before.clear()
        traffic.active.all = tuple(each for each in traffic.active.all if each is not self)

    def _see(self, gradient: Tensor) -> None:
        if self.look and gradient.numel():
            # One pass, and no sum that could overflow.
            bad = ~torch.linalg.vector_norm(gradient, float("inf")).isfinite()
            self.nonfinite = bad if self.nonfinite is None else self.nonfinite | bad


def _of_histories(maxima: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.during("amaxes", "reduce", maxima, group)


def _of_headers(header: Tensor, group: Any) -> AbstractContextManager[Any]:
    return traffic.during("control", "reduce", header, group)


def _as(comm: Any, kind: type, owner: Traffic, unit: Collectives) -> Any:
    """A collective of fully_shard's as one of another class, which does the same and counts."""
    counting = copy.copy(comm)
    counting.__class__ = kind
    counting.owner, counting.unit = owner, unit
    return counting


@cache
def _gathering(kind: Any) -> type:
    """The class of an all-gather that counts, of the class of one."""

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        owner = (self.owner,)
        if async_op:
            traffic.count("weights", "gather", input_tensor, group, owner)
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)
        with traffic.during("weights", "gather", input_tensor, group, owner):
            return kind.__call__(self, output_tensor, input_tensor, group, async_op)

    return _derived(kind, call)


@cache
def _scattering(kind: Any) -> type:
    """The class of a reduce-scatter that counts, of the class of one."""
    counts_itself = getattr(kind, "counts_itself", False)

    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        owner = (self.owner,)
        self.owner._see(input_tensor)
        if self.unit.replicas is not None:
            traffic.count("gradients", "reduce", output_tensor, self.unit.replicas, owner)
        with traffic.during("gradients", "scatter", input_tensor, group, () if counts_itself else owner):
            return kind.__call__(self, output_tensor, input_tensor, group, op, async_op)

    return _derived(kind, call)


def _derived(kind: Any, call: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _kind(x: Any) -> Any:
    return type(x)
