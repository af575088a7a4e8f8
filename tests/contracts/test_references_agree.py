"""Two independent implementations of one specification give the same bits."""

import numpy as np
import pytest

from quaver.recipes import get
from quaver.recipes.formats import FORMATS
from quaver.recipes.spec import QuantSpec
from quaver.reference import quantize
from quaver.reference.numerics import encode, round_to
from tests.close import assert_bitwise
from tests.contracts import second_reference
from tests.operands import SPECS, every_nth, nasty

STREAM = {"seed": 0x1234567890ABCDEF, "tensor_id": 0xDEADBEEF, "count": 3}
SHAPES = [(5, 40), (1, 1), (130, 3), (3, 129), (16, 16), (0, 5), (5, 0), (0, 0)]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def second(x: np.ndarray, spec: QuantSpec, **given: object) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales by the second reference."""
    power_of_two = spec.scale != "two_level_fp32"
    scale = "two_level" if spec.two_level else spec.scale
    return second_reference.operand(
        x, spec.format.name, spec.block, scale, spec.rounding, spec.hadamard, power_of_two, **STREAM, **given
    )


def assert_agree(x: np.ndarray, spec: QuantSpec, what: str, **given: object) -> None:
    q = quantize(x, spec, **STREAM, **given)  # type: ignore[arg-type]
    codes, scales = second(x, spec, **given)
    assert_bitwise(q.codes(), codes, f"{what}, codes")
    assert_bitwise(q.scales(), scales, f"{what}, scales")


@every_spec
def test_codes_and_scales_agree(spec: QuantSpec) -> None:
    # Alternate, so that each spec occurs with each operand in several shapes, and each shape with several specs.
    for at, shape in enumerate(SHAPES, list(SPECS.values()).index(spec)):
        for name, x in every_nth(nasty(shape), at, 3).items():
            assert_agree(x, spec, f"{shape}, {name}")


@every_spec
def test_they_agree_under_a_given_amax(spec: QuantSpec) -> None:
    blocks = (1, 1) if spec.two_level else spec.blocks(5, spec.padded(40))
    for at, amax in enumerate((1.3, 0.0, 1e-39, 3e38, np.inf, np.nan), list(SPECS.values()).index(spec)):
        for name, x in every_nth(nasty((5, 40)), at, 3).items():
            given = np.full(blocks, amax, np.float32)
            # Where S / s_b overflows, the second reference is literal (zeros become +6) and this one stops at FLT_MAX.
            if spec.scale != "two_level_fp32" or not 0 < amax < 1:
                assert_agree(x, spec, f"{name}, amax {amax}", amax=given)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.per_tensor], ids=str)
def test_they_agree_under_a_given_factor(spec: QuantSpec) -> None:
    for name, x in nasty((5, 40)).items():
        for factor in (0.0, 8.0, 2.0**-126, 2.0**100, 0.3):
            assert_agree(x, spec, f"{name}, factor {factor}", factor=factor)


@pytest.mark.parametrize("name", second_reference.RECIPES)
def test_the_recipes_operands_agree(name: str) -> None:
    for label, given in second_reference.recipe_operands(name).items():
        spec = get(name).operands()[label]
        if spec is None or given is None:
            assert spec is given is None, label
        else:
            own = {"format": spec.format.name, "block": spec.block, "scale": spec.scale}
            own |= {"rounding": spec.rounding} if spec.rounding != "nearest" else {}
            own |= {"hadamard": True} if spec.hadamard else {}
            assert own == given, label


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.signed], ids=str)
def test_rounding_agrees_on_a_sweep_of_every_exponent(fmt) -> None:  # type: ignore[no-untyped-def]
    bits = np.arange(0, 1 << 32, 0x000F1357, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    expected = np.array([second_reference.round_to(v, fmt.name) for v in x], np.uint8)
    assert_bitwise(encode(round_to(x, fmt), fmt), np.where(np.isnan(x) & fmt.has_nan, np.uint8(0x7F), expected))
