"""`cache_compiled_weights`: a compiled graph quantizes each weight once per optimizer step, with the same bits."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import quaver.torch as qt
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation
from tests.close import assert_bitwise
from tests.torch.conversion.in_place import model_of
from tests.torch.nn.test_transformer import make
from tests.torch.state.test_weight_cache import SEEN, WRITERS, K, N, T, Writer, linear, trained, without_gradients

#: Traces and partitions as Inductor does, without generated C++.
BACKEND = "aot_eager_decomp_partition"
#: One scale for both directions of a weight, blocks in each direction, packed codes, and noise besides.
RECIPES = ["tensorwise", "mxfp8", "mxfp4", "nvfp4"]
SLOW_WRITERS = [*WRITERS[1::3], *WRITERS[2::3]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what was quantized, in order."""
    shapes: list[tuple[int, ...]] = []

    def recorded(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args: shapes.append(tuple(x.shape)) or run(x, *args)

    those = [Implementation(i.name, recorded(i.run), i.reason) for i in ops.QUANTIZE.implementations]
    monkeypatch.setattr(ops.QUANTIZE, "implementations", those)
    monkeypatch.setattr(ops.QUANTIZE, "enabled", those)
    ops.clear_resolved()
    yield shapes
    ops.clear_resolved()


def compiled(module: nn.Module, backend: str = BACKEND) -> Any:
    return torch.compile(module, fullgraph=True, backend=backend)


def losses(module: nn.Module, run: Any, inputs: Tensor) -> list[Tensor]:
    """Losses of each micro-batch [steps, micro-batches, ...], and the gradients of the last step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    results: list[Tensor] = []
    for micro_batches in inputs:
        optimizer.zero_grad()
        for x in micro_batches:
            loss = run(x).float().square().mean()
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
    return results + [p.grad for p in module.parameters() if p.grad is not None]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).bfloat16()


def llama() -> nn.Module:
    return make("Llama", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("recipe", "make_layer"),
    [*((recipe, mlp) for recipe in RECIPES), *(pytest.param(r, llama, marks=pytest.mark.slow) for r in RECIPES)],
)
def test_losses_are_those_of_eager_mode_and_without_the_option(
    recipe: str, make_layer: Callable[[], nn.Module]
) -> None:
    layer = make_layer()
    qt.convert(layer, recipe)
    plain, cached = copy.deepcopy(layer), copy.deepcopy(layer)
    assert qt.cache_compiled_weights(cached) == [n for n, m in layer.named_modules() if isinstance(m, qt.Linear)]
    inputs = torch.randn(3, 2, 2, 16, 64).bfloat16()
    expected = losses(layer, layer, inputs)
    for module in (plain, cached):
        torch._dynamo.reset()
        for ours, eager in zip(losses(module, compiled(module), inputs), expected, strict=True):
            assert_bitwise(ours, eager)


@pytest.mark.parametrize("backend", [BACKEND, pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_llama_layer_quantizes_inputs_forward_gradients_backward_and_weights_once_a_step(
    backend: str, quantized: list[tuple[int, ...]]
) -> None:
    model: Any = model_of("llama", torch.bfloat16, num_hidden_layers=1)
    qt.convert(model, "tensorwise", blocks=True)
    layer = model.model.layers[0]
    qt.cache_compiled_weights(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    weights = sorted(tuple(p.shape) for p in layer.parameters() if p.dim() == 2)
    positions = model.model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(12)[None])
    run = compiled(layer, backend)
    counts = []
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(2, 12, model.config.hidden_size).bfloat16().requires_grad_()
            quantized.clear()
            y = run(x, position_embeddings=positions)
            forward = [*quantized]
            y.float().square().sum().backward()
            # Inputs and gradients have a row for each of the 24 tokens.
            assert sorted(s for s in quantized if s[0] != 24) in ([], weights)
            counts.append((len(forward), len(quantized) - len(forward)))
        optimizer.step()
        optimizer.zero_grad()
    # torch 2.15 saves the activation of an MLP and quantizes it once more.
    backward = 7 + (torch.__version__ >= "2.15")
    assert counts == [(4 + 7, backward), (4, backward), (4, backward)] * 2


# A second each.
@pytest.mark.parametrize("write", [*WRITERS[::3], *(pytest.param(w, marks=pytest.mark.slow) for w in SLOW_WRITERS)])
def test_every_writer_is_seen(write: Writer) -> None:
    layer, x = linear("mxfp8"), torch.randn(T, K)
    qt.cache_compiled_weights(layer)
    # Parameters are exchanged, which compiles again.
    run = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        trained(run, x)
        trained(run, x)
        write(layer)
        without_gradients(layer)
        expected = copy.deepcopy(layer)
        qt.cache_compiled_weights(expected, enabled=False)
        for ours, eager in zip(trained(run, x), trained(expected, x), strict=True):
            assert_bitwise(ours, eager)


@pytest.mark.parametrize("write", SEEN[::4])
def test_writes_that_leave_a_trace_are_seen_between_micro_batches(write: Writer) -> None:
    layer, x = linear("tensorwise"), torch.randn(T, K)
    qt.cache_compiled_weights(layer)
    run = torch.compile(layer, backend="aot_eager")
    trained(run, x)
    write(layer)
    ours = trained(run, x)
    assert_bitwise(ours[0], layer(x).detach())


def test_a_write_between_forward_and_backward_is_an_error() -> None:
    layer = linear("tensorwise")
    qt.cache_compiled_weights(layer)
    y = compiled(layer)(torch.randn(T, K, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_that_are_not_the_layers_own_are_quantized(quantized: list[tuple[int, ...]]) -> None:
    layer, x = linear("tensorwise"), torch.randn(T, K)
    qt.cache_compiled_weights(layer)
    other = {"weight": torch.randn(N, K, requires_grad=True), "bias": torch.zeros(N)}

    def call(x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, other, (x,))  # type: ignore[no-any-return]

    expected, run = call(x).detach(), torch.compile(call, backend="aot_eager")
    for _ in range(2):
        quantized.clear()
        y = run(x)
        y.sum().backward()
        assert_bitwise(y.detach(), expected)
        assert (N, K) in quantized


def test_checkpoints_and_two_calls_of_a_layer_use_the_cache(quantized: list[tuple[int, ...]]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(K, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.layer, torch.relu(self.layer(x)), use_reentrant=False)
            return y

    module = Twice()
    qt.convert(module, "tensorwise")
    qt.cache_compiled_weights(module)
    eager, run = copy.deepcopy(module), compiled(module)
    for step in range(2):
        x = torch.randn(T, K)
        quantized.clear()
        ours = trained(run, x)
        done = quantized.count((K, K))
        for one, expected in zip(ours, trained(eager, x), strict=True):
            assert_bitwise(one, expected)
        # Before there is a gradient each call quantizes the weight.
        assert done == (2, 0)[step]


@pytest.mark.parametrize("make_layer", [lambda: Conv1D(N, K), lambda: spectral_norm(nn.Linear(K, N))])
def test_a_weight_that_is_no_parameter_is_quantized_each_time(make_layer: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(make_layer())
    qt.convert(module, "mxfp8")
    qt.cache_compiled_weights(module)
    module.eval()
    eager, run = copy.deepcopy(module), torch.compile(module, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(T, K)
        for one, expected in zip(trained(run, x), trained(eager, x), strict=True):
            assert_bitwise(one, expected)
        for each in (module, eager):
            without_gradients(each)
            for p in each.parameters():
                p.data.mul_(2)


def test_the_option_is_copied_turned_off_and_reverted(quantized: list[tuple[int, ...]]) -> None:
    def weights_quantized(model: nn.Module) -> int:
        torch._dynamo.reset()
        run = compiled(model)
        for _ in range(2):
            quantized.clear()
            trained(run, torch.randn(T, K))
        return sum(T not in shape for shape in quantized)

    model = nn.Sequential(nn.Linear(K, N))
    with pytest.raises(ValueError, match="no quantizable linear layer"):
        qt.cache_compiled_weights(model)
    qt.convert(model, "tensorwise")
    assert weights_quantized(model) == 2
    qt.cache_compiled_weights(model)
    assert weights_quantized(copy.deepcopy(model)) == 0
    qt.cache_compiled_weights(model, enabled=False)
    assert weights_quantized(model) == 2
    qt.cache_compiled_weights(model)
    qt.revert(model)
    qt.convert(model, "tensorwise")
    assert weights_quantized(model) == 2


def test_counters_see_no_part_of_a_compiled_layer() -> None:
    layer = linear("tensorwise")
    qt.cache_compiled_weights(layer)
    with qt.count(layer) as counters:
        trained(compiled(layer), torch.randn(T, K))
    assert not counters.table
