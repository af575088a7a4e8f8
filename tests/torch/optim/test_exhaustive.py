"""What is promised of every number, sequence and cut: enumerated where that can be done, else drawn by a seed."""

import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.reference import optim as bounds
from quaver.torch import optim
from quaver.torch.optim import layout, master_weights
from quaver.torch.optim import step as pieces
from quaver.torch.optim.layout import key_of
from quaver.torch.optim.master_weights import WeightFormat

BETAS = ((0.9, 0.95), (0.9, 0.999), (0.0, 0.99), (0.5, 0.3), (0.95, 0.95), (0.99, 0.9999), (0.3, 0.0901))
#: A preset with three stochastically rounded codes, which share a random word by groups of ten bits.
THREE = optim.Preset(
    name="three",
    first=optim.StateSpec(code="int8_softsign", stochastic=True),
    second=optim.StateSpec(code="uint8_root", stochastic=True, floor=True),
    codes="residual8",
    bfloat16="residual8",
    stochastic=True,
)


def sequences(steps: int, number: int, betas: tuple[float, float], decades: float, rng: Any) -> np.ndarray:
    """Gradients that push an update to its bound, each by one of seven patterns: float64 [steps, number]."""
    t, sign = np.arange(steps)[:, None], rng.choice([-1.0, 1.0], (steps, number))
    size = 10.0 ** rng.uniform(-decades, decades, number)
    last = rng.integers(1, steps, number)
    rising = (betas[0] / betas[1]) ** (last - t).clip(0, 300)
    patterns = (
        sign,
        rng.standard_normal((steps, number)),
        10.0 ** rng.uniform(-decades / 2, decades / 2, (steps, number)) * sign,
        np.where(rng.random((steps, number)) < 0.05, sign, 0.0),
        (t == last) * 1.0,
        # Reaches the bound at the step `last`, and continues with zeros or with the opposite sign.
        np.where(t <= last, rising, 0.0),
        np.where(t <= last, rising, -rising),
    )
    chosen = rng.integers(0, len(patterns), number)
    return np.choose(chosen, np.stack(patterns)) * size / decades


@pytest.mark.parametrize("betas", BETAS)
def test_no_gradients_move_an_update_beyond_its_bound(betas: tuple[float, float]) -> None:
    """In float64 the bound holds, and with float32 states no element is clamped."""
    rng = np.random.default_rng(0)
    g = sequences(80, 4096, betas, 12.0, rng)
    m, v = np.zeros(4096), np.zeros(4096)
    # eps only avoids 0 / 0; it makes updates smaller.
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = optim.AdamW([p], 1.0, betas, 1e-30, weight_decay=0.0, preset="float32", statistics=True)
    largest = 0.0
    for step, gradient in enumerate(g, 1):
        m, v = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v + (1 - betas[1]) * gradient**2
        update = (m / (1 - betas[0] ** step)) / (np.sqrt(v / (1 - betas[1] ** step)) + 1e-300)
        largest = max(largest, float(np.abs(update).max()) / bounds.adam(step, *betas))
        p.grad = torch.tensor(gradient, dtype=torch.float32).view(64, 64)
        optimizer.step()
    assert 0.9999 < largest < 1 + 1e-9
    # If v falls by two thirds per step, it underflows float32 within the run, and updates are clamped.
    assert betas[1] < 0.9 or int(optimizer.counted[p][0]) == 0


