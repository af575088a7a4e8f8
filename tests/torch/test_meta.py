"""Layers made on the meta device and filled later are those made where they run, under every recipe."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear.stored_weight import CODE_DTYPES
from tests.close import assert_bitwise

ALL = pytest.mark.parametrize("name", recipes.RECIPES)


def model(recipe: str | None, device: str | None = None, quantized: bool = False) -> nn.Sequential:
    def layers() -> nn.Sequential:
        one, two = (qt.Linear(*shape, device=device, recipe=recipe) for shape in ((32, 48), (48, 16)))
        return nn.Sequential(one, nn.GELU(), two)

    if not quantized:
        return layers()
    assert recipe is not None
    with qt.quantized_init(recipe):
        return layers()


def reset(net: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for layer in (net[0], net[2]):  # type: ignore[index]
        layer.reset_parameters()


def step(net: nn.Module, name: str) -> dict[str, Tensor]:
    torch.manual_seed(7)
    for _ in range(2):
        with qt.autocast(name):
            net(torch.randn(8, 32)).square().sum().backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    # Another model's autocast will roll these layers.
    return grads | {n: b.clone() for n, b in net.named_buffers() if not n.endswith("count")}


def assert_alike(net: nn.Module, other: nn.Module, name: str) -> None:
    one, two = step(net, name), step(other, name)
    assert list(one) == list(two)
    for key, value in one.items():
        assert_bitwise(two[key], value, key)


KINDS = pytest.mark.parametrize(
    "name, own, quantized",
    [(n, own, False) for n in recipes.RECIPES for own in (True, False)]
    + [(n, True, True) for n, r in recipes.RECIPES.items() if (w := r().fprop.b) and w.format.name in CODE_DTYPES],
)


@KINDS
def test_to_empty_and_reset_parameters(name: str, own: bool, quantized: bool) -> None:
    recipe = name if own else None
    here, later = model(recipe, quantized=quantized), model(recipe, "meta", quantized)
    assert all(t.is_meta for t in (*later.parameters(), *later.buffers()))
    later.to_empty(device="cpu")
    for net in (here, later):
        reset(net)
    for key, value in here.state_dict().items():
        if not key.endswith("count"):
            assert_bitwise(later.state_dict()[key], value, key)
    assert_alike(here, later, name)


@KINDS
@pytest.mark.parametrize("trained", [False, True])
def test_load_state_dict_by_assignment(name: str, own: bool, quantized: bool, trained: bool) -> None:
    recipe = name if own else None
    here, later = model(recipe, quantized=quantized), model(recipe, "meta", quantized)
    if trained:
        step(here, name)
        here.zero_grad()
    given = copy.deepcopy(here.state_dict())
    later.load_state_dict(given, assign=True)
    assert not any(t.is_meta for t in (*later.parameters(), *later.buffers()))
    assert_alike(here, later, name)


@ALL
@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_of_plain_weights_by_assignment(name: str, own: bool) -> None:
    here, later = model(name if own else None), model(name if own else None, "meta")
    given = copy.deepcopy(qt.plain_state_dict(here))
    with warnings.catch_warnings():
        # A warning reports that histories start fresh.
        warnings.simplefilter("ignore")
        later.load_state_dict(given, assign=True, strict=False)
    assert not any(t.is_meta for t in (*later.parameters(), *later.buffers()))
    assert_alike(here, later, name)


def test_a_layer_on_meta_does_not_disturb_the_steps_of_others() -> None:
    meta, here = qt.Linear(8, 8, device="meta", recipe="delayed"), qt.Linear(8, 8)
    for _ in range(2):
        with qt.autocast("delayed"):
            here(torch.randn(4, 8)).sum().backward()
    assert here.factor[0] > 0 and meta.history.is_meta


@ALL
def test_shapes_can_be_propagated(name: str) -> None:
    net = model(None, "meta")
    with qt.autocast(name), torch.no_grad():
        assert net(torch.empty(3, 32, device="meta")).shape == (3, 16)


@ALL
def test_shapes_can_be_propagated_backward(name: str) -> None:
    for net in (model(None, "meta"), qt.MLP(32, 16, "swiglu", normalization="RMSNorm", device="meta")):
        # For recipes with state, the first step creates buffers and the second uses them.
        for _ in range(2 if name in ("delayed", "nvfp4") else 1):
            x = torch.empty(3, 32, device="meta", requires_grad=True)
            with qt.autocast(name):
                net(x).sum().backward()
            assert x.grad is not None and x.grad.is_meta
