"""Checkpoints of many ranks by torch.distributed.checkpoint: each rank writes and reads its own part.

What a checkpoint holds goes by no rank: the names of the model without wrappers, and of its optimizers by parameter.
So other numbers of ranks, other parallelisms and other recipes read it. The newest row of delayed scaling's histories
is what a rank alone has recorded, and torch.distributed.checkpoint writes one rank's of what all ranks have:
`sync_amax_histories` makes it that of all.

Source: pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import copy
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from quaver.torch.linear.linear import Quantizable
from quaver.torch.linear.stored_weight import CODES, SCALES
from quaver.torch.state.buffers import STATE, take_state
from quaver.torch.state.history import scaling_step
from quaver.torch.state.history.sync import check_agreement, new_group

#: The file of a checkpoint that has the SHA-256 of each other one.
DIGESTS = "digests.json"
#: What torch writes last, and what it calls a rank's files.
INDEX, PARTS = ".metadata", "*.distcp"
MODEL, OPTIMIZER, OTHERS = "model.", "optimizer.", "others."
#: Of optimizers: states of parameters, and options of their groups, of which versions of torch have others.
STATES, GROUPS = f"{OPTIMIZER}state.", f"{OPTIMIZER}param_groups."
#: By parameter, not by group: so stages of a pipeline, whose optimizers have groups of their own, write what one has.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_LENIENT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
#: What wrappers add to names, and torch.distributed.checkpoint leaves out.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def sync_amax_histories(model: nn.Module) -> None:
    """Have all ranks agree on what delayed scaling's histories of a model have recorded since they rolled.

    Call it on all ranks before a state dict is taken on any, between two steps; it is one all-reduce of three numbers a
    layer for each process group, after one of a byte. Training goes on as without it, bit for bit: the next step would
    have begun with the same. `Checkpoint` calls it.

    Args:
        model: with layers of quaver's, in whatever wrappers; on a rank of a pipeline its stages.
    """
    scaling_step.agree(_layers(model))


class Checkpoint:
    """A model, its optimizers and what else goes on from a checkpoint, saved and loaded by all ranks together.

    Args:
        model: in whatever wrappers: `fully_shard`, DistributedDataParallel, torch.compile, tensor parallelism, none; on
            a rank of a pipeline an nn.ModuleDict or list with its stages' names.
        optimizers: of its parameters; one, several or none.
        others: what has `state_dict` and `load_state_dict` and is the same on all ranks, by name: a schedule, a loader.
        group: process group with all ranks; None is the default one. Without any, this process is all.

    Files are torch.distributed.checkpoint's, which reads them without quaver, too: names begin with `model.`,
    `optimizer.` and `others.`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        *,
        others: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> None:
        self.model = model
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.others = dict(others or {})
        self.group = group
        #: What ranks write through while they train: two collectives of one group at once would take each other's data.
        self._apart: Any = None
        #: The last asynchronous save.
        self._writing: Future[None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of what is saved, with histories as all ranks agreed on them. All ranks call it.

        Raises:
            ValueError: on all ranks, if the state of a model, an optimizer or one of `others` cannot be taken on one.
        """
        sync_amax_histories(self.model)
        with self._on_all_ranks("take the state"):
            fresh = [optimizer for optimizer in self.optimizers if not len(optimizer.state)]
            try:
                state = self._state()
            finally:
                # torch has made their states by a step without gradients, which would count as the first.
                for optimizer in fresh:
                    optimizer.state.clear()
            names = self._names(fresh)
        return {name: value for name, value in state.items() if _of_parameter(name) not in names}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a folder that all ranks see, and return when it is whole.

        Raises:
            ValueError: on all ranks: a checkpoint is in the folder, one rank has no optimizer or `others` of its own,
                the state cannot be taken on one rank, or the files or digests of them could not be written.
        """
        self._wait_for_writing()
        self._check(_why_not_into(Path(folder)), f"save into {folder}", self._parts())
        state = self.state_dict()
        with _one_error(f"save into {folder}"):
            dcp.save(state, checkpoint_id=folder, process_group=self.group)
        why = ""
        try:
            self._seal(Path(folder))
        except OSError as error:
            why = f"{folder} has a checkpoint without {DIGESTS}, which could not be written ({error}): save elsewhere"
        # The other ranks wait here, and would for good if the first raised an error before.
        self._check(why, f"save into {folder}")

    def async_save(self, folder: str | os.PathLike[str]) -> "Future[None]":
        """Copy the state into the processor's memory, and write it while training goes on.

        Ranks write through a process group of their own over gloo, which is made at the first call and waits as long
        as the default group.

        Returns:
            A future that is done when the checkpoint is whole, with the error if there was one. Wait for it before
            the program ends. The next save or load of this `Checkpoint` waits for it.
        Raises:
            ValueError: on all ranks: a checkpoint is in the folder, one rank has no optimizer or `others` of its own,
                or the state cannot be taken on one rank.
        """
        self._wait_for_writing()
        self._check(_why_not_into(Path(folder)), f"save into {folder}", self._parts())
        if self._apart is None and dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(self.group)
            self._apart = new_group(ranks, backend="gloo", use_local_synchronization=self.group is not None)
        # What is on a CPU already torch may write as it is, while the optimizer changes it.
        state = self.state_dict()
        with self._on_all_ranks("copy the state"):
            state = {name: _copied(value) for name, value in state.items()}
        written: Any = dcp.async_save(state, checkpoint_id=folder, process_group=self._apart)
        whole: Future[None] = Future()

        def seal(of_torch: Any) -> None:
            try:
                with _one_error(f"save into {folder}"):
                    of_torch.result()
                self._seal(Path(folder))
            except BaseException as error:
                whole.set_exception(error)
            else:
                whole.set_result(None)

        written.add_done_callback(seal)
        self._writing = whole
        return whole

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take up what any number of ranks has saved, of the same model in any parallelism and under any recipe.

        Layers whose recipe keeps a history or a count that the checkpoint lacks start fresh, with a warning; what
        their recipe does not keep is left. Weights that exist only in codes are loaded from such codes, or quantized
        from a checkpoint in high precision where they are not sharded.

        Raises:
            ValueError: on all ranks, before anything is loaded: no whole checkpoint, a damaged file, another model or
                shape, or an optimizer of another kind.
        Exact: a run that goes on, on as many ranks in the same parallelism, has the bits of one that was not stopped.
        """
        self._wait_for_writing()
        where = Path(folder)
        why = f"{where} has no whole checkpoint ({INDEX} is not there): give another folder"
        self._check("" if (where / INDEX).exists() else why, f"load {where}", self._parts())
        self._check(_damage(where, _rank(self.group), _ranks(self.group)), f"load {where}")
        with self._on_all_ranks(f"load {where}"):
            metadata = dcp.FileSystemReader(where).read_metadata()
            for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
                # Before anything is loaded. Raises: FileNotFoundError, with the name.
                (where / name).stat()
        saved = metadata.state_dict_metadata
        sync_amax_histories(self.model)
        before = self._held_states()
        try:
            whole = self._with_all_states(before)
            self._compare(where, saved, whole)
        except ValueError:
            for optimizer, states in before.items():
                optimizer.state.clear()
                optimizer.state.update(states)
            raise
        if self._take_state(saved):
            whole = self._state()
        asked = {name: _buffer(name, value, saved) for name, value in whole.items() if _holds(saved, name)}
        with _one_error(f"load {where}"):
            dcp.load(asked, checkpoint_id=where, process_group=self.group)
        with self._on_all_ranks(f"load {where}"):
            self._set({**{name: value for name, value in whole.items() if not _may_lack(name)}, **asked})
        self._forget({_of_parameter(name) for name in whole if name not in saved and _is_unused(saved, name)})

    def _held_states(self) -> dict[torch.optim.Optimizer, dict[Any, Any]]:
        """What optimizers hold that lack the state of a parameter, which a checkpoint may have."""
        return {
            optimizer: dict(optimizer.state)
            for optimizer in self.optimizers
            if not all(optimizer.state.get(p) for p in _trained(optimizer))
        }

    def _with_all_states(self, lacking: Collection[torch.optim.Optimizer]) -> dict[str, Any]:
        """`_state`, with those states that optimizers lack: torch makes them where there is neither one nor a gradient,
        and takes what it has not found for what is not wanted."""
        aside = [(p, p.grad) for optimizer in lacking for p in _trained(optimizer)]
        for optimizer in lacking:
            optimizer.state.clear()
        for p, _ in aside:
            p.grad = None
        try:
            return self._state()
        finally:
            for p, gradient in aside:
                p.grad = gradient

    def _names(self, optimizers: Iterable[torch.optim.Optimizer]) -> set[str]:
        """The names of optimizers' parameters."""
        held = {p for optimizer in optimizers for p in _trained(optimizer)}
        return {_unwrapped(name) for name, p in _bare(self.model).named_parameters() if p in held}

    def _state(self) -> dict[str, Any]:
        of_model: Any = get_model_state_dict(self.model)
        state = {MODEL + name: value for name, value in of_model.items()}
        if self.optimizers:
            of_optimizers: Any = get_optimizer_state_dict(self.model, self.optimizers, options=_FLAT)
            state |= {OPTIMIZER + name: value for name, value in of_optimizers.items()}
        return state | {OTHERS + name: other.state_dict() for name, other in self.others.items()}

    def _set(self, state: Mapping[str, Any]) -> None:
        def part(prefix: str) -> dict[str, Any]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        set_model_state_dict(self.model, part(MODEL), options=_LENIENT)
        if self.optimizers:
            set_optimizer_state_dict(self.model, self.optimizers, part(OPTIMIZER), options=_FLAT)
        for name, value in part(OTHERS).items():
            self.others[name].load_state_dict(value)

    def _forget(self, names: set[str]) -> None:
        """Drop what optimizers hold of parameters that had no gradient yet when the checkpoint was saved."""
        unused = {parameter for name, parameter in _bare(self.model).named_parameters() if _unwrapped(name) in names}
        for optimizer in self.optimizers:
            for parameter in unused & set(optimizer.state):
                del optimizer.state[parameter]

    def _take_state(self, saved: Mapping[str, Any]) -> bool:
        """Make buffers that recipes keep state in and the checkpoint has. Returns whether there was one to make."""
        taken = False
        for prefix, layer in _named_layers(self.model):
            for name in STATE:
                held = saved.get(f"{MODEL}{prefix}{name}")
                if isinstance(held, TensorStorageMetadata):
                    taken |= take_state(layer, name, tuple(held.size), held.properties.dtype)
        return taken

    def _compare(self, folder: Path, saved: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another model or shape."""
        why = _why_other(whole, saved)
        missing = {name for name in saved if name.startswith(MODEL) and name not in whole and not _may_lack(name)}
        if _ranks(self.group) > 1:
            every: list[Any] = [None] * _ranks(self.group)
            # What no rank has; a rank of a pipeline has some of it alone.
            dist.all_gather_object(every, missing, self.group)
            missing = set.intersection(*every)
        if missing and not why:
            why = f"it has {_some(missing)}, which this model has not"
        self._check(f"{folder} is a checkpoint of another model: {why}" if why else "", f"load {folder}")

    def _wait_for_writing(self) -> None:
        """Wait for the last asynchronous save, whose collectives another one's would meet; its future has its error."""
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    @contextmanager
    def _on_all_ranks(self, did: str) -> Iterator[None]:
        """Raise a ValueError on all ranks if one of them raises within the block, which has no collectives."""
        try:
            yield
        except Exception as error:
            self._check(f"could not {did}: {type(error).__name__}: {error}", did)
        else:
            self._check("", did)

    def _parts(self) -> dict[str, Any]:
        """What all ranks save or none does."""
        return {"optimizers": "some" if self.optimizers else "none", "others": sorted(self.others)}

    def _check(self, why: str, did: str, what: Mapping[str, Any] | None = None) -> None:
        """Raise a ValueError on all ranks if one of them has a reason, or something else of `what`."""
        advice = "give Checkpoint optimizers and others on all ranks or on none"
        check_agreement(did, what or {}, self.group, error=why, advice=advice)

    def _seal(self, folder: Path) -> None:
        """Write the SHA-256 of each file: the first rank does."""
        if _rank(self.group) != 0:
            return
        digests = {path.name: _digest(path) for path in [folder / INDEX, *sorted(folder.glob(PARTS))]}
        unnamed = folder / f"{DIGESTS}.tmp"
        unnamed.write_text(json.dumps({"sha256": digests}, indent=1) + "\n", encoding="utf-8")
        os.replace(unnamed, folder / DIGESTS)


@contextmanager
def _one_error(did: str) -> Iterator[None]:
    """Raise a ValueError in the place of torch's error, which all ranks have: it is no Exception, and of many lines."""
    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise ValueError(f"could not {did}, rank {rank} has failed: {type(why).__name__}: {why}") from error


def _copied(value: Any) -> Any:
    """A value that training does not change; torch itself copies what lies on a GPU."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value
    return copy.deepcopy(value)


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of an optimizer that may have a state."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _ranks(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Quantizable)]


def _named_layers(model: nn.Module) -> list[tuple[str, Quantizable]]:
    """Quantizable layers by the prefix of their names in a checkpoint."""
    layers = [(_unwrapped(name), each) for name, each in _bare(model).named_modules() if isinstance(each, Quantizable)]
    return [(f"{name}." if name else "", layer) for name, layer in layers]


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _unwrapped(name: str) -> str:
    """A name as it is in a checkpoint."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _may_lack(name: str) -> bool:
    """Whether a checkpoint may lack what has this name, or have it in vain: what recipes add."""
    return name.startswith(MODEL) and name.rpartition(".")[2] in (*STATE, *SCALES)


def _why_not_into(folder: Path) -> str:
    there = (folder / INDEX).exists()
    return f"{folder} has a checkpoint already, which would be lost meanwhile: give another folder" if there else ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(folder: Path, rank: int, ranks: int) -> str:
    """Why a checkpoint's files are not those that were saved, as far as this rank reads them."""
    written = folder / DIGESTS
    if not written.exists():
        # torch.distributed.checkpoint alone wrote it.
        return ""
    try:
        digests: dict[str, str] = json.loads(written.read_text(encoding="utf-8"))["sha256"]
    except (ValueError, KeyError, TypeError):
        return f"{written} is not what was written (it has no digests): load another checkpoint"
    for name in sorted(digests)[rank::ranks]:
        path = folder / name
        try:
            if _digest(path) != digests[name]:
                return f"{path} is not what was written (its SHA-256 differs): load another checkpoint"
        except OSError as error:
            # The other ranks would wait for this one.
            return f"{path} cannot be read ({error}): load another checkpoint"
    return ""


def _why_other(whole: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Why a checkpoint is of another model than the one whose state this is, or ""."""
    given = [name for name in whole if not _may_lack(name) and not name.startswith(GROUPS)]
    absent = [n for n in given if not _holds(saved, n) and not _is_unused(saved, n) and not _is_nothing(whole[n])]
    if absent:
        bare = all(name.startswith(OPTIMIZER) for name in absent) and not any(n.startswith(OPTIMIZER) for n in saved)
        return "it has no optimizer: give none" if bare else f"it lacks {_some(absent)}"
    another = _another_optimizer(whole, saved)
    if another:
        return another
    for name, value in whole.items():
        held = saved.get(name)
        if not isinstance(value, Tensor) or not isinstance(held, TensorStorageMetadata) or name.endswith(".history"):
            continue
        stored, codes = f"{name.rpartition('.')[0]}.{SCALES[0]}", name.rpartition(".")[2] == "weight"
        if codes and stored in saved and stored not in whole:
            return (
                f"{name} is codes there and in high precision here; call quaver.torch.quantize_weights(model, recipe) "
                "before loading"
            )
        if codes and stored in whole and stored not in saved:
            if hasattr(value, "device_mesh"):
                return f"{name} is in high precision there and codes in parts here; load it before the model is sharded"
            continue
        if tuple(held.size) != tuple(value.shape):
            return f"{name} is {list(held.size)} there and {list(value.shape)} here"
        if held.properties.dtype is not value.dtype and {held.properties.dtype, value.dtype} & {*CODES, torch.uint8}:
            return f"{name} is {held.properties.dtype} there and {value.dtype} here, codes of another recipe"
    return ""


def _another_optimizer(whole: Collection[str], saved: Collection[str]) -> str:
    """Why the optimizers that were saved are of another kind than those here, or "".

    Versions of torch add options to a kind; only another kind has some that this one lacks and lacks some that it has.
    """
    here, there = (_options(names) for names in (whole, saved))
    for parameter in sorted(here.keys() & there.keys()):
        ours, theirs = here[parameter] - there[parameter], there[parameter] - here[parameter]
        if ours and theirs:
            return (
                f"its optimizer of {parameter} is of another kind, with {', '.join(sorted(theirs))} and not "
                f"{', '.join(sorted(ours))}; give that kind, or none to take the model alone"
            )
    return ""


def _options(names: Collection[str]) -> dict[str, set[str]]:
    """By parameter, the names of its optimizer's options."""
    options: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(GROUPS):
            parameter, _, option = name.removeprefix(GROUPS).rpartition(".")
            options.setdefault(parameter, set()).add(option)
    return options


def _holds(saved: Mapping[str, Any], name: str) -> bool:
    """Whether a checkpoint holds a name; of what `others` gave it has the names below that one."""
    return name in saved or (name.startswith(OTHERS) and any(each.startswith(f"{name}.") for each in saved))


def _is_nothing(value: Any) -> bool:
    """Whether it is a state without values, as of a GradScaler that is not enabled: torch writes none of it."""
    return isinstance(value, Mapping) and all(map(_is_nothing, value.values()))


def _of_parameter(name: str) -> str:
    """The parameter that an optimizer's state of this name is of, or ""."""
    return name.removeprefix(STATES).rpartition(".")[0] if name.startswith(STATES) else ""


def _is_unused(saved: Mapping[str, Any], name: str) -> bool:
    """Whether it is an optimizer's state of a parameter that the optimizer had no state of yet."""
    options = f"{GROUPS}{_of_parameter(name)}."
    return name.startswith(STATES) and any(each.startswith(options) for each in saved)


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first


def _buffer(name: str, value: Any, saved: Mapping[str, Any]) -> Any:
    """Where a value is read to: its own memory, else new memory of the checkpoint's shape and dtype."""
    held = saved.get(name)
    if not isinstance(value, Tensor) or not isinstance(held, TensorStorageMetadata):
        return value
    same = tuple(held.size) == tuple(value.shape) and held.properties.dtype is value.dtype
    if same or hasattr(value, "device_mesh"):
        return value
    return torch.empty(tuple(held.size), dtype=held.properties.dtype, device=value.device)
