"""What is promised of every number, sequence and cut: enumerated where that can be done, else drawn by a seed."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import layout, master_weights
from quaver.torch.optim import step as pieces

#: A preset with three stochastically rounded codes, which share a random word by groups of ten bits.
THREE = optim.Preset(
    name="three",
    first=optim.StateSpec(code="int8_softsign", stochastic=True),
    second=optim.StateSpec(code="uint8_root", stochastic=True, floor=True),
    codes="residual8",
    bfloat16="residual8",
    stochastic=True,
)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("plain", "bfloat16"), ("exact", "bfloat16"), ("lean", "tensorwise"), ("three", "mxfp8")],
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


@pytest.mark.parametrize("preset", ["exact", "balanced", "lean", "bnb8"])
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
