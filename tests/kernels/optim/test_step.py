"""The kernel of a step has the bits of the operations in torch, for parameters of several shapes in one launch."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.reference.optimizer_state import PRESETS, StateSpec
from quaver.torch.backends.gpu import device
from quaver.torch.numerics import reference
from quaver.torch.optim import codes, gpu, master_weights
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import AdamRule, LionRule, MuonRule, SGDRule
from quaver.torch.optim.step import ParameterTensors, RngKey, ShardPosition, StepConfig, step_parameter
from tests.kernels.compare import DEVICE

LEAN, BALANCED, EXACT = (PRESETS[name] for name in ("lean", "balanced", "exact"))
FLOAT, BFLOAT = StateSpec(), StateSpec(code="bfloat16")
TENSORWISE, ANY_SCALE = QuantSpec(E4M3), QuantSpec(E4M3, scale="fp32")
NOISY = StateSpec(code="bfloat16", stochastic=True)
MOMENTS = LEAN.first, LEAN.second
assert isinstance(LEAN.gradient, StateSpec)
W8R8 = WeightFormat("residual8", TENSORWISE, stochastic=True)
BLOCKWISE, BLOCKWISE_ANY = QuantSpec(E4M3, (128, 128)), QuantSpec(E4M3, (128, 128), "fp32")
MXFP8, SQUARES = QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (32, 32), "e8m0")


def config(
    weight_format: WeightFormat, moments: tuple[StateSpec, ...], rule: Any = None, gradient: Any = None
) -> StepConfig:
    predicts_scale = weight_format.code_spec is not None and weight_format.code_spec.per_tensor
    return StepConfig(rule or AdamRule(), weight_format, moments, gradient, predicts_scale)


#: Configs with a branch of their own, by name: config, and the dtypes of weight and gradient.
WAYS: dict[str, tuple[StepConfig, torch.dtype, torch.dtype]] = {
    "lean": (config(W8R8, MOMENTS, gradient=LEAN.gradient), torch.float8_e4m3fn, torch.uint8),
    "balanced": (config(WeightFormat("residual16", TENSORWISE), MOMENTS), torch.float8_e4m3fn, torch.bfloat16),
    "any scale": (
        config(replace(W8R8, code_spec=ANY_SCALE, stochastic=False), MOMENTS),
        torch.float8_e4m3fn,
        torch.bfloat16,
    ),
    "exact": (config(WeightFormat("remainder"), (NOISY, NOISY)), torch.bfloat16, torch.bfloat16),
    "lean bf16": (config(WeightFormat("residual8", stochastic=True), MOMENTS), torch.bfloat16, torch.bfloat16),
    "balanced bf16": (config(WeightFormat("residual16"), MOMENTS), torch.bfloat16, torch.float32),
    "float32": (config(WeightFormat("plain"), (FLOAT, FLOAT)), torch.float32, torch.float32),
    "moments and weight at random": (
        config(WeightFormat("plain", stochastic=True), (NOISY, NOISY)),
        torch.bfloat16,
        torch.bfloat16,
    ),
    "float16": (config(WeightFormat("plain"), (BFLOAT, BFLOAT)), torch.float16, torch.float16),
    "to nearest": (
        config(
            WeightFormat("plain"), tuple(replace(spec, stochastic=False) for spec in MOMENTS), AdamRule(clamp=False)
        ),
        *(torch.float32, torch.float32),
    ),
    "coupled": (
        config(W8R8, MOMENTS, AdamRule(decoupled=False, maximize=True), LEAN.gradient),
        *(torch.float8_e4m3fn, torch.uint8),
    ),
    "lion": (config(W8R8, MOMENTS[:1], LionRule(), LEAN.gradient), torch.float8_e4m3fn, torch.uint8),
    "lion float32": (config(WeightFormat("plain"), (FLOAT,), LionRule(maximize=True)), torch.float32, torch.float32),
    "sgd": (config(WeightFormat("plain"), (), SGDRule(maximize=True)), torch.float32, torch.float32),
    "sgd with momentum": (
        config(WeightFormat("remainder"), (NOISY,), SGDRule(momentum=True)),
        torch.bfloat16,
        torch.bfloat16,
    ),
    "nesterov lean": (
        config(
            WeightFormat("residual8", stochastic=True),
            MOMENTS[:1],
            SGDRule(momentum=True, nesterov=True),
            LEAN.gradient,
        ),
        *(torch.bfloat16, torch.uint8),
    ),
}
#: Configs of weights in codes with scales of blocks.
WAYS_OF_BLOCKS: dict[str, tuple[StepConfig, torch.dtype]] = {
    "lean blockwise": (config(replace(W8R8, code_spec=BLOCKWISE), MOMENTS, gradient=LEAN.gradient), torch.uint8),
    "balanced blockwise": (config(WeightFormat("residual16", BLOCKWISE), MOMENTS), torch.bfloat16),
    "any scale": (config(replace(W8R8, code_spec=BLOCKWISE_ANY), MOMENTS), torch.bfloat16),
    "lean 32x32": (config(replace(W8R8, code_spec=SQUARES), MOMENTS, gradient=LEAN.gradient), torch.uint8),
    "balanced 32x32": (config(WeightFormat("residual16", SQUARES), MOMENTS), torch.bfloat16),
    "masters 32x32": (config(WeightFormat("float32", SQUARES), (FLOAT, FLOAT)), torch.float32),
    "masters blockwise": (config(WeightFormat("float32", BLOCKWISE_ANY), (NOISY, NOISY)), torch.bfloat16),
    "lean 1x32": (config(replace(W8R8, code_spec=MXFP8), MOMENTS, gradient=LEAN.gradient), torch.uint8),
    "lion 32x32": (config(replace(W8R8, code_spec=SQUARES), MOMENTS[:1], LionRule()), torch.float32),
    "sgd blockwise": (config(replace(W8R8, code_spec=BLOCKWISE), MOMENTS[:1], SGDRule(momentum=True)), torch.bfloat16),
    "sgd 32x32": (config(replace(W8R8, code_spec=SQUARES), (), SGDRule(maximize=True)), torch.float32),
}
#: Several programs of whole blocks; and rows and columns that end within a block.
SHAPES_OF_BLOCKS = [(128, 256), (161, 192), (3, 200), (1, 33)]
#: Shapes with contiguous reads, several iterations and rows of two blocks; and rows that end within a block.
SHAPES = [(32, 128), (3, 200), (1, 33), (5, 64)]
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-2, "momentum": 0.9, "dampening": 0.1}
SEED = 0x9E3779B97F4A7C15


@dataclass
class Parameter:
    """A parameter with its tensors, config and state."""

    config: StepConfig
    parts: ParameterTensors
    state: dict[str, Tensor]
    place: ShardPosition
    factor: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parts.weight, *(t for moment in self.parts.moments for t in moment), *self.state.values()]


def drawn(shape: tuple[int, int], generator: torch.Generator, size: float, hostile: bool, outlier: bool) -> Tensor:
    """float32: zeros, subnormals and tiny numbers among ordinary ones; one huge one; NaN and infinities, if hostile."""
    x = torch.randn(shape, generator=generator) * size
    flat = x.view(-1)
    number = flat.numel()
    flat[: number // 16] = 0.0
    flat[number // 16 : number // 12] = -0.0
    flat[number // 12 : number // 10] *= 1e-40 / size
    flat[number // 10 : number // 8] *= 1e-20
    if outlier:
        flat[number // 2] = 1e4 * size
    if hostile:
        for i, value in enumerate((float("nan"), float("inf"), -float("inf"), 1e38)):
            flat[number - 1 - 7 * i] = value
    return x


def parameter(
    how: StepConfig, dtype: torch.dtype, gradient: torch.dtype, shape: tuple[int, int], seed: int, hostile: bool
) -> Parameter:
    generator = torch.Generator().manual_seed(seed)
    outlier = seed % 2 == 1
    value = drawn(shape, generator, 0.1, False, outlier)
    grad = drawn(shape, generator, 1.0, hostile, outlier)
    weight_format = how.weight_format
    nothing = torch.ones(shape)
    if weight_format.code_spec is not None and not weight_format.code_spec.per_tensor:
        # Blocks of zeros, and of numbers so small that they count as zeros.
        high, long = (size or 1 for size in weight_format.code_spec.block)
        nothing[:high, :long] = 0.0
        value[:high, :long] = 0.0
        nothing[:high, long : 2 * long] = 0.0
        value[:high, long : 2 * long] *= 1e-41
        grad *= nothing
    if weight_format.code_spec is not None:
        q = reference.quantize(value, weight_format.code_spec)
        assert isinstance(q.scale, Tensor)
        weights: tuple[Tensor, ...] = (q.data, q.scale)
    else:
        weights = (value.to(dtype),)
    if weight_format.states:
        kind = torch.int8 if weight_format.kind == "residual8" else torch.int16
        info = torch.iinfo(kind)
        rest = torch.randint(info.min, info.max + 1, shape, generator=generator).to(kind)
        # Residuals below zeros too, as after a pruning mask.
        weights = (*weights, value if weight_format.kind == "float32" else rest)
    moments = []
    for spec, signed, size in zip(how.moments, how.rule.signed, (0.1, 0.01), strict=False):
        x = drawn(shape, generator, size, False, outlier) * nothing
        noise = torch.randint(0, 2**15, shape, generator=generator).int() if spec.stochastic else None
        data, scale = codes.encode(x if signed else x.abs(), spec, noise)
        moments.append((data.contiguous(),) if scale is None else (data.contiguous(), scale))
    if how.gradient is not None:
        data, scale = codes.encode(grad, how.gradient)
        assert scale is not None
        given: tuple[Tensor, ...] = (data.contiguous(), scale)
    else:
        given = (grad.to(gradient),)
    state = {"step": torch.tensor(float(3 + seed))}
    if how.predicts_scale:
        assert weight_format.code_spec is not None
        state["amax"] = master_weights.block_amax(weight_format.code_spec, master_weights.read(weight_format, weights))
    # The second half of a parameter: its noise depends on the position in the whole.
    high = 1 if weight_format.code_spec is None else weight_format.code_spec.block[0] or 1
    start = -(-shape[0] // high) * high
    place = ShardPosition((start, 0), shape, (start + shape[0], shape[1]))
    factor = torch.tensor(0.37) if seed % 2 else None
    return Parameter(how, ParameterTensors(weights, tuple(moments), given), state, place, factor)


def by_kernel(parameters: list[Parameter], keep: bool | None, statistics: bool = True) -> Any:
    """Move parameters to the device, step them there and return the counts."""
    launches: list[gpu.Launch] = []
    with device.asking("triton"):
        for number, p in enumerate(parameters):
            # Tensors on a GPU are copies; the caller compares them.
            p.parts = ParameterTensors(*(moved(each) for each in p.parts))
            p.state = {name: t.to(DEVICE) for name, t in p.state.items()}
            p.factor = None if p.factor is None else p.factor.to(DEVICE)
            why = gpu.reason(p.parts.weight[0], p.config, p.parts, p.place, p.state["step"])
            assert not why, why
            row = gpu.kernel_parameter(p.config, p.parts, p.place, SEED, number, p.state, p.factor)
            assert row.form.even == (
                p.place.local_shape[1] % 128 == 0 and p.place.local_shape[0] % max(row.form.high, 1) == 0
            )
            scalars = p.config.rule.scalars(GROUP, p.state["step"].double().view(1) + 1)
            launches.append(([row], torch.stack(scalars)))
        keep_flag = None if keep is None else torch.tensor(keep, device=DEVICE)
        ((_, counts),) = gpu.launch(launches, {}, None, keep_flag, statistics)
    return counts


def moved(tensors: Any) -> Any:
    return tensors.to(DEVICE) if isinstance(tensors, Tensor) else tuple(map(moved, tensors))


def step_separately(parameters: list[Parameter]) -> list[int | None]:
    counts = []
    for number, p in enumerate(parameters):
        p.state["step"] += 1
        scalars = p.config.rule.scalars(GROUP, p.state["step"].double())
        place = RngKey(SEED, number, p.state["step"].long(), p.place)
        amax, clamped = step_parameter(p.config, p.parts, scalars, p.factor, place, p.state.get("amax"))
        if amax is not None:
            p.state["amax"].copy_(amax)
        counts.append(None if clamped is None else int(clamped))
    return counts


def assert_same(ours: Parameter, theirs: Parameter, what: str) -> None:
    """Compare bits; all NaN are equal, and residuals and signs of codes are ignored under a scale of NaN."""
    nothing = lost(theirs) if ours.config.weight_format.kind.startswith("residual") else None
    for i, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=True)):
        a, wide = a.cpu(), b.is_floating_point()
        same = (a.float() == b.float()) & (a.float().signbit() == b.float().signbit()) if wide else a == b
        same = same | (a.float().isnan() & b.float().isnan()) if wide else same
        same = same | nothing if nothing is not None and i == 2 else same
        same = same | nothing & (a.float().abs() == b.float().abs()) if nothing is not None and i == 0 else same
        assert same.all(), f"{what}: {int((~same).sum())} of tensor {i} differ, {a[~same][0]} and not {b[~same][0]}"


def lost(p: Parameter) -> Tensor | None:
    """A bool of the weight's shape: which elements have a scale of NaN."""
    spec, (rows, columns) = p.config.weight_format.code_spec, p.place.local_shape
    if spec is None:
        return None
    scale = p.parts.weight[1]
    bad = scale == 255 if scale.dtype is torch.uint8 else scale.isnan()
    bad = bad.repeat_interleave(spec.block[0] or rows, 0).repeat_interleave(spec.block[1] or columns, 1)
    return bad[:rows, :columns]


