"""A layer's step on a GPU, decided beforehand, has the bits, gradients and state of the general one."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import E4M3, QuantSpec, recipes
from quaver.recipes.spec import GemmSpec, Recipe
from quaver.torch.backends.gpu import quantize_launch
from quaver.torch.linear import linear as linear_module
from quaver.torch.linear.plan import LinearPlan
from quaver.torch.state import weight_cache
from tests.close import assert_bitwise
from tests.torch.backends.gpu.cublaslt import torchs_own
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu, become
from tests.torch.linear.fast_plans import by_fast_plan, general_plans

T, K, N = 32, 48, 64
#: Recipes with fast plans, and their architectures.
DECIDED = [
    (recipe, arch)
    for arch, names in {
        # Formats that the GPU lacks are emulated: `linear.plans.emulated`.
        89: ("tensorwise", "rowwise", "blockwise", "mxfp4"),
        90: ("tensorwise", "delayed", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "mxfp6", "nvfp4"),
        100: ("tensorwise", "rowwise", "mxfp8", "nvfp4"),
        120: ("delayed",),
    }.items()
    for recipe in names
]


#: Each recipe with and without bias: alternately over its architectures, or both on its only one.
WITH_BIAS = [
    (recipe, arch, bias)
    for recipe, archs in {name: [arch for other, arch in DECIDED if other == name] for name, _ in DECIDED}.items()
    for turn, arch in enumerate(archs)
    for bias in ((True, False) if len(archs) == 1 else (bool(turn % 2),))
]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with as_on_a_gpu(monkeypatch):
        yield


def steps(layer: qt.Linear, xs: list[Tensor], direct: bool) -> list[Tensor]:
    """Outputs, gradients and state of some steps; the weight changes after every other one."""
    tensors = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for number, value in enumerate(xs):
        x = value.clone().requires_grad_()
        with qt.autocast(layer.recipe):
            y = layer(x)
        assert by_fast_plan(y) is direct
        y.square().sum().backward()
        assert x.grad is not None
        tensors += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*tensors, *(b.clone() for b in layer.buffers())]


@pytest.mark.parametrize(("recipe", "arch", "bias"), WITH_BIAS)
def test_bits_and_state_equal_the_general_path(
    recipe: str,
    arch: int,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become(arch, monkeypatch)
    xs = [torch.randn(2, T // 2, K).bfloat16() * 3.0**i for i in range(3)]
    xs.append(torch.full_like(xs[0], torch.inf))
    first = qt.Linear(K, N, bias=bias, dtype=torch.bfloat16, recipe=recipe)
    second = qt.Linear(K, N, bias=bias, dtype=torch.bfloat16, recipe=recipe)
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    ours = steps(first, xs, True)
    with general_plans():
        theirs = steps(second, xs, False)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=number: f"{n}: {text}")


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [("tensorwise", 90), ("rowwise_bf16_wgrad", 90), ("mxfp8", 100), ("nvfp4", 100)],
)
def test_overwritten_shared_codes_are_not_reused(recipe: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small codes reuse one buffer: those of a leaf, of a norm's output, and of a gradient."""
    become(arch, monkeypatch)
    first, other, last = (qt.Linear(K, K, bias=False, dtype=torch.bfloat16, recipe=recipe) for _ in range(3))
    normed = qt.LayerNormLinear(K, K, bias=False, dtype=torch.bfloat16, recipe=recipe)
    leaf = torch.randn(T, K).bfloat16().requires_grad_()
    h = torch.randn(T, K).bfloat16().requires_grad_() * 1.0
    expected = last(h.clone())
    y = other(leaf)
    for between in (lambda: other(leaf), lambda: normed(leaf), lambda: y.sum().backward()):
        first(h)
        between()
        again = last(h)
        assert by_fast_plan(again)
        assert_bitwise(again, expected)


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        *(("tensorwise", 90), ("delayed", 90), ("rowwise", 90)),
        # Two seconds.
        pytest.param("delayed", 120, marks=pytest.mark.slow),
        *(("rowwise_bf16_wgrad", 90), ("blockwise", 90), ("mxfp8", 100), ("mxfp8", 90), ("nvfp4", 100)),
    ],
)
def test_layers_of_one_input_have_the_bits_of_the_general_path(
    recipe: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A normalization before two layers, and an activation before one, all by fast plans."""
    become(arch, monkeypatch)
    begun, begin = [], linear_module.begin_call

    def recorded(plan: LinearPlan, *args: Any) -> Any:
        begun.append(plan)
        return begin(plan, *args)

    monkeypatch.setattr(linear_module, "begin_call", recorded)
    first = qt.LayerNormMLP(K, N, "swiglu", fused=False, dtype=torch.bfloat16, recipe=recipe)
    second = copy.deepcopy(first)
    ours = trained(first)
    assert len(begun) == 3 * 3
    with general_plans():
        theirs = trained(second)
    assert len(begun) == 3 * 3
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=number: f"{n}: {text}")


def trained(block: qt.LayerNormMLP) -> list[Tensor]:
    """Outputs, gradients and state of some steps; the weights change after the second."""
    results = []
    for number in range(3):
        x = torch.linspace(-3, 2, T * K).roll(number).view(2, T // 2, K).bfloat16()
        # In the last step, rows of zeros, of subnormals, with one outlier, and with NaN.
        for row, value in enumerate((0.0, 1e-39, 3e38, torch.inf) if number == 2 else ()):
            x[0, row, : K if row < 2 else 1] = value
        x.requires_grad_()
        with qt.autocast(block.down_proj.recipe):
            y = block(x)
        y.float().square().mean().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]
        if number == 1:
            with torch.no_grad():
                for p in block.parameters():
                    p.mul_(0.75)
    return [*results, *(b.clone() for b in block.buffers())]


@pytest.mark.parametrize(
    ("off", "tokens", "k", "n"),
    [
        *((off, T, K, N) for off in ("stochastic_rounding", "hadamard", "weight_2d", "power_of_two")),
        # Codes padded with zeros on both axes, and buffers allocated anew in each call, as for large matrices.
        ("attention", 48, 80, 16),
        ("attention", 48, 128, 16),
    ],
)
def test_two_level_scaling_has_the_bits_of_the_general_path(
    off: str,
    tokens: int,
    k: int,
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with only the required gradients: only stochastic rounding advances the noise count."""
    become(100, monkeypatch)
    if k == 128:
        monkeypatch.setattr(quantize_launch, "SMALL", 1 << 12)
    recipe = recipes.nvfp4(**{off: False})
    first = qt.Linear(k, n, bias=False, dtype=torch.bfloat16, recipe=recipe)
    second = copy.deepcopy(first)
    x = torch.randn(tokens, k).bfloat16()
    x[0, :3] = torch.tensor([3e38, 1e-39, 0.0])

    def train_some(layer: qt.Linear, direct: bool) -> list[Tensor]:
        results = []
        for which in ("both", "x", "weight", "both"):
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            assert by_fast_plan(y) is direct
            wanted = {"x": (leaf,), "weight": (layer.weight,)}.get(which, (leaf, layer.weight))
            results += [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]
            results += [b.clone() for b in layer.buffers()]
        return results

    ours = train_some(first, True)
    with general_plans():
        theirs = train_some(second, False)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise(a, b, str(number))


@pytest.mark.parametrize(
    ("recipe", "arch"), [("rowwise", 90), ("mxfp8", 100), ("nvfp4(weight_2d=False, stochastic_rounding=False)", 100)]
)
def test_backward_quantizes_only_its_own_operand_of_a_weight_that_was_freed(
    recipe: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FSDP2 frees weights between forward and backward."""
    become(arch, monkeypatch)
    driver = Driver(monkeypatch, runs=True)
    layer = qt.Linear(K, N, dtype=torch.bfloat16, recipe=recipe)
    spec = recipes.get(recipe).dgrad.b
    assert spec is not None
    x = torch.randn(T, K).bfloat16()

    def launched(run: Callable[[], object]) -> int:
        driver.launched.clear()
        run()
        return len(driver.launched)

    counts, grads = [], []
    for freed in (False, False, True):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        assert by_fast_plan(y)
        if freed:
            weight_cache.free(layer)
        backward = partial(torch.autograd.grad, y.sum(), (leaf, layer.weight))
        counts.append(launched(lambda backward=backward: grads.append(backward())))
    with qt.only("triton"):
        assert 0 < counts[2] - counts[1] == launched(lambda: qt.quantize(layer.weight.t(), spec))
    for a, b in zip(*grads[1:], strict=True):
        assert_bitwise(a, b)


def test_two_level_scaling_has_the_same_bits_where_torch_fills_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in deterministic mode; torch does not fill new tensors of four-bit codes."""
    become(100, monkeypatch)
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipes.nvfp4(stochastic_rounding=False))
    x, grads = torch.randn(T, K).bfloat16().requires_grad_(), []
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for on in (False, True):
            torch.use_deterministic_algorithms(on)
            grads.append(torch.autograd.grad(layer(x).float().square().sum(), (x, layer.weight)))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_input_and_a_weight_of_different_scales_have_the_bits_of_the_general_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become(90, monkeypatch)
    rounded, divided = QuantSpec(E4M3), QuantSpec(E4M3, scale="fp32")
    recipe = Recipe("mixed", *[GemmSpec(rounded, divided)] * 2, GemmSpec(rounded, rounded))
    first = qt.Linear(K, N, dtype=torch.bfloat16, recipe=recipe)
    second, x = copy.deepcopy(first), torch.randn(T, K).bfloat16()
    ours = first(x.clone().requires_grad_())
    with general_plans():
        assert_bitwise(ours, second(x.clone().requires_grad_()))


def test_counters_that_are_opened_after_forward_count_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    become(90, monkeypatch)
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe="rowwise")
    y = layer(torch.randn(T, K).bfloat16().requires_grad_())
    with qt.count(layer) as counters:
        y.sum().backward()
    elements = {name: counts.elements for name, counts in counters.table[""].items()}
    assert elements == dict.fromkeys(["grad_output", "grad_output.T"], T * N)


