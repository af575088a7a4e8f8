"""Compiled steps write the bits of eager ones, matrices of every shape share a program, and a compiler may fail."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver.recipes import Recipe, get, mxfp8
from quaver.reference.optimizer_state import FLOAT32
from quaver.torch import optim
from quaver.torch.optim import compiled
from quaver.torch.optim import step as pieces
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import AdamRule
from quaver.torch.optim.step import ParameterTensors, RngKey, ShardPosition, StepConfig
from quaver.torch.quantized_tensor import memory_of
from tests.kernels.optim.test_step import SQUARES

#: Shapes of one chunk, two chunks, one and a remainder, none, and one of each size with a remainder.
SHAPES = ((512, 512), (512, 1024), (1280, 256), (64, 128), (1344, 1024))
LEAN = pytest.mark.slow
WAYS = [
    pytest.param("float32", None, 1, id="float32"),
    pytest.param("exact", None, 2, id="exact", marks=LEAN),
    pytest.param("balanced", None, 2, id="balanced", marks=LEAN),
    pytest.param("balanced", get("tensorwise"), 2, id="balanced of codes", marks=LEAN),
    pytest.param("lean", None, 2, id="lean of bfloat16", marks=LEAN),
    pytest.param("lean", get("tensorwise"), 2, id="lean", marks=LEAN),
    # Its blocks span rows, so each width compiles to its own program.
    pytest.param("lean", mxfp8(weight_2d=True), 4, id="lean of blocks", marks=LEAN),
]


def trained(preset: str, recipe: Recipe | None, compile: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    # The largest shape has chunks of another size, which compile to another program.
    shapes, dtype = (SHAPES[:-1], torch.float32) if preset == "float32" else (SHAPES, torch.bfloat16)
    model = nn.ModuleList(qt.Linear(columns, rows, dtype=dtype) for rows, columns in shapes)
    if recipe is not None:
        qt.quantize_weights(model, recipe)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset, statistics=True, compile=compile)
    for step in range(2):
        for (_, columns), layer in zip(shapes, model, strict=True):
            with qt.autocast(recipe or get("bf16")):
                y = layer(torch.randn(8, columns, dtype=dtype))
            # Gradients have an outlier and zeros; in the second step all but the first columns are zero.
            y = y * torch.randn_like(y) * (y.detach() > 0)
            (y.sum() + (step == 0) * 1e4 * y[0, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model


@pytest.mark.parametrize(("preset", "recipe", "programs"), WAYS)
def test_compiled_steps_are_eager_ones_bit_for_bit(preset: str, recipe: Recipe | None, programs: int) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*learning rate.*")
        ours, model = trained(preset, recipe, compile=True)
        eager, twin = trained(preset, recipe, compile=False)
    assert not ours._programs.failed and len(ours._programs.programs) == programs
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        same(p, q, name)
        for key, value in ours.state[p].items():
            same(value, eager.state[q][key], f"{name}, {key}")
        if p in ours.counted:
            assert int(ours.counted[p][0]) == int(eager.counted[q][0]), name
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        same(b, c, name)


def same(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
    a, b = (memory_of(t.detach()).reshape(-1).view(torch.uint8) for t in (a, b))
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{name}: byte {wrong[0].item()} of {len(wrong)} that differ"


def test_a_failing_compiler_warns_and_the_step_runs_without_it() -> None:
    torch._dynamo.reset()
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.warns(UserWarning, match="it continues without compilation"),
    ):
        ours, model = trained("float32", None, compile=True)
    assert ours._programs.failed
    _, twin = trained("float32", None, compile=False)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


#: Recipes None (bfloat16 weights) and of weights in codes; presets with all kinds of states.
TRACED: list[tuple[Any, dict[str, Any], Any, Any]] = [
    (optim.AdamW, {}, "lean", "tensorwise"),
    (optim.AdamW, {}, "lean", "blockwise"),
    (optim.AdamW, {}, "lean", None),
    (optim.AdamW, {}, "lean", mxfp8(weight_2d=True)),
    (optim.AdamW, {"statistics": True}, "balanced", "tensorwise"),
    (optim.AdamW, {}, "balanced", "mxfp8"),
    (optim.AdamW, {}, "exact", None),
    (optim.AdamW, {}, replace(optim.PRESETS["exact"], name="plain", bfloat16="none", stochastic=True), None),
    (optim.Adam, {"weight_decay": 0.1, "maximize": True}, "lean", "tensorwise"),
    (optim.Lion, {}, "lean", "tensorwise"),
    (optim.ScheduleFreeAdamW, {"weight_decay": 0.1, "warmup_steps": 2}, "lean", "tensorwise"),
    (optim.ScheduleFreeAdamW, {}, "balanced", "blockwise"),
    (optim.SGD, {}, "exact", None),
    (optim.SGD, {"momentum": 0.9}, "balanced", None),
]


def hard_gradient(step: int) -> torch.Tensor:
    """Zeros of both signs, tiny and subnormal numbers, blocks of zeros and an outlier; in step 2 NaN and infinities."""
    g = torch.randn(192, 256, generator=torch.Generator().manual_seed(step))
    g[0], g[1, :64], g[2, ::3], g[3, ::5], g[4, 7] = 0.0, -0.0, g[2, ::3] * 1e-20, g[3, ::5] * 1e-41, 1e4
    if step == 2:
        g[6, 3], g[7, 90], g[8, 64] = float("nan"), float("inf"), -float("inf")
    return g


@pytest.mark.parametrize(("rule", "options", "preset", "recipe"), TRACED)
def test_steps_traced_for_a_compiler_have_the_bits_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch, rule: Any, options: dict[str, Any], preset: Any, recipe: Any
) -> None:
    """Without a compiler: chunks that are read as packed4 and others, of 128 rows and of the last 64."""
    monkeypatch.setattr(pieces, "COMPILED_CHUNK_ELEMENTS", (128 * 256, 64 * 256))
    monkeypatch.setattr(compiled, "_programs", {})
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    both = []
    for compile in (True, False):
        torch.manual_seed(0)
        layer = qt.Linear(256, 192, bias=False, dtype=torch.bfloat16)
        if recipe is not None:
            qt.quantize_weights(layer, recipe)
        optimizer = rule(layer.parameters(), lr=1e-2, preset=preset, nonfinite="keep", compile=compile, **options)
        both.append((layer, layer.weight, optimizer))
    (layer, p, ours), (twin, q, eager) = both
    for step in range(3):
        for weight, optimizer in ((p, ours), (q, eager)):
            weight.grad = hard_gradient(step).to(weight.grad_dtype or torch.bfloat16)
            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                hook(weight)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step < 2:
            for name, t in [*layer.state_dict().items(), *ours.state[p].items()]:
                same(t, {**twin.state_dict(), **eager.state[q]}[name], name)
        else:
            a, b = (qt.plain_state_dict(each)["weight"].float().nan_to_num(-1.0) for each in (layer, twin))
            assert torch.equal(a, b)
    assert not ours._programs.failed and ours._programs.programs


def test_a_block_with_a_number_that_is_none_has_the_scale_nan() -> None:
    """The compiled maximum of NaN has all bits set, which is a negative integer."""
    weight_format = WeightFormat("residual8", SQUARES)
    unpacked = [torch.rand(64, 16, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    unpacked[2][40, 3] = float("nan")
    run = torch.compile(
        lambda *unpacked: compiled._coded_in_blocks(weight_format, [*unpacked], [None] * 4, torch.Size((2, 2)))[1]
    )
    assert (
        run(*unpacked).tolist()
        == compiled._coded_in_blocks(weight_format, unpacked, [None] * 4, torch.Size((2, 2)))[1].tolist()
    )
    assert int((run(*unpacked) == 255).sum()) == 1


@pytest.mark.slow
def test_memory_in_another_order_is_another_program() -> None:
    """Programs are cached by shapes and dtypes only, which are equal here."""
    torch._dynamo.reset()
    both = []
    for compile in (True, False):
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(1024, 256, generator=draw), torch.randn(256, 1024, generator=draw).t()]
        parameters = [nn.Parameter(w) for w in weights]
        optimizer = optim.AdamW(parameters, lr=1e-3, preset="float32", compile=compile)
        for p in parameters:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=draw))
        optimizer.step()
        both.append(parameters)
        assert not compile or (not optimizer._programs.failed and len(optimizer._programs.programs) == 2)
    for i, (p, q) in enumerate(zip(*both, strict=True)):
        assert p.stride() == q.stride()
        same(p.contiguous(), q.contiguous(), str(i))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_words_for_a_compiler_match_eager_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random keys for a first element beyond 2**34, counters across 2**31, and a 64-bit seed."""
    first, drawn = 3 * 2**34 + 2**33 - 2**10, (0xFEDC_BA98_7654_3210, 3, 70_000, torch.device("cpu"))
    expected = pieces.words(first, 4096, *drawn).to(torch.int32)
    monkeypatch.setattr(compiled, "in_bytes", lambda _: dtype is torch.int32)
    config = StepConfig(AdamRule(), WeightFormat("residual8", stochastic=True), (FLOAT32, FLOAT32))
    rng_key = RngKey(*drawn[:3], ShardPosition((0, 0), (1, 1), (1, 1)))
    place = compiled._place(config, torch.empty(0), False, first, rng_key)
    assert place is not None and torch.equal(compiled.traced_words(4096, *place), expected)
    place = compiled._place(config, torch.empty(0), True, first, rng_key)
    assert place is not None and all(word.dtype is dtype for word in place)
    packed4 = compiled.traced_packed4(torch.Size((16, 64)), *place)
    assert torch.equal(torch.stack(packed4, -1).view(-1), expected)
    pairs = compiled.traced_pairs(torch.Size((64, 32)), *place)
    assert torch.equal(torch.stack(pairs, -1).view(-1), expected)


