"""Test the weight cache: quantized once per optimizer step, and again whenever the weight may have changed."""

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.cpu import quantize
from quaver.torch.linear import plan_cpu
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
N, K = 24, 16


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of tensors quantized while a test runs."""
    shapes: list[tuple[int, ...]] = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(x: Tensor, *args: Any, **options: Any) -> Any:
            shapes.append(tuple(x.shape))
            return run(x, *args, **options)

        return counting

    impls = [Implementation(i.name, counted(i.run), i.reason) for i in ops.QUANTIZE.implementations]
    monkeypatch.setattr(ops.QUANTIZE, "implementations", impls)
    monkeypatch.setattr(ops.QUANTIZE, "enabled", impls)
    # Plans of small layers do not call the operation.
    known = vars(quantize)
    counting = {name: counted(known[name]) for name in ("quantize", "per_tensor")}
    monkeypatch.setattr(plan_cpu, "fp8", SimpleNamespace(**{**known, **counting}))
    ops.clear_resolved()
    yield shapes
    ops.clear_resolved()


def of_weight(shapes: list[tuple[int, ...]]) -> int:
    """Count how many of them were the weight or its transpose, and clear the list."""
    count = sum(shape in ((N, K), (K, N)) for shape in shapes)
    shapes.clear()
    return count


def per_step(recipe: str) -> int:
    """Number of quantizations: the weight, and its transpose if dgrad cannot use the same codes."""
    return 1 if recipes.get(recipe).reuse.weight else 2


def layer_with(recipe: str, **options: Any) -> qt.Linear:
    return qt.Linear(K, N, recipe=recipe, **options)


def forward_backward(layer: nn.Module) -> Tensor:
    x = torch.randn(5, K, dtype=next(layer.parameters()).dtype, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    return y.detach()  # type: ignore[no-any-return]


def assert_current(layer: qt.Linear) -> None:
    """Check that the layer computes with its current weight."""
    x = torch.randn(5, K, dtype=layer.weight.dtype)
    fresh = copy.deepcopy(layer)
    assert state_of(fresh).weights is None
    # Without gradients no cached operand would be used.
    assert_bitwise(layer(x), fresh(x))


# Number of quantizations.


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_a_weight_is_quantized_once_per_optimizer_step_for_all_micro_batches(
    recipe: str, quantized: list[tuple[int, ...]]
) -> None:
    layer = layer_with(recipe)
    optimizer = torch.optim.AdamW(layer.parameters())
    with qt.autocast(recipe):
        forward_backward(layer)
    if recipe == "delayed":
        # The first roll sets the factor, which also invalidates the cache.
        with qt.autocast(recipe):
            forward_backward(layer)
    for _ in range(2):
        optimizer.step()
        quantized.clear()
        for _ in range(4):
            forward_backward(layer)
        assert of_weight(quantized) == per_step(recipe)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise"])
def test_a_forward_without_gradients_neither_keeps_nor_uses_nor_drops(
    recipe: str, mode: Callable[[], Any], quantized: list[tuple[int, ...]]
) -> None:
    layer = layer_with(recipe).eval()
    with mode():
        for _ in range(3):
            layer(torch.randn(5, K))
    assert of_weight(quantized) == 3 and not state_of(layer).weights.entries
    forward_backward(layer)
    quantized.clear()
    with mode():
        layer(torch.randn(5, K))
    assert of_weight(quantized) == 1
    forward_backward(layer)
    assert of_weight(quantized) == 0, "the evaluation between two micro-batches cost them something"


# Requantization after optimizer steps.

FORMS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def torch_optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """All torch optimizers for dense float parameters, in each implementation (plain, foreach, fused)."""
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if name in ("Optimizer", "SparseAdam"):
            continue
        known = inspect.signature(kind).parameters
        forms = {form: options for form, options in FORMS.items() if set(options) <= set(known)} or {"plain": {}}
        for form, options in forms.items():
            optimizers[f"{name}-{form}"] = lambda p, kind=kind, options=options: kind(p, lr=0.05, **options)
    return optimizers


OPTIMIZERS = torch_optimizers()


def take_step(optimizer: torch.optim.Optimizer, layer: nn.Module, step: Callable[..., Any]) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = layer(torch.ones(3, K)).square().sum()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        step(closure)
    else:
        forward_backward(layer)
        step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_makes_the_weight_be_quantized_again(name: str) -> None:
    layer = layer_with("tensorwise", bias=False)
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(2):
        before = layer.weight.detach().clone()
        take_step(optimizer, layer, optimizer.step)
        assert not torch.equal(before, layer.weight)
        assert_current(layer)


#: A plain implementation, and those whose fused kernels do not change the version.
COMPILED = {"SGD-plain": "eager", "SGD-fused": "eager", "Adagrad-fused": "eager", "AdamW-fused": "aot_eager"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_optimizer_step_makes_the_weight_be_quantized_again(name: str) -> None:
    torch.compiler.reset()
    layer = layer_with("tensorwise", bias=False)
    optimizer = OPTIMIZERS[name](layer.parameters())
    step = torch.compile(optimizer.step, backend=COMPILED[name])
    for _ in range(2):
        before = layer.weight.detach().clone()
        forward_backward(layer)
        step()
        assert not torch.equal(before, layer.weight)
        assert_current(layer)


# Requantization after other writes.


def test_functional_call_uses_the_given_weights() -> None:
    layer = layer_with("tensorwise")
    x = torch.randn(5, K)
    own = layer(x)
    for make in (nn.Parameter, torch.Tensor.clone):
        other = {"weight": make(torch.randn(N, K)), "bias": layer.bias.detach()}
        expected = layer_with("tensorwise")
        expected.load_state_dict(other)
        assert_bitwise(functional_call(layer, other, (x,)), expected(x))
        assert_bitwise(layer(x), own)


def test_another_recipe_requantizes_the_weight() -> None:
    layer = qt.Linear(K, N)
    x = torch.randn(5, K)
    outputs = {}
    for _ in range(2):
        for recipe in ("tensorwise", "rowwise", "nvfp4"):
            with qt.autocast(recipe):
                outputs.setdefault(recipe, layer(x).detach())
                assert_bitwise(layer(x), outputs[recipe], recipe)


def test_a_requested_implementation_runs_on_cached_weights() -> None:
    layer = layer_with("mxfp8")
    x = torch.randn(5, K)
    y = layer(x)
    with qt.only("reference"):
        assert torch.allclose(layer(x), y, rtol=1e-5, atol=1e-5)


# Lifetime of the cache.


def test_the_cache_does_not_keep_a_parameter_alive() -> None:
    layer = layer_with("tensorwise")
    forward_backward(layer)
    layer.zero_grad()
    dead = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.randn(N, K))
    gc.collect()
    assert dead() is None
    assert_current(layer)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_layer_is_freed_without_the_garbage_collector(name: str) -> None:
    """Ranks whose collectors run at different times would roll different histories."""
    gc.disable()
    try:
        layer = layer_with(name)
        for _ in range(3):
            forward_backward(layer)
        dead = weakref.ref(layer)
        del layer
        assert dead() is None
    finally:
        gc.enable()


# Parameters exchanged by torch.


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "delayed"])
def test_parameters_that_torch_swaps_are_moved_cast_and_loaded_after_a_step(recipe: str, swapping: None) -> None:
    net = nn.Sequential(layer_with(recipe), qt.LayerNormLinear(N, K, recipe=recipe))
    tied = layer_with(recipe)
    tied.weight = net[0].weight  # type: ignore[assignment]
    net.append(tied)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for change in (
        lambda: net.load_state_dict({name: t + 0.5 for name, t in net.state_dict().items()}),
        lambda: net.to(torch.bfloat16),
        lambda: net.to(torch.float32),
    ):
        x = torch.randn(5, K, dtype=tied.weight.dtype)
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net(x).square().sum().backward()
        change()
        x = torch.randn(5, K, dtype=tied.weight.dtype)
        assert_bitwise(net(x), copy.deepcopy(net)(x))


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_weights_that_are_codes_are_swapped_too(recipe: str, swapping: None) -> None:
    with qt.quantized_init(recipe):
        layer = layer_with(recipe)
    x = torch.randn(5, K)
    layer(x).sum().backward()
    layer.zero_grad()
    layer.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
    assert_bitwise(layer(x), copy.deepcopy(layer)(x))
    layer.to(torch.bfloat16)
    assert qt.initial_value(layer.weight) is None, "it is no longer known whose it is"
    layer.weight.grad = torch.ones(N, K)
    with pytest.raises(ValueError, match="is stored as codes"):
        torch.optim.SGD([layer.weight], 0.1).step()
