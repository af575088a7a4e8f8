"""AdamW, weight decay on matrices only, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from quaver.train.config import TrainConfig
from quaver.train.model import MODELS


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """torch's fused AdamW, norms without decay; the schedule sets its learning rate."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def lr_at(step: int, config: TrainConfig) -> float:
    """Linear warm-up to the highest rate, then a cosine down to `final_lr` of it; steps count from 1."""
    highest = config.lr or MODELS[config.model].lr
    if step <= config.warmup:
        return highest * step / (config.warmup + 1)
    done = (step - config.warmup) / (config.steps - config.warmup + 1)
    return highest * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
