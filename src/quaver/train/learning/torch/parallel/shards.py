"""Checkpoints of many ranks by torch.distributed.checkpoint, as safetensors: each rank writes and reads its own part.

A rank's file has the names that a single process's files have, and says where in the whole each part begins.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from quaver.train.learning.torch.optimizer import load_state, state_of


def write(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a model's and its optimizer's state into a folder that is there, on all ranks at once.

    Raises: OSError on every rank if one could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save({**model.state_dict(), **state_of(model, optimizer)}, storage_writer=writer)
    except CheckpointException as error:
        raise OSError(in_short(error)) from error


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Take up what any number of ranks, or a single process, has written.

    Raises: ValueError for what does not fit.
    """
    of_model = model.state_dict()
    of_optimizer = fresh(model)
    whole = {**of_model, **of_optimizer}
    try:
        dcp.load(whole, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise ValueError(in_short(error)) from error
    model.load_state_dict({name: whole[name] for name in of_model})
    load_state(model, optimizer, {name: whole[name] for name in of_optimizer})


def in_short(error: CheckpointException) -> str:
    """The first rank's failure, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(failure).split())[:300]}"


def fresh(model: nn.Module) -> dict[str, Tensor]:
    """AdamW's state before the first step, under the names of `state_of` and divided as the parameters are."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name in dict(model.named_parameters()):
            state[f"{name}/step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{moment}"] = torch.zeros_like(value)
    return state
