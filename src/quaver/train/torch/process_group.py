"""torch's process group of a run: devices, collectives of the loop, joining and leaving, and errors of ranks.

Only tested with gloo on CPUs. On GPUs, NCCL handles tensors and gloo handles control messages.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from quaver.recipes.text import shown
from quaver.torch.state.history.sync import new_group
from quaver.train.config import TrainConfig, error_text
from quaver.train.mesh import MeshSizes, OtherRankFailed, RankError, rank

# ---- devices ----

#: Supported devices: CPUs, and NVIDIA GPUs.
DEVICE_KINDS = ("cpu", "cuda")


def device_of(name: str) -> torch.device:
    """Return the device of a name. Raises: ValueError if this machine has no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in DEVICE_KINDS:
            raise RuntimeError(f"quaver trains on {' and '.join(DEVICE_KINDS)}")
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the device {shown(name)} is not available ({why[:200]}); try --device cpu") from error
    return device


# ---- process group ----

#: Private in torch; without it, a hang in a group of the mesh ends only after torch's default timeout.
set_timeout: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: None)
#: Mesh dimensions over which weights are sharded, the outermost first: ranks with different tokens, and tensor
#: parallelism.
DIMENSIONS = ("data", "tp")


class PipelineStages(Protocol):
    """Interface of a pipeline; see `quaver.train.torch.sharding`."""

    def step(self, batches: torch.Tensor) -> torch.Tensor:
        """Return the loss of micro-batches, and accumulate gradients."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch without gradients."""

    def stage_of(self, name: str) -> int:
        """Return the stage of a module or parameter."""


#: Timeout of the store once a rank has failed.
ANSWER = timedelta(seconds=5)
#: Store key by which one rank claims to report the error.
CLAIM = "ended"
#: Words that identify a lost connection to another rank; gloo and NCCL raise ordinary RuntimeErrors.
LOST = ("gloo", "NCCL", "Connection", "Broken pipe", "Socket")
#: Options that may differ between ranks.
OWN = ("text", "threads", "device")
#: Seconds that a rank waits so that the first rank can report a common error.
POLITE = 0.2


