"""Linear layers without bias: nn.Linear, torchao's and ours with the same weight."""

import copy

import torch
from torch import nn

import quaver.torch as qt
from benchmarks.subjects import peer


def linear(features: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(features, features, bias=False, dtype=dtype)


def ours(base: nn.Linear) -> qt.Linear:
    layer = qt.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)
    layer.load_state_dict(base.state_dict())
    return layer


def torchao(base: nn.Linear, recipe: str) -> nn.Module:
    return peer.convert(copy.deepcopy(base), recipe)