@pytest.mark.parametrize("name", WAYS)
def test_parameters_of_one_launch_step_as_their_pieces(name: str) -> None:
    """Shapes with whole blocks and without, gradients with NaN and without, factors, and noise by position."""
    how, dtype, gradient = WAYS[name]
    ours = [
        parameter(how, dtype, gradient, shape, i, hostile)
        for i, (shape, hostile) in enumerate((s, h) for h in (False, True) for s in SHAPES[: 2 + 2 * (name == "lean")])
    ]
    theirs = copy.deepcopy(ours)
    counts = by_kernel(ours, None)
    expected = step_separately(theirs)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(one, other, f"{name}, parameter {i} of {one.place.local_shape}")
        if expected[i] is not None:
            assert int(counts[i]) == expected[i], name


@pytest.mark.parametrize("name", ["lean", "lion"])
def test_betas_of_zero_step_as_their_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUP, "betas", (0.0, 0.0))
    ours = [parameter(*WAYS[name], SHAPES[0], 0, False)]
    theirs = copy.deepcopy(ours)
    by_kernel(ours, None)
    step_separately(theirs)
    assert_same(ours[0], theirs[0], name)


@pytest.mark.parametrize("name", WAYS_OF_BLOCKS)
def test_weights_with_scales_of_blocks_step_as_their_pieces(name: str) -> None:
    """Blocks of zeros, of subnormal numbers, with NaN and infinities, whole ones and those at a matrix's edges."""
    how, gradient = WAYS_OF_BLOCKS[name]
    start = 2 * (list(WAYS_OF_BLOCKS).index(name) % 2)
    shapes = SHAPES_OF_BLOCKS[start : start + 2] if name != "lean 1x32" else [(128, 256), (96, 384)]
    every = [
        parameter(how, torch.float8_e4m3fn, gradient, shape, i, hostile)
        for i, (shape, hostile) in enumerate((s, h) for h in (False, True) for s in shapes)
    ]
    ours, theirs = copy.deepcopy(every), every
    counts = by_kernel(ours, None)
    expected = step_separately(theirs)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(one, other, f"{name}, {one.place.local_shape}, {'hostile' if i > 1 else 'kind'}")
        if expected[i] is not None:
            assert int(counts[i]) == expected[i], name
    finite = [bool(lost(p).any()) for p in every if lost(p) is not None]  # type: ignore[union-attr]
    assert finite == [False] * 2 + [True] * 2


