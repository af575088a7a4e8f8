"""torch's process group of a run: joining, heartbeats, devices, and error reports that name the failed rank.

Only tested with gloo on CPUs. On GPUs, NCCL handles tensors and gloo handles control messages.
"""

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from quaver.recipes.text import shown
from quaver.torch.parallel.comm_counter import KINDS, CommCounter, count_collective
from quaver.torch.state.history.sync import new_group
from quaver.train.config import TrainConfig, reason
from quaver.train.mesh import MeshSizes, OtherRankFailed, RankError, rank

# ---- heartbeats ----
# Each rank writes heartbeats to the shared store, so that the final error can name the rank that is furthest behind.
#
# A thread writes them, so a rank that computes for long is not taken for dead, and a rank that is stopped or gone falls
# silent. A rank whose collective has failed watches all heartbeats for a while, using only its own clock.

#: Seconds between heartbeats, and seconds after which a rank without one counts as silent.
EVERY, SILENT = 0.5, 4.0
#: Timeout of the store.
ANSWER = timedelta(seconds=5)


@dataclass(frozen=True)
class Heartbeat:
    """Position of a rank at one time."""

    #: Number of this heartbeat.
    number: int
    step: int
    #: "training", "validation" or "saving".
    phase: str
    #: Number of collectives that the rank has started.
    calls: int
    #: Kind of traffic that it waited for, or "".
    waiting: str
    #: Seconds since its step, phase or number of collectives changed.
    idle: float
    #: True if the rank has left because the run ends.
    left: bool = False

    def place(self) -> str:
        return f"at step {self.step} ({self.phase})" if self.step else f"before step 1 ({self.phase})"


