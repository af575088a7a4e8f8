"""Interface between the training loop and a framework: a model with its optimizer behind a few methods.

The loop, text, batches, checkpoints and reports are independent of the framework.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quaver.recipes.spec import Recipe

# ---- learner ----

#: Arrays by name.
Tensors = Mapping[str, np.ndarray]


class Learner(Protocol):
    """A model in training. Arrays are numpy's; a batch is int64 [accumulate, B, S + 1]."""

    @property
    def model(self) -> Any:
        """The trained model as the framework's own object."""

    @property
    def conversion(self) -> Any:
        """Report of which layers the recipe applies to, and why not to others."""

    @property
    def extra_metrics(self) -> Mapping[str, float]:
        """Additional numbers from the last `step` or `loss`, for the metrics."""

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        """Run one update; returns the loss and the gradient norm. If either is not finite, nothing is updated."""

    def change_recipe(self, recipe: Recipe) -> None:
        """Switch to another recipe: weights and moments stay, recorded state of the old recipe is dropped."""

    def loss(self, batches: np.ndarray) -> float:
        """Return the mean loss in nats per token, without an update."""

    def first_output(self, batch: np.ndarray) -> str:
        """Describe the first value, in order of computation, that is not finite."""

    def first_gradient(self, batch: np.ndarray) -> str:
        """Describe the first parameter, from the head down, whose gradient is not finite."""

    def tensors(self) -> tuple[Tensors, Tensors]:
        """Return the model's and the optimizer's state for a checkpoint: names, shapes and layout of PyTorch."""

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        """Load the results of `tensors` from any framework. Raises: ValueError if they do not fit."""

    def names(self) -> set[str]:
        """Return the names of the model's tensors in `tensors`."""


class InspectedLearner(Learner, Protocol):
    """A learner that measures its quantized GEMMs."""

    def inspect(self, folder: Path, first: int) -> AbstractContextManager[object]:
        """Return a context in which every `config.inspect_every`-th step is measured.

        Such a step adds `inspect_snr` and others to `extra_metrics`.

        Args:
            folder: destination of inspect.jsonl, which keeps the rows of earlier steps.
            first: number of the next step.
        """


class DistributedLearner(Learner, Protocol):
    """A learner distributed over several ranks."""

    def write(self, folder: Path, behind: bool = False) -> Callable[[], None]:
        """Start to write each rank's shards of `tensors` into a folder; all ranks must call it.

        Args:
            folder: destination.
            behind: write a copy while training continues.
        Returns:
            A function that waits until all ranks have written. Raises: OSError.
        """

    def read(self, folder: Path) -> None:
        """Load this rank's shards from files of any number of ranks. Raises: ValueError if they do not fit."""


# ---- errors ----


class NonFiniteError(ValueError):
    """Stops a run with a loss or gradient that is not finite; nothing was updated."""
