"""The quantized linear layer against plain compositions, for odd shapes and dtypes, and in all uses of autograd."""

import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from quaver import recipes
from quaver.costs.ledger import saved_bytes
from quaver.recipes.spec import GemmSpec
from quaver.torch.linear import linear as linear_module
from quaver.torch.linear.linear import Linear
from quaver.torch.state.history import roll
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs
from tests.torch.linear.composition import compose

ALL = pytest.mark.parametrize("name", recipes.RECIPES)
QUANTIZED = pytest.mark.parametrize("name", [n for n, r in recipes.RECIPES.items() if r().quantizes])
SHAPES = {
    "vector": (33,),
    "matrix": (7, 33),
    "three axes": (2, 3, 33),
    "four axes": (2, 1, 3, 33),
}


def run(layer: nn.Linear, recipe: str, x: Tensor, g: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with qt.autocast(recipe):
        y = layer(x)
    y.backward(torch.ones_like(y) if g is None else g)
    grads = [p.grad for p in layer.parameters()]
    assert x.grad is not None and all(grad is not None for grad in grads)
    return y.detach(), x.grad, *(grad for grad in grads if grad is not None)


def test_signature_is_nn_linears_and_more_by_keyword() -> None:
    ours = list(inspect.signature(Linear.__init__).parameters.values())
    theirs = list(inspect.signature(nn.Linear.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("bias", [True, False])
def test_initial_weights_and_state_dict_are_nn_linears(bias: bool) -> None:
    torch.manual_seed(3)
    ours = qt.Linear(5, 7, bias, dtype=torch.bfloat16).state_dict()
    torch.manual_seed(3)
    theirs = nn.Linear(5, 7, bias, dtype=torch.bfloat16).state_dict()
    assert list(ours) == list(theirs)
    for key in theirs:
        assert_bitwise(ours[key], theirs[key], key)


@pytest.mark.parametrize("name", ["bf16", None])
def test_without_quantization_it_is_nn_linear(name: str | None) -> None:
    layer = qt.Linear(33, 17, dtype=torch.bfloat16, recipe=name)
    x = torch.randn(5, 33, dtype=torch.bfloat16)
    assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(
    ("name", "shape", "bias"),
    pairs(
        recipes.RECIPES,
        [(1, 1, 1), (3, 5, 3), (5, 3, 2), (17, 33, 9), (33, 17, 65), (40, 160, 136)],
        [True, False],
    ),
)
def test_forward_and_backward_equal_a_plain_composition(name: str, shape: tuple[int, int, int], bias: bool) -> None:
    tokens, k, n = shape
    layer = qt.Linear(k, n, bias)
    x, g = torch.randn(tokens, k), torch.randn(tokens, n) * 1e-3
    expected = compose(layer, recipes.get(name), x, g)
    got = run(layer, name, x, g)
    assert_close("output", got[0], expected.output, 1e-6)
    assert_close("grad_input", got[1], expected.grad_input, 1e-6)
    assert_close("grad_weight", got[2], expected.grad_weight, 1e-6)
    if bias:
        assert_close("grad_bias", got[3], expected.grad_bias, 1e-6)


@ALL
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_leading_axes_are_tokens(name: str, shape: tuple[int, ...]) -> None:
    # With few features, as in a head with a few classes, other GEMMs run.
    for k, n in ((33, 17), (33, 3), (3, 33), (33, 1)):
        layer = qt.Linear(k, n)
        x, g = torch.randn(*shape[:-1], k), torch.randn(*shape[:-1], n)
        expected = compose(layer, recipes.get(name), x, g)
        y, grad_input, grad_weight, grad_bias = run(layer, name, x, g)
        assert_close(f"{k}, {n}, output", y, expected.output, 1e-6)
        assert_close(f"{k}, {n}, grad_input", grad_input, expected.grad_input, 1e-6)
        assert_close(f"{k}, {n}, grad_weight", grad_weight, expected.grad_weight, 1e-6)
        assert_close(f"{k}, {n}, grad_bias", grad_bias, expected.grad_bias, 1e-6)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    layer = qt.Linear(96, 64, dtype=dtype)
    x, g = torch.randn(48, 96).to(dtype), torch.randn(48, 64).to(dtype)
    expected = compose(layer, recipes.get(name), x, g)
    got = run(layer, name, x, g)
    step = torch.finfo(dtype).eps / 2
    for what, one, want in zip(
        ("output", "grad_input", "grad_weight", "grad_bias"), got, vars(expected).values(), strict=True
    ):
        assert one.dtype is dtype, what
        assert_close(what, one, want, step)


@ALL
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded gradient"])
def test_memory_layout_does_not_matter(name: str, layout: str) -> None:
    layer = qt.Linear(32, 48)
    x, g = torch.randn(16, 32), torch.randn(16, 48)
    if layout == "expanded gradient":
        odd_x, odd_g = x, torch.full((), 0.37).expand(16, 48)
    elif layout == "transposed":
        odd_x, odd_g = x.t().contiguous().t(), g.t().contiguous().t()
    else:
        odd_x, odd_g = torch.randn(16, 64)[:, ::2].copy_(x), torch.randn(16, 96)[:, ::2].copy_(g)
    expected = compose(layer, recipes.get(name), odd_x, odd_g)
    got = run(layer, name, odd_x, odd_g)
    for what, one, want in zip(("output", "grad_input", "grad_weight"), got, vars(expected).values(), strict=False):
        assert_close(what, one, want, 1e-6)


@ALL
@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33)])
def test_zero_tokens_give_zero_gradients(name: str, shape: tuple[int, ...]) -> None:
    layer = qt.Linear(33, 17)
    y, grad_input, grad_weight, grad_bias = run(layer, name, torch.randn(shape))
    assert y.shape == (*shape[:-1], 17) and grad_input.shape == shape
    assert_bitwise(grad_weight, torch.zeros(17, 33))
    assert_bitwise(grad_bias, torch.zeros(17))


