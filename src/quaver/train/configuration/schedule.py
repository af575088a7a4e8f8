"""The learning rate as a function of the step."""

import math

from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.sizes import MODELS


def lr_at(step: int, config: TrainConfig) -> float:
    """Linear warm-up to the highest rate, then a cosine down to `final_lr` of it; steps count from 1."""
    highest = config.lr or MODELS[config.model].lr
    if step <= config.warmup:
        return highest * step / (config.warmup + 1)
    done = (step - config.warmup) / (config.steps - config.warmup + 1)
    return highest * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
