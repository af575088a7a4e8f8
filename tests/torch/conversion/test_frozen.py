"""`frozen`: weights that do not change are quantized once, and only as long as they do not."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state import weight_cache
from tests.close import assert_bitwise

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
N, K, T = 48, 32, 5
MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(autouse=True)
def _no_hint_yet() -> Iterator[None]:
    weight_cache._CacheHint.was_shown = False
    yield
    weight_cache._CacheHint.was_shown = False


def bare_write(layer: Any) -> None:
    """Write a weight without a trace, which a cached quantization does not see."""
    layer.weight.data.mul_(-1.5)


def is_cached(layer: Any) -> bool:
    """Whether a forward reads a quantization from before a write without a trace."""
    x = torch.ones(1, layer.in_features)
    before, weight = layer(x), layer.weight.detach().clone()
    bare_write(layer)
    same = torch.equal(layer(x), before)
    layer.weight.data.copy_(weight)
    return same


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_forwards_inside_share_one_quantization_and_results_are_those_without(recipe: str, mode: str) -> None:
    layer, x = qt.Linear(K, N, recipe=recipe), torch.randn(T, K)
    with MODES[mode]():
        expected = layer(x)
        with qt.frozen(layer):
            assert is_cached(layer)
            assert_bitwise(layer(x), expected)
        assert not is_cached(layer)
    # What was quantized in another mode serves a forward and its backward.
    gradients = []
    for each in (layer, copy.deepcopy(layer)):
        own = x.clone().requires_grad_()
        with qt.frozen(layer):
            with MODES[mode]():
                layer(x)
            each(own).sum().backward()
        gradients.append(own.grad)
    if recipe != "nvfp4":  # whose noise goes on
        assert_bitwise(*gradients)


@torch.no_grad()
def test_contexts_nest_and_affect_only_their_layers() -> None:
    net: Any = nn.Sequential(qt.Linear(K, K, recipe="mxfp8"), qt.Linear(K, K, recipe="tensorwise"))
    outer = qt.frozen(net)
    with outer:
        with qt.frozen(net[0]), outer:
            assert is_cached(net[0]) and is_cached(net[1])
        assert is_cached(net[0]) and is_cached(net[1])
        copied = copy.deepcopy(net[0])
    assert not is_cached(net[0]) and not is_cached(net[1]) and not is_cached(copied)
    with qt.frozen(net[0]):
        assert is_cached(net[0]) and not is_cached(net[1])
        qt.revert(net)
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("mode", MODES)
def test_writes_that_leave_a_trace_and_refresh_are_seen(mode: str) -> None:
    layer, x = qt.Linear(K, N, recipe="rowwise"), torch.randn(T, K)
    with qt.frozen(layer):
        for write in (
            lambda: layer.weight.mul_(2.0),
            lambda: layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()}),
            lambda: setattr(layer.weight, "data", layer.weight.data * 2),
            lambda: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
            lambda: (bare_write(layer), qt.refresh(layer)),
        ):
            with MODES[mode]():
                layer(x)
            with torch.no_grad():
                write()
            with MODES[mode]():
                assert_bitwise(layer(x), copy.deepcopy(layer)(x))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_stepping_a_frozen_weight_gives_a_clear_error(kind: type[torch.optim.Optimizer]) -> None:
    layer, other = qt.Linear(K, N, recipe="mxfp8"), qt.Linear(K, N, recipe="mxfp8")
    optimizer = kind([*layer.parameters(), *other.parameters()], lr=0.1)  # type: ignore[call-arg]
    before = layer.weight.detach().clone()
    message = rf"{kind.__name__} would step the weight of Linear\({K} → {N}\)"
    with pytest.raises(ValueError, match=message), qt.frozen(layer):
        other(torch.randn(T, K)).sum().backward()
        optimizer.step()  # of the other one, whose gradients are there
        layer(torch.randn(T, K)).sum().backward()
        optimizer.step()
    assert_bitwise(layer.weight.detach(), before)
    optimizer.step()
    with torch.no_grad():
        assert not is_cached(layer)


def test_it_decorates_functions_also_recursive_ones_and_in_several_threads() -> None:
    layer, x = qt.Linear(K, N, recipe="mxfp8"), torch.randn(T, K)
    meeting = threading.Barrier(3, timeout=20)

    @qt.frozen(layer)
    @torch.no_grad()
    def inside(depth: int) -> Tensor:
        """What it computes."""
        y: Tensor = layer(x)
        if depth:
            inside(depth - 1)
        else:
            meeting.wait()
        return y

    with torch.no_grad():
        expected = layer(x)
        with ThreadPoolExecutor(3) as pool:
            for y in pool.map(inside, [1] * 3):
                assert_bitwise(y, expected)
        assert inside.__doc__ == "What it computes." and not is_cached(layer)


def test_only_a_module_can_be_frozen() -> None:
    with pytest.raises(TypeError, match="not a Parameter"):
        qt.frozen(qt.Linear(K, N).weight)  # type: ignore[arg-type]


def test_a_backward_after_its_end_has_the_codes_of_its_forward() -> None:
    for recipe in ("tensorwise", "mxfp8"):
        layer = qt.Linear(K, N, recipe=recipe)
        x = torch.randn(2, T, K)
        inputs = [each.clone().requires_grad_() for each in (x, x)]
        with qt.frozen(layer):
            y = layer(inputs[0])
        y.sum().backward()
        layer(inputs[1]).sum().backward()
        assert_bitwise(inputs[0].grad, inputs[1].grad, recipe)  # type: ignore[arg-type]


def test_compiled_code_accepts_frozen_layers_and_caches_nothing() -> None:
    torch.compiler.reset()
    layer = qt.Linear(K, N, recipe="mxfp8")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with qt.frozen(layer):
            y: Tensor = layer(x)
        return y

    x = torch.randn(T, K)
    with torch.no_grad(), qt.frozen(layer):
        assert torch.allclose(run(x), layer(x))
        bare_write(layer)
        assert torch.allclose(run(x), copy.deepcopy(layer)(x))


# The hint.


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_forwards_without_gradients_of_one_weight_name_it_once(mode: str) -> None:
    first, second, x = qt.Linear(K, N, recipe="mxfp8"), qt.Linear(K, N, recipe="mxfp8"), torch.randn(T, K)
    with MODES[mode]():
        for _ in range(weight_cache.FORWARDS - 1):
            first(x)
        with pytest.warns(UserWarning, match=rf"Linear\({K} → {N}\).*with quaver.torch.frozen\(model\)"):
            first(x)
        for _ in range(weight_cache.FORWARDS + 1):
            first(x)
            second(x)


def test_the_hint_to_freeze_is_given_only_where_it_helps() -> None:
    layer, x = qt.Linear(K, N, recipe="mxfp8"), torch.randn(T, K)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A weight that changes, reentrant checkpointing, a frozen one, one that is codes.
        for _ in range(4):
            for _ in range(weight_cache.FORWARDS // 3):
                with torch.no_grad():
                    layer(x)
            layer(x).sum().backward()
            optimizer.step()
        for _ in range(weight_cache.FORWARDS + 1):
            y = torch.utils.checkpoint.checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True)
            y.sum().backward()
        with torch.no_grad(), qt.frozen(layer):
            for _ in range(weight_cache.FORWARDS + 1):
                layer(x)
        qt.quantize_weights(layer, "mxfp8")
        with torch.no_grad():
            for _ in range(weight_cache.FORWARDS + 1):
                layer(x)