@ALL
def test_torch_autocast_gives_its_dtype_and_float32_weight_gradients(name: str) -> None:
    layer = qt.Linear(32, 48)
    x = torch.randn(16, 32, requires_grad=True)
    with qt.autocast(name), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    y.backward(torch.randn_like(y))
    assert x.grad is not None and x.grad.dtype is torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    assert layer.bias.grad is not None and layer.bias.grad.dtype is torch.float32


@QUANTIZED
def test_backward_inside_torch_autocast_gives_the_same_bits(name: str) -> None:
    layer = qt.Linear(32, 48)
    x, g = torch.randn(16, 32), torch.randn(16, 48).bfloat16()
    results = []
    for inside in (False, True):
        layer.zero_grad()
        layer._buffers.pop("count", None)
        state_of(layer).buffers_recipe = None
        leaf = x.clone().requires_grad_()
        with qt.autocast(name), torch.autocast("cpu", torch.bfloat16):
            y = layer(leaf)
            if inside:
                y.backward(g)
        if not inside:
            y.backward(g)
        results.append([y, leaf.grad, layer.weight.grad, layer.bias.grad])
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("enabled", [True, False])
def test_torch_autocast_is_as_it_was_afterwards(enabled: bool) -> None:
    layer = qt.Linear(32, 48, recipe="mxfp8")
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        layer(torch.randn(4, 32)).float().sum().backward()
        assert torch.is_autocast_enabled("cpu") is enabled


def test_torch_autocast_leaves_float64_alone() -> None:
    layer = qt.Linear(8, 8, dtype=torch.float64)
    linear_module._warned.add("float64")
    x = torch.randn(4, 8, dtype=torch.float64)
    with qt.autocast("mxfp8"), torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


# GEMMs and saved tensors of backward.


def backward_gemms(layer: nn.Linear, name: str, x: Tensor) -> int:
    with qt.autocast(name):
        y = layer(x)
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y))
    flops, one = counter.get_total_flops(), 2 * x.shape[0] * layer.in_features * layer.out_features
    assert flops % one == 0
    return flops // one


@ALL
def test_frozen_operands_cost_no_gemm(name: str) -> None:
    layer = qt.Linear(160, 128, bias=False)
    x = torch.randn(144, 160, requires_grad=True)
    # The rotation pads tokens to sixteen, which 144 are already.
    assert backward_gemms(layer, name, x) == 2
    assert backward_gemms(layer, name, x.detach()) == 1
    assert layer.requires_grad_(False) is layer
    assert backward_gemms(layer, name, x) == 1


@pytest.fixture
def saved() -> Iterator[list[Tensor]]:
    """Every tensor that autograd saves during the test."""
    tensors: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield tensors


