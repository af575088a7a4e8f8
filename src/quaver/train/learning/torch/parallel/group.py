"""torch's process group of a run: joined at its beginning, left at its end, however that comes.

Untried beyond gloo on CPUs: on GPUs NCCL carries tensors and gloo what ranks tell one another.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from quaver.train.configuration.config import TrainConfig, reason
from quaver.train.learning.mesh import Sizes
from quaver.train.learning.ranks import OnRank, Told, rank
from quaver.train.learning.torch.device import device_of

#: What weights are divided over, the outermost first: ranks that have other tokens, and those that share layers.
DIMENSIONS = ("data", "tp")


class Stages(Protocol):
    """A model in stages, as those see it who run it: see `quaver.train.learning.torch.parallel.pipeline`."""

    def step(self, batches: torch.Tensor) -> torch.Tensor:
        """The loss of micro-batches, whose gradients are added up."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """That of a batch, without gradients."""


#: Under this key a rank claims to say why the run ends.
CLAIM = "ended"
#: By what an error of a connection to another rank is known; gloo's and NCCL's are RuntimeErrors like others.
LOST = ("gloo", "NCCL", "Connection", "Broken pipe", "Socket")
#: Seconds that a rank leaves the first one to say what all of them have met.
POLITE = 0.2


class Group:
    """The ranks of a run under torch.

    Attributes:
        device: of this rank.
        sizes: how many ranks share what.
        mesh: of "pp", whose ranks have the stages, and `DIMENSIONS`.
        across: of `sizes`, whose "cp" a sequence is divided over; None where it is not.
        pipeline: of the model's stages; None of one that has all layers on each rank.
        saving: a group of all ranks for what is written while they go on; None if nothing is.
        cut: gives this rank's tokens of [B, S]; of a sequence that is not divided all.
    """

    def __init__(self, sizes: Sizes, device: torch.device, async_save: bool) -> None:
        self.number, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = device
        self.sizes = sizes
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, (sizes.pp, sizes.fsdp * sizes.cp, sizes.tp), mesh_dim_names=("pp", *DIMENSIONS)
        )
        self.across: DeviceMesh | None = None
        if sizes.cp > 1:
            self.across = init_device_mesh(device.type, sizes, mesh_dim_names=sizes._fields)
        self.cut: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
        self.pipeline: Stages | None = None
        self.saving: Any = dist.new_group(backend="gloo") if async_save else None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        self.largest(0)

    def largest(self, value: int) -> int:
        number = torch.tensor(value, dtype=torch.int64, device="cpu")
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def given(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def rows(self, batch: int) -> slice:
        """The sequences of a batch that are this rank's."""
        part = batch // self.sizes.fsdp
        first = self.mesh.get_local_rank("data") // self.sizes.cp * part
        return slice(first, first + part)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the parts of a batch and of its sequences."""
        parts = self.sizes.fsdp * self.sizes.cp
        if parts > 1:
            dist.all_reduce(value, dist.ReduceOp.SUM, self.mesh.get_group("data"))
            value /= parts
        return value

    def every(self, value: Any) -> list[Any]:
        """What each rank gives, in their order; small, of Python's own types."""
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value)
        return values

    def earliest(self, seen: tuple[int, str], backward: bool = False) -> str:
        """What the rank says that gives the smallest number, of the first stage that gives less than the largest.

        Args:
            backward: the last stage comes first.
        """
        stage = self.mesh.get_local_rank("pp") * (-1 if backward else 1)
        return str(min(self.every((seen[0] == sys.maxsize, stage, *seen)))[-1])

    def tokens(self, config: TrainConfig) -> int:
        """How many of a sequence's tokens are on this rank between its layers."""
        return config.sequence // (self.sizes.cp * (self.sizes.tp if config.sp else 1))

    def of_all(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank's number, in their order: [ranks]."""
        every = [torch.empty_like(value) for _ in range(self.number)]
        dist.all_gather(every, value)
        return torch.stack(every)

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank's part of a parameter is no other's; of ranks that have the same, the first one's is."""
        if not isinstance(parameter, DTensor):
            return self.rank == 0
        names = parameter.device_mesh.mesh_dim_names or ()
        divided = {name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()}
        return all(name in divided or self.mesh.get_local_rank(name) == 0 for name in DIMENSIONS)


def local_device(config: TrainConfig) -> torch.device:
    """The device of this rank: a CPU, or the GPU of its number on this machine.

    Raises: OnRank if there is no such GPU.
    """
    kind = device_of(config.device).type
    if kind == "cpu":
        return torch.device(kind)
    try:
        return device_of(f"{kind}:{os.environ.get('LOCAL_RANK', '0')}")
    except ValueError as error:
        raise OnRank(f"rank {rank()}: {error}") from error


@contextmanager
def joined(config: TrainConfig, sizes: Sizes) -> Iterator[Group]:
    """Join the group that the environment speaks of, and leave it at the end.

    Raises: Told if the run ends by an error of which another rank speaks. On a rank that is not the first, OnRank in
        place of a ValueError; in place of a lost connection of which no rank speaks, a ValueError that says so.
    """
    device = local_device(config)
    store, number, world = next(iter(rendezvous("env://")))
    # A second run of these processes meets under other keys, since what the first one wrote stays.
    store = PrefixStore(f"quaver/{store.add(f'quaver/runs of {number}', 1)}", store)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=number, world_size=world)
    try:
        with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
            yield Group(sizes, device, config.async_save)
    except Exception as error:
        if not _claimed(store, number):
            raise Told from error
        sentence = reason(error)
        if _is_lost(error):
            what = (str(error).splitlines() or [type(error).__name__])[0][:200]
            sentence = f"another rank ended without a word, of memory or a signal perhaps ({what}); go on with --resume"
        elif number == 0 or not isinstance(error, ValueError | OSError):
            raise
        raise OnRank(f"rank {number}: {sentence}") from error
    finally:
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def _is_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


def _claimed(store: Any, number: int) -> bool:
    """Whether it is this rank that says why the run ends; the first one goes before those that meet the same."""
    if number:
        time.sleep(POLITE)
    try:
        return bool(store.add(CLAIM, 1) == 1)
    except RuntimeError:  # the store went with the rank that had it
        return False
