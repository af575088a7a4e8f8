"""Linear layers without bias: nn.Linear, torchao's and ours with the same weight, and one step of each."""

import copy

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.timing import Step
from benchmarks.subjects import peer
from quaver.recipes.spec import Recipe


def linear(features: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(features, features, bias=False, dtype=dtype)


def ours(base: nn.Linear) -> qt.Linear:
    layer = qt.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)
    layer.load_state_dict(base.state_dict())
    return layer


def torchao(base: nn.Linear, recipe: str) -> nn.Module:
    return peer.convert(copy.deepcopy(base), recipe)


def plain_step(layer: nn.Module, x: Tensor, g: Tensor) -> Step:
    """Forward and backward of a micro-batch: the weight's gradient adds up, the input's is dropped."""

    def step() -> None:
        layer(x).backward(g)
        x.grad = None

    return step


def recipe_step(layer: qt.Linear, recipe: Recipe, x: Tensor, g: Tensor) -> Step:
    """The same under `autocast`, whose entry and exit are part of the step."""

    def step() -> None:
        with qt.autocast(recipe):
            y = layer(x)
        y.backward(g)
        x.grad = None

    return step


def changing(step: Step, weight: Tensor) -> Step:
    """The step, then a weight that counts as changed: nothing that was made from it may be used again.

    An optimizer's update would change the version too, but takes as long as a small layer. Raising the version alone
    takes about a microsecond, which is left in the figure, against us.
    """

    def stepped() -> None:
        step()
        torch._C._autograd._unsafe_set_version_counter((weight,), (weight._version + 1,))

    return stepped
