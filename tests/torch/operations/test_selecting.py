"""Selective checkpoints over quantized layers: bits and states of no checkpoint, whatever a policy saves."""

import copy
import functools
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatching
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import quaver.torch as qt
from quaver import recipes
from quaver.torch.operations import ops, selecting
from tests.close import assert_bitwise

aten = torch.ops.aten
#: What frameworks save: products, attention and the largest of what is quantized.
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
}


RECIPES = ["delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4", recipes.tensorwise(attention=True)]


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


def steps(net: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of three steps: in the first weights are quantized and plans are made."""
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


@pytest.mark.parametrize("saves", POLICIES)
@pytest.mark.parametrize("model", [linears, layer])
@pytest.mark.parametrize(
    "recipe", ["delayed", "rowwise_bf16_wgrad", "mxfp8", "nvfp4", recipes.mxfp8(attention=True)], ids=str
)
def test_bits_and_states_are_those_without_a_checkpoint(recipe: Any, model: Any, saves: str) -> None:
    torch.manual_seed(0)
    net = model(recipe)
    expected = steps(copy.deepcopy(net), lambda net, x: net(x))
    select = contexts(POLICIES[saves])
    got = steps(net, lambda net, x: checkpoint(net, x, use_reentrant=False, context_fn=select))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(got[name], value, name)


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


def test_other_modes_see_what_they_saw() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net, x = linears("mxfp8"), torch.randn(32, 64, requires_grad=True)
    net(x).sum().backward()
    with FlopCounterMode(display=False) as counted:
        net(x)
    with FlopCounterMode(display=False) as unquantized:
        nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 64))(x)
    assert counted.get_total_flops() == unquantized.get_total_flops() > 0
    assert not selecting.is_active() and not selecting.is_hidden()


def test_an_error_inside_leaves_the_modes_as_they_were() -> None:
    net, x = linears("mxfp8"), torch.randn(32, 64, requires_grad=True)
    with pytest.raises(ValueError, match="its last axis must be"):
        checkpoint(net, x[:, :3], use_reentrant=False, context_fn=contexts(POLICIES["all"]))
    failing = selecting.unseen(lambda: selecting.seen(lambda: 1 / 0))
    forward, _ = contexts(POLICIES["all"])()
    with forward:
        with pytest.raises(ZeroDivisionError):
            failing()
        assert selecting.is_active() and not selecting.is_hidden()
    assert not selecting.is_active()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (checkpoints, "_CachingTorchDispatchMode"),
        (checkpoints, "_CachedTorchDispatchMode"),
        (torch._C, "_len_torch_dispatch_stack"),
        (dispatching, "_get_current_dispatch_mode_stack"),
        (dispatching, "_push_mode"),
        (dispatching, "_pop_mode"),
    ],
)
def test_without_a_name_of_torchs_layers_are_seen_whole(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = contexts(POLICIES["all"])()
    entered = [mode for mode in modes if owner is not checkpoints or type(mode).__name__ == name]
    present = runpy.run_path(selecting.__file__)
    with monkeypatch.context() as without:
        without.delattr(owner, name)
        absent = runpy.run_path(selecting.__file__)
    for mode in entered:
        with mode:
            assert present["is_active"]() and not absent["is_active"]()
