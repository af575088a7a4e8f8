"""Properties of every code of optimizer states for any input, tested on the reference for all other versions."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from quaver.reference import optim
from quaver.reference.optimizer_state import CODES, INTEGERS, StateCode, StateSpec
from tests.states import KINDS, drawn, every_spec

F = np.float32
SPECS = [spec for spec in every_spec((16, None)) if spec.scale == "bfloat16" or spec.of.numbers > 1]
SCALED = [spec for spec in SPECS if spec.of.scaled]
NEAREST = [spec for spec in SCALED if not spec.stochastic and not spec.floor]
RANDOM = [spec for spec in SPECS if spec.stochastic and spec.block and not spec.floor]


def examples(spec: StateSpec) -> Iterator[np.ndarray]:
    """Finite numbers of every kind, in blocks that are whole, ragged and of one element."""
    for seed, kind in product(range(4), KINDS):
        for shape in ((3, 1), (2, 16), (3, 37)):
            x = of(spec, drawn(kind, shape, np.random.default_rng(seed)))
            yield np.where(np.isfinite(x), x, F(0))


def of(spec: StateSpec, x: np.ndarray) -> np.ndarray:
    return x if spec.of.signed else np.abs(x)


def words(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**15, shape).astype(np.int32)


def every_value(code: StateCode) -> np.ndarray:
    """Magnitudes of a code as multiples of its scale, ascending."""
    every = np.arange(2 ** (8 * code.bytes)).astype(np.uint8 if code.bytes == 1 else np.uint16)
    signed = code.signed and code.kind in INTEGERS
    kind = np.int8 if signed else np.float16 if code.kind == "float16" else every.dtype
    values = np.abs(optim.table_values(every.view(kind), code))
    # -128 is no code; of kind "mitchell" the largest is slightly above the nominal one.
    return np.unique(values[values <= code.largest * (1 + 2.0**-15)]).astype(np.float64)


def crooked(code: StateCode) -> float:
    """Below this value, the map of fourth roots is not linear between two codes."""
    return float(optim.table_values(np.array([4]), code)[0]) if code.halvings == 2 else 0.0


def steps(y: np.ndarray, code: StateCode) -> np.ndarray:
    """Where a code's own steps are even: the scale on which it rounds to the nearest."""
    if code.kind == "softsign":
        return 254 * y / (1 + y)
    return np.sqrt(y) if code.root or code.kind == "root" else y


@pytest.mark.parametrize("spec", [spec for spec in NEAREST if spec.of.numbers == 1], ids=lambda spec: spec.text)
def test_decoded_values_are_within_half_a_step(spec: StateSpec) -> None:
    grid = steps(every_value(spec.of), spec.of)

    for x in examples(spec):
        # The signed map has 1 and lacks -1.
        x = np.abs(x) if spec.of.kind == "dynamic" else x
        codes, scale = optim.encode(x, spec)
        assert scale is not None
        spread = optim.over_blocks(scale, x.shape, spec.block).astype(np.float64)
        within = (spread > 0) & (np.abs(x) <= spread * spec.of.largest)
        y = np.abs(x.astype(np.float64))[within] / spread[within]
        values = optim.table_values(codes, spec.of).astype(np.float64)[within]
        wanted, at = steps(y, spec.of), steps(np.abs(values), spec.of)
        above = np.clip(np.searchsorted(grid, wanted), 1, len(grid) - 1)
        step = grid[above] - grid[above - 1]
        # The quotient that is rounded has been rounded twice or thrice itself.
        most = np.where(wanted < crooked(spec.of), step, step / 2)
        assert (np.abs(wanted - at) <= most + 4e-7 * (wanted + grid[1])).all()
        assert (np.signbit(values) == np.signbit(x[within]))[values != 0].all()


@pytest.mark.parametrize(
    "spec",
    [spec for spec in SPECS if spec.block != 16 or spec.code == "bfloat16"]
    + [spec for spec in SCALED if spec.of.numbers > 1],
    ids=lambda spec: spec.text,
)
def test_decoding_is_monotonic(spec: StateSpec) -> None:
    for x in examples(spec):
        x = np.sort(x.reshape(1, -1)[:, :16])
        noise = np.full(x.shape, x.view(np.uint32).sum() % 2**15, np.int32)
        # The same noise rounds the two signs in opposite directions; each sign is monotonic.
        for part in (x, np.abs(x), -np.abs(x)) if spec.of.signed else (x,):
            part = np.sort(part)
            if spec.stochastic and (part < 0).any() and (part > 0).any():
                continue
            values = optim.decode(*optim.encode(part, spec, noise), spec)
            assert (np.diff(values.astype(np.float64)) >= 0).all(), (part, values)


@pytest.mark.parametrize("spec", [spec for spec in SCALED if spec.floor], ids=lambda spec: spec.text)
def test_with_a_floor_no_number_but_zero_is_read_as_zero(spec: StateSpec) -> None:
    for x in examples(spec):
        codes, scale = optim.encode(x, spec, words(x.shape))
        assert scale is not None
        usable = optim.over_blocks(scale, x.shape, spec.block) > 0
        assert (codes[(x != 0) & usable] != 0).all()
        assert (codes[x == 0] == 0).all()


