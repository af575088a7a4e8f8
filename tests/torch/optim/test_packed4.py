"""Test that stepping four elements at once has the bits of stepping element by element."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from quaver.reference.optimizer_state import PRESETS
from quaver.torch import optim
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import decode_scales, spread
from quaver.torch.optim import codes, compiled, master_weights
from quaver.torch.optim import step as pieces
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import AdamRule, LionRule, SGDRule
from quaver.torch.optim.step import ParameterTensors, RngKey, StepConfig, step_chunk
from tests.kernels.optim.test_step import BLOCKWISE, BLOCKWISE_ANY, MXFP8, SQUARES, TENSORWISE
from tests.pairs import pairs

LEAN, EXACT = PRESETS["lean"], PRESETS["exact"]
ROWS, COLUMNS, SEED = 128, 256, 0x9E3779B97F4A7C15
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-2, "momentum": 0.0, "dampening": 0.0}
BYTES, HALVES = (LEAN.first, LEAN.second), (EXACT.first, EXACT.second)
RULE = AdamRule()
E4M3 = optim.StateSpec(code="e4m3", block=128)
ROOTS = optim.StateSpec(code="uint8_mitchell", floor=True)
#: The states of presets; also square roots of v, codes rounded to nearest, both gradient types, and other rules.
CONFIGS = {
    "lean": StepConfig(RULE, WeightFormat("residual8", TENSORWISE, True), BYTES, E4M3, True),
    "coupled": StepConfig(
        AdamRule(decoupled=False, maximize=True), WeightFormat("residual8", TENSORWISE, True), BYTES, E4M3, True
    ),
    "roots": StepConfig(RULE, WeightFormat("residual8", TENSORWISE, True), (LEAN.first, ROOTS), E4M3, True),
    "lion": StepConfig(LionRule(), WeightFormat("residual8", TENSORWISE, True), (LEAN.first,), E4M3, True),
    "balanced": StepConfig(RULE, WeightFormat("residual16", TENSORWISE), BYTES, None, True),
    "codes beside bfloat16": StepConfig(RULE, WeightFormat("residual8", TENSORWISE), HALVES, None, True),
    "lean 32x32": StepConfig(RULE, WeightFormat("residual8", SQUARES, True), BYTES, E4M3),
    "balanced 1x32": StepConfig(RULE, WeightFormat("residual16", MXFP8), BYTES),
    "any scale": StepConfig(RULE, WeightFormat("residual8", BLOCKWISE_ANY), HALVES),
    "blockwise": StepConfig(RULE, WeightFormat("residual8", BLOCKWISE, True), BYTES, E4M3),
    "exact": StepConfig(RULE, WeightFormat("remainder"), HALVES),
    "remainder beside bytes": StepConfig(RULE, WeightFormat("remainder"), BYTES),
    "lean of bfloat16": StepConfig(RULE, WeightFormat("residual8", None, True), BYTES, E4M3),
    "longer bfloat16": StepConfig(RULE, WeightFormat("residual16"), BYTES),
    "sgd": StepConfig(SGDRule(), WeightFormat("remainder"), ()),
    "sgd of longer bfloat16": StepConfig(SGDRule(), WeightFormat("residual16"), ()),
    "bfloat16 alone": StepConfig(RULE, WeightFormat("plain", None, True), HALVES),
}


def hard_values(size: float, seed: int, bad: bool) -> torch.Tensor:
    """Zeros of both signs, tiny and subnormal numbers, blocks of zeros and an outlier; if `bad`, NaN and infinities."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * size
    x[0], x[1, :64], x[2, ::3], x[3, ::5] = 0.0, -0.0, x[2, ::3] * 1e-20, x[3, ::5] * 1e-41 / size
    x[4, 7], x[5] = 1e4 * size, x[5] * 1e-30
    if bad:
        x[6, 3], x[7, 90], x[8, 64] = float("nan"), float("inf"), -float("inf")
    return x


