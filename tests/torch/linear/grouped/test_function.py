"""The autograd function of groups beside its products: rows that are made within it, compilers, checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.noise import fresh_count, name_streams
from tests.close import assert_bitwise
from tests.torch.linear.grouped.test_matmul import RECIPES, ends

G, K, N = 4, 48, 40
T = 70
#: Rows and group sizes of each step; the last rows of the first step belong to no group.
STEPS = [(70, (5, 0, 40, 19)), (57, (1, 8, 32, 16)), (64, (0, 0, 64, 0))]
BY_ROWS = ["rowwise", "blockwise", "mxfp8", "mxfp4", "rowwise_bf16_wgrad"]


def rows(seed: int, count: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(count, size, generator=generator) for size in (K, N))
    x = x * torch.logspace(-3, 3, count)[:, None]
    return x.to(dtype).requires_grad_(), g.to(dtype)


def layer_of(recipe: Any, **how: Any) -> qt.GroupedLinear:
    torch.manual_seed(0)
    layer = qt.GroupedLinear(G, K, N, recipe=recipe, **how)
    layer.__dict__["qualified_name"] = "experts"
    name_streams(layer)
    if "count" in layer._buffers:
        layer._buffers["count"] = fresh_count(layer)
    return layer


def input_spec(recipe: str) -> QuantSpec:
    spec = recipes.get(recipe).fprop.a
    assert spec is not None
    return spec


@pytest.mark.parametrize("recipe", BY_ROWS)
def test_codes_are_multiplied_as_they_are(recipe: str) -> None:
    x, g = rows(0)
    q = qt.quantize(x, input_spec(recipe))
    on_codes, on_values, again = layer_of(recipe), layer_of(recipe), layer_of(recipe)
    y, expected = on_codes(q, ends(STEPS[0][1])), on_values(x, ends(STEPS[0][1]))
    assert_bitwise(y.detach(), expected.detach())
    y.backward(g)
    # wgrad's operand is quantized from the dequantized codes.
    again(q.dequantize().to(x.dtype), ends(STEPS[0][1])).backward(g)
    for p, wanted in zip(on_codes.parameters(), again.parameters(), strict=True):
        assert_bitwise(p.grad, wanted.grad)
    z = qt.grouped_matmul(q, on_codes.weight, ends(STEPS[0][1]), bias=on_codes.bias, recipe=recipe)
    assert_bitwise(z.detach(), y.detach())


def test_codes_of_one_scale_serve_all_groups() -> None:
    recipe: Recipe = recipes.get("tensorwise")
    x, g = rows(0)
    q = qt.quantize(x, input_spec("tensorwise"))
    layer, single = layer_of(recipe), [qt.Linear(K, N, recipe="bf16") for _ in range(G)]
    y = layer(q, ends(STEPS[0][1]))
    y.backward(g)
    for group, (start, end) in enumerate(((0, 5), (5, 5), (5, 45), (45, 64))):
        values = qt.quantize(layer.weight[group], recipe.fprop.b).dequantize()  # type: ignore[arg-type]
        expected = q.dequantize()[start:end].double() @ values.double().t() + layer.bias[group].double()  # type: ignore[index]
        assert (y[start:end] - expected).norm() <= 1e-6 * expected.norm()
    assert len(single) == G and layer.weight.grad is not None and not layer.weight.grad[1].any()


@pytest.mark.parametrize(
    ("given", "recipe", "sentence"),
    [
        ("mxfp8", "rowwise", "recipe rowwise reads its input as"),
        ("mxfp8", None, "no recipe quantizes it here"),
        ("mxfp8", "bf16", "recipe bf16 quantizes it here"),
    ],
)
def test_codes_of_another_spec_are_refused(given: str, recipe: str | None, sentence: str) -> None:
    q = qt.quantize(rows(0)[0], input_spec(given))
    with pytest.raises(ValueError, match=sentence):
        layer_of(recipe)(q, ends(STEPS[0][1]))
    with pytest.raises(ValueError, match=sentence):
        qt.grouped_matmul(q, torch.zeros(G, N, K), ends(STEPS[0][1]), recipe=recipe)


def test_blocks_that_span_several_groups_are_refused() -> None:
    spec = QuantSpec(input_spec("rowwise").format, (32, 32))
    square = GemmSpec(spec, spec)
    recipe = Recipe("squares", square, square, square)
    q = qt.quantize(rows(0)[0], spec)
    with pytest.raises(ValueError, match="rows of several groups"):
        layer_of(recipe)(q, ends(STEPS[0][1]))


@dataclass(frozen=True)
class Permuted:
    """Quantize each token once and copy its codes to all its rows."""

    recomputes_input: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        tokens, places = x
        assert tokens is not None and places is not None
        return self.recompute_input((tokens, places), spec), (tokens, places)

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        tokens, places = saved
        if spec is None:
            return tokens[places]
        q = qt.quantize(tokens, spec)
        assert isinstance(q.scale, Tensor)
        return Quantized(q.data.view(torch.uint8)[places].view(q.data.dtype), q.scale[places], spec, (len(places), K))

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        tokens, places = saved
        value: Tensor = tokens[places]
        return value

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        tokens, places = saved
        return torch.zeros_like(tokens).index_add_(0, places, g), None


@pytest.mark.parametrize("recipe", [*BY_ROWS, "bf16", RECIPES["rowwise, wgrad dequantized"]], ids=str)
@pytest.mark.parametrize("recomputes_input", [False, True])
def test_rows_may_be_made_within_the_function(recipe: Any, recomputes_input: bool) -> None:
    places = torch.randint(0, 24, (T,), generator=torch.Generator().manual_seed(3))
    tokens = rows(1, 24)[0].detach()
    one, other = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    made_within, given = layer_of(recipe), layer_of(recipe)
    g = rows(0)[1]
    y = made_within.project(Permuted(recomputes_input), (one, places), ends(STEPS[0][1]))
    expected = given(other.index_select(0, places), ends(STEPS[0][1]))
    assert_bitwise(y.detach(), expected.detach())
    y.backward(g)
    expected.backward(g)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
    for p, wanted in zip(made_within.parameters(), given.parameters(), strict=True):
        assert_bitwise(p.grad, wanted.grad)


def steps_of(layer: qt.GroupedLinear, run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Train three steps; return outputs, gradients and state."""
    results = []
    for seed, (count, sizes) in enumerate(STEPS):
        x, g = rows(seed, count, layer.weight.dtype)
        with qt.autocast(recipe="bf16"):
            y = run(x, ends(sizes))
        y.backward(g)
        assert x.grad is not None
        results += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
        results += [b.clone() for b in layer.buffers()]
        layer.zero_grad()
    return results


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("delayed", {}),
        ("tensorwise", {"layout": "kn"}),
        ("mxfp8", {"dtype": torch.bfloat16}),
        ("nvfp4", {"layout": "kn"}),
        ("rowwise_bf16_wgrad", {}),
        ("bf16", {"bias": False}),
        (RECIPES["mxfp8, dequantized"], {}),
    ],
    ids=str,
)
def test_one_graph_handles_all_sizes_with_the_eager_bits(recipe: Any, how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    eager, compiled = layer_of(recipe, **how), layer_of(recipe, **how)
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = torch.compile(lambda x, offsets: compiled(x, offsets), backend=counted, fullgraph=True, dynamic=True)
    for ours, expected in zip(steps_of(compiled, run), steps_of(eager, eager), strict=True):
        assert_bitwise(ours.contiguous(), expected.contiguous())
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_inductor_has_eager_bits_too(recipe: str) -> None:
    torch._dynamo.reset()
    eager, compiled = layer_of(recipe), layer_of(recipe)
    run = torch.compile(lambda x, offsets: compiled(x, offsets), fullgraph=True, dynamic=True)
    for ours, expected in zip(steps_of(compiled, run), steps_of(eager, eager), strict=True):
        assert_bitwise(ours.contiguous(), expected.contiguous())


def test_compiled_functions_and_rows_that_are_made_have_eager_bits() -> None:
    torch._dynamo.reset()
    layer, places = layer_of("nvfp4"), torch.arange(T) % 24

    def both(tokens: Tensor, offsets: Tensor) -> Tensor:
        y = qt.grouped_matmul(tokens[places], layer.weight, offsets, recipe="nvfp4", name="tower", count=3)
        return y + layer_of_rows.project(Permuted(), (tokens, places), offsets)

    results = []
    for run in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        layer_of_rows = layer_of("mxfp8")
        tokens = rows(1, 24)[0]
        y = run(tokens, ends(STEPS[0][1]))
        y.backward(rows(0)[1])
        assert tokens.grad is not None and layer.weight.grad is not None
        results.append([y.detach(), tokens.grad, layer.weight.grad, layer_of_rows.weight.grad])
        layer.zero_grad()
    for ours, expected in zip(*results, strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "mxfp8"])
