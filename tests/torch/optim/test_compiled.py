"""Compiled steps write the bits of eager ones, matrices of every shape share a program, and a compiler may fail."""

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

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
    pytest.param("float32", None, 2, id="float32"),
    pytest.param("exact", None, 2, id="exact", marks=LEAN),
    pytest.param("balanced", None, 2, id="balanced", marks=LEAN),
    pytest.param("balanced", get("tensorwise"), 2, id="balanced of codes", marks=LEAN),
    pytest.param("lean", None, 2, id="lean of bfloat16", marks=LEAN),
    pytest.param("lean", get("tensorwise"), 2, id="lean", marks=LEAN),
    # Its blocks span rows, so each width compiles to its own program.
    pytest.param("lean", mxfp8(weight_2d=True), 4, id="lean of blocks", marks=LEAN),
]


def trained(preset: str, recipe: Recipe | None, compile: bool, steps: int = 2) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    dtype = torch.float32 if preset == "float32" else torch.bfloat16
    model = nn.ModuleList(qt.Linear(columns, rows, dtype=dtype) for rows, columns in SHAPES)
    if recipe is not None:
        qt.quantize_weights(model, recipe)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, preset=preset, statistics=True, compile=compile)
    for step in range(steps):
        for (_, columns), layer in zip(SHAPES, model, strict=True):
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


@pytest.mark.parametrize("preset", ["balanced", "lean"])
def test_a_piece_that_ends_within_a_block_steps_beside_whole_ones(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """The last 64 of 192 rows in blocks of 128 are a separate chunk, which is not read as packed4."""
    monkeypatch.setattr(pieces, "COMPILED_CHUNK_ELEMENTS", (128 * 256, 64 * 256))
    monkeypatch.setattr(compiled, "_programs", {})
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    both = []
    for compile in (True, False):
        layer = qt.Linear(256, 192, bias=False, dtype=torch.bfloat16)
        torch.nn.init.constant_(layer.weight, 0.1)
        qt.quantize_weights(layer, "blockwise")
        optimizer = optim.AdamW(layer.parameters(), lr=1e-2, preset=preset, compile=compile)
        draw = torch.Generator().manual_seed(0)
        for _ in range(2):
            with qt.autocast("blockwise"):
                (layer(torch.randn(8, 256, generator=draw).bfloat16()) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        both.append((layer, optimizer))
    (layer, ours), (twin, eager) = both
    assert not ours._programs.failed
    assert sorted(packed4 for _, packed4, *_ in ours._programs.programs) == [False, True]
    for key, value in ours.state[layer.weight].items():
        same(value, eager.state[twin.weight][key], key)
    for (name, t), other in zip(layer.state_dict().items(), twin.state_dict().values(), strict=True):
        same(t, other, name)


@pytest.mark.parametrize("preset", ["float32", "exact"])
def test_fake_tensors_step_without_a_program(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """The compiled step reads memory, which tensors on meta lack."""
    monkeypatch.setattr(compiled, "_programs", {})
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    with FakeTensorMode():
        p = nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = optim.AdamW([p], preset=preset, compile=True)
        optimizer.step()
    assert not optimizer._programs.programs and not optimizer._programs.failed


def test_a_copy_compiles_as_the_first_does() -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(2, 2))], compile=True)
    assert deepcopy(optimizer)._programs is not None


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