class HeartbeatMonitor:
    """Writes this rank's heartbeats and reads those of all ranks.

    Args:
        store: torch.distributed store; heartbeats use a separate connection if possible.
        rank: rank of this process.
        world: number of ranks.
        sent: traffic counters of this rank.
    """

    def __init__(self, store: Any, rank: int, world: int, sent: CommCounter) -> None:
        with suppress(NotImplementedError, RuntimeError):
            store = store.clone()
        store.set_timeout(ANSWER)
        self.store, self.rank, self.world, self.sent = store, rank, world, sent
        self.step, self.phase = 0, "setting up"
        self._number, self._moved = 0, time.monotonic()
        self._seen: tuple[int, str, int, str] | None = None
        self._ended, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="quaver-pulse", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Set this rank's present step and phase."""
        self.step, self.phase = step, phase
        self._woken.set()

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Write a last heartbeat that says that this rank leaves."""
        self._ended.set()
        self._woken.set()
        self._thread.join(2 * ANSWER.total_seconds())
        with suppress(RuntimeError):
            self._write(left=True)

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._woken.wait(EVERY)
            self._woken.clear()
            try:
                self._write()
            except RuntimeError:  # the store does not respond; ranks that read heartbeats will notice
                continue

    def _write(self, left: bool = False) -> None:
        seen = (self.step, self.phase, sum(self.sent.calls.values()), self.sent.waiting)
        if seen != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        self._number += 1
        sign = Heartbeat(self._number, *seen, time.monotonic() - self._moved, left)
        self.store.set(f"pulse/{self.rank}", json.dumps(asdict(sign)))

    def signs(self) -> dict[int, Heartbeat]:
        """Return the newest heartbeat of each rank that has written one. Raises: RuntimeError if the store does not
        respond.
        """
        keys = {rank: f"pulse/{rank}" for rank in range(self.world)}
        keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: Heartbeat(**json.loads(self.store.get(key))) for rank, key in keys.items()}

    def behind(self) -> tuple[list[int], list[int], Mapping[int, Heartbeat]]:
        """Watch all ranks until each has written a new heartbeat or `SILENT` seconds have passed.

        Returns:
            The silent ranks; of the others those furthest behind; and the newest heartbeat of each.
        """
        first, begun = self.signs(), time.monotonic()
        others = [rank for rank in range(self.world) if rank != self.rank]
        while True:
            # Give other waiting ranks time to leave.
            time.sleep(2 * EVERY)
            newest = self.signs()
            silent = [rank for rank in others if _silent(first, newest, rank)]
            if not silent or time.monotonic() > begun + SILENT:
                alive = {rank: newest[rank] for rank in others if rank not in silent and not newest[rank].left}
                return silent, _furthest(alive), newest


def _silent(first: Mapping[int, Heartbeat], newest: Mapping[int, Heartbeat], rank: int) -> bool:
    if rank not in newest:
        return True
    return not newest[rank].left and rank in first and newest[rank].number == first[rank].number


def _furthest(alive: Mapping[int, Heartbeat]) -> list[int]:
    """Return the live ranks in the earliest step that are not waiting; else those with the fewest collectives."""
    if not alive:
        return []
    step = min(sign.step for sign in alive.values())
    alive = {rank: sign for rank, sign in alive.items() if sign.step == step}
    busy = [rank for rank, sign in alive.items() if not sign.waiting]
    if busy and len(busy) < len(alive):
        return busy
    fewest = min(sign.calls for sign in alive.values())
    return [rank for rank, sign in alive.items() if sign.calls == fewest]


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
        traffic: counters of sent bytes and waiting times.
    """

    def __init__(
        self, sizes: MeshSizes, device: torch.device, async_save: bool, store: Any, limit: timedelta | None = None
    ) -> None:
        self.number, self.rank = dist.get_world_size(), dist.get_rank()
        self._entered = ExitStack()
        self.traffic = self._entered.enter_context(CommCounter(look=True))
        self.pulse = HeartbeatMonitor(store, self.rank, self.number, self.traffic)
        self.pulse.begin()
        self._begun = (time.perf_counter(), 0.0, [0] * len(KINDS))
        self.device = device
        self.sizes = sizes
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
        with count_collective("control", "reduce", number):
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def numbers(self, values: list[float]) -> list[list[float]]:
        """All-gather each rank's numbers, of the same count."""
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        parts = [torch.empty_like(own) for _ in range(self.number)]
        with count_collective("control", "gather", own):
            dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def watch(self, model: torch.nn.Module) -> None:
        """Also count fully_shard's traffic of a model."""
        self.traffic.also(model)

    def at(self, step: int, phase: str) -> None:
        self.pulse.at(step, phase)
        self.traffic.forget()
        self._begun = (time.perf_counter(), self.traffic.seconds, [self.traffic.bytes[kind] for kind in KINDS])

    def done(self) -> dict[str, float]:
        begun, waited, before = self._begun
        seconds, waited = time.perf_counter() - begun, self.traffic.seconds - waited
        sent = [self.traffic.bytes[kind] - size for kind, size in zip(KINDS, before, strict=True)]
        of_steps, of_waits, *of_kinds = zip(*self.numbers([seconds, waited, *sent]), strict=True)
        own = [step - wait for step, wait in zip(of_steps, of_waits, strict=True)]
        return {
            "step_seconds": round(max(of_steps), 6),
            "own_seconds_min": round(min(own), 6),
            "own_seconds_median": round(statistics.median(own), 6),
            "own_seconds_max": round(max(own), 6),
            "slowest_rank": own.index(max(own)),
            "communication": round(sum(of_waits) / sum(of_steps), 4),
            **{
                f"bytes_{kind}": round(statistics.mean(sizes))
                for kind, sizes in zip(KINDS, of_kinds, strict=True)
                if any(sizes)
            },
        }

    def whose(self, loss: torch.Tensor | None = None) -> str:
        """Return a clause that names the ranks whose own loss, or unreduced gradients, are not finite.

        Args:
            loss: this rank's own loss; None checks gradients.
        """
        bad = self.traffic.nonfinite if loss is None else ~loss.isfinite()
        ranks = [str(rank) for rank, (own,) in enumerate(self.numbers([float(bad is not None and bool(bad))])) if own]
        if not ranks:
            return ""
        of = "all ranks" if len(ranks) == self.number > 1 else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        return f"it comes from {of}; "

    def leave(self) -> None:
        """Stop counting, and write a last heartbeat."""
        self._entered.close()
        self.pulse.end()

    def rows(self, batch: int) -> slice:
        """Return which sequences of a batch belong to this rank."""
        part = batch // self.sizes.fsdp
        first = self.mesh.get_local_rank("data") // self.sizes.cp * part
        return slice(first, first + part)

    def agreed(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's number, or a non-finite one on all ranks if any rank has one, so that all stop."""
        every = self.of_all(value)
        return torch.where(every.isfinite().all(), value, every.sum())

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over ranks with different sequences or tokens."""
        parts = self.sizes.fsdp * self.sizes.cp
        if parts > 1:
            with count_collective("control", "reduce", value, self.mesh.get_group("data")):
                dist.all_reduce(value, dist.ReduceOp.SUM, self.mesh.get_group("data"))
            value /= parts
        return value

    def every(self, value: Any) -> list[Any]:
        """All-gather small objects of Python's built-in types, in rank order."""
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value)
        return values

    def earliest(self, seen: tuple[int, str, str], backward: bool = False) -> str:
        """Return the message of the rank with the earliest position: the smallest number in the first stage that has
        one.

        Args:
            seen: a number, the name of a module or parameter or "", and the message.
            backward: the last stage comes first.
        """
        number, name, says = seen
        stage = self.pipeline.stage_of(name) if self.pipeline is not None and name else 0
        return str(min(self.every((not name, -stage if backward else stage, number, says)))[-1])

    def tokens(self, config: TrainConfig) -> int:
        """Return how many of a sequence's tokens this rank has between layers."""
        return config.sequence // (self.sizes.cp * (self.sizes.tp if config.sp else 1))

    def loss_chunk(self, config: TrainConfig) -> int:
        """Return the number of tokens whose logits exist at once.

        With tp, 0 is replaced by the number of all tokens, because 0 makes the model return logits of the whole
        vocabulary.
        """
        return config.loss_chunk or (config.batch * config.sequence if self.sizes.tp > 1 else 0)

    def of_all(self, value: torch.Tensor) -> torch.Tensor:
        """All-gather one number per rank, in rank order: [ranks]."""
        every = [torch.empty_like(value) for _ in range(self.number)]
        with count_collective("control", "gather", value):
            dist.all_gather(every, value)
        return torch.stack(every)

    def counts(self, parameter: torch.Tensor) -> bool:
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
    ValueError. If a connection is lost and no rank reports why, a RankError that says so.
    """
    device = local_device(config)
    store, number, world = next(iter(rendezvous("env://")))
    # Entries of an earlier run of these processes remain in the store, so use a new prefix.
    store = PrefixStore(f"quaver/{store.add(f'quaver/runs of {number}', 1)}", store)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=config.timeout) if config.timeout else None
    check_options(store, number, world, config)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    group = heard = None
    try:
        with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
            group = TorchProcessGroup(sizes, device, config.async_save, store, limit)
            yield group
    except Exception as error:
        if _is_lost(error) and threading.current_thread() is threading.main_thread():
            # torchrun has noticed a dead process and sends SIGTERM to the others; report the error first.
            heard = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _reports_error(store, number):
            raise OtherRankFailed from error
        if _is_lost(error):
            raise RankError(describe_lost_connection(error, group)) from error
        if number == 0 or not isinstance(error, ValueError | OSError):
            raise
        raise RankError(f"rank {number}: {reason(error)}") from error
    finally:
        if group is not None:
            group.leave()
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
    said = ""
    for other in range(1, world):
        its = json.loads(store.get(f"options/{other}"))
        # Round trip through JSON, which turns tuples into lists.
        wrong = [name for name, value in json.loads(json.dumps(options)).items() if its.get(name) != value]
        if wrong:
            name = wrong[0]
            said = (
                f"{name} is {options[name]!r}, and on rank {other} {its.get(name)!r}; give every rank the same options"
            )
            break
    store.set("options", said)
    if said:
        time.sleep(POLITE)  # the store may belong to this process, and other ranks must read it first
        raise ValueError(said)


def describe_lost_connection(error: Exception, group: TorchProcessGroup | None) -> str:
    """Describe why a collective failed: which rank is gone, does not respond, or is furthest behind."""
    message = (str(error).splitlines() or [type(error).__name__])[0][:200]
    go_on = "continue with --resume"
    try:
        silent, behind, signs = ([], [], {}) if group is None else group.pulse.behind()
    except RuntimeError:
        # The first rank hosts the store, so it is gone or stopped.
        return f"rank 0, which keeps the ranks' store, does not answer any more ({message}); {go_on}"
    late = "imed out" in str(error)
    named = silent or (behind if late else [])
    if not named:
        return f"another rank ended without a word, of memory or a signal perhaps ({message}); {go_on}"
    who = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
    place = signs[named[0]].place() if named[0] in signs else "before it gave a sign"
    if silent and not late:
        return f"{who} ended without a word {place}, of memory or a signal perhaps ({message}); {go_on}"
    if silent:
        return f"{who} stopped {place} and does not answer, while others waited ({message}); {go_on}"
    sign = signs[named[0]]
    where = f"{place}, after {sign.calls} collectives, where it has been for {sign.idle:.0f} seconds"
    return (
        f"{who} is furthest behind, {where}, while others waited ({message}); {go_on}, and --timeout if it was at work"
    )


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
