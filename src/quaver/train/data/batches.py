"""Batches as pure functions: of the seed and the step in training, of the text alone in validation.

A resumed run needs no state to see the batches that it would have seen, and two runs with one seed see the
same ones.
"""

import numpy as np

from quaver.train.configuration.config import TrainConfig


def training_batch(tokens: np.ndarray, config: TrainConfig, step: int) -> np.ndarray:
    """The sequences of one step and the token after each: int64 [accumulate, batch, sequence + 1]."""
    random = np.random.default_rng([config.seed, step])
    starts = random.integers(0, len(tokens) - config.sequence, (config.accumulate, config.batch))
    return windows(tokens, starts, config.sequence)


def validation_batches(tokens: np.ndarray, config: TrainConfig) -> np.ndarray:
    """Sequences spread evenly over the held-out text: int64 [batches, batch, sequence + 1].

    There are `config.validation_batches`, or as many as the text fills without overlap, but at least one.
    """
    room = (len(tokens) - 1) // config.sequence
    batches = max(1, min(config.validation_batches, room // config.batch))
    starts = np.linspace(0, len(tokens) - config.sequence - 1, batches * config.batch).astype(np.int64)
    return windows(tokens, starts.reshape(batches, config.batch), config.sequence)


def windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    return tokens[starts[..., None] + np.arange(sequence + 1)].astype(np.int64)
