"""torch's process group of a run: joined at its beginning, left at its end, however that comes.

Untried beyond gloo on CPUs: on GPUs NCCL carries tensors and gloo what ranks tell one another.
"""

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from quaver.torch.parallel import Traffic
from quaver.torch.parallel.traffic import KINDS, during
from quaver.torch.state.history.groups import new_group
from quaver.train.configuration.config import TrainConfig, reason
from quaver.train.learning.mesh import Sizes
from quaver.train.learning.ranks import OnRank, Told, rank
from quaver.train.learning.torch.device import device_of
from quaver.train.learning.torch.parallel.pulse import ANSWER, Pulse

#: Private in torch; without it a hang in a group of the mesh is seen after torch's own timeout.
set_timeout: Any = getattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: None)
#: What weights are divided over, the outermost first: ranks that have other tokens, and those that share layers.
DIMENSIONS = ("data", "tp")


class Stages(Protocol):
    """A model in stages, as those see it who run it: see `quaver.train.learning.torch.parallel.pipeline`."""

    def step(self, batches: torch.Tensor) -> torch.Tensor:
        """The loss of micro-batches, whose gradients are added up."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """That of a batch, without gradients."""

    def stage_of(self, name: str) -> int:
        """The stage of a module or a parameter."""


#: Under this key a rank claims to say why the run ends.
CLAIM = "ended"
#: By what an error of a connection to another rank is known; gloo's and NCCL's are RuntimeErrors like others.
LOST = ("gloo", "NCCL", "Connection", "Broken pipe", "Socket")
#: Options that each rank may have for itself.
OWN = ("text", "threads", "device")
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
        traffic: what this rank has sent, and waited for.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, async_save: bool, store: Any, limit: timedelta | None = None
    ) -> None:
        self.number, self.rank = dist.get_world_size(), dist.get_rank()
        self._entered = ExitStack()
        self.traffic = self._entered.enter_context(Traffic(look=True))
        self.pulse = Pulse(store, self.rank, self.number, self.traffic)
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
        self.pipeline: Stages | None = None
        self.saving: Any = new_group(backend="gloo") if async_save else None
        meshes = [mesh for mesh in (self.mesh, self.across) if mesh is not None and limit is not None]
        for group in (group for mesh in meshes for group in mesh.get_all_groups()):
            # A mesh gives its groups torch's own.
            set_timeout(limit, group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        self.largest(0)

    def largest(self, value: int) -> int:
        number = torch.tensor(value, dtype=torch.int64, device="cpu")
        with during("control", "reduce", number):
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def given(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def numbers(self, values: list[float]) -> list[list[float]]:
        """Each rank's numbers, which are as many."""
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        parts = [torch.empty_like(own) for _ in range(self.number)]
        with during("control", "gather", own):
            dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def watch(self, model: torch.nn.Module) -> None:
        """Count what fully_shard sends of a model, too."""
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
        """A clause that names the ranks whose own loss, or whose gradients before any sum, are not finite.

        Args:
            loss: this rank's own; None is for gradients.
        """
        bad = self.traffic.nonfinite if loss is None else ~loss.isfinite()
        ranks = [str(rank) for rank, (own,) in enumerate(self.numbers([float(bad is not None and bool(bad))])) if own]
        if not ranks:
            return ""
        of = "all ranks" if len(ranks) == self.number > 1 else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        return f"it comes from {of}; "

    def leave(self) -> None:
        """Count no more, and give a last sign."""
        self._entered.close()
        self.pulse.end()

    def rows(self, batch: int) -> slice:
        """The sequences of a batch that are this rank's."""
        part = batch // self.sizes.fsdp
        first = self.mesh.get_local_rank("data") // self.sizes.cp * part
        return slice(first, first + part)

    def agreed(self, value: torch.Tensor) -> torch.Tensor:
        """A rank's number, or on all ranks one that is not finite where any has such a one, so that all stop."""
        every = self.of_all(value)
        return torch.where(every.isfinite().all(), value, every.sum())

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the parts of a batch and of its sequences."""
        parts = self.sizes.fsdp * self.sizes.cp
        if parts > 1:
            with during("control", "reduce", value, self.mesh.get_group("data")):
                dist.all_reduce(value, dist.ReduceOp.SUM, self.mesh.get_group("data"))
            value /= parts
        return value

    def every(self, value: Any) -> list[Any]:
        """What each rank gives, in their order; small, of Python's own types."""
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value)
        return values

    def earliest(self, seen: tuple[int, str, str], backward: bool = False) -> str:
        """What the rank says whose place comes first: in the first stage that has one, the smallest number.

        Args:
            seen: a number, a module or parameter's name or "", and what is said of it.
            backward: the last stage comes first.
        """
        number, name, says = seen
        stage = self.pipeline.stage_of(name) if self.pipeline is not None and name else 0
        return str(min(self.every((not name, -stage if backward else stage, number, says)))[-1])

    def tokens(self, config: TrainConfig) -> int:
        """How many of a sequence's tokens are on this rank between its layers."""
        return config.sequence // (self.sizes.cp * (self.sizes.tp if config.sp else 1))

    def loss_chunk(self, config: TrainConfig) -> int:
        """Tokens whose logits exist at once; with tp those of all in the place of 0, which has the model give logits of
        all words."""
        return config.loss_chunk or (config.batch * config.sequence if self.sizes.tp > 1 else 0)

    def of_all(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank's number, in their order: [ranks]."""
        every = [torch.empty_like(value) for _ in range(self.number)]
        with during("control", "gather", value):
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
    limit = timedelta(seconds=config.timeout) if config.timeout else None
    check_options(store, number, world, config)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    group = heard = None
    try:
        with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
            group = Group(sizes, device, config.async_save, store, limit)
            yield group
    except Exception as error:
        if _is_lost(error) and threading.current_thread() is threading.main_thread():
            # torchrun has seen a process die, and asks the others to end: one of them speaks first.
            heard = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _claimed(store, number):
            raise Told from error
        if _is_lost(error):
            raise OnRank(lost(error, group)) from error
        if number == 0 or not isinstance(error, ValueError | OSError):
            raise
        raise OnRank(f"rank {number}: {reason(error)}") from error
    finally:
        if group is not None:
            group.leave()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
        if heard is not None:
            signal.signal(signal.SIGTERM, heard)


def check_options(store: Any, number: int, world: int, config: TrainConfig) -> None:
    """Compare the options of all ranks, before any of them could wait for another one in vain.

    What may differ is the text, which is compared as such, and what is each machine's own.
    Raises: ValueError on the first rank if another one has other options, and Told on the others.
    """
    options = {name: value for name, value in asdict(config).items() if name not in OWN}
    store.set(f"options/{number}", json.dumps(options))
    if number:
        if store.get("options").decode():
            raise Told
        return
    said = ""
    for other in range(1, world):
        its = json.loads(store.get(f"options/{other}"))
        # Without JSON a tuple is no list.
        wrong = [name for name, value in json.loads(json.dumps(options)).items() if its.get(name) != value]
        if wrong:
            name = wrong[0]
            said = (
                f"{name} is {options[name]!r}, and on rank {other} {its.get(name)!r}; give every rank the same options"
            )
            break
    store.set("options", said)
    if said:
        time.sleep(POLITE)  # the store may be this process's, and the others have yet to read
        raise ValueError(said)


def lost(error: Exception, group: Group | None) -> str:
    """What ended a run in which a rank waits in vain: the rank that is gone, stands still, or is furthest behind."""
    message = (str(error).splitlines() or [type(error).__name__])[0][:200]
    go_on = "go on with --resume"
    try:
        silent, behind, signs = ([], [], {}) if group is None else group.pulse.behind()
    except RuntimeError:
        # A store of the first rank's goes with it, and stands still with it.
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


def _claimed(store: Any, number: int) -> bool:
    """Whether it is this rank that says why the run ends; the first one goes before those that meet the same."""
    if number:
        time.sleep(POLITE)
    try:
        store.set_timeout(ANSWER)
        return bool(store.add(CLAIM, 1) == 1)
    except RuntimeError:
        # The store went with the first rank, or stands still with it: one rank of each machine speaks for the others.
        return number == 1 or (number > 1 and os.environ.get("LOCAL_RANK") == "0")