def parameter_tensors(config: StepConfig, bad: bool) -> tuple[ParameterTensors, torch.Tensor | None]:
    weight_format, value = config.weight_format, hard_values(0.1, 0, False)
    weight: tuple[Any, ...] = (value.bfloat16(),)
    if weight_format.code_spec is not None:
        q = reference.quantize(value, weight_format.code_spec)
        weight = (q.data, q.scale)
    if weight_format.states:
        kind = torch.int8 if weight_format.kind == "residual8" else torch.int16
        weight = (*weight, torch.zeros(ROWS, COLUMNS, dtype=kind))
        weight = (*weight[:-1], *master_weights.around(weight_format, value, weight))
        # A pruning mask wrote zeros of both signs over the codes and left the residuals.
        weight[0][9].copy_(torch.zeros(COLUMNS).copysign(value[9]))
    moments: list[tuple[torch.Tensor, ...]] = []
    for spec, size in zip(config.moments, (0.1, 0.01), strict=False):
        x = hard_values(size, 1, False)
        some = torch.Generator().manual_seed(3)
        drawn = torch.randint(0, 2**15, x.shape, dtype=torch.int32, generator=some) if spec.stochastic else None
        written = codes.encode(x.abs() if moments else x, spec, drawn)
        moments.append(tuple(t for t in written if t is not None))
    gradient: Any = (hard_values(1.0, 2, bad).bfloat16(),)
    if config.gradient is not None:
        gradient = codes.encode(hard_values(1.0, 2, bad), config.gradient)
    tensors: Any = ParameterTensors(weight, tuple(moments), gradient)
    return tensors, master_weights.block_amax(
        weight_format.code_spec, master_weights.read(weight_format, weight)
    ) if config.predicts_scale else None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "keep", "bad"), pairs(CONFIGS, (None, True, False), (False, True)), ids=lambda x: str(x)
)
def test_four_at_once_have_the_bits_of_a_step_one_by_one(name: str, keep: bool | None, bad: bool) -> None:
    config = CONFIGS[name]
    keep_step = None if keep is None else torch.tensor(keep)
    ours, theirs = parameter_tensors(config, bad), parameter_tensors(config, bad)
    for step in (1, 2, 3):
        scalars = config.rule.scalars(GROUP, torch.tensor(float(step), dtype=torch.float64))
        place = pieces.ShardPosition((0, 0), (ROWS, COLUMNS), (ROWS, COLUMNS))
        words = partial(pieces.words_at, place, slice(0, ROWS), SEED, 5, step, torch.device("cpu"))
        factor = None if step == 1 else torch.tensor(0.5)
        parts, amax = theirs
        weight_bound = None if amax is None else config.rule.weight_bound(amax, scalars, ())
        expected = step_chunk(config, parts, scalars, factor, words, weight_bound, keep_step)
        own = ours[0]
        assert compiled.fits(config, own)
        done = compiled.run_packed4(
            config,
            compiled.viewed(own),
            scalars,
            factor,
            compiled._place(config, own.weight[0], True, 0, RngKey(SEED, 5, step, place)),
            weight_bound,
            keep_step,
        )
        lost = bad and config.single_scale
        if config.weight_format.code_spec is not None and not config.single_scale:
            # Do not compare blocks whose scale is NaN.
            stored = [
                decode_scales(tensors.weight[1], config.weight_format.code_spec, None) for tensors in (own, parts)
            ]
            assert torch.equal(*(scale.nan_to_num(-1) for scale in stored))
            assert bool(stored[0].isnan().any()) == (bad and keep is not False)
            valid = spread(~stored[0].isnan(), config.weight_format.code_spec.block, (ROWS, COLUMNS)).to(torch.int8)
            for tensors in (own, parts):
                tensors.weight[0].view(torch.int8).mul_(valid)
                tensors.weight[2].mul_(valid)
        same(own.weight[0], parts.weight[0], "codes", lost)
        if config.weight_format.states:
            same(own.weight[-1], parts.weight[-1], "residuals", lost)
        for one, other in zip(own.moments, parts.moments, strict=True):
            same(one[0], other[0], "a moment")
            for scale, its in zip(one[1:], other[1:], strict=True):
                same(scale, its, "its scales")
        for a, b in ((done.scale, expected.scale), (done.amax, expected.amax)):
            assert (a is None) == (b is None) == (not config.single_scale)
            assert a is None or torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))  # type: ignore[union-attr]
        assert (done.clamped is None) == (expected.clamped is None)
        assert done.clamped is None or int(done.clamped) == int(expected.clamped)  # type: ignore[arg-type]
        if (bad or keep is False) and config.single_scale:
            break
        if config.single_scale:
            for tensors, outcome in ((own, done), (parts, expected)):
                tensors.weight[1].copy_(outcome.scale)  # type: ignore[arg-type]
        theirs = (parts, expected.amax)


def same(a: torch.Tensor, b: torch.Tensor, which: str, lost: bool = False) -> None:
    """Compare bit for bit; residuals and signs of a weight with a NaN scale are ignored."""
    floats = a.dtype is torch.bfloat16
    a, b = (t.contiguous().view(torch.int16 if t.itemsize == 2 else torch.int8).int() for t in (a, b))
    if which == "residuals" and lost:
        return
    if lost:
        a, b = a & 0x7F, b & 0x7F
    if floats:
        # Any NaN equals any other.
        a, b = (torch.where((t & 0x7FFF) > 0x7F80, 0x7FC0, t) for t in (a, b))
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{which}: {len(wrong)} differ, {wrong[0].tolist()} first"


