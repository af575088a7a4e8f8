"""Optimizers with quantized states, master weights and gradients."""

from quaver.reference.optimizer_state import PRESETS, Preset, StateSpec
from quaver.torch.optim.optimizer import Optimizer
from quaver.torch.optim.optimizers import SGD, Adam, AdamW, Lion, Muon, ScheduleFreeAdamW

__all__ = [
    "PRESETS",
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "Optimizer",
    "Preset",
    "ScheduleFreeAdamW",
    "StateSpec",
]
