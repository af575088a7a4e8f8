"""Saving a run: by its one process, or by every rank its own part of one folder that the first rank seals.

Several ranks may go on meanwhile, with `async_save`: what they write is a copy, and a save begins when the one before
has ended.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.learner import InParts, Learner
from quaver.train.learning.ranks import Ranks
from quaver.train.records import checkpoint


class Saver:
    """Writes the checkpoints of a run; every rank calls every method."""

    def __init__(self, trained: Learner, ranks: Ranks, folder: Path, config: TrainConfig) -> None:
        self.trained, self.ranks, self.folder, self.config = trained, ranks, folder, config
        #: Waits for the save that has begun, and raises its error.
        self.pending: Callable[[], object] = nothing
        self.threads = ThreadPoolExecutor(1, "saving")

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, or begin to, and return its folder; see `checkpoint.save`.

        Raises: CheckpointError if it cannot be written, or the one before could not; those before them stay.
        """
        self.finish()
        if self.ranks.number == 1:
            return checkpoint.save(self.folder, step, *self.trained.tensors(), state, self.config.keep)
        with ExitStack() as stack:
            partial = ""
            if self.ranks.first:
                partial = str(stack.enter_context(checkpoint.writing(self.folder, step, state, self.config.keep)))
            written = cast(InParts, self.trained).write(Path(self.ranks.given(partial)), self.config.async_save)
            sealing = stack.pop_all()
        self.pending = self.threads.submit(sealed, sealing, written).result if self.config.async_save else nothing
        if not self.config.async_save:
            sealed(sealing, written)
            self.ranks.wait()
        return self.folder / checkpoint.name_of(step)

    def finish(self) -> None:
        """Wait for the save that has begun, if any. Raises: CheckpointError if it could not be written."""
        pending, self.pending = self.pending, nothing
        if pending is not nothing:
            pending()
            self.ranks.wait()


def nothing() -> None:
    """Of a run that saves nothing just now."""


def sealed(sealing: ExitStack, written: Callable[[], None]) -> None:
    """Wait until all ranks' parts are written; the first rank then gives the checkpoint its place."""
    with sealing:
        written()
