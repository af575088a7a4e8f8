"""Checkpoints of many ranks by torch.distributed.checkpoint, as safetensors: each rank writes and reads its own part.

A rank's file has the names that a single process's files have, and says where in the whole each part begins.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from quaver.torch.optim import Optimizer
from quaver.torch.parallel import agree_histories
from quaver.torch.state.buffers import STATE
from quaver.train.learning.torch.optimizer import load_state, state_of


def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Any = None) -> Callable[[], None]:
    """Begin to write a model's and its optimizer's state into a folder that is there, on all ranks at once.

    Args:
        group: of all ranks on CPUs, for this alone: the state is copied, and a thread writes the copy.
    Returns:
        What waits until all have written, and raises an OSError on every rank if one could not.
    """
    agree_histories(model)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state = {**model.state_dict(), **state_of(model, optimizer)}
    if group is None:
        begun = partial(dcp.save, state, storage_writer=writer)
    else:
        # What is on a CPU already torch would write as it is, while the optimizer changes it.
        copies = {
            name: value.detach().clone() if value.device.type == "cpu" else value for name, value in state.items()
        }
        future: Any = dcp.async_save(copies, storage_writer=writer, process_group=group)
        begun = getattr(future, "upload_completion", future).result

    def wait() -> None:
        try:
            begun()
        except CheckpointException as error:
            raise OSError(in_short(error)) from error

    return wait


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Take up what any number of ranks, or a single process, has written.

    Raises: ValueError for what does not fit.
    """
    reader = HuggingFaceStorageReader(str(folder))
    of_model = as_saved(model.state_dict(), reader.read_metadata().state_dict_metadata)
    of_optimizer = fresh(model, optimizer)
    whole = {**of_model, **of_optimizer}
    try:
        dcp.load(whole, storage_reader=reader)
    except CheckpointException as error:
        raise ValueError(in_short(error)) from error
    model.load_state_dict({name: whole[name] for name in of_model})
    load_state(model, optimizer, {name: whole[name] for name in of_optimizer})


def as_saved(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's state what a checkpoint has, where another recipe wrote that: layers begin the rest anew, and take
    histories of other lengths."""
    own = dict(state)
    for name, value in state.items():
        if name.rpartition(".")[2] not in STATE:
            continue
        held = saved.get(name)
        if held is None:
            del own[name]
        elif tuple(held.size) != tuple(value.shape):
            own[name] = torch.empty(tuple(held.size), dtype=value.dtype, device=value.device)
    return own


def in_short(error: CheckpointException) -> str:
    """The first rank's failure, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(failure).split())[:300]}"


def fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state before the first step, under the names of `state_of` and divided as the parameters are."""
    state: dict[str, Tensor] = {}
    if isinstance(optimizer, Optimizer):
        names = {p: name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                state |= {f"{names[p]}/{key}": value for key, value in optimizer.first_state(p, group).items()}
        return state
    for name, value in model.state_dict().items():
        if name in dict(model.named_parameters()):
            state[f"{name}/step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{moment}"] = torch.zeros_like(value)
    return state