def activation_bytes(tensors: list[Tensor], parameters: list[Tensor]) -> int:
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for at, size in storages.items() if at not in known)


@pytest.mark.parametrize("name", [n for n, r in recipes.RECIPES.items() if r().wgrad.b is not None])
def test_backward_saves_the_operands_of_the_gemm(name: str, saved: list[Tensor]) -> None:
    recipe, (tokens, k) = recipes.get(name), (512, 256)
    layer = qt.Linear(k, 128, dtype=torch.bfloat16)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
    with qt.autocast(recipe):
        y = layer(x)
    saved_size = activation_bytes(saved, list(layer.parameters()))
    plain = 2 * tokens * k
    data = tokens * k * recipe.wgrad.b.format.stored_bits // 8
    assert saved_size <= 0.52 * plain + saved_bytes(recipe, tokens, k) - data
    assert saved_size <= 0.52 * plain or name == "mxfp8" or recipe.wgrad.b.block[1] is not None
    if name == "nvfp4":
        assert saved_size <= 0.30 * plain
    y.sum().backward()


@ALL
def test_a_frozen_weight_keeps_no_input(name: str, saved: list[Tensor]) -> None:
    layer = qt.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    with qt.autocast(name):
        y = layer(x)
    assert activation_bytes(saved, list(layer.parameters())) == 0
    y.sum().backward()


@QUANTIZED
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(name: str, mode: type) -> None:
    layer, x = qt.Linear(32, 48), torch.randn(16, 32)
    with qt.autocast(name), mode():
        y = layer(x)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert_close("output", y, compose(layer, recipes.get(name), x, torch.zeros(16, 48)).output, 1e-6)


@QUANTIZED
def test_training_continues_after_inference_mode(name: str) -> None:
    layer, other = qt.Linear(32, 48), qt.Linear(32, 48)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(16, 32)
    with torch.inference_mode(), qt.autocast(name):
        layer(x)
    for _ in range(3):
        got, expected = run(layer, name, x), run(other, name, x)
        with torch.inference_mode(), qt.autocast(name):
            layer(x)
        for one, want in zip(got, expected, strict=True):
            assert_bitwise(one, want)
    # Each autocast rolls what this thread has run; this ends the last step of both.
    roll.roll_all()
    for key, value in other.state_dict().items():
        if key != "count":
            assert_bitwise(layer.state_dict()[key], value, key)


@QUANTIZED
def test_weights_made_under_inference_mode_work(name: str) -> None:
    with torch.inference_mode():
        layer = qt.Linear(32, 48, recipe=name)
        x = torch.randn(4, 32)
        first = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        assert_bitwise(layer(x), first * 2)


@QUANTIZED
def test_eval_mode_gives_the_bits_of_training_mode(name: str) -> None:
    layer = qt.Linear(32, 48)
    x = torch.randn(4, 32)
    with qt.autocast(name):
        training = layer(x)
        assert_bitwise(layer.eval()(x), training)
        with torch.no_grad():
            assert_bitwise(layer(x), training)


# Several forwards and backwards.


@QUANTIZED
def test_used_twice_in_a_step_gradients_add_up(name: str) -> None:
    layer = qt.Linear(32, 32)
    x = torch.randn(4, 32)
    with qt.autocast(name):
        y = layer(layer(x))
    y.sum().backward()
    both = layer.weight.grad
    assert both is not None

    layers = [qt.Linear(32, 32), qt.Linear(32, 32)]
    for one in layers:
        one.load_state_dict({k: layer.state_dict()[k] for k in ("weight", "bias")})
        state_of(one).serial = state_of(layer).serial
        if name == "nvfp4":
            one.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    if name == "nvfp4":
        # The second layer's backward runs first and draws the first noise.
        layers[0].count[:2] = 1
    with qt.autocast(name):
        layers[1](layers[0](x)).sum().backward()
    assert layers[0].weight.grad is not None and layers[1].weight.grad is not None
    assert_bitwise(both, layers[1].weight.grad + layers[0].weight.grad)


