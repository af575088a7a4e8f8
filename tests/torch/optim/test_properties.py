"""Properties of the numbers that hold for every optimizer, preset and chunk size."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.reference import optim as bounds
from quaver.torch import optim
from quaver.torch.optim import master_weights
from quaver.torch.optim import step as step_module
from quaver.torch.quantized_tensor import QuantizedTensor, memory_of
from tests.pairs import pairs
from tests.torch.optim.models import full_weight

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
SQUARES = recipes.mxfp8(weight_2d=True)
#: Pairs of lr and weight decay; with lr * decay near 1 the weight vanishes and rounding errors of its old value remain.
RATES = ((0.0, 0.1), (1e-3, 0.0), (1e-3, 999.9), (0.5, 0.1), (0.5, 30.0), (1e-30, 0.0))
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Lion": (optim.Lion, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "ScheduleFreeAdamW": (optim.ScheduleFreeAdamW, {"weight_decay": 0.1}),
}


def values_of(p: Tensor) -> Tensor:
    return (p.dequantize() if isinstance(p, QuantizedTensor) else p).detach().float()


def layer_of(recipe: Any, rows: int = 96, columns: int = 128) -> qt.Linear:
    torch.manual_seed(0)
    layer = qt.Linear(columns, rows, bias=False)
    if recipe != "none":
        qt.quantize_weights(layer, recipe)
    return layer


def set_grad(p: Tensor, gradient: Tensor) -> None:
    p.grad = gradient.to(p.grad_dtype or torch.float32)


@pytest.mark.parametrize(("preset", "rule", "recipe"), pairs(("balanced", "lean"), RULES, (*RECIPES, SQUARES)))
def test_a_step_does_not_depend_on_the_chunk_size(
    preset: str, rule: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are rows, or columns of a few adjacent blocks; 456 columns and 200 rows end within blocks."""
    kind, options = RULES[rule]
    results = []
    for size in (1 << 20, 1 << 12):
        monkeypatch.setattr(step_module, "CHUNK_ELEMENTS", size)
        layer = layer_of(recipe, 200, 456)
        # A learning rate high enough that the weight's scale changes at each step.
        optimizer = kind([layer.weight], lr=0.02, preset=preset, **options)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            set_grad(layer.weight, torch.randn(200, 456, generator=draw))
            optimizer.step()
        states = optimizer.state[layer.weight].values()
        results.append(
            [
                memory_of(layer.weight).view(torch.uint8),
                layer.weight.scale,
                full_weight(optimizer, layer.weight),
                *states,
            ]
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def float32_bit_patterns() -> Tensor:
    """All upper halves of a float32 with lower halves at the edges, and a million random values: int32 [1, n]."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    upper = torch.arange(1 << 16)[:, None] << 16
    drawn = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([(upper | low).flatten(), drawn]).to(torch.int32).view(1, -1)


def test_remainders_restore_every_float32_and_nan_reaches_gemms() -> None:
    weight = float32_bit_patterns().view(torch.float32)
    held = master_weights.write(master_weights.WeightFormat("remainder"), weight, (weight.bfloat16(),), None)
    back = master_weights.read(master_weights.WeightFormat("remainder"), held)
    nan = weight.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], weight.view(torch.int32)[~nan])
    assert bool(back[nan].isnan().all() and held[0][nan].isnan().all())
    # Rounded to nearest, ties away from zero.
    finite = held[0].isfinite() & weight.isfinite()
    error = (held[0].double() - weight.double()).abs()[finite]
    assert bool((error <= (weight.bfloat16().double() - weight.double()).abs()[finite]).all())


@pytest.mark.parametrize(
    ("bad", "rule", "preset"),
    pairs((float("nan"), float("inf")), RULES, ("exact", "balanced", "lean", "msamp")),
)
def test_state_touched_by_a_nonfinite_gradient_is_read_as_nonfinite(
    bad: float, rule: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nonfinite="keep"; a weight that became finite again, or stopped changing, would hide the failure."""
    monkeypatch.setattr(step_module, "CHUNK_ELEMENTS", 1 << 10)
    kind, options = RULES[rule]
    layers = {recipe: layer_of(recipe) for recipe in RECIPES}
    layers |= {str(dtype): qt.Linear(128, 96, bias=False, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    parameters = [layer.weight for layer in layers.values()]
    optimizer = kind(parameters, lr=1e-2, preset=preset, **options)
    for step in range(3):
        gradient = torch.randn(96, 128, generator=torch.Generator().manual_seed(step))
        if step == 0:
            gradient[5, 7] = bad
        for p in parameters:
            set_grad(p, gradient)
        optimizer.step()
    for name, layer in layers.items():
        read = qt.plain_state_dict(layer)["weight"]
        assert not read[5, 7].isfinite(), name
        # No code is a number if its scale is not finite.
        assert bool(full_weight(optimizer, layer.weight)[5, 7].isnan()), name


@pytest.mark.parametrize("preset", ["exact", "balanced", "lean", "coat"])
def test_a_pruned_weight_decodes_to_almost_zero(preset: str) -> None:
    """A mask writes zeros of both signs over the codes; the residual is then at most half a step."""
    layers = [qt.Linear(128, 96, bias=False, dtype=torch.bfloat16), *(layer_of(recipe) for recipe in RECIPES)]
    optimizer = optim.AdamW([layer.weight for layer in layers], lr=1e-2, preset=preset)
    for step in range(3):
        for layer in layers:
            set_grad(layer.weight, torch.randn(96, 128, generator=torch.Generator().manual_seed(step)))
        optimizer.step()
        for layer in layers:
            p = layer.weight.detach()
            was = full_weight(optimizer, layer.weight).abs().amax()
            # Write to the codes directly: quantizing zeros would change the scale.
            memory_of(p).copy_(torch.zeros(96, 128).copysign(values_of(p)))
            read = full_weight(optimizer, layer.weight)
            assert bool(read.isfinite().all())
            # Formats that store the full weight, not a residual, are unchanged.
            held = optimizer.config(layer.weight, optimizer.param_groups[0]).weight_format.kind[:3] == "res"
            assert not held or read.abs().amax() < 2e-2 * was
    for layer in layers:
        assert bool(values_of(layer.weight).isfinite().all())


@pytest.mark.parametrize(
    "rule",
    [*("AdamW", "AdamW, no bound", "Adam", "Lion", "SGD", "SGD, momentum", "SGD, dampening"), "ScheduleFreeAdamW"],
)
def test_no_weight_exceeds_the_bound_computed_before_the_step(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For gradients that grow the weight, huge decays, zero and tensor learning rates, and gradient factors."""
    name, _, kind = rule.partition(", ")
    options: dict[str, Any] = {
        "momentum": {"momentum": 0.9, "nesterov": True},
        "dampening": {"momentum": 0.9, "dampening": 3.0},
        "no bound": {"betas": (0.95, 0.9)},
    }.get(kind, {})
    written: list[tuple[Tensor, Tensor | None]] = []
    write = master_weights.write

    def seen(weight_format: Any, weight: Tensor, tensors: Any, noise: Any, amax: Tensor | None = None) -> Any:
        written.append((master_weights.block_amax(weight_format.code_spec, weight), amax))
        return write(weight_format, weight, tensors, noise, amax)

    monkeypatch.setattr(master_weights, "write", seen)
    for number, (recipe, preset, (lr, decay)) in enumerate(
        itertools.product(("tensorwise", "rowwise"), ("balanced", "lean"), RATES)
    ):
        layer = layer_of(recipe, 64, 64)
        p = layer.weight
        rate = torch.tensor(lr) if number % 2 else lr
        if name != "ScheduleFreeAdamW":
            options["maximize"] = number % 3 == 0
        optimizer = getattr(optim, name)([p], rate, weight_decay=decay, preset=preset, **options)
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            optimizer.grad_scale = torch.tensor(0.25)
            set_grad(p, torch.randn(64, 64, generator=draw) * 10.0**step if step else -values_of(p).sign())
            optimizer.step()
            after, (amax, weight_bound) = full_weight(optimizer, p), written.pop()
            assert bool(after.isfinite().all())
            assert (weight_bound is None) == (kind == "no bound")
            if weight_bound is not None:
                assert not bool((amax > weight_bound).any()), (recipe, preset, lr, decay, step)
                # The stored value may exceed the bound by the rounding of the residual, half a step of it.
                stored = optimizer.state[p]["amax"]
                assert bool((stored <= weight_bound * (1 + 2.0**-11)).all())
                assert torch.equal(stored, master_weights.block_amax(layer.weight_spec, after))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.0, 0.999), (0.99, 0.999)])
def test_updates_of_exact_moments_are_never_clamped(betas: tuple[float, float]) -> None:
    """Gradients are those that reach the bound; magnitudes differ by row, and the step of the peak by column."""
    (b1, b2), p = betas, nn.Parameter(torch.zeros(64, 64))
    options: Any = {"betas": betas, "eps": 0.0, "weight_decay": 0.0, "preset": "float32"}
    optimizer = optim.AdamW([p], lr=1.0, statistics=True, **options)
    end, largest = torch.arange(64) + 2, 0.0
    for step in range(1, 70):
        rising = ((b1 / b2) ** (end - step).clamp(min=0)).double()
        column = torch.where(step <= end, rising, torch.rand(64).double()).clamp(min=1e-9)
        set_grad(p, (torch.logspace(-6, 6, 64).double()[:, None] * column).float())
        before = p.detach().clone()
        optimizer.step()
        reached = float((p - before).detach().abs().max()) / bounds.adam(step, *betas)
        largest = max(largest, reached) if step > 1 else largest
    clamped, number = optimizer.counted[p]
    assert (int(clamped), number) == (0, 69 * 64 * 64)
    # The check is meaningful only if the bound is reached.
    assert 0.999 < largest < 1.0001


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_change_betas_match_torch(schedule: str) -> None:
    """The bound on updates assumes constant betas."""
    results = []
    for kind, options in ((optim.AdamW, {"preset": "float32"}), (torch.optim.AdamW, {})):
        p = nn.Parameter(torch.zeros(64, 64))
        optimizer = kind([p], lr=1e-2, **options)
        more = {"total_steps": 9} if schedule == "OneCycleLR" else {"step_size_up": 2, "base_lr": 1e-3}
        scheduler = getattr(torch.optim.lr_scheduler, schedule)(optimizer, max_lr=1e-2, **more)
        for step in range(8):
            set_grad(p, torch.randn(64, 64, generator=torch.Generator().manual_seed(step)))
            optimizer.step()
            scheduler.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_predicted_scales_stop_when_betas_change() -> None:
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW([layer.weight], lr=1e-2, betas=(0.9, 0.95), preset="balanced")
    for step, betas in enumerate([(0.9, 0.95), (0.9, 0.95), (0.8, 0.95), (0.9, 0.95)]):
        optimizer.param_groups[0]["betas"] = betas
        set_grad(layer.weight, torch.randn(96, 128))
        optimizer.step()
        assert ("amax" in optimizer.state[layer.weight]) == (step < 2)
        assert float(full_weight(optimizer, layer.weight).abs().max()) < 1


def test_a_step_that_is_refused_changes_nothing() -> None:
    p, words = nn.Parameter(torch.ones(80, 80)), nn.Embedding(100, 64, sparse=True)
    optimizer = optim.AdamW([p, words.weight], lr=0.1, preset="float32")
    p.grad = torch.ones(80, 80)
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="is sparse"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(80, 80)) and not any(optimizer.state.values())


@pytest.mark.parametrize(("preset", "dtype"), [("float32", torch.float32), ("lean", torch.bfloat16)])
def test_a_scalar_steps_as_a_vector_of_one(preset: str, dtype: torch.dtype) -> None:
    """A temperature is a parameter of no dimension."""
    one, vector = (nn.Parameter(torch.full(shape, 1.5, dtype=dtype)) for shape in ((), (1,)))
    optimizer = optim.AdamW([one, vector], lr=0.1, preset=preset)
    for gradient in (1.0, -0.3):
        for p in (one, vector):
            set_grad(p, torch.full(p.shape, gradient))
        optimizer.step()
    assert one.shape == () and float(one.detach()) == float(vector.detach()) != 1.5


def test_gradients_cleared_by_zero_grad_are_not_stepped() -> None:
    layer = nn.Linear(80, 80)
    optimizer = optim.AdamW(layer.parameters(), lr=0.1)
    optimizer.step_in_backward()
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 80)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(layer.weight.detach(), before)


@pytest.mark.parametrize(("name", "around"), pairs(("AdamW", "Muon"), ("torch.autocast", "torch.compile")))
def test_a_step_is_the_same_under_autocast_and_in_a_compiler(around: str, name: str) -> None:
    results = []
    for within in (False, True):
        layer = layer_of("none" if name == "Muon" else "tensorwise")
        optimizer = getattr(optim, name)([layer.weight], lr=1e-2, preset="lean")
        call = torch.compile(optimizer.step) if within and around == "torch.compile" else optimizer.step
        for step in range(2):
            set_grad(layer.weight, torch.randn(96, 128, generator=torch.Generator().manual_seed(step)))
            with torch.autocast("cpu", torch.float16, enabled=within and around == "torch.autocast"):
                call()
        results.append(full_weight(optimizer, layer.weight).clone())
    assert torch.equal(*results)
