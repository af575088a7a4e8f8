"""A piece of bytes that steps four at once has the bits of one that steps element by element."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quaver.core.states.presets import PRESETS
from quaver.torch import optim
from quaver.torch.numerics import reference
from quaver.torch.numerics.philox import round_keys
from quaver.torch.optim import codes, weights
from quaver.torch.optim.rules.adam import Adam
from quaver.torch.optim.rules.lion import Lion
from quaver.torch.optim.stepping import fours, noise
from quaver.torch.optim.stepping.pieces import Parts, Way, move, put
from quaver.torch.optim.weights import Keeping
from tests.kernels.optim.test_step import TENSORWISE

LEAN = PRESETS["lean"]
ROWS, SEED = 96, 0x9E3779B97F4A7C15
GROUP = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-2}
#: Also roots of v, codes to nearest, and all else that a rule may be.
WAYS = {
    "lean": (Adam(), (LEAN.first, LEAN.second)),
    "coupled": (Adam(decoupled=False, maximize=True, clamp=True), (LEAN.first, LEAN.second)),
    "roots": (Adam(), (LEAN.first, optim.StateSpec(code="uint8_mitchell", floor=True))),
    "lion": (Lion(), (LEAN.first,)),
}


def hostile(size: float, seed: int, bad: bool) -> torch.Tensor:
    """Zeros of both signs, tiny and subnormal numbers, blocks of zeros, an outlier; numbers that are none."""
    x = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(seed)) * size
    x[0], x[1, :64], x[2, ::3], x[3, ::5] = 0.0, -0.0, x[2, ::3] * 1e-20, x[3, ::5] * 1e-41 / size
    x[4, 7], x[5] = 1e4 * size, x[5] * 1e-30
    if bad:
        x[6, 3], x[7, 90], x[8, 64] = float("nan"), float("inf"), -float("inf")
    return x


def piece(way: Way, bad: bool) -> tuple[Parts, torch.Tensor]:
    assert way.keeping.spec is not None and way.gradient is not None
    value = hostile(0.1, 0, False)
    q = reference.quantize(value, way.keeping.spec)
    scale: Any = q.scale
    first = torch.zeros(ROWS, 128, dtype=torch.int8)
    (beside,) = weights.around(way.keeping, value, (q.data, scale, first))
    moments = []
    for spec, size in zip(way.moments, (0.1, 0.01), strict=False):
        x = hostile(size, 1, False)
        some = torch.Generator().manual_seed(3)
        drawn = torch.randint(0, 2**15, x.shape, dtype=torch.int32, generator=some) if spec.stochastic else None
        moments.append(tuple(codes.encode(x if spec.of.signed else x.abs(), spec, drawn)))
    gradient: Any = codes.encode(hostile(1.0, 2, bad), way.gradient)
    held: Any = Parts((q.data, scale, beside), tuple(moments), gradient)
    return held, weights.block_amax(way.keeping.spec, weights.read(way.keeping, held.weight))


@pytest.mark.parametrize("bad", [False, True], ids=["numbers", "not finite"])
@pytest.mark.parametrize("keep", [None, True, False])
@pytest.mark.parametrize("name", WAYS)
def test_four_at_once_have_the_bits_of_a_step_one_by_one(name: str, keep: bool | None, bad: bool) -> None:
    rule, moments = WAYS[name]
    way = Way(rule, Keeping("residual8", TENSORWISE, True), moments, LEAN.gradient, True)
    told = None if keep is None else torch.tensor(keep)
    ours, theirs = piece(way, bad), piece(way, bad)
    for step in (1, 2, 3):
        scalars = rule.scalars(GROUP, torch.tensor(float(step), dtype=torch.float64))
        place = noise.Place((0, 0), (ROWS, 128), (ROWS, 128))
        word = noise.words_at(place, slice(0, ROWS), SEED, 5, step, torch.device("cpu"))
        factor = None if step == 1 else torch.tensor(0.5)
        parts, amax = theirs
        reach = rule.reach(amax, scalars, ())
        expected = put(way, parts, move(way, parts, scalars, factor, word, reach), told)
        own = ours[0]
        assert fours.fits(way, own)
        key, upper = noise.stream(SEED, 5, step, torch.device("cpu"))
        drawn = (t.to(torch.int32) for t in (torch.tensor(0), round_keys(key), upper))
        done = fours.run(way, fours.viewed(own), scalars, factor, tuple(drawn), reach, told)
        same(own.weight[0], parts.weight[0], "codes", lost=bad)
        same(own.weight[2], parts.weight[2], "residuals", lost=bad)
        for one, other in zip(own.moments, parts.moments, strict=True):
            same(one[0], other[0], "a moment")
            same(one[1], other[1], "its scales")
        assert done.scale is not None and expected.scale is not None and done.amax is not None
        assert torch.equal(done.scale.nan_to_num(-1), expected.scale.nan_to_num(-1))
        assert expected.amax is not None and torch.equal(done.amax.nan_to_num(-1), expected.amax.nan_to_num(-1))
        assert (done.clamped is None) == (expected.clamped is None)
        assert done.clamped is None or int(done.clamped) == int(expected.clamped)  # type: ignore[arg-type]
        if bad or keep is False:
            break
        for held, outcome in ((own, done), (parts, expected)):
            held.weight[1].copy_(outcome.scale)  # type: ignore[arg-type]
        theirs = (parts, expected.amax)


def same(a: torch.Tensor, b: torch.Tensor, which: str, lost: bool = False) -> None:
    """Bit by bit; of a weight whose scale is NaN neither residuals nor signs say anything."""
    a, b = (t.contiguous().view(torch.uint8).int() for t in (a, b))
    if which == "residuals" and lost:
        return
    if lost:
        a, b = a & 0x7F, b & 0x7F
    if which == "its scales":
        # A NaN is a NaN.
        high = [t.view(-1)[1::2] << 8 | t.view(-1)[::2] for t in (a, b)]
        a, b = (torch.where((t & 0x7FFF) > 0x7F80, 0x7FC0, t) for t in high)
    wrong = (a != b).nonzero()
    assert not len(wrong), f"{which}: {len(wrong)} differ, {wrong[0].tolist()} first"


def test_what_has_other_codes_or_shapes_steps_one_by_one() -> None:
    way = Way(Adam(), Keeping("residual8", TENSORWISE, True), (LEAN.first, LEAN.second), LEAN.gradient, True)
    own, _ = piece(way, False)
    assert fours.fits(way, own)
    assert not fours.fits(replace(way, predicts=False), own)
    assert not fours.fits(replace(way, gradient=None), own)
    assert not fours.fits(replace(way, keeping=Keeping("residual16", TENSORWISE)), own)
    softsign = optim.StateSpec(code="int8_softsign")
    assert not fours.fits(replace(way, moments=(softsign, LEAN.second)), own)
    assert not fours.fits(way, own._replace(weight=(own.weight[0][:, :64], *own.weight[1:])))
    beside = torch.zeros(ROWS * 128 + 4, dtype=torch.int8)
    for start, fits in ((4, True), (1, False)):
        moved = beside[start : start + ROWS * 128].view(ROWS, 128)
        assert fours.fits(way, own._replace(weight=(*own.weight[:2], moved))) == fits