@QUANTIZED
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_may_precede_their_backwards(name: str, order: tuple[int, int]) -> None:
    layer = qt.Linear(32, 48)
    inputs = [torch.randn(4, 32), torch.randn(8, 32) * 100]
    gradients = [torch.randn(4, 48), torch.randn(8, 48) * 100]
    outputs = []
    for x in inputs:
        with qt.autocast(name):
            outputs.append(layer(x))
    for turn, i in enumerate(order):
        layer.zero_grad()
        outputs[i].backward(gradients[i])
        # The second autocast rolled once: input and weight have factors then, the gradient has none.
        factors = (0.0, 0.0, 0.0)
        if name == "delayed" and i == 1:
            factors = tuple(layer.factor.tolist())
            assert factors[0] > 0 and factors[2] == 0
        expected = compose(layer, recipes.get(name), inputs[i], gradients[i], factors=factors, count=turn)
        assert_close("output", outputs[i], expected.output, 1e-6)
        assert_close("grad_weight", layer.weight.grad, expected.grad_weight, 1e-6)


@ALL
def test_a_weight_update_before_backward_is_nn_linears_error(name: str) -> None:
    for layer in (qt.Linear(32, 48), nn.Linear(32, 48)):
        x = torch.randn(4, 32, requires_grad=True)
        with qt.autocast(name) if isinstance(layer, qt.Linear) else nullcontext():
            y = layer(x)
        with torch.no_grad():
            layer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@QUANTIZED
def test_a_weight_update_between_two_forwards_is_seen(name: str) -> None:
    layer = qt.Linear(32, 48, bias=False)
    x = torch.randn(4, 32)
    with qt.autocast(name):
        first = layer(x)
        with torch.no_grad():
            layer.weight.mul_(4.0)
        assert_bitwise(layer(x), first * 4)


@QUANTIZED
def test_retained_graphs_run_backward_again(name: str) -> None:
    layer = qt.Linear(32, 48)
    x = torch.randn(4, 32, requires_grad=True)
    with qt.autocast(name):
        y = layer(x)
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, layer.weight), g, retain_graph=True)
    if name == "nvfp4":
        # Repeat the same noise.
        layer.count[:2] = 0
    second = torch.autograd.grad(y, (x, layer.weight), g)
    for one, other in zip(first, second, strict=True):
        assert_bitwise(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, layer.weight), g)


# Nonfinite values.


@pytest.mark.parametrize(
    ("name", "value", "dtype"), pairs(recipes.RECIPES, [math.nan, math.inf, -math.inf], [torch.float32, torch.bfloat16])
)
def test_nonfinite_values_reach_the_output(name: str, value: float, dtype: torch.dtype) -> None:
    layer = qt.Linear(64, 48, dtype=dtype)
    x = torch.randn(40, 64, dtype=dtype)
    x[3, 5] = value
    y, _, grad_weight, _ = run(layer, name, x)
    assert not y[3].isfinite().any()
    assert not grad_weight[:, 5].isfinite().any()
    if recipes.get(name).fprop.a is None or recipes.get(name).fprop.a.block[0] == 1:  # type: ignore[union-attr]
        assert y[0].isfinite().all() or name == "nvfp4"


@ALL
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_reach_the_input_gradients(name: str, value: float) -> None:
    layer = qt.Linear(64, 48)
    g = torch.randn(40, 48)
    g[3, 5] = value
    y, grad_input, grad_weight, grad_bias = run(layer, name, torch.randn(40, 64), g)
    assert y.isfinite().all()
    assert not grad_input[3].isfinite().any()
    assert not grad_weight[5].isfinite().any()
    assert not grad_bias[5].isfinite()


# Errors.


def test_float64_is_high_precision_and_warns_once() -> None:
    layer = qt.Linear(8, 8, dtype=torch.float64, recipe="mxfp8")
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    linear_module._warned.discard("float64")
    with pytest.warns(UserWarning, match="float64 is computed in high precision"):
        y = layer(x)
    assert_bitwise(y, nn.functional.linear(x, layer.weight, layer.bias))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).sum().backward()


