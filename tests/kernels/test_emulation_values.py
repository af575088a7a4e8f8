"""Values of codes from one kernel, without codes: the bits of the reference after quantizing and decoding, also from
codes that are saved for later."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E2M1, E2M3, E3M2, E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import emulation
from quaver.torch.numerics import reference
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE
from tests.operands import nasty

BF16 = torch.bfloat16
NAMES = ["wide", "ties", "NaN", "huge", "normal", "-infinity", "sparse", "negative zeros", "subnormal"]
LINES = [
    QuantSpec(E4M3, (1, 32), "e8m0"),
    QuantSpec(E5M2, (1, 32), "e8m0"),
    QuantSpec(E2M3, (1, 32), "e8m0"),
    QuantSpec(E3M2, (1, 16), "e8m0"),
    QuantSpec(E2M1, (1, 32), "e8m0"),
    QuantSpec(E4M3, (1, 128), "power_of_two"),
]
SQUARES = [QuantSpec(E4M3, (32, 32), "e8m0"), QuantSpec(E4M3, (128, 128), "power_of_two")]
SHAPES = [(64, 128), (5, 7), (130, 65)]
#: Shapes whose rows are a multiple of 16.
WHOLE = [(128, 128), (16, 7), (80, 200)]
TWO_LEVELS = {
    "lines": (QuantSpec(E2M1, (1, 16), "two_level"),) * 2,
    "rotated": (QuantSpec(E2M1, (1, 16), "two_level"), QuantSpec(E2M1, (1, 16), "two_level", hadamard=True)),
    "squares": (QuantSpec(E2M1, (16, 16), "two_level"),) * 2,
}


def reference_values(x: Tensor, spec: QuantSpec, *given: Any) -> Tensor:
    """Values of the reference's codes as bf16, clamped to its largest number."""
    v = reference.quantize(x, spec, *given).dequantize()
    largest = torch.finfo(BF16).max
    half = torch.where(v.isinf(), v.sign() * largest, v).to(BF16)
    assert torch.equal(half.float().nan_to_num(), torch.where(v.isinf(), v.sign() * largest, v).nan_to_num())
    return half


def assert_values(name: str, ours: Tensor | None, expected: Tensor) -> None:
    assert ours is not None and ours.dtype is BF16, name
    assert_bitwise(ours.float(), expected.float(), name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", LINES + SQUARES, ids=str)
def test_blocks_have_the_values_of_the_references_codes(spec: QuantSpec, shape: tuple[int, int]) -> None:
    # Alternate, so that each spec and each shape occur with each kind of operand.
    for name in NAMES[SHAPES.index(shape) :: 3]:
        x = torch.from_numpy(nasty(shape)[name]).to(DEVICE).to(BF16)
        along, down, saved = emulation.values(x, spec, False)
        assert saved is None
        assert_values(name, along, reference_values(x, spec))
        expected = reference_values(x.t(), spec).t()
        if spec.block[0] != 1:
            assert down is None
            assert_values(name, along, expected)
            continue
        assert_values(name, down, expected)
        along, nothing, saved = emulation.values(x, spec, True)
        assert nothing is None and saved is not None
        assert_values(name, along, reference_values(x, spec))
        assert_values(name, emulation.saved_values(*saved, spec), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_blocks_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.from_numpy(nasty((64, 96))["wide"]).to(DEVICE).to(dtype)
    along, down, _ = emulation.values(x, LINES[0], False)
    assert_values("along", along, reference_values(x, LINES[0]))
    assert_values("down", down, reference_values(x.t(), LINES[0]).t())


@pytest.mark.parametrize("spec", [LINES[0], LINES[2], LINES[4], SQUARES[1]], ids=str)
def test_every_exponent_of_an_amax_has_the_references_values(spec: QuantSpec) -> None:
    """Blocks whose amaxes are all powers of two and their neighbours, up to float32's and bf16's largest."""
    width = spec.block[1]
    assert width is not None
    powers = (torch.arange(255, dtype=torch.int32) << 23).view(torch.float32)
    amax_values = torch.cat([powers, powers.nextafter(torch.tensor(torch.inf)), powers * 1.75, powers * 1.9921875])
    x = torch.zeros(len(amax_values), width if spec.block[0] == 1 else len(amax_values), device=DEVICE)
    x[:, 5] = amax_values.to(DEVICE)
    x[:, 7] = -amax_values.to(DEVICE) / 3
    along, *_ = emulation.values(x, spec, False)
    assert_values("along", along, reference_values(x, spec))


def test_which_formats_eight_bits_keep() -> None:
    assert [emulation.saved_format(f) for f in (E4M3, E5M2, E2M3, E3M2, E2M1)] == [E4M3, E5M2, E4M3, E4M3, E4M3]


@pytest.mark.parametrize("shape", WHOLE, ids=str)
@pytest.mark.parametrize("kind", TWO_LEVELS)
def test_two_levels_have_the_values_of_the_references_codes(kind: str, shape: tuple[int, int]) -> None:
    spec, other = TWO_LEVELS[kind]
    for name in NAMES[WHOLE.index(shape) :: 3]:
        x = torch.from_numpy(nasty(shape)[name]).to(DEVICE).to(BF16)
        along, down, saved = emulation.two_level_values(x, spec, other, False)
        assert saved is None
        assert_values(name, along, reference_values(x, spec))
        expected = reference_values(x.t(), other).t()
        if kind == "squares":
            assert down is None
            assert_values(name, along, expected)
            continue
        assert_values(name, down, expected)
        along, nothing, saved = emulation.two_level_values(x, spec, other, True)
        assert nothing is None and saved is not None
        assert_values(name, along, reference_values(x, spec))
        assert_values(name, emulation.cached_two_level_values(*saved), expected)


@pytest.mark.parametrize("top", [3.38e38, 2.3e38, 1e38, 1e-30, 1.2e-38], ids=str)
def test_two_levels_at_the_ends_of_the_range(top: float) -> None:
    x = torch.from_numpy(nasty((32, 64))["normal"]).to(DEVICE)
    x = (x / x.abs().max() * top).to(BF16)
    for spec, other in (TWO_LEVELS["lines"], TWO_LEVELS["rotated"]):
        along, down, _ = emulation.two_level_values(x, spec, other, False)
        assert_values("along", along, reference_values(x, spec))
        assert_values("down", down, reference_values(x.t(), other).t())


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("straight", "transposed"), [(True, True), (True, False), (False, True)])
def test_stochastic_rounding_draws_the_words_of_the_reference(hadamard: bool, straight: bool, transposed: bool) -> None:
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    other = QuantSpec(E2M1, (1, 16), "two_level", "stochastic", hadamard)
    seed, streams, counts = 0x1234_5678_9ABC, (0xDEADBEEF, 7), (3, 2**32 + 5)
    for name in ("normal", "NaN"):
        x = torch.from_numpy(nasty((48, 72))[name]).to(DEVICE).to(BF16)
        count = torch.tensor([*counts, 11], dtype=torch.int64, device=DEVICE)
        noise = emulation.StochasticRounding(seed, *streams, count)
        along, down, _ = emulation.two_level_values(x, spec, other, False, noise, straight, transposed)
        assert count.tolist() == [counts[0] + straight, counts[1] + transposed, 11]
        if straight:
            assert_values(name, along, reference_values(x, spec, None, None, (seed, streams[0], counts[0])))
        if transposed:
            assert_values(name, down, reference_values(x.t(), other, None, None, (seed, streams[1], counts[1])).t())
        assert (along is None, down is None) == (not straight, not transposed)