@pytest.mark.parametrize("number", [1, 2])
def test_noise_parts_are_uniform_with_the_documented_correlation(number: int) -> None:
    """Means and products of pairs, for a million elements and their neighbours, are within three sigmas."""
    count = 1 << 20
    drawn = pieces.split_noise(pieces.words(3, count, 11, 5, 7, torch.device("cpu")), number)
    # For uniform numbers in [0, 1) minus their mean, with variance 1 / 12.
    centred = [share.double() / 2**15 + 2.0**-16 - 0.5 for share in drawn]
    for share in centred:
        assert abs(float(share.mean())) < 3 * (1 / 12 / count) ** 0.5
        assert abs(float(share.square().mean()) * 12 - 1) < 3 * (0.8 / count) ** 0.5 + 1e-6
    after = [share.roll(-1) for share in centred]
    for a, b in [*itertools.combinations(centred, 2), *itertools.product(centred, after)]:
        assert abs(float((a * b).mean())) * 12 < 2.0 ** -(16 // number) + 3 / count**0.5
    # Rounding errors of two codes of one element are nearly independent.
    for a, b in itertools.combinations(drawn, 2):
        for at, to in itertools.product((100, 5_000, 16_384, 31_000), repeat=2):
            up, too = (a < at).double(), (b < to).double()
            together = float((up * too).mean() - up.mean() * too.mean())
            assert abs(together) < 2.0 ** -(16 // number) / 4 + 3 / 2 / count**0.5


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("plain", "bfloat16"), *itertools.product(("exact", "lean", "three"), ("bfloat16", "tensorwise", "mxfp8"))],
)
def test_stochastic_rounding_of_a_step_is_unbiased(kind: str, dtype: str) -> None:
    """Over 200 draws of a full step with 4096 elements, means of moments and weights are within three sigmas."""
    torch.manual_seed(0)
    preset = {"three": THREE, "plain": optim.Preset(name="plain", bfloat16="none")}.get(kind)
    layer: Any = qt.Linear(64, 64, bias=False, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    if dtype != "bfloat16":
        qt.quantize_weights(layer, dtype)
    p = layer.weight
    optimizer = optim.AdamW([p], lr=0.1, betas=(0.9, 0.99), preset=preset or kind)
    group = optimizer.param_groups[0]
    p.grad = torch.randn(64, 64).to(p.grad_dtype or torch.float32)
    optimizer.step()
    config = optimizer.config(p, group)
    parts = optimizer.parts(p, config)
    parts = copied(parts)
    scalars = tuple(s[0] for s in config.rule.scalars(group, torch.tensor([2.0], dtype=torch.float64)))
    amax = optimizer.state[p].get("amax")
    if amax is not None:
        amax = config.rule.weight_bound(amax, scalars, ())
    exact = config.rule(
        master_weights.read(config.weight_format, parts.weight),
        parts.gradient[0].float(),
        tuple(pieces._decoded(held, spec) for held, spec in zip(parts.moments, config.moments, strict=True)),
        scalars,
    )
    wanted: dict[str, Tensor] = {}
    draws: dict[str, list[Tensor]] = {}
    if config.weight_format.stochastic:
        wanted["weight"] = exact.weight
    wanted |= {
        f"moment {i}": value
        for i, (value, spec) in enumerate(zip(exact.moments, config.moments, strict=True))
        if spec.stochastic
    }
    assert wanted and config.noise_per_element == ("weight" in wanted) + any(name != "weight" for name in wanted)
    for step in range(200):
        word = pieces.words(0, 4096, 3, 1, step, torch.device("cpu")).view(64, 64)
        moved = copied(parts)
        pieces.step_chunk(config, moved, scalars, None, partial(next, iter([word])), amax, None)
        values = {"weight": master_weights.read(config.weight_format, moved.weight)}
        values |= {
            f"moment {i}": pieces._decoded(held, spec)
            for i, (held, spec) in enumerate(zip(moved.moments, config.moments, strict=True))
        }
        for name in wanted:
            draws.setdefault(name, []).append(values[name].double())
    for name, want in wanted.items():
        values = torch.stack(draws[name])
        errors, step = values - want.double(), values.amax(0) - values.amin(0)
        spread = errors.std(0)
        # Elements whose two codes are both likely; a floor rounds up values below the smallest code.
        both = (step > 0) & (spread > step / 4) & (values.amin(0).abs() > float(want.abs().amax()) * 1e-4)
        assert int(both.sum()) > 1000, name
        z = (errors.mean(0) / spread * 200**0.5)[both]
        assert abs(float(z.mean())) * len(z) ** 0.5 < 3, name
        # The square of a Student t variable with 199 degrees of freedom: mean 199 / 197, variance slightly above 2.
        assert abs(float(z.square().mean()) - 199 / 197) < 3 * (2.1 / len(z)) ** 0.5, name


def copied(parts: pieces.ParameterTensors) -> pieces.ParameterTensors:
    moments = tuple(tuple(t.clone() for t in held) for held in parts.moments)
    return pieces.ParameterTensors(tuple(t.clone() for t in parts.weight), moments, parts.gradient)


def cuts(rows: int, world: int, rng: np.random.Generator) -> list[list[int]]:
    """Boundaries of row shards: torch's, and random ones, also with empty shards."""
    size = -(-rows // world)
    evenly = [min(i * size, rows) for i in range(world + 1)]
    return [evenly, [0, *sorted(rng.integers(0, rows + 1, world - 1).tolist()), rows]]


@pytest.mark.parametrize("preset", ["exact", "balanced", "lean", "coat", "flashoptim", "bnb8", THREE], ids=str)
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (37, 3, 88)), (torch.bfloat16, (37, 3, 88)), (torch.float32, (37, 8, 3, 3))]
)
def test_any_split_of_rows_steps_like_the_whole(
    dtype: torch.dtype, shape: tuple[int, ...], preset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, codes and scales are equal for 1, 2, 3 and 5 ranks, with uneven and empty shards."""
    monkeypatch.setattr("quaver.torch.optim.optimizer.SMALL", 0)
    places: dict[int, pieces.ShardPosition] = {}
    place = layout.place
    monkeypatch.setattr(layout, "place", lambda p: places.get(id(p)) or place(p))
    rng = np.random.default_rng(0)
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=draw).to(dtype)
    gradients = [torch.randn(shape, generator=draw) * 10.0**-i for i in range(2)]

    def train(begin: int, end: int) -> dict[str, Tensor]:
        p = nn.Parameter(first[begin:end].clone())
        places[id(p)] = pieces.ShardPosition((begin, *[0] * (len(shape) - 1)), tuple(p.shape), shape)
        optimizer = optim.AdamW([p], lr=1e-2, preset=preset, seed=5)
        for gradient in gradients:
            p.grad = gradient[begin:end].to(p.grad_dtype or torch.float32)
            optimizer.step()
        return {"weight": p.detach(), **{k: v for k, v in optimizer.state[p].items() if v.dim()}}

    whole = train(0, 37)
    for world in (1, 2, 3, 5):
        for edges in cuts(37, world, rng):
            parts = [train(*edge) for edge in itertools.pairwise(edges)]
            for name, value in whole.items():
                assert torch.equal(torch.cat([part[name] for part in parts]), value), (name, edges)


def test_a_cut_along_any_dimensions_draws_the_words_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        shape = tuple(int(n) for n in rng.integers(1, 12, rng.integers(1, 4)))
        whole = pieces.words(0, int(np.prod(shape)), 9, 2, 4, torch.device("cpu")).view(shape)
        start = tuple(int(rng.integers(0, n + 1)) for n in shape)
        part = tuple(int(rng.integers(0, n - at + 1)) for n, at in zip(shape, start, strict=True))
        if 0 in part:
            continue
        rows = int(np.prod(part[:-1]))
        drawn = pieces.words_at(pieces.ShardPosition(start, part, shape), slice(0, rows), 9, 2, 4, torch.device("cpu"))
        own = whole[tuple(slice(at, at + n) for at, n in zip(start, part, strict=True))]
        assert torch.equal(drawn.view(part), own), (shape, start, part)


@pytest.mark.parametrize("exponent", [0, 127, 254, 255])
def test_a_remainder_keeps_all_mantissas(exponent: int) -> None:
    """All 2**23 mantissas of subnormals, of numbers of both signs, of the largest numbers, and of NaN."""
    bits = torch.arange(1 << 23, dtype=torch.int32) | (exponent << 23)
    bits = (bits | (-(1 << 31) if exponent % 2 else 0)).view(1, -1)
    weight, weight_format = bits.view(torch.float32), WeightFormat("remainder")
    held = master_weights.write(weight_format, weight, (torch.empty(0, dtype=torch.bfloat16),), None)
    back = master_weights.read(weight_format, held).view(torch.int32)
    # NaN stays NaN, but its payload is lost.
    assert torch.equal(back, torch.where(weight.isnan(), 0x7FC00000, bits))
    if exponent < 255:
        assert int(((bits >> 16) - held[0].view(torch.int16).int()).abs().max()) <= 1


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "bfloat16"])
def test_residuals_of_all_codes_become_finer_without_a_loss(recipe: str) -> None:
    """Convert W8R8 to W8R16 and to float32, for every code with every possible residual."""
    spec = None
    if recipe == "bfloat16":
        data = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 1)
        data = data[data.isfinite()].view(-1, 1).repeat(1, 64)
        residual = torch.cat([torch.arange(-128, -112), torch.arange(-8, 8), torch.arange(96, 128)])
        weight: tuple[Tensor, ...] = (data,)
    else:
        layer: Any = qt.Linear(256, 256, bias=False)
        qt.quantize_weights(layer, recipe)
        spec = layer.weight_spec
        data = torch.arange(256, dtype=torch.uint8).view(-1, 1).repeat(1, 256)
        data = torch.where(data.view(torch.float8_e4m3fn).isnan(), 0, data).view(torch.float8_e4m3fn)
        residual = torch.arange(-128, 128)
        weight = (data, layer.weight.scale)
    # There is no magnitude below zero.
    residual = torch.where(data.float() == 0, residual.clamp(min=0), residual).to(torch.int8).contiguous()
    old = WeightFormat("residual8", spec, True)
    value = master_weights.read(old, (*weight, residual))
    for kind in ("residual16", "float32") if spec is not None else ("residual16", "remainder"):
        weight_format = WeightFormat(kind, spec)
        neighbours = master_weights.first_states(weight_format, data, value)
        neighbours = master_weights.around(weight_format, value, (*weight, *neighbours))
        assert torch.equal(master_weights.read(weight_format, (*weight, *neighbours)), value), kind


KINDS = ("float32", "bfloat16", "tensorwise", "mxfp8")


@pytest.mark.parametrize("before", optim.PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_presets_become_each_other_as_float32_becomes_them(kind: str, before: str) -> None:
    """Converting between presets gives the same codes, moments and residuals as converting through float32."""
    torch.manual_seed(0)
    layer: Any = qt.Linear(160, 64, bias=False, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind in KINDS[2:]:
        qt.quantize_weights(layer, kind)
    p = layer.weight

    def optimizer_of(preset: str, state: Any = None) -> optim.Optimizer:
        optimizer = optim.AdamW([p], lr=1e-3, preset=preset)
        if state is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.load_state_dict(state)
        return optimizer

    first = optimizer_of(before)
    for _ in range(2):
        p.grad = torch.randn(64, 160).to(p.grad_dtype or torch.float32)
        first.step()
    plain = optimizer_of("float32", first.state_dict())
    group, read = plain.param_groups[0], master_weights.read
    whole = read((config := plain.config(p, group)).weight_format, layout.tensors_of_weight(p, config, plain.state[p]))
    old = first.config(p, first.param_groups[0])
    # For a negative number half a step from a bfloat16, the remainder is one float32 ulp too small.
    ulp = 2.0**-23 if (kind, before) == ("bfloat16", "lean") else 0.0
    torch.testing.assert_close(
        whole, read(old.weight_format, layout.tensors_of_weight(p, old, first.state[p])), rtol=ulp, atol=0
    )
    for name, spec in zip(old.rule.names, old.moments, strict=True):
        held = first.state[p][key_of(name, spec)], first.state[p].get(f"{name}_scale")
        assert torch.equal(plain.state[p][name], optim.codes.decode(*held, spec))
    for after in optim.PRESETS:
        direct, through = optimizer_of(after, first.state_dict()), optimizer_of(after, plain.state_dict())
        new = direct.config(p, direct.param_groups[0])
        same = {name for name, a, b in zip(new.rule.names, old.moments, new.moments, strict=True) if a == b}
        for name, value in direct.state[p].items():
            if name.removesuffix("_scale").removesuffix("_codes") in same:
                # Codes were loaded unchanged; a block whose maximum was rounded down now has another scale.
                assert torch.equal(value, first.state[p][name])
            elif name == "amax":
                torch.testing.assert_close(value, through.state[p][name], rtol=1e-6, atol=0)
            else:
                assert torch.equal(value, through.state[p][name]), (after, name)
