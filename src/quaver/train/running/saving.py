"""Saving a run: by its one process, or by every rank its own part of one folder that the first rank seals."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from quaver.train.learning.learner import InParts, Learner
from quaver.train.learning.ranks import Ranks
from quaver.train.records import checkpoint


def save(trained: Learner, ranks: Ranks, folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a step, and return its folder once it is whole; see `checkpoint.save`.

    Raises: CheckpointError if it cannot be written; the checkpoints before it stay.
    """
    if ranks.number == 1:
        return checkpoint.save(folder, step, *trained.tensors(), state, keep)
    with checkpoint.writing(folder, step, state, keep) if ranks.first else nullcontext() as partial:
        cast(InParts, trained).write(Path(ranks.given(str(partial))))
    ranks.wait()
    return folder / checkpoint.name_of(step)
