"""What a framework does in a run, and nothing more: a model with its optimizer, behind nine methods.

The loop, the text, the batches, the checkpoints and the reports know no framework.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quaver.recipes.spec import Recipe

# ---- learner ---------------------------------------------------------------------------------------------

#: Arrays by name.
Tensors = Mapping[str, np.ndarray]


class Learner(Protocol):
    """A model in training. Arrays go in and out as numpy's; a batch is int64 [accumulate, B, S + 1]."""

    @property
    def model(self) -> Any:
        """The trained model, in the framework's own terms."""

    @property
    def conversion(self) -> Any:
        """What the recipe was applied to and what not, and why; its str is a report."""

    @property
    def said(self) -> Mapping[str, float]:
        """Numbers that the last `step` or `loss` has besides, as metrics hold them."""

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        """One update; returns the loss and the gradient's norm. Where either is not finite nothing is updated."""

    def take(self, recipe: Recipe) -> None:
        """Go on under another recipe: weights and moments stay, what the one before has recorded goes."""

    def loss(self, batches: np.ndarray) -> float:
        """Mean loss in nats a token, without an update."""

    def first_output(self, batch: np.ndarray) -> str:
        """Where, in order of computation, something first is not finite, in words."""

    def first_gradient(self, batch: np.ndarray) -> str:
        """The parameter, from the head down, whose gradient first is not finite, in words."""

    def tensors(self) -> tuple[Tensors, Tensors]:
        """The model's and the optimizer's state as checkpoints hold them: names, shapes and layout of PyTorch."""

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        """Take up what `tensors` gave, in whichever framework. Raises: ValueError where it does not fit."""

    def names(self) -> set[str]:
        """Of the model's tensors in `tensors`."""


class DistributedLearner(Learner, Protocol):
    """A learner that several ranks are, each a part."""

    def write(self, folder: Path, behind: bool = False) -> Callable[[], None]:
        """Begin to write each rank's part of what `tensors` would give into a folder; all ranks call it.

        Args:
            behind: go on meanwhile, of a copy.
        Returns:
            What waits until all ranks have written. Raises: OSError.
        """

    def read(self, folder: Path) -> None:
        """Take up this rank's part of what any number of ranks wrote. Raises: ValueError where it does not fit."""


class LowBitOptimizerLearner(Learner, Protocol):
    """A learner whose optimizer is one of `quaver.torch.optim`."""

    def renew(self) -> None:
        """Write the optimizer's states, which were loaded from a checkpoint of their first form, in today's."""


# ---- nonfinite -------------------------------------------------------------------------------------------
# The error that stops a run whose numbers are no longer finite.


class NonFiniteError(ValueError):
    """A loss or gradient that is not finite; nothing was written over."""
