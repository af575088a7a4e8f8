"""`frozen`: weights that hold still are quantized once, and only as long as they do."""

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
from quaver.torch.conversion.quantized_weights import _frozen_layers
from quaver.torch.state import weight_cache
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
N, K, T = 48, 32, 5
MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(autouse=True)
def no_hint_yet() -> Iterator[None]:
    weight_cache._CacheHint.was_shown = False
    yield
    weight_cache._CacheHint.was_shown = False


def while_frozen(layer: nn.Module) -> dict[str, weight_cache.CachedWeight]:
    return dict(state_of(layer).weights.frozen_entries)


def bare_write(layer: nn.Module) -> None:
    layer.weight.data.mul_(-1.5)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_forwards_inside_share_one_quantization_and_results_are_those_without(recipe: str, mode: str) -> None:
    layer, x = qt.Linear(K, N, recipe=recipe), torch.randn(T, K)
    with MODES[mode]():
        expected = layer(x)
        with qt.frozen(layer):
            y = layer(x)
            (entry,) = while_frozen(layer).values()
            assert_bitwise(layer(x), expected)
            assert while_frozen(layer)["fprop"] is entry
        assert_bitwise(y, expected)
        assert not while_frozen(layer)
    # What was kept in another mode serves a forward and its backward.
    with qt.frozen(layer):
        with MODES[mode]():
            layer(x)
        x = x.clone().requires_grad_()
        layer(x).sum().backward()
    other = copy.deepcopy(layer)
    other.zero_grad()
    again = x.detach().clone().requires_grad_()
    other(again).sum().backward()
    if recipe != "nvfp4":  # whose noise goes on
        assert_bitwise(x.grad, again.grad)


def test_frozen_weights_contexts_nest_and_affect_only_their_layers() -> None:
    net = nn.Sequential(qt.Linear(K, K, recipe="mxfp8"), qt.Linear(K, K, recipe="tensorwise"))
    x = torch.randn(T, K)
    outer = qt.frozen(net)
    with torch.no_grad(), outer:
        with qt.frozen(net[0]), outer:
            net(x)
            assert while_frozen(net[0]) and while_frozen(net[1])
        assert while_frozen(net[0]) and while_frozen(net[1]), "the inner one dropped what the outer one holds"
    assert not while_frozen(net[0]) and not while_frozen(net[1])
    with torch.no_grad(), qt.frozen(net[0]):
        net(x)
        assert while_frozen(net[0]) and not while_frozen(net[1])
        # The other one sees a bare write.
        bare_write(net[1])
        assert_bitwise(net[1](x), copy.deepcopy(net[1])(x))
    assert not _frozen_layers


@pytest.mark.parametrize("mode", MODES)
def test_the_key_is_still_checked_and_refresh_still_drops(mode: str) -> None:
    layer, x = qt.Linear(K, N, recipe="rowwise"), torch.randn(T, K)
    with qt.frozen(layer):
        for write in (
            lambda: layer.weight.mul_(2.0),
            lambda: layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()}),
            lambda: setattr(layer.weight, "data", layer.weight.data * 2),
            lambda: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
            lambda: (bare_write(layer), qt.refresh(layer)),
            weight_cache.count_step,  # a replayed graph's, which writes without a trace
        ):
            with MODES[mode]():
                layer(x)
            with torch.no_grad():
                write()
                if write is weight_cache.count_step:
                    bare_write(layer)
            with MODES[mode]():
                assert_bitwise(layer(x), copy.deepcopy(layer)(x))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_stepping_a_frozen_weight_gives_a_clear_error(kind: type[torch.optim.Optimizer]) -> None:
    layer, other = qt.Linear(K, N, recipe="mxfp8"), qt.Linear(K, N, recipe="mxfp8")
    optimizer = kind([*layer.parameters(), *other.parameters()], lr=0.1)  # type: ignore[call-arg]
    before = layer.weight.detach().clone()
    with qt.frozen(layer):
        other(torch.randn(T, K)).sum().backward()
        optimizer.step()  # of the other one, whose gradients are there
        layer(torch.randn(T, K)).sum().backward()
        with pytest.raises(ValueError, match=rf"{kind.__name__} would step the weight of Linear\({K} → {N}\)"):
            optimizer.step()
    assert_bitwise(layer.weight.detach(), before)
    optimizer.step()


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
        assert while_frozen(layer), "the inner call, or another thread's, dropped what this one holds"
        return y

    with torch.no_grad():
        expected = layer(x)
    with ThreadPoolExecutor(3) as pool:
        for y in pool.map(inside, [1] * 3):
            assert_bitwise(y, expected)
    assert inside.__doc__ == "What it computes." and not _frozen_layers
    assert not while_frozen(layer) and not weight_cache.frozen(layer)


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
    with torch.no_grad():
        expected = layer(x)
        assert torch.allclose(run(x), expected)
        with qt.frozen(layer):
            assert torch.allclose(run(x), expected)
            assert not while_frozen(layer)
            bare_write(layer)
            assert torch.allclose(run(x), copy.deepcopy(layer)(x))
    assert not weight_cache.frozen(layer) and not _frozen_layers


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
        # A weight that changes, reentrant checkpointing, a held one, one that is codes.
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