def to_host(x: Tensor) -> tuple[torch.device, Tensor]:
    """As `torch.autograd.graph.save_on_cpu` does for a GPU tensor: `.cpu()` allocates and copies."""
    return x.device, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").copy_(x)


def to_pinned(x: Tensor) -> tuple[torch.device, Tensor]:
    """As with pin_memory=True, which makes rows contiguous for any input layout."""
    return x.device, torch.empty(x.size(), dtype=x.dtype, device="cpu").copy_(x)


def from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, x = packed
    return x.to(device, copy=True)


@pytest.mark.parametrize(
    ("recipe", "arch"), [("tensorwise", 90), ("delayed", 120), ("blockwise", 90), ("mxfp8", 90), ("nvfp4", 100)]
)
def test_saved_tensors_may_be_offloaded_to_the_host(recipe: str, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests run in deterministic mode, in which torch fills new tensors, except those of four-bit codes."""
    become(arch, monkeypatch)
    first = qt.Linear(K, N, dtype=torch.bfloat16, recipe=recipe)
    layers = [first, *(copy.deepcopy(first) for _ in range(2))]
    x, results = torch.randn(T, K).bfloat16(), []
    for layer, pack in zip(layers, (None, to_host, to_pinned), strict=True):
        tensors = []
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, from_host) if pack else contextlib.nullcontext()
            with qt.autocast(recipe), hooks:
                y = layer(leaf)
            # The first step of delayed scaling measures amaxes.
            assert by_fast_plan(y) or recipe == "delayed"
            y.square().sum().backward()
            assert leaf.grad is not None
            tensors += [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]
        results.append(tensors)
    for other in results[1:]:
        for number, (a, b) in enumerate(zip(results[0], other, strict=True)):
            assert_bitwise(b, a, str(number))


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_noise_of_one_gemm_advances_only_its_own_count(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom recipe with stochastic rounding for one GEMM of backward."""
    become(100, monkeypatch)
    nearest, random = recipes.nvfp4(stochastic_rounding=False), recipes.nvfp4()
    recipe = dataclasses.replace(nearest, **{gemm: random.gemms[gemm]})
    first = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)
    second = copy.deepcopy(first)
    xs = [torch.randn(T, K).bfloat16()] * 2
    ours = steps(first, xs, True)
    assert first.count[:2].tolist() == [2 * (gemm == "dgrad"), 2 * (gemm == "wgrad")]
    with general_plans():
        theirs = steps(second, xs, False)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise(a, b, str(number))


