"""The noise of stochastic rounding follows from seed and construction, not from what else a process has built."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from tests.close import assert_bitwise

D = 32


def linears(**options: Any) -> nn.Module:
    return nn.Sequential(qt.Linear(D, D, **options), nn.GELU(), qt.Linear(D, D, **options))


def transformer(**options: Any) -> nn.Module:
    return qt.TransformerLayer(D, 2, 2 * D)


class Grouped(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.two = (qt.GroupedLinear(2, D, D, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([x.shape[0] // 2, x.shape[0]], dtype=torch.int32)
        y: Tensor = self.two(self.one(x, ends), ends)
        return y


def built(build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(**options)


def trained(model: nn.Module, steps: range = range(3), cast: bool = True, run: Any = None) -> list[Tensor]:
    """Train some steps; return losses and gradients."""
    results = []
    parameters = list(model.parameters())
    for step in steps:
        x = torch.randn(16, D, generator=torch.Generator().manual_seed(step))
        x = x[None] if isinstance(model, qt.TransformerLayer) else x
        with qt.autocast("nvfp4") if cast else nullcontext():
            loss = (run or model)(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        results += [loss.detach(), *gradients]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    return results


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize(
    ("build", "cast"),
    [(linears, True), (linears, False), (transformer, True), (Grouped, True), (Grouped, False)],
)
def test_a_model_that_is_built_again_draws_the_same_noise(build: Any, cast: bool) -> None:
    options = {} if cast else {"recipe": "nvfp4"}
    assert_equal(trained(built(build, **options), cast=cast), trained(built(build, **options), cast=cast))


def test_layers_of_one_model_do_not_share_noise_under_autocast() -> None:
    for build in (linears, Grouped):
        model = built(build)
        trained(model, range(1))
        numbers = torch.cat([b[..., 2].reshape(-1) for n, b in model.named_buffers() if n.endswith("count")])
        assert numbers.min() == 0 and len(set(numbers.tolist())) == len(numbers)


class Interrupted(nn.Module):
    """A module that raises once, after its first layer has run."""

    raised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.raised:
            self.raised = True
            raise RuntimeError("interrupted")
        return x


def interrupted_linears() -> nn.Module:
    return nn.Sequential(qt.Linear(D, D), Interrupted(), qt.Linear(D, D))


def interrupted_mlp() -> nn.Module:
    mlp, raising = qt.MLP(D, D), Interrupted()
    mlp.down_proj.register_forward_pre_hook(lambda _, args: raising(*args))
    return mlp


@pytest.mark.parametrize("build", [interrupted_linears, interrupted_mlp])
def test_layers_do_not_share_noise_after_a_forward_that_raised(build: Callable[[], nn.Module]) -> None:
    model = build()
    with pytest.raises(RuntimeError, match="interrupted"):
        trained(model, range(1))
    trained(model, range(1))
    numbers = torch.cat([b[..., 2].reshape(-1) for n, b in model.named_buffers() if n.endswith("count")])
    assert len(numbers) > 1 and len(set(numbers.tolist())) == len(numbers)


def test_compiled_code_draws_the_noise_of_eager_code() -> None:
    torch._dynamo.reset()
    model = built(linears)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(trained(model, run=compiled), trained(built(linears)))


@pytest.mark.parametrize("build", [linears, Grouped])
def test_a_checkpoint_continues_its_noise_in_layers_with_other_numbers(build: Any) -> None:
    model = built(build)
    trained(model, range(2))
    saved, expected = copy.deepcopy(model.state_dict()), trained(model, range(2, 4))
    unused, numbered = built(build), built(build)
    with qt.autocast("nvfp4"):
        # Use the other layer first, so that layer numbers differ from the checkpoint's.
        qt.Linear(D, D)(torch.randn(4, D, requires_grad=True))
        numbered(torch.randn(4, D, requires_grad=True))
    for other in (unused, numbered):
        other.load_state_dict(saved)
        assert_equal(trained(other, range(2, 4)), expected)
    copied = built(build)
    trained(copied, range(2))
    with qt.autocast("nvfp4"):
        qt.Linear(D, D)(torch.randn(4, D, requires_grad=True))
        assert_equal(trained(copy.deepcopy(copied), range(2, 4), cast=False), expected)