class TorchProcessGroup:
    """The ranks of a run under torch.

    Attributes:
        device: device of this rank.
        sizes: number of ranks along each dimension.
        mesh: device mesh with "pp" and `DIMENSIONS`.
        across: device mesh with all dimensions of `sizes`, including "cp"; None without context parallelism.
        pipeline: the model's pipeline stages, or None.
        saving: separate process group of all ranks for asynchronous saves, or None.
        cut: selects this rank's tokens of a [B, S] tensor; all without context parallelism.
    """

    def __init__(
        self, sizes: MeshSizes, device: torch.device, async_save: bool, limit: timedelta | None = None
    ) -> None:
        self.number, self.rank = dist.get_world_size(), dist.get_rank()
        self.device, self.sizes = device, sizes
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, (sizes.pp, sizes.fsdp * sizes.cp, sizes.tp), mesh_dim_names=("pp", *DIMENSIONS)
        )
        self.across: DeviceMesh | None = None
        if sizes.cp > 1:
            self.across = init_device_mesh(device.type, sizes, mesh_dim_names=sizes._fields)
        self.cut: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
        self.pipeline: PipelineStages | None = None
        self.saving: Any = new_group(backend="gloo") if async_save else None
        meshes = [mesh for mesh in (self.mesh, self.across) if mesh is not None and limit is not None]
        for group in (group for mesh in meshes for group in mesh.get_all_groups()):
            # A mesh creates its groups with torch's default timeout.
            set_timeout(limit, group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        self.largest(0)

    def largest(self, value: int) -> int:
        number = torch.tensor(value, dtype=torch.int64, device="cpu")
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def ranks_of_nonfinite(self, loss: torch.Tensor) -> str:
        """Return a clause that names the ranks whose own loss is not finite."""
        ranks = [str(rank) for rank, finite in enumerate(self.gather_number(loss).isfinite().tolist()) if not finite]
        if not ranks:
            return ""
        of = "all ranks" if len(ranks) == self.number > 1 else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        return f"it comes from {of}; "

    def rows(self, batch: int) -> slice:
        """Return which sequences of a batch belong to this rank."""
        part = batch // self.sizes.fsdp
        first = self.mesh.get_local_rank("data") // self.sizes.cp * part
        return slice(first, first + part)

    def agree_if_finite(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's number, or a non-finite one on all ranks if any rank has one, so that all stop."""
        every = self.gather_number(value)
        return torch.where(every.isfinite().all(), value, every.sum())

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks with different sequences or tokens."""
        parts = self.sizes.fsdp * self.sizes.cp
        if parts > 1:
            dist.all_reduce(value, dist.ReduceOp.SUM, self.mesh.get_group("data"))
            value /= parts
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        """All-gather small objects of Python's built-in types, in rank order."""
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value)
        return values

    def first_message(self, seen: tuple[int, str, str], backward: bool = False) -> str:
        """Return the message of the rank with the earliest position: the smallest number in the first stage that has
        one.

        Args:
            seen: a number, the name of a module or parameter or "", and the message.
            backward: the last stage comes first.
        """
        number, name, message = seen
        stage = self.pipeline.stage_of(name) if self.pipeline is not None and name else 0
        return str(min(self.gather_objects((not name, -stage if backward else stage, number, message)))[-1])

    def tokens(self, config: TrainConfig) -> int:
        """Return how many of a sequence's tokens this rank has between layers."""
        return config.sequence // (self.sizes.cp * (self.sizes.tp if config.sp else 1))

    def loss_chunk(self, config: TrainConfig) -> int:
        """Return the number of tokens whose logits exist at once.

        With tp, 0 is replaced by the number of all tokens, because 0 makes the model return logits of the whole
        vocabulary.
        """
        return config.loss_chunk or (config.batch * config.sequence if self.sizes.tp > 1 else 0)

    def gather_number(self, value: torch.Tensor) -> torch.Tensor:
        """All-gather one number per rank, in rank order: [ranks]."""
        every = [torch.empty_like(value) for _ in range(self.number)]
        dist.all_gather(every, value)
        return torch.stack(every)

    def counts_parameter(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank counts a parameter's shard; of ranks with the same shard only the first does."""
        if not isinstance(parameter, DTensor):
            return self.rank == 0
        names = parameter.device_mesh.mesh_dim_names or ()
        divided = {name for name, place in zip(names, parameter.placements, strict=True) if not place.is_replicate()}
        return all(name in divided or self.mesh.get_local_rank(name) == 0 for name in DIMENSIONS)


def local_device(config: TrainConfig) -> torch.device:
    """Return the device of this rank: a CPU, or the GPU with its local rank.

    Raises: RankError if there is no such GPU.
    """
    kind = device_of(config.device).type
    if kind == "cpu":
        return torch.device(kind)
    try:
        return device_of(f"{kind}:{os.environ.get('LOCAL_RANK', '0')}")
    except ValueError as error:
        raise RankError(f"rank {rank()}: {error}") from error


@contextmanager
def joined(config: TrainConfig, sizes: MeshSizes) -> Iterator[TorchProcessGroup]:
    """Join the process group that the environment describes, and leave it at the end.

    Raises: OtherRankFailed if another rank reports the error. On ranks other than the first, RankError instead of a
    ValueError, also if a connection is lost and no rank reports why.
    """
    device = local_device(config)
    store, number, world = next(iter(rendezvous("env://")))
    # Entries of an earlier run of these processes remain in the store, so use a new prefix.
    store = PrefixStore(f"quaver/{store.add(f'quaver/runs of {number}', 1)}", store)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=config.timeout) if config.timeout else None
    check_options(store, number, world, config)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    heard = None
    try:
        with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
            yield TorchProcessGroup(sizes, device, config.async_save, limit)
    except Exception as error:
        if _is_lost(error) and threading.current_thread() is threading.main_thread():
            # torchrun has noticed a dead process and sends SIGTERM to the others; report the error first.
            heard = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _reports_error(store, number):
            raise OtherRankFailed from error
        if _is_lost(error):
            message = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise RankError(
                "another rank ended, of memory or a signal perhaps, or did not answer for --timeout seconds "
                f"({message}); continue with --resume"
            ) from error
        if number == 0 or not isinstance(error, ValueError | OSError):
            raise
        raise RankError(f"rank {number}: {error_text(error)}") from error
    finally:
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
        if heard is not None:
            signal.signal(signal.SIGTERM, heard)


def check_options(store: Any, number: int, world: int, config: TrainConfig) -> None:
    """Compare the options of all ranks before any collective could hang.

    The text is compared later by its fingerprint, and options of the machine may differ.
    Raises: ValueError on the first rank if another one has other options, and OtherRankFailed on the others.
    """
    options = {name: value for name, value in asdict(config).items() if name not in OWN}
    store.set(f"options/{number}", json.dumps(options))
    if number:
        if store.get("options").decode():
            raise OtherRankFailed
        return
    error = ""
    for other in range(1, world):
        its = json.loads(store.get(f"options/{other}"))
        # Round trip through JSON, which turns tuples into lists.
        wrong = [name for name, value in json.loads(json.dumps(options)).items() if its.get(name) != value]
        if wrong:
            name = wrong[0]
            error = (
                f"{name} is {options[name]!r}, and on rank {other} {its.get(name)!r}; give every rank the same options"
            )
            break
    store.set("options", error)
    if error:
        time.sleep(POLITE)  # the store may belong to this process, and other ranks must read it first
        raise ValueError(error)


def _is_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)


def _reports_error(store: Any, number: int) -> bool:
    """Return True if this rank reports the error; the first rank takes precedence for a common error."""
    if number:
        time.sleep(POLITE)
    try:
        store.set_timeout(ANSWER)
        return bool(store.add(CLAIM, 1) == 1)
    except RuntimeError:
        # The store is gone with the first rank: let one rank of each machine report.
        return number == 1 or (number > 1 and os.environ.get("LOCAL_RANK") == "0")
