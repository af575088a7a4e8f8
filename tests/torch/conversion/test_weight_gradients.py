"""Gradients of weights that go to `main_grad` in float32, or wait, are those that autograd would have had."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver import recipes
from quaver.torch.parallel.pipeline import split_backwards
from quaver.torch.state.context import active_context
from tests.close import assert_bitwise, assert_close
from tests.torch.linear.composition import compose

RECIPES = [None, *recipes.RECIPES]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    assert active_context.apply_override is None and not active_context.captures_wgrad


def mlp(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return qt.LayerNormMLP(64, 96, "swiglu", normalization="RMSNorm").to(dtype)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(model: nn.Module, recipe: Any, x: Tensor, **options: bool) -> tuple[Tensor, Any]:
    """The gradient of x, and who took those of weights."""
    taker = qt.weight_gradients(**options)
    x = x.clone().requires_grad_()
    with qt.autocast(recipe, enabled=recipe is not None), taker:
        y = model(x)
    y.backward(drawn(*y.shape, dtype=y.dtype, seed=1))
    assert x.grad is not None
    return x.grad, taker


def gradients(model: nn.Module, recipe: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What autograd gives, of x and of each parameter."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with qt.autocast(recipe, enabled=recipe is not None):
        y = model(x)
    y.backward(drawn(*y.shape, dtype=y.dtype, seed=1))
    assert x.grad is not None
    each = [p.grad for p in model.parameters()]
    model.zero_grad()
    return x.grad, each  # type: ignore[return-value]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() > 1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [3, 48])
def test_main_grad_has_the_sums_of_float32(recipe: str | None, tokens: int) -> None:
    """Those of the reference, unrounded, beside what autograd gives without."""
    torch.manual_seed(0)
    layer, x = qt.Linear(64, 32, dtype=torch.bfloat16), drawn(tokens, 64)
    other = copy.deepcopy(layer)
    layer.weight.main_grad = torch.full_like(layer.weight, 0.5, dtype=torch.float32)  # type: ignore[attr-defined]
    expected = compose(layer, recipes.get(recipe or "bf16"), x, drawn(tokens, 32, seed=1)).grad_weight
    got, _ = run(layer, recipe, x, main_grad=True)
    assert layer.weight.grad is None
    added = layer.weight.main_grad - 0.5  # type: ignore[attr-defined]
    assert_close("weight", added, expected, 1e-6)
    if recipe != "nvfp4":  # its noise is another layer's
        of_x, (of_weight, of_bias) = gradients(other, recipe, x)
        assert_bitwise(got, of_x, "input")
        assert_bitwise(layer.bias.grad, of_bias, "bias")
        assert_close("rounded once", of_weight, added, 2.0**-8)


def test_micro_batches_add_up_and_the_first_may_overwrite() -> None:
    model = mlp()
    total: list[Tensor] = []
    for p in matrices(model):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    for i in range(3):
        before = [p.main_grad.clone() for p in matrices(model)]
        run(model, "mxfp8", drawn(16, 64, seed=i), main_grad=True)
        total = [p.main_grad.clone() for p in matrices(model)]
        assert all((a != b).any() for a, b in zip(before, total, strict=True))
    for p in matrices(model):
        p.overwrite_main_grad = True
    run(model, "mxfp8", drawn(16, 64, seed=0), main_grad=True)
    first = [p.main_grad.clone() for p in matrices(model)]
    for p in matrices(model):
        p.overwrite_main_grad = False
        p.main_grad.zero_()
    run(model, "mxfp8", drawn(16, 64, seed=0), main_grad=True)
    for p, right in zip(matrices(model), first, strict=True):
        assert_bitwise(p.main_grad, right)
        assert p.grad is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_delayed_gradients_equal_autograd_gradients(recipe: str | None) -> None:
    if recipe == "nvfp4":
        recipe = recipes.nvfp4(stochastic_rounding=False)  # type: ignore[assignment]
    model, x = mlp(), drawn(48, 64)
    of_x, each = gradients(model, recipe, x)
    got, taker = run(model, recipe, x, later=True)
    assert_bitwise(got, of_x, "input")
    assert [p.grad is None for p in model.parameters()] == [p.dim() > 1 for p in model.parameters()]
    taker.compute()
    for (name, p), right in zip(model.named_parameters(), each, strict=True):
        assert_bitwise(p.grad, right, name)
    taker.compute()
    for p, right in zip(model.parameters(), each, strict=True):
        assert_bitwise(p.grad, right, "once")


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_weight_written_after_its_delayed_gradient_is_gone_is_quantized_again(recipe: str) -> None:
    layer, x = qt.Linear(64, 32, bias=False), drawn(48, 64, dtype=torch.float32)
    run(layer, recipe, x, later=True)[1].compute()
    # No version counts a write through .data; the gradient that is gone shows that a step has been taken.
    layer.weight.data.mul_(-2.0)
    layer.weight.grad = None
    with qt.autocast(recipe):
        after = layer(x.clone().requires_grad_())
        qt.refresh(layer)
        assert_bitwise(after.detach(), layer(x.clone().requires_grad_()).detach())


def test_delayed_gradients_go_to_main_grad_or_through_hooks() -> None:
    model, x, ran = mlp(), drawn(48, 64), []
    _, each = gradients(model, "blockwise", x)
    first, second = matrices(model)
    first.main_grad = torch.zeros_like(first, dtype=torch.float32)  # type: ignore[attr-defined]
    second.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad.clone()))
    run(model, "blockwise", x, later=True, main_grad=True)[1].compute()
    of_second = next(g for p, g in zip(model.parameters(), each, strict=True) if p is second)
    assert first.grad is None and first.main_grad.any()  # type: ignore[attr-defined]
    assert_bitwise(ran[0], of_second)


@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
@pytest.mark.parametrize("later", [False, True])
def test_layers_that_are_run_again_in_backward_give_the_same(recipe: str | None, later: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return qt.checkpoint(self.mlp, x)  # type: ignore[no-any-return]

    results = []
    for model in (mlp(), Again()):
        for p in matrices(model):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
        run(model, recipe, drawn(24, 64), main_grad=True, later=later)[1].compute()
        results.append([p.main_grad for p in matrices(model)])  # type: ignore[attr-defined]
    for one, other in zip(*results, strict=True):
        assert one.any()
        assert_bitwise(one, other)


def test_experts_and_whole_layers_take_part() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 32, 64))
    ends = torch.tensor([5, 16], dtype=torch.int32)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return qt.grouped_matmul(x, self.weight, ends)

    layer = qt.TransformerLayer(64, 4, 96, recipe="tensorwise")
    for model, shape in ((Experts(), (16, 64)), (layer, (2, 8, 64))):
        x = drawn(*shape, dtype=torch.float32)
        _, each = gradients(model, "tensorwise", x)
        taker = run(model, "tensorwise", x, later=True)[1]
        assert all(p.grad is None for p in matrices(model))
        taker.compute()
        for (name, p), right in zip(model.named_parameters(), each, strict=True):
            assert_bitwise(p.grad, right, name)


def refused() -> list[tuple[str, Callable[[], object]]]:
    layer = qt.Linear(32, 32)

    def compiled() -> None:
        torch.compiler.reset()
        run(torch.compile(layer, backend="aot_eager"), "mxfp8", drawn(8, 32, dtype=torch.float32), later=True)  # type: ignore[arg-type]

    def in_a_stage() -> None:
        x = drawn(8, 32, dtype=torch.float32).requires_grad_()
        with split_backwards([x]), qt.weight_gradients(later=True):
            pass

    def freed() -> None:
        _, taker = run(layer, "mxfp8", drawn(8, 32, dtype=torch.float32), later=True)
        layer.weight.untyped_storage().resize_(0)
        taker.compute()

    def wrapped() -> None:
        DistributedDataParallel._active_ddp_module = layer  # type: ignore[attr-defined]
        try:
            run(layer, "mxfp8", drawn(8, 32, dtype=torch.float32), main_grad=True)
        finally:
            DistributedDataParallel._active_ddp_module = None  # type: ignore[attr-defined]

    return [
        ("changes nothing: give main_grad=True", lambda: qt.weight_gradients()),
        ("a compiled layer ran in weight_gradients", compiled),
        ("a pipeline schedule that splits the backward", in_a_stage),
        ("all-reduce weight.main_grad", wrapped),
        ("fully_shard has freed the weight", freed),
    ]


def test_unsupported_uses_give_a_clear_error() -> None:
    for sentence, do in refused():
        with pytest.raises(ValueError, match=sentence):
            do()


def test_a_second_derivative_is_refused() -> None:
    layer, x = qt.Linear(32, 32), drawn(8, 32, dtype=torch.float32).requires_grad_()
    with qt.autocast("mxfp8"), qt.weight_gradients(later=True):
        y = layer(x).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


def test_hooks_run_where_a_weight_asks_for_them() -> None:
    layer, ran = qt.Linear(32, 32), []
    layer.weight.main_grad = torch.zeros(32, 32)  # type: ignore[attr-defined]
    layer.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    layer.weight.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad))
    run(layer, "tensorwise", drawn(8, 32, dtype=torch.float32), main_grad=True)
    assert layer.weight.grad_added_to_main_grad and not ran[0].any()  # type: ignore[attr-defined]
    assert layer.weight.main_grad.any()  # type: ignore[attr-defined]