@QUANTIZED
def test_another_dtype_says_what_to_do(name: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    with pytest.raises(ValueError, match=r"Linear\(8 → 16\) has torch.float32 weights and got a torch.bfloat16 input"):
        layer(torch.randn(4, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"got a torch.int64 input"):
        layer(torch.ones(4, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got a torch.int64 input"), torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(4, 8, dtype=torch.int64))


@QUANTIZED
@pytest.mark.parametrize("shape", [(4, 7), (8, 1), (7,), ()])
def test_a_wrong_last_axis_says_what_it_must_be(name: str, shape: tuple[int, ...]) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    with pytest.raises(ValueError, match=r"its last axis must be 8"):
        layer(torch.randn(shape))


@QUANTIZED
def test_a_second_derivative_gives_a_clear_error(name: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*autocast\(enabled=False\)"):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*autocast\(enabled=False\)"):
        torch.autograd.grad(grad.square().sum(), layer.weight)


@QUANTIZED
def test_a_gradient_penalty_is_never_silently_ignored(name: str) -> None:
    model = nn.Sequential(qt.Linear(8, 16, recipe=name), nn.ReLU(), qt.Linear(16, 1, recipe=name))
    x = torch.randn(4, 8, requires_grad=True)
    y = model(x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (y + grad.square().sum()).backward()


@QUANTIZED
def test_create_graph_alone_gives_the_gradients(name: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    x = torch.randn(4, 8, requires_grad=True)
    plain = torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias))
    if name == "nvfp4":
        layer.count[:2] = 0
    graphed = torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias), create_graph=True)
    for one, other in zip(plain, graphed, strict=True):
        assert_bitwise(one, other.detach())


@QUANTIZED
def test_second_derivatives_work_where_quantization_is_off(name: str) -> None:
    layer = qt.Linear(8, 1, recipe=name)
    x = torch.randn(4, 8, requires_grad=True)
    with qt.autocast(enabled=False):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert layer.weight.grad is not None


@QUANTIZED
def test_functorch_transforms_give_a_clear_error(name: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    x = torch.randn(4, 8)
    parameters = dict(layer.named_parameters())

    def loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, p, (x,)).sum()

    for transform in (
        lambda: torch.vmap(layer)(x),
        lambda: torch.func.grad(loss)(parameters),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.func.jacrev(layer)(x),
    ):
        with pytest.raises(NotImplementedError, match=r"vmap and grad.*autocast\(enabled=False\)"):
            transform()
    with qt.autocast(enabled=False):
        assert torch.vmap(layer)(x).shape == (4, 16)


@QUANTIZED
def test_functional_call_works(name: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    x = torch.randn(4, 8)
    weight = (layer.weight.detach() * 2).requires_grad_()
    y = torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros(16)}, (x,))
    y.sum().backward()
    assert weight.grad is not None and layer.weight.grad is None
    products = compose(layer, recipes.get(name), x, y).output - layer.bias.detach().numpy()
    assert_close("output", y, 2 * products, 1e-6)


@QUANTIZED
@pytest.mark.parametrize("which", ["input", "weight", "bias"])
def test_forward_mode_gives_a_clear_error(name: str, which: str) -> None:
    layer = qt.Linear(8, 16, recipe=name)
    x = torch.randn(4, 8)
    with forward_ad.dual_level():
        given = {"weight": layer.weight, "bias": layer.bias}
        if which == "input":
            x = forward_ad.make_dual(x, torch.ones_like(x))
        else:
            given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))  # type: ignore[assignment]
        with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*autocast\(enabled=False\)"):
            torch.func.functional_call(layer, given, (x,))


def test_no_input_features_is_only_the_bias() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = qt.Linear(0, 3, recipe="tensorwise")
    nn.init.ones_(layer.bias)
    assert_bitwise(layer(torch.randn(2, 5, 0)), torch.ones(2, 5, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_delayed_scaling_may_leave_the_gradient_of_weights_in_high_precision(compiled: bool) -> None:
    whole = recipes.delayed(history=4)
    recipe = replace(whole, wgrad=GemmSpec(None, None), name="delayed but wgrad")
    layer, other = (Linear(64, 48, recipe=r) for r in (recipe, whole))
    other.load_state_dict(layer.state_dict())
    call = torch.compile(layer) if compiled else layer
    for _ in range(3):
        x, g = torch.randn(32, 64).requires_grad_(), torch.randn(32, 48)
        y, expected = call(x), other(x)
        dx, dw = torch.autograd.grad(y, (x, layer.weight), g)
        (expected_dx,) = torch.autograd.grad(expected, x, g)
        assert_bitwise(y, expected)
        assert_bitwise(dx, expected_dx)
        assert_close("", dw, g.T @ x.detach(), 1e-6)
