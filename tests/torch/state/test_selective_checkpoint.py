"""Selective checkpoints over quantized layers: bits and states of no checkpoint, whatever a policy saves."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from quaver import recipes
from quaver.torch.operations import ops
from quaver.torch.state import selective_checkpoint
from tests.close import assert_bitwise
from tests.pairs import alternating, case_name, pairs

aten = torch.ops.aten
#: Operations whose outputs frameworks save: GEMMs, attention and amax reductions.
PRODUCTS = {torch.ops.quaver.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.max.default}
POLICIES: dict[str, Callable[[Any], bool]] = {
    "products": PRODUCTS.__contains__,
    "parts": {
        aten.amax.default,
        aten.abs.default,
        aten._to_copy.default,
        aten.mul.Tensor,
    }.__contains__,
    "all": lambda op: True,
    "none": lambda op: False,
}


RECIPES = [
    *("delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4"),
    recipes.tensorwise(attention=True),
    recipes.override("mxfp8", fprop=None),
]


def contexts(saves: Callable[[Any], bool]) -> Any:
    def policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def linears(recipe: Any, inplace: bool = False) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(inplace), nn.Linear(96, 96, bias=False), nn.Linear(96, 64))
    qt.convert(net, recipe)
    return net


def layer(recipe: Any) -> nn.Module:
    net = qt.TransformerLayer(64, 4, hidden=96, activation="swiglu")
    qt.convert(net, recipe)
    return net


def transposed(recipe: Any) -> nn.Module:
    net = qt.TransformerLayer(64, 4, hidden=96, normalization="RMSNorm", rope=qt.RotaryEmbedding(16), window=(7, 0))
    qt.convert(net, recipe)
    return net


def steps(net: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of three steps; the first quantizes weights and creates plans."""
    results = {}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 16, 64).requires_grad_()
        y = call(net, x)
        y.square().mean().backward()
        results |= {f"{step} y": y.detach(), f"{step} x": x.grad}
        results |= {f"{step} {name}": p.grad for name, p in net.named_parameters()}
        results |= {f"{step} {name}": b.clone() for name, b in net.named_buffers()}
        net.zero_grad()
    return results


@pytest.mark.parametrize(
    ("recipe", "model", "saves"),
    pairs(
        ("delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4", recipes.mxfp8(attention=True)), (linears, layer), POLICIES
    ),
    ids=case_name,
)
def test_bits_and_states_equal_those_without_a_checkpoint(recipe: Any, model: Any, saves: str) -> None:
    torch.manual_seed(0)
    net = model(recipe)
    expected = steps(copy.deepcopy(net), lambda net, x: net(x))
    select = contexts(POLICIES[saves])
    got = steps(net, lambda net, x: checkpoint(net, x, use_reentrant=False, context_fn=select))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(got[name], value, name)


@pytest.mark.parametrize(("recipe", "model"), alternating(RECIPES, [linears, layer, transposed], []), ids=case_name)
def test_a_first_forward_shows_the_operations_of_every_other(recipe: Any, model: Any) -> None:
    net, shown = model(recipe), []
    select = contexts(lambda op: shown[-1].append(op) or False)
    for _ in range(2):
        shown.append([])
        checkpoint(net, torch.randn(2, 16, 64, requires_grad=True), use_reentrant=False, context_fn=select)
    assert shown[0] and shown[0] == shown[1]


def test_an_output_may_be_written_to() -> None:
    net, select = linears("mxfp8", inplace=True), contexts(POLICIES["products"])
    expected = steps(copy.deepcopy(net), lambda net, x: net(x))
    got = steps(net, lambda net, x: checkpoint(net, x, use_reentrant=False, context_fn=select))
    for name, value in expected.items():
        assert_bitwise(got[name], value, name)


@pytest.mark.parametrize(("saves", "again"), [("products", 0), ("parts", 3)])
def test_a_product_that_is_saved_is_computed_once(saves: str, again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, done = linears("mxfp8"), []
    eager = ops.MATMUL.eager
    monkeypatch.setattr(ops.MATMUL, "eager", lambda *args: done.append(1) or eager(*args))
    x = torch.randn(32, 64, requires_grad=True)
    y = checkpoint(net, x, use_reentrant=False, context_fn=contexts(POLICIES[saves]))
    assert len(done) == 3
    # Backward's own products are not seen; what the recomputation needs last it does not run to the end for.
    done.clear()
    y.sum().backward()
    assert len(done) <= again and bool(done) is bool(again)


class Logged(TorchDispatchMode):
    """Record the names of all operations, as a user's own dispatch mode would."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def flops(net: nn.Module, saves: str) -> int:
    """FLOPs of a forward under a selective checkpoint and its backward, counted by torch."""
    with FlopCounterMode(display=False) as counted:
        x = torch.randn(32, 64, requires_grad=True)
        checkpoint(net, x, use_reentrant=False, context_fn=contexts(POLICIES[saves])).sum().backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("recipe", ["delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4"])
def test_other_modes_see_the_same_calls(recipe: str) -> None:
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 64))
    assert flops(linears(recipe), "products") == flops(plain, "products") == 3 * 2 * 32 * (64 * 96 + 96 * 96 + 96 * 64)
    net, x, seen = linears(recipe), torch.randn(32, 64), []
    net(x)
    for run in (net, functools.partial(checkpoint, net, use_reentrant=False, context_fn=contexts(POLICIES["all"]))):
        with Logged() as log:
            run(x.requires_grad_())
        seen.append([name for name in log.names if name in ("aten.mm.default", "aten.addmm.default")])
    assert seen[0] == seen[1] and len(seen[0]) == 3
    assert not selective_checkpoint.is_active() and not selective_checkpoint.thread.hidden


def inside_selective(net: nn.Module, x: Tensor) -> Tensor:
    whole = functools.partial(checkpoint, net, use_reentrant=False)
    y: Tensor = checkpoint(whole, x, use_reentrant=False, context_fn=contexts(POLICIES["products"]))
    return y


def counted_forward(net: nn.Module, x: Tensor) -> Tensor:
    with qt.count(net):
        y: Tensor = checkpoint(net, x, use_reentrant=False)
    return y


def counted_recomputation(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(net, x, use_reentrant=False)
    counting = contextlib.ExitStack()

    def begin(_: Tensor) -> None:
        counting.enter_context(qt.count(net))

    y.register_hook(begin)
    x.register_hook(lambda g: counting.close())
    return y


def logged_forward(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = qt.checkpoint(functools.partial(checkpoint, net, use_reentrant=False), x)
    return y


@pytest.mark.parametrize(
    ("recipe", "model", "call"),
    pairs(
        ("delayed", "rowwise_bf16_wgrad", "mxfp8"),
        (linears, layer),
        (inside_selective, counted_forward, counted_recomputation, logged_forward),
    ),
)
def test_a_recomputation_saves_the_same_tensors_as_its_forward(recipe: str, model: Any, call: Any) -> None:
    """Though it alone is watched, or the forward alone was: torch refused it, where a watched layer saves otherwise."""
    torch.manual_seed(0)
    net = model(recipe)
    expected = steps(copy.deepcopy(net), lambda net, x: net(x))
    got = steps(net, call)
    for name, value in expected.items():
        assert_bitwise(got[name], value, name)