@pytest.mark.parametrize("kind", ["residual8", "residual16"])
def test_every_code_with_every_residual_decodes_as_when_single(kind: str) -> None:
    """Also for a weight set to zero with a residual below it, which decodes to zero."""
    weight_format, more = WeightFormat(kind, TENSORWISE), compiled.MORE[kind]
    code = torch.arange(256, dtype=torch.int32).repeat_interleave(256).view(512, 128)
    rest = torch.arange(-128, 128, dtype=torch.int32).repeat(256).view(512, 128) * 2 ** (more - 8)
    rest[:, ::5] += 2 ** (more - 8) - 1
    expected = master_weights.from_code_and_residual(weight_format, code, rest, more)
    assert bool(expected.isfinite().all())
    weight = (code.to(torch.uint8), rest.to(torch.int8 if more == 8 else torch.int16))
    packed = tuple(map(compiled._lanes, compiled.viewed(ParameterTensors(weight, (), weight)).weight))
    unpacked = torch.stack([compiled._weight(weight_format, packed, k, 4) for k in range(4)], -1).view(512, 128)
    assert torch.equal(unpacked.view(torch.int32), expected.view(torch.int32))


def test_other_codes_and_shapes_step_one_by_one() -> None:
    config = CONFIGS["lean"]
    own, _ = parameter_tensors(config, False)
    assert compiled.fits(config, own)
    assert not compiled.fits(replace(config, predicts_scale=False), own)
    columns = replace(TENSORWISE, block=(None, 1))
    assert not compiled.fits(replace(config, weight_format=WeightFormat("residual8", columns, True)), own)
    blocks, _ = parameter_tensors(CONFIGS["lean 32x32"], False)
    assert not compiled.fits(CONFIGS["blockwise"], blocks._replace(weight=(blocks.weight[0][:96], *blocks.weight[1:])))
    assert not compiled.fits(replace(config, weight_format=WeightFormat("float32", TENSORWISE)), own)
    assert not compiled.fits(replace(config, weight_format=WeightFormat("float16", TENSORWISE)), own)
    for other in ("int8_softsign", "float32", "bfloat16"):
        assert not compiled.fits(replace(config, moments=(optim.StateSpec(code=other), LEAN.second)), own)
    assert not compiled.fits(replace(config, gradient=None), own._replace(gradient=(torch.zeros(ROWS, COLUMNS),)))
    assert not compiled.fits(config, own._replace(weight=(own.weight[0][:, :64], *own.weight[1:])))
    for name, kind in (("lean", torch.int8), ("exact", torch.int16)):
        config, neighbour = CONFIGS[name], torch.zeros(ROWS * COLUMNS + 4, dtype=kind)
        own, _ = parameter_tensors(config, False)
        for start, fits in ((4, True), (2, False), (1, False)):
            moved = neighbour[start : start + ROWS * COLUMNS].view(ROWS, COLUMNS)
            assert compiled.fits(config, own._replace(weight=(*own.weight[:-1], moved))) == fits
    config, (own, _) = CONFIGS["lean"], parameter_tensors(CONFIGS["lean"], False)
    signed = optim.StateSpec(code="int8_mitchell", floor=True)
    assert not compiled.fits(replace(config, moments=(signed, LEAN.second)), own)
    data, scales = own.moments[0]
    transposed = scales.t().contiguous().t()
    assert not compiled.fits(config, own._replace(moments=((data, transposed), own.moments[1])))
    data, scales = own.gradient
    both = torch.cat([scales, scales], 1)[:, :1]
    assert not compiled.fits(config, own._replace(gradient=(data, both)))
    plain = StepConfig(RULE, WeightFormat("plain"), HALVES)
    assert not compiled.fits(plain, parameter_tensors(CONFIGS["bfloat16 alone"], False)[0])


def test_strided_rows_step_one_by_one_unless_aligned_to_four() -> None:
    config = CONFIGS["exact"]
    own, _ = parameter_tensors(config, False)
    for width, fits in ((132, True), (130, False), (129, False)):
        strided = torch.zeros(ROWS, width, dtype=torch.bfloat16)[:, :128]
        one = ParameterTensors(
            (strided[:1], own.weight[1][:1]), tuple((m[0][:1],) for m in own.moments), (own.gradient[0][:1],)
        )
        assert strided[:1].is_contiguous() and compiled.fits(config, one) == fits
