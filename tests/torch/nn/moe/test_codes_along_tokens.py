"""Codes in blocks of a row, once more in blocks along tokens, as a weight gradient consumes tokens that came as codes.

Scales are powers of two, so that quantizing the values of codes is a shift of exponents: no multiplication rounds.
"""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized


def _moves(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.block[0] == 1 and spec.power_of_two and spec.format == E4M3


#: Of which recipes blocks move so: (input of fprop, input of wgrad).
MOVED = {
    name: (recipe.fprop.a, recipe.wgrad.b)
    for name, recipe in ((name, build()) for name, build in RECIPES.items())
    if _moves(recipe.fprop.a) and _moves(recipe.wgrad.b)
}


def shifted(code: int, by: int) -> int:
    """An E4M3 code's value times 2**by as a code, by whole numbers: ties to even, no code above 448."""
    sign, magnitude = code & 0x80, code & 0x7F
    exponent, mantissa = magnitude >> 3, magnitude & 7
    # The value is units * 2**(power - 9), 2**-9 the smallest there is.
    units, power = (mantissa, 0) if exponent == 0 else (mantissa | 8, exponent - 1)
    power += by
    if power < 0:
        whole, rest = divmod(units, 1 << -power)
        half = 1 << (-power - 1)
        units, power = whole + (rest > half or (rest == half and whole & 1)), 0
    while units and units < 8 and power > 0:
        units, power = units * 2, power - 1
    while units >= 16:
        units, power = units // 2, power + 1
    return sign | (units if units < 8 else (power + 1) << 3 | units & 7)


@functools.cache
def table() -> np.ndarray:
    """[256 codes, shifts from -40 to 24]."""
    return np.array(
        [[shifted(code, by) if code & 0x7F != 0x7F else 0x7F for by in range(-40, 25)] for code in range(256)]
    )


def moved(q: Quantized, spec: QuantSpec) -> Quantized:
    return qt.quantize(q.dequantize().t(), spec)


def drawn(spread: float, tokens: int = 256, features: int = 256, seed: int = 0) -> Tensor:
    """Normal values, each token scaled by its own power of two within 2**±spread."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** np.round(rng.uniform(-spread, spread, (tokens, 1)))
    return torch.from_numpy((rng.normal(size=(tokens, features)) * sizes).astype(np.float32))


def by_element(q: Quantized) -> np.ndarray:
    """float32 [rows, k]: each element's scale."""
    rows, width = q.shape
    scales = q.scales()
    wide = q.spec.block[1]
    return scales.repeat_interleave(width if wide is None else wide, 1)[:, :width].expand(rows, width).numpy()


def test_all_codes_are_shifted_as_they_are_rounded() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    spec = QuantSpec(E4M3, (None, None), "unit")
    for at, by in enumerate(range(-40, 25)):
        values = torch.ldexp(codes.float(), torch.tensor(by))
        fits = (values.abs() <= 448) | values.isnan()
        expected = qt.quantize(values.where(fits, torch.zeros(()))[:, None], spec).codes()[:, 0]
        ours = torch.from_numpy(table()[:, at])
        assert torch.equal(ours[fits & ~values.isnan()], expected[fits & ~values.isnan()].long()), by


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("spread", [0, 4, 12])
def test_values_of_codes_quantized_along_tokens_are_codes_shifted(name: str, spread: int) -> None:
    by_row, along = MOVED[name]
    assert by_row is not None and along is not None
    q = qt.quantize(drawn(spread), by_row)
    other = moved(q, along)
    shift = np.log2(by_element(q).T) - np.log2(by_element(other))
    assert (shift == np.round(shift)).all() and shift.max() <= 24
    # Beyond -40 nothing is left.
    expected = table()[q.codes().numpy().T, shift.clip(-40).astype(int) + 40]
    assert (other.codes().numpy() == expected).all()


@pytest.mark.parametrize("name", MOVED)
def test_no_value_moves_further_than_half_the_smallest_code(name: str) -> None:
    by_row, along = MOVED[name]
    assert by_row is not None and along is not None
    for spread in (0, 4, 8, 12, 40):
        q = qt.quantize(drawn(spread), by_row)
        other = moved(q, along)
        before, after = q.dequantize().t().double().numpy(), other.dequantize().double().numpy()
        of_row, of_column = by_element(q).T.astype(float), by_element(other).astype(float)
        off = np.abs(after - before)
        # Exact where a row's scale is no smaller than the column's, and else where no bit falls off its end.
        assert (off[of_row >= of_column] == 0).all()
        assert (off <= of_column * 2.0**-10).all()
        # Of the numbers themselves: a rounding to four bits, and those of both ends.
        x = drawn(spread).t().double().numpy()
        bound = np.maximum(np.abs(x) * 2.0**-4, of_row * 2.0**-10) + of_column * 2.0**-10
        assert (np.abs(after - x) <= bound).all()


#: Of normally distributed rows whose sizes are powers of two within 2**±spread: the share of values that a move leaves
#: as they are, and that are those of quantizing the numbers along tokens, at least.
SHARES = {0: (0.9999, 0.9999), 4: (0.99, 0.998), 6: (0.965, 0.99), 8: (0.84, 0.967), 12: (0.6, 0.967)}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("spread", SHARES)
def test_most_values_match_quantizing_along_tokens(name: str, spread: int) -> None:
    by_row, along = MOVED[name]
    assert by_row is not None and along is not None
    x = drawn(spread)
    q = qt.quantize(x, by_row)
    other, direct = moved(q, along), qt.quantize(x.t(), along)
    values = other.dequantize()
    exact = (values == q.dequantize().t()).double().mean()
    same = (values == direct.dequantize()).double().mean()
    assert exact >= SHARES[spread][0] and same >= SHARES[spread][1], (exact, same)
    ratio = torch.from_numpy(by_element(other) / by_element(direct)).expand(values.shape)
    # A largest number that was rounded down may let a block take the finer scale.
    assert set(ratio.unique().tolist()) <= {0.5, 1.0} and (ratio == 1).double().mean() > 0.94
    codes = (other.codes() == direct.codes())[ratio == 1].double().mean()
    assert codes >= 0.97, codes


def test_recipes_with_blocks_that_move_with_tokens() -> None:
    # The table that docs/blocks/experts.md has.
    assert set(MOVED) == {"rowwise", "blockwise", "mxfp8"}, MOVED
    nvfp4 = RECIPES["nvfp4"]()
    assert nvfp4.fprop.a is not None and not nvfp4.fprop.a.power_of_two


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(("spread", "least"), [(12, 0.975), (24, 0.965)])
def test_the_fraction_of_equal_values_is_bounded_by_the_row_spread(name: str, spread: int, least: float) -> None:
    """With 64 and 256 tokens, where the largest row is 2**spread times the smallest."""
    by_row, along = MOVED[name]
    assert by_row is not None and along is not None
    for seed in range(6):
        for tokens in (64, 256):
            x = drawn(spread / 2, tokens, seed=seed)
            direct = qt.quantize(x.t(), along)
            same = (moved(qt.quantize(x, by_row), along).dequantize() == direct.dequantize()).double().mean().item()
            assert same >= least, (seed, tokens, same)