@pytest.mark.parametrize("spec", RANDOM, ids=lambda spec: spec.text)
def test_noise_of_every_interval_is_unbiased(spec: StateSpec) -> None:
    """A million evenly spaced words: more exact than random ones, whose three sigmas would be a fiftieth of a step."""
    rng = np.random.default_rng(0)
    if spec.code == "bfloat16":
        grid = (np.sort(rng.integers(0x0080, 0x7F00, 257)).astype(np.uint32) << 16).view(F).astype(np.float64)
        low, high = grid, (grid.astype(F).view(np.uint32) + 0x10000).view(F).astype(np.float64)
    else:
        grid = every_value(spec.of)
        low, high = grid[:-1], grid[1:]
    count = -(-(10**6) // len(low))
    even = ((np.arange(count) + 0.5) * 2**15 / count).astype(np.int32)
    sign = rng.choice([-1, 1] if spec.of.signed else [1], len(low))
    x = (sign * (low + (high - low) * rng.uniform(0.01, 0.99, len(low)))).astype(F)
    whole = np.broadcast_to(x[:, None], (len(x), count))
    # A first element of the largest magnitude makes the scale one.
    top = np.full((len(x), 1), spec.of.largest, F)
    one = StateSpec(code=spec.code, block=None if not spec.of.scaled else count + 1, stochastic=True)
    codes, scale = optim.encode(
        np.concatenate([top, whole], 1), one, np.pad(np.tile(even, (len(x), 1)), ((0, 0), (1, 0)))
    )
    assert scale is None or (scale == 1).all()
    values = optim.decode(codes, scale, one)[:, 1:].astype(np.float64)
    step = high - low
    assert set(np.unique(np.round((np.abs(values) - low[:, None]) / step[:, None], 4))) == {0.0, 1.0}
    straight = low >= crooked(spec.of)
    assert (np.abs(values.mean(1) - x) / step)[straight].max() < 2 / count + 1e-5
    assert (np.abs(values.mean(1) - x) / step)[~straight].max(initial=0) < 0.5


@pytest.mark.parametrize("spec", [spec for spec in SCALED if spec.block], ids=lambda spec: spec.text)
def test_blocks_of_zeros_subnormals_and_nonfinite_values(spec: StateSpec) -> None:
    x = np.zeros((6, 16), F)
    x[1] = F(1e-42)
    x[2], x[3], x[4] = 1.0, 1.0, 1.0
    x[2, 3], x[3, 3], x[4, 3] = np.nan, np.inf, -np.inf if spec.of.signed else np.inf
    x[5], x[5, 7] = 1e-3, 1e30
    codes, scale = optim.encode(x, spec, words(x.shape))
    values = optim.decode(codes, scale, spec)
    assert (values[:2] == 0).all() or (spec.of.largest < 2 and np.abs(values[1]).max() <= 2.0**-126)
    assert np.isnan(values[2:5]).all(), "a block that is not finite is read as such"
    assert abs(values[5, 7] / F(1e30) - 1) < 0.1
    assert (np.abs(np.delete(values[5], 7)) <= 1e30 / 60).all()
    alone, _ = optim.encode(x[5:], spec, words(x.shape)[5:])
    assert (alone == codes[5:]).all()


@pytest.mark.parametrize("scale", ["bfloat16", "float32", "power_of_two"])
@pytest.mark.parametrize(
    "code", [code for code in CODES.values() if code.scaled and code.numbers == 1], ids=lambda c: c.name
)
def test_a_scale_is_never_below_the_largest_magnitude_over_the_largest_code(code: StateCode, scale: str) -> None:
    spec = StateSpec(code=code.name, block=16, scale=scale)

    for x in examples(spec):
        top = optim.in_blocks(np.abs(x), 16).max(-1)
        scales = optim.scales(x, spec)
        covered = scales.astype(np.float64) * code.largest
        usable = (scales > 0) & (scales < optim.LARGEST_SCALE)
        # A float32 scale is the nearest quotient, half an ulp below at most; others are rounded up.
        least = top.astype(np.float64) * (1 - 2.0**-24)
        assert (covered >= least)[usable].all()
        assert (covered <= least * (2.0 if scale == "power_of_two" else 1 + 2.0**-7) + 2.0**-125 * code.largest)[
            usable
        ].all()
        assert (top[scales == 0] <= code.largest * 2.0**-126).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.block], ids=lambda spec: spec.text)
def test_a_piece_along_the_rows_is_written_as_the_whole(spec: StateSpec) -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        x = of(spec, drawn(kind, (7, 37), rng))
        noise = words(x.shape)
        with np.errstate(all="ignore"):
            whole, scale = optim.encode(x, spec, noise)
            for rows in (slice(0, 3), slice(3, 7), slice(5, 5)):
                piece, own = optim.encode(x[rows], spec, noise[rows])
                np.testing.assert_array_equal(piece, whole[rows])
                if scale is not None:
                    np.testing.assert_array_equal(own, scale[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_anything_can_be_written_and_read(kind: str) -> None:
    for spec, shape in product(SPECS, ((0, 3), (3, 0), (), (5,), (2, 3, 37))):
        x = of(spec, drawn(kind, shape, np.random.default_rng(0)))
        with np.errstate(all="ignore"):
            values = optim.decode(*optim.encode(x, spec, words(x.shape)), spec)
        assert values.shape == x.shape and values.dtype == F