@pytest.mark.parametrize(("preset", "recipe"), [("exact", None), ("lean", "tensorwise"), ("lean", "blockwise")])
def test_a_step_has_its_bits_while_another_thread_compiles(
    monkeypatch: pytest.MonkeyPatch, preset: str, recipe: str | None
) -> None:
    """torch reports that every thread compiles while one does."""
    both = []
    for compiling in (False, True):
        layer = qt.Linear(128, 136, dtype=torch.bfloat16)
        layer.load_state_dict({name: torch.ones_like(value) for name, value in layer.state_dict().items()})
        if recipe is not None:
            qt.quantize_weights(layer, recipe)
        optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
        draw = torch.Generator().manual_seed(0)
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiling)
        assert torch.compiler.is_compiling() == compiling
        for _ in range(2):
            for p in layer.parameters():
                p.grad = torch.randn(p.shape, generator=draw).to(p.grad_dtype or torch.float32)
            optimizer.step()
            optimizer.zero_grad()
        monkeypatch.undo()
        both.append((layer, optimizer))
    for p, q in zip(both[0][0].parameters(), both[1][0].parameters(), strict=True):
        same(p, q, "weight")
        for key, value in both[0][1].state[p].items():
            same(value, both[1][1].state[q][key], key)


def test_scalars_of_another_dtype_or_shape_step_without_a_program() -> None:
    config, part = StepConfig(AdamRule(), WeightFormat("plain"), (FLOAT32, FLOAT32)), torch.zeros(64, 64)
    parts = ParameterTensors((part,), ((part.clone(),), (part.clone(),)), (part.clone(),))
    scalars, drawn = (torch.ones(()),) * 8, RngKey(0, 0, 1, ShardPosition((0, 0), (64, 64), (64, 64)))
    programs = compiled.CompiledSteps()
    for factor in (torch.ones((), dtype=torch.float64), torch.ones(1)):
        assert programs.step(config, parts, scalars, factor, drawn, 0, None, None) is None
    scalars = (*scalars[:7], torch.ones((), dtype=torch.float64))
    assert programs.step(config, parts, scalars, None, drawn, 0, None, None) is None
    assert not programs.programs