@pytest.mark.parametrize("spec", [BLOCKWISE, SQUARES], ids=str)
def test_elements_beside_a_matrix_have_no_part_in_its_scales(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without eps their update is 0 / 0."""
    monkeypatch.setitem(GROUP, "eps", 0.0)
    how = config(WeightFormat("residual16", spec), (FLOAT, FLOAT))
    ours = [parameter(how, torch.float8_e4m3fn, torch.float32, (3, 200), 0, False)]
    for tensor in (*ours[0].parts.gradient, *(t for moment in ours[0].parts.moments for t in moment)):
        tensor.fill_(0.5)
    theirs = copy.deepcopy(ours)
    by_kernel(ours, None)
    step_separately(theirs)
    assert_same(ours[0], theirs[0], "without eps")
    scales = lost(ours[0])
    assert scales is not None and not scales.any()


@pytest.mark.parametrize(
    ("spec", "shape", "start", "why"),
    [
        (MXFP8, (33, 128), 0, "32 rows at a time"),
        (MXFP8, (32, 64), 0, "blocks of 128"),
        (SQUARES, (48, 64), 0, "its blocks cross shards"),
        (SQUARES, (32, 64), 16, "its blocks cross shards"),
        (SQUARES, (16, 64), 64, ""),
    ],
)
def test_unsupported_blocks_give_a_reason(spec: QuantSpec, shape: tuple[int, int], start: int, why: str) -> None:
    how = config(WeightFormat("residual16", spec), MOMENTS)
    p = parameter(how, torch.float8_e4m3fn, torch.bfloat16, shape, 0, False)
    place = ShardPosition((start, 0), shape, (80, shape[1]))
    message = gpu.reason(p.parts.weight[0], how, p.parts, place, p.state["step"])
    assert (why in message) if why else not message, message


def test_weights_of_blocks_are_left_where_a_step_is_skipped() -> None:
    for name in ("lean blockwise", "lean 32x32"):
        how, gradient = WAYS_OF_BLOCKS[name]
        ours = [parameter(how, torch.float8_e4m3fn, gradient, shape, 2, False) for shape in SHAPES_OF_BLOCKS[:2]]
        before = copy.deepcopy(ours)
        by_kernel(ours, False)
        for one, other in zip(ours, before, strict=True):
            assert_same(one, other, name)


def test_configs_rules_and_groups_share_a_step_and_a_false_flag_keeps_all() -> None:
    """Parameters of different configs share one table; each config has one launch."""
    ours = [parameter(*WAYS[name], SHAPES[i % 2], i, False) for i, name in enumerate(("lean", "exact", "float32"))]
    before = copy.deepcopy(ours)
    by_kernel(ours, False)
    for one, other in zip(ours, before, strict=True):
        assert_same(one, other, "unchanged")
    by_kernel(ours, True)
    step_separately(before)
    for one, other in zip(ours, before, strict=True):
        assert_same(one, other, "stepped")


def test_a_chunk_of_many_rounds_and_several_chunks_are_one_parameter() -> None:
    how, dtype, gradient = WAYS["lean"]
    ours = [parameter(how, dtype, gradient, (64, 512), 2, False)]
    theirs = copy.deepcopy(ours)
    by_kernel(ours, None, statistics=False)
    step_separately(theirs)
    assert_same(ours[0], theirs[0], "two programs")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"moments": (StateSpec(code="int8_dynamic", block=256, scale="float32"), FLOAT)}, "int8_dynamic/256 float32"),
        ({"moments": (StateSpec(code="int8_softsign", block=32), FLOAT)}, "int8_softsign/32"),
        ({"weight_format": WeightFormat("float32", TENSORWISE), "predicts_scale": False}, "masters in float32"),
        ({"weight_format": WeightFormat("residual8", QuantSpec(E4M3, (64, 64)))}, "those of blockwise and mxfp8"),
        (
            {"weight_format": WeightFormat("residual8", QuantSpec(E4M3, (128, 128), "e8m0"))},
            "those of blockwise and mxfp8",
        ),
        ({"weight_format": WeightFormat("float16", BLOCKWISE), "predicts_scale": False}, "masters in float16"),
        ({"predicts_scale": False}, "depends on the weight after the step"),
        ({"gradient": StateSpec(code="e4m3", block=64)}, "gradients in e4m3/64"),
        ({"rule": SGDRule(momentum=True), "moments": MOMENTS[:1]}, "depends on the largest gradient"),
        ({"rule": MuonRule(), "moments": MOMENTS[:1]}, "does not support Muon"),
    ],
)
def test_unsupported_parameters_give_a_reason(changed: dict[str, Any], why: str) -> None:
    how, dtype, gradient = WAYS["lean"]
    p = parameter(how, dtype, gradient, (32, 128), 0, False)
    assert why in gpu.reason(p.parts.weight[0], replace(how, **changed), p.parts, p.place, p.state["step"])