def test_checkpointing_changes_no_bit(recipe: str) -> None:
    whole, again = layer_of(recipe), layer_of(recipe)
    expected = steps_of(whole, whole)

    def run(x: Tensor, offsets: Tensor) -> Tensor:
        y: Tensor = qt.checkpoint(again, x, offsets)
        return y

    for ours, wanted in zip(steps_of(again, run), expected, strict=True):
        assert_bitwise(ours.contiguous(), wanted.contiguous())


@pytest.mark.parametrize("way", ["reference", "decoded"])
@pytest.mark.parametrize(
    ("recipe", "layout", "dtype"),
    [("nvfp4", "nk", torch.float32), ("mxfp8", "kn", torch.bfloat16), ("bf16", "kn", torch.float32)],
)
def test_gradients_of_weights_may_be_added_elsewhere_or_wait(recipe: str, layout: str, dtype: Any, way: str) -> None:
    expected, x, g = layer_of(recipe, layout=layout, dtype=dtype), *rows(0, dtype=dtype)
    with qt.only(way):
        expected(x, ends(STEPS[0][1])).backward(g)
        for options in ({"main_grad": True}, {"later": True}, {"main_grad": True, "later": True}):
            layer, gradients = layer_of(recipe, layout=layout, dtype=dtype), qt.weight_gradients(**options)
            for p in layer.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
            with gradients:
                y = layer(x, ends(STEPS[0][1]))
            y.backward(g)
            if gradients.later:
                assert layer.weight.grad is None and not layer.weight.main_grad.any()  # type: ignore[union-attr]
                gradients.compute()
            for p, of in zip(layer.parameters(), expected.parameters(), strict=True):
                assert of.grad is not None and (p.grad is None) is gradients.main_grad
                ours = p.main_grad if gradients.main_grad else p.grad  # type: ignore[attr-defined]
                assert_bitwise(ours.to(dtype), of.grad)


def test_backward_keeps_codes_alone() -> None:
    """Bytes saved for backward relative to bf16, without weights."""
    for recipe, most in (
        ("tensorwise", 0.52),
        ("rowwise", 0.52),
        ("blockwise", 0.58),
        ("mxfp8", 0.54),
        ("nvfp4", 0.30),
    ):
        layer, saved = qt.GroupedLinear(4, 256, 512, recipe=recipe, dtype=torch.bfloat16), dict[int, int]()
        x = torch.randn(1024, 256).bfloat16().requires_grad_()

        def record(t: Tensor, layer: Any = layer, saved: dict[int, int] = saved) -> Tensor:
            if t.data_ptr() != layer.weight.data_ptr():
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
            layer(x, ends((300, 100, 500, 124)))
        assert sum(saved.values()) <= most * x.numel() * 2, recipe
