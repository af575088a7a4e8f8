"""Sharded checkpoints with torch.distributed.checkpoint: each rank writes and reads its own shards.

A checkpoint does not depend on the number of ranks. It uses the model's names without wrappers, and names optimizer
states by parameter. So it can be loaded with another number of ranks, another parallelism or another recipe. The newest
row of a delayed-scaling history differs between ranks, while torch.distributed.checkpoint writes only one rank's copy
of a replicated tensor: `sync_amax_histories` makes the ranks agree on it first.

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

#: File with the SHA-256 of every other file of a checkpoint.
DIGESTS = "digests.json"
#: The index file, which torch writes last, and the pattern of the ranks' data files.
INDEX, PARTS = ".metadata", "*.distcp"
MODEL, OPTIMIZER, OTHERS = "model.", "optimizer.", "others."
#: Name prefixes of optimizer states and of parameter-group options. The options differ between torch versions.
STATES, GROUPS = f"{OPTIMIZER}state.", f"{OPTIMIZER}param_groups."
#: Keyed by parameter, not by group, so that pipeline stages with separate optimizers write the same names as a single
#: optimizer.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_LENIENT = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
#: Name components added by wrappers; torch.distributed.checkpoint omits them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def sync_amax_histories(model: nn.Module) -> None:
    """All-reduce the newest row of every delayed-scaling history, so that all ranks have the same state.

    Call it on all ranks between two steps, before any of them takes a state dict; `Checkpoint` calls it itself. It
    costs one all-reduce of three numbers per layer for each process group, after one of a byte. Training continues bit
    for bit as without the call, because the next step would have done the same all-reduce.

    Args:
        model: a model with Quaver layers, in any wrappers; on a pipeline rank its stages.
    """
    scaling_step.agree([module for module in model.modules() if isinstance(module, Quantizable)])


class Checkpoint:
    """A model, its optimizers and other stateful objects, saved and loaded by all ranks together.

    Args:
        model: in any wrappers: `fully_shard`, DistributedDataParallel, torch.compile, tensor parallelism, or none. On a
            pipeline rank, an nn.ModuleDict or list with the names of its stages.
        optimizers: optimizers of its parameters; one, several or none.
        others: further objects by name, with `state_dict` and `load_state_dict` and the same state on all ranks, such
            as a schedule or a data loader.
        group: process group with all ranks; None is the default one. Without a process group, this process saves
            everything.

    The files are torch.distributed.checkpoint's and can be read without Quaver. Names begin with `model.`, `optimizer.`
    or `others.`.
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
        #: Separate gloo group for asynchronous saves; collectives of training and saving in one group would get mixed
        #: up.
        self._async_group: Any = None
        #: Future of the last asynchronous save.
        self._writing: Future[None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state to save, after all ranks agreed on the histories. All ranks must call
        it.

        Raises:
            ValueError: on all ranks, if one of them cannot take the state of a model, an optimizer or one of `others`.
        """
        sync_amax_histories(self.model)
        with self._on_all_ranks("take the state"):
            fresh = [optimizer for optimizer in self.optimizers if not len(optimizer.state)]
            try:
                state = self._state()
            finally:
                # torch created these states by a step without gradients, which would count as the first step.
                for optimizer in fresh:
                    optimizer.state.clear()
            without = {p for optimizer in fresh for p in _trained_parameters(optimizer)}
            names = {name for name, p in self._parameters().items() if p in without}
        return {name: value for name, value in state.items() if _parameter_name(name) not in names}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a folder that all ranks can access, and return when it is complete.

        Raises:
            ValueError: on all ranks. The folder already has a checkpoint, one rank lacks optimizers or `others` that
                another has, a state cannot be taken, or the files or their digests could not be written.
        """
        self._begin_save(folder)
        state = self.state_dict()
        with _first_error(f"save into {folder}"):
            dcp.save(state, checkpoint_id=folder, process_group=self.group)
        why = ""
        try:
            self._write_digests(Path(folder))
        except OSError as error:
            why = f"{folder} has a checkpoint without {DIGESTS}, which could not be written ({error}): save elsewhere"
        # All ranks must reach this check: if the first rank raised earlier, the others would hang here.
        self._check(why, f"save into {folder}")

    def async_save(self, folder: str | os.PathLike[str]) -> "Future[None]":
        """Copy the state to CPU memory and write it while training continues.

        Ranks write through a gloo process group of their own. It is created at the first call and has the timeout of
        the default group.

        Returns:
            A future that completes when the checkpoint is complete, or has the error. Wait for it before the program
            ends. The next save or load of this `Checkpoint` waits for it.
        Raises:
            ValueError: on all ranks. The folder already has a checkpoint, one rank lacks optimizers or `others` that
                another has, or a state cannot be taken.
        """
        self._begin_save(folder)
        if self._async_group is None and dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(self.group)
            self._async_group = new_group(ranks, backend="gloo", use_local_synchronization=self.group is not None)
        # torch may write CPU tensors without a copy, while the optimizer already changes them.
        state = self.state_dict()
        with self._on_all_ranks("copy the state"):
            state = {name: _copied(value) for name, value in state.items()}
        written: Any = dcp.async_save(state, checkpoint_id=folder, process_group=self._async_group)
        whole: Future[None] = Future()

        def seal(future: Any) -> None:
            try:
                with _first_error(f"save into {folder}"):
                    future.result()
                self._write_digests(Path(folder))
            except BaseException as error:
                whole.set_exception(error)
            else:
                whole.set_result(None)

        written.add_done_callback(seal)
        self._writing = whole
        return whole

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a checkpoint that any number of ranks saved, of the same model in any parallelism and under any recipe.

        A layer whose recipe needs a history or counter that the checkpoint lacks starts fresh, with a warning. Saved
        state that the recipe does not need is ignored. Weights stored only as codes are loaded from codes, or quantized
        from a high-precision checkpoint if they are not sharded.

        Raises:
            ValueError: on all ranks, before anything is loaded. The checkpoint is incomplete or damaged, belongs to
                another model, has other shapes, or has another kind of optimizer.
        Exact: on as many ranks in the same parallelism, a resumed run has the bits of an uninterrupted one.
        """
        self._wait_for_writing()
        where = Path(folder)
        why = f"{where} has no whole checkpoint ({INDEX} is not there): give another folder"
        self._check("" if (where / INDEX).exists() else why, f"load {where}", self._parts())
        self._check(_check_digests(where, *self._rank_and_ranks()), f"load {where}")
        with self._on_all_ranks(f"load {where}"):
            metadata = dcp.FileSystemReader(where).read_metadata()
            for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
                # Check that the file exists before anything is loaded; raises FileNotFoundError with its name.
                (where / name).stat()
        saved = metadata.state_dict_metadata
        sync_amax_histories(self.model)
        # The present states of those optimizers in which a trained parameter has no state yet.
        before = {
            optimizer: dict(optimizer.state)
            for optimizer in self.optimizers
            if not all(optimizer.state.get(p) for p in _trained_parameters(optimizer))
        }
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
        requested = {name: _buffer(name, value, saved) for name, value in whole.items() if _has_entry(saved, name)}
        with _first_error(f"load {where}"):
            dcp.load(requested, checkpoint_id=where, process_group=self.group)
        with self._on_all_ranks(f"load {where}"):
            self._set({**{name: value for name, value in whole.items() if not _is_recipe_state(name)}, **requested})
        parameters = self._parameters()
        for name in whole:
            if name not in saved and _is_unused(saved, name):
                # The parameter had no state yet when the checkpoint was saved.
                for optimizer in self.optimizers:
                    optimizer.state.pop(parameters[_parameter_name(name)], None)

    def _with_all_states(self, lacking: Collection[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return `_state` with a state for every trained parameter.

        torch creates missing states only if an optimizer has no state and no gradients, and would otherwise skip them
        on load.
        """
        aside = [(p, p.grad) for optimizer in lacking for p in _trained_parameters(optimizer)]
        for optimizer in lacking:
            optimizer.state.clear()
        for p, _ in aside:
            p.grad = None
        try:
            return self._state()
        finally:
            for p, gradient in aside:
                p.grad = gradient

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters by their names in a checkpoint."""
        return {_unwrapped(name): p for name, p in _unwrap_ddp(self.model).named_parameters()}

    def _state(self) -> dict[str, Any]:
        model_state: Any = get_model_state_dict(self.model)
        state = {MODEL + name: value for name, value in model_state.items()}
        if self.optimizers:
            optimizer_state: Any = get_optimizer_state_dict(self.model, self.optimizers, options=_FLAT)
            state |= {OPTIMIZER + name: value for name, value in optimizer_state.items()}
        return state | {OTHERS + name: other.state_dict() for name, other in self.others.items()}

    def _set(self, state: Mapping[str, Any]) -> None:
        def part(prefix: str) -> dict[str, Any]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        set_model_state_dict(self.model, part(MODEL), options=_LENIENT)
        if self.optimizers:
            set_optimizer_state_dict(self.model, self.optimizers, part(OPTIMIZER), options=_FLAT)
        for name, value in part(OTHERS).items():
            self.others[name].load_state_dict(value)

    def _take_state(self, saved: Mapping[str, Any]) -> bool:
        """Create recipe-state buffers that the checkpoint has and the layers lack. Return True if any was created."""
        created = False
        for layer_name, layer in _unwrap_ddp(self.model).named_modules():
            for name in STATE if isinstance(layer, Quantizable) else ():
                stored = saved.get(MODEL + _unwrapped(f"{layer_name}.{name}".lstrip(".")))
                if isinstance(stored, TensorStorageMetadata):
                    created |= take_state(layer, name, tuple(stored.size), stored.properties.dtype)
        return created

    def _compare(self, folder: Path, saved: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Raise on all ranks if the checkpoint belongs to another model or has other shapes."""
        why = _why_other(whole, saved)
        missing = {
            name for name in saved if name.startswith(MODEL) and name not in whole and not _is_recipe_state(name)
        }
        _, ranks = self._rank_and_ranks()
        if ranks > 1:
            every: list[Any] = [None] * ranks
            # Entries missing on every rank; a single pipeline rank lacks those of other stages.
            dist.all_gather_object(every, missing, self.group)
            missing = set.intersection(*every)
        if missing and not why:
            why = f"it has {_some(missing)}, which this model lacks"
        self._check(f"{folder} is a checkpoint of another model: {why}" if why else "", f"load {folder}")

    def _begin_save(self, folder: str | os.PathLike[str]) -> None:
        self._wait_for_writing()
        exists = (Path(folder) / INDEX).exists()
        why = f"{folder} already has a checkpoint, which would be overwritten: give another folder" if exists else ""
        self._check(why, f"save into {folder}", self._parts())

    def _wait_for_writing(self) -> None:
        """Wait for the last asynchronous save, so that its collectives do not mix with new ones. Its future reports its
        error.
        """
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    @contextmanager
    def _on_all_ranks(self, did: str) -> Iterator[None]:
        """Turn an exception on one rank within the block into a ValueError on all. The block must not contain
        collectives.
        """
        try:
            yield
        except Exception as error:
            self._check(f"could not {did}: {type(error).__name__}: {error}", did)
        else:
            self._check("", did)

    def _parts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: presence of optimizers, and the names of `others`."""
        return {"optimizers": "some" if self.optimizers else "none", "others": sorted(self.others)}

    def _check(self, why: str, did: str, what: Mapping[str, Any] | None = None) -> None:
        """Raise a ValueError on all ranks if one of them has an error message, or if their `what` differs."""
        advice = "give Checkpoint optimizers and others on all ranks or on none"
        check_agreement(did, what or {}, self.group, error=why, advice=advice)

    def _rank_and_ranks(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self.group), dist.get_world_size(self.group)
        return 0, 1

    def _write_digests(self, folder: Path) -> None:
        """Write the SHA-256 of each checkpoint file, on the first rank only."""
        if self._rank_and_ranks()[0]:
            return
        digests = {path.name: _digest(path) for path in [folder / INDEX, *sorted(folder.glob(PARTS))]}
        unnamed = folder / f"{DIGESTS}.tmp"
        unnamed.write_text(json.dumps({"sha256": digests}, indent=1) + "\n", encoding="utf-8")
        os.replace(unnamed, folder / DIGESTS)


@contextmanager
def _first_error(did: str) -> Iterator[None]:
    """Replace torch's CheckpointException, which is no `Exception` and spans many lines, by a ValueError with its first
    cause.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise ValueError(f"could not {did}, rank {rank} has failed: {type(why).__name__}: {why}") from error


def _copied(value: Any) -> Any:
    """Return a copy of a value that later training steps do not change. torch copies GPU tensors itself."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value
    return copy.deepcopy(value)


def _trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer that require gradients and may have a state."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _unwrap_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _unwrapped(name: str) -> str:
    """Return a name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_recipe_state(name: str) -> bool:
    """True if the name is recipe state, which a checkpoint may lack or have in excess."""
    return name.startswith(MODEL) and name.rpartition(".")[2] in (*STATE, *SCALES)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digests(folder: Path, rank: int, ranks: int) -> str:
    """Return an error message if a file that this rank checks differs from what was saved, else ""."""
    written = folder / DIGESTS
    if not written.exists():
        # Written by torch.distributed.checkpoint without Quaver.
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
            # Return the message instead of raising: the other ranks would wait for this one.
            return f"{path} cannot be read ({error}): load another checkpoint"
    return ""


def _why_other(whole: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return why a checkpoint does not fit this model and its optimizers, or "".

    Args:
        whole: the state of the present model, by name.
        saved: metadata of the checkpoint, by name.
    """
    expected = [name for name in whole if not _is_recipe_state(name) and not name.startswith(GROUPS)]
    absent = [
        n for n in expected if not _has_entry(saved, n) and not _is_unused(saved, n) and not _is_empty_state(whole[n])
    ]
    if absent:
        bare = all(name.startswith(OPTIMIZER) for name in absent) and not any(n.startswith(OPTIMIZER) for n in saved)
        return "it has no optimizer: give none" if bare else f"it lacks {_some(absent)}"
    another = _another_optimizer(whole, saved)
    if another:
        return another
    for name, value in whole.items():
        entry = saved.get(name)
        if not isinstance(value, Tensor) or not isinstance(entry, TensorStorageMetadata) or name.endswith(".history"):
            continue
        stored, codes = f"{name.rpartition('.')[0]}.{SCALES[0]}", name.rpartition(".")[2] == "weight"
        if codes and stored in saved and stored not in whole:
            return (
                f"{name} is in high precision in the model and stored as codes in the checkpoint; call "
                "quaver.torch.quantize_weights(model, recipe) before loading"
            )
        if codes and stored in whole and stored not in saved:
            if hasattr(value, "device_mesh"):
                return (
                    f"{name} is in high precision in the checkpoint and stored as sharded codes in the model; "
                    "load it before the model is sharded"
                )
            continue
        if tuple(entry.size) != tuple(value.shape):
            return f"{name} has shape {list(entry.size)} in the checkpoint and {list(value.shape)} in the model"
        if entry.properties.dtype is not value.dtype and {entry.properties.dtype, value.dtype} & {*CODES, torch.uint8}:
            return (
                f"{name} is {entry.properties.dtype} in the checkpoint and {value.dtype} in the model, which are "
                "codes of different recipes"
            )
    return ""


def _another_optimizer(whole: Collection[str], saved: Collection[str]) -> str:
    """Return why the saved optimizers are of another kind than the present ones, or "".

    torch versions only add options to an optimizer. Kinds differ only if each has options that the other lacks.
    """
    here, there = (_options(names) for names in (whole, saved))
    for parameter in sorted(here.keys() & there.keys()):
        ours, theirs = here[parameter] - there[parameter], there[parameter] - here[parameter]
        if ours and theirs:
            return (
                f"its optimizer of {parameter} is of another kind, with {', '.join(sorted(theirs))} and not "
                f"{', '.join(sorted(ours))}; pass an optimizer of that kind, or none to load only the model"
            )
    return ""


def _options(names: Collection[str]) -> dict[str, set[str]]:
    """Return the names of the optimizer options of each parameter."""
    options: dict[str, set[str]] = {}
    for name in names:
        if name.startswith(GROUPS):
            parameter, _, option = name.removeprefix(GROUPS).rpartition(".")
            options.setdefault(parameter, set()).add(option)
    return options


def _has_entry(saved: Mapping[str, Any], name: str) -> bool:
    """True if a checkpoint has this name, or, for one of `others`, any entry below this name."""
    return name in saved or (name.startswith(OTHERS) and any(each.startswith(f"{name}.") for each in saved))


def _is_empty_state(value: Any) -> bool:
    """True if a state has no values, such as that of a disabled GradScaler; torch writes nothing for it."""
    return isinstance(value, Mapping) and all(map(_is_empty_state, value.values()))


def _parameter_name(name: str) -> str:
    """Return the parameter that an optimizer-state name belongs to, or ""."""
    return name.removeprefix(STATES).rpartition(".")[0] if name.startswith(STATES) else ""


def _is_unused(saved: Mapping[str, Any], name: str) -> bool:
    """True if the name is the state of a parameter that had options but no state in the saved optimizer."""
    options = f"{GROUPS}{_parameter_name(name)}."
    return name.startswith(STATES) and any(each.startswith(options) for each in saved)


def _some(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first


def _buffer(name: str, value: Any, saved: Mapping[str, Any]) -> Any:
    """Return the tensor to load a saved value into: the value itself if it matches or is a DTensor, else a new one."""
    stored = saved.get(name)
    if not isinstance(value, Tensor) or not isinstance(stored, TensorStorageMetadata):
        return value
    same = tuple(stored.size) == tuple(value.shape) and stored.properties.dtype is value.dtype
    if same or hasattr(value, "device_mesh"):
        return value
    return torch.empty(tuple(stored.size), dtype=stored.properties.dtype, device=value.device)