def test_noise_continues_over_steps_despite_other_calls_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other shapes by turns, a length without a plan, a second layer, evaluation, a checkpoint that runs the forward
    again, a micro-batch whose backward comes later; then another seed and other counts, a name, and a copy."""
    become(100, monkeypatch)
    layers = [qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe="nvfp4") for _ in range(2)]
    others = copy.deepcopy(layers)
    for layer, other in zip(layers, others, strict=True):
        other.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    x = torch.randn(T, K).bfloat16()

    def step(layer: qt.Linear, tokens: int, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
        leaf = x[:tokens].clone().requires_grad_()
        y = layer(leaf) if run is None else run(leaf)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (leaf, layer.weight))]

    def program(layers: list[qt.Linear]) -> list[Tensor]:
        first, second = layers
        results = [*step(first, T), *step(first, 16), *step(second, T), *step(first, T), *step(first, 17)]
        with torch.no_grad():
            results.append(first.eval()(x))
        first.train()
        results += step(first, T, lambda x: qt.checkpoint(first, x))
        leaf = x.clone().requires_grad_()
        late = first(leaf)
        results += step(first, 16)
        results += torch.autograd.grad(late.float().square().sum(), (leaf, first.weight))
        first.seed = 5
        results += step(first, T)
        first.count.add_(3)  # type: ignore[operator, union-attr]
        results += step(first, T)
        qt.convert(torch.nn.ModuleDict({"name": first}), "nvfp4")
        results += step(first, T)
        again = copy.deepcopy(first)
        results += [*step(again, T), *step(first, T)]
        return [*results, *(b.clone() for layer in (*layers, again) for b in layer.buffers())]

    ours = program(layers)
    assert by_fast_plan(layers[0](x.clone().requires_grad_()))
    with general_plans():
        theirs = program(others)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise(a, b, str(number))


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        ("tensorwise", 90),
        ("tensorwise", 100),
        ("rowwise", 90),
        ("rowwise_bf16_wgrad", 90),
        ("blockwise", 90),
        ("mxfp8", 100),
        ("mxfp8", 89),
    ],
)
def test_two_forwards_before_their_backwards_keep_their_own_codes(
    recipe: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(arch, monkeypatch)
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x1, x2 = (torch.randn(T, K).bfloat16().requires_grad_() for _ in range(2))
    alone = []
    for x in (x1, x2):
        y = layer(x)
        alone.append((y.detach().clone(), *torch.autograd.grad(y.float().square().sum(), (x, layer.weight))))
    y1, y2 = layer(x1), layer(x2)
    assert by_fast_plan(y1)
    together = [torch.autograd.grad(y.float().square().sum(), (x, layer.weight)) for y, x in ((y1, x1), (y2, x2))]
    for (y, *grads), again, out in zip(alone, together, (y1, y2), strict=True):
        assert torch.equal(out, y)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@torchs_own
@pytest.mark.parametrize(
    "case", ["no gradient of x", "frozen weight", "odd tokens", "not contiguous", "counted", "torch's autocast"]
)
def test_unplanned_calls_have_the_bits_of_the_general_path(case: str) -> None:
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe="tensorwise")
    x = torch.randn(T, K).bfloat16().requires_grad_()
    assert by_fast_plan(layer(x))
    layer.weight.requires_grad_(case != "frozen weight")
    if case == "no gradient of x":
        x = x.detach()
    elif case == "odd tokens":
        x = x[:17]
    elif case == "not contiguous":
        x = torch.randn(K, T).bfloat16().t().requires_grad_()
    counted = qt.count(layer) if case == "counted" else contextlib.nullcontext()
    with counted, torch.autocast("cpu", torch.bfloat16, enabled=case == "torch's autocast"):
        y = layer(x)
        assert not by_fast_plan(y)
    with general_plans():
        assert_bitwise(y, layer(x))


@pytest.mark.parametrize(
    ("recipe", "arch", "features"), [("tensorwise", 90, 40), ("rowwise", 90, 48), ("mxfp8", 100, 80)]
)
def test_a_weight_of_another_shape_has_its_own_plan(
    recipe: str,
    arch: int,
    features: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    become(arch, monkeypatch)
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(T, K).bfloat16().requires_grad_()
    assert by_fast_plan(layer(x))
    layer.weight = torch.nn.Parameter(torch.randn(features, K).bfloat16())
    y = layer(x)
    assert by_fast_plan(y) == (features % 16 == 0)
    grads = torch.autograd.grad(y.float().square().sum(), (x, layer.weight))
    with general_plans():
        expected = layer(x)
        others = torch.autograd.grad(expected.float().square().sum(), (x, layer.weight))
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_recipes_that_share_a_weight_operand_read_it_in_their_own_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    become(100, monkeypatch)
    first = recipes.mxfp8()
    square = GemmSpec(first.dgrad.a, recipes.mxfp8(weight_2d=True).dgrad.b)
    second = dataclasses.replace(first, dgrad=square)
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-5, 0, K))
    x = torch.randn(T, K).bfloat16().requires_grad_()

    def gradient(recipe: Recipe) -> Tensor:
        with qt.autocast(recipe):
            y = layer(x)
        return torch.autograd.grad(y.float().square().sum(), x)[0]

    grads = [gradient(recipe) for recipe in (first, second, first)]
    with general_plans():
        expected = [gradient(recipe) for recipe in (first, second, first)]
    assert not torch.equal(expected[0], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_out_of_memory_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = qt.Linear(K, N, bias=False, dtype=torch.bfloat16, recipe="tensorwise")
    x = torch.randn(T, K).bfloat16().requires_grad_()
    layer(x)

    def full(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for the quantized copy"):
        layer(x)
