"""Codes of four and six bits are those of the numpy reference, and are found by the path that is meant to find them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quaver import reference as specification
from quaver.recipes.spec import QuantSpec
from quaver.reference.numerics import noise_stream, philox2x32
from quaver.torch.backends.cpu import few_bits, noise
from quaver.torch.numerics import reference
from quaver.torch.operations import ops
from tests.close import assert_bitwise
from tests.operands import SPECS

#: Every spec of a recipe that this implementation takes.
FEW = sorted(
    {spec.text for spec in SPECS.values() if spec.two_level or not few_bits.reason_e8m0(torch.ones(1, 1), spec)}
)
#: (seed, tensor id, count) of stochastic rounding.
NOISE = (7 << 32) + 5, 11, 3


def everything() -> Tensor:
    """All bf16 numbers, those near each other in one block."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def mixed() -> Tensor:
    """The same, far ones in one block."""
    return everything().flatten()[torch.randperm(65536)].view(64, 1024)


def moderate() -> Tensor:
    """Every bf16 number up to 2**90, far ones in one block."""
    x = mixed()
    return torch.where(x.abs() < 2.0**90, x, 1.0)


def any_float() -> Tensor:
    """float32 of any bits, NaN and infinities of all kinds among them."""
    return torch.randint(-(2**31), 2**31, (512, 512), dtype=torch.int64).to(torch.int32).view(torch.float32)


def rows_far_apart() -> Tensor:
    return (torch.randn(304, 96) * 2.0 ** torch.randint(-125, 126, (304, 1))).bfloat16()


def with_one(value: float) -> Callable[[], Tensor]:
    def draw() -> Tensor:
        x = torch.randn(64, 64)
        x[7, 3] = value
        return x.bfloat16()

    return draw


def scaled(power: float) -> Callable[[], Tensor]:
    return lambda: (torch.randn(64, 96) * 2.0**power).bfloat16()


def zero_blocks() -> Tensor:
    x = torch.randn(64, 96)
    x[:16], x[:, 16:48] = 0.0, -0.0
    return x.bfloat16()


#: bf16 operands whose codes are looked up by their bits.
BY_BITS = {
    "ragged": lambda: torch.randn(5, 33, dtype=torch.bfloat16),
    "normal": scaled(0),
    "several pieces": lambda: torch.randn(992, 704).bfloat16() * torch.randn(992, 704).exp().bfloat16(),
    "every bf16 below 2**90": moderate,
    "zeros": lambda: (torch.zeros(16, 64) * torch.tensor([[1.0], [-1.0]]).repeat(8, 1)).bfloat16(),
    "zero blocks": zero_blocks,
    "ties": lambda: (torch.randint(-24, 25, (64, 96)) / 4).bfloat16(),
    "outlier": with_one(1e9),
    "small": scaled(-70),
    "large": scaled(90),
}
OTHERS = {
    "every bf16": everything,
    "every bf16, mixed": mixed,
    "any float32": any_float,
    "rows far apart": rows_far_apart,
    "tiny": scaled(-124),
    "subnormal": scaled(-129),
    "huge": scaled(125),
    "NaN": with_one(torch.nan),
    "negative NaN": with_one(-torch.nan),
    "infinity": with_one(-torch.inf),
    "float16": lambda: torch.randn(64, 64).half() * 100,
    "one odd row": lambda: torch.randn(1, 7),
    "all float32": lambda: torch.randn(80, 64) * torch.randn(80, 64).exp(),
}


class Calls:
    """Count the calls of functions of a module by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, *names: str) -> None:
        self.counts = dict.fromkeys(names, 0)
        for name in names:
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: object) -> Tensor:
            self.counts[name] += 1
            return function(*args)

        return counted


@pytest.mark.parametrize("name", [*BY_BITS, *OTHERS])
@pytest.mark.parametrize("text", FEW)
def test_codes_and_scales_match_the_reference(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec, x = QuantSpec.parse(text), {**BY_BITS, **OTHERS}[name]()
    fast = few_bits.two_level if spec.two_level else few_bits.e8m0
    calls = Calls(monkeypatch, few_bits, "_look_up", "_nearest", "_stochastic")
    for label, view in (("rows", x), ("transposed", x.t()), ("strided", x[:, ::2])):
        assert ops.QUANTIZE.pick(view, spec) is fast
        before = dict(calls.counts)
        own = fast(view, spec, None, None, NOISE)
        used = {function for function, count in calls.counts.items() if count > before[function]}
        expected = specification.quantize(view.float().numpy(), spec, seed=NOISE[0], tensor_id=NOISE[1], count=NOISE[2])
        assert_bitwise(own.codes().numpy(), expected.codes(), f"{label}: codes")
        assert_bitwise(own.scales().numpy(), expected.scales(), f"{label}: scales")
        plain = reference.quantize(view, spec, None, None, NOISE)
        assert own.amax is not None and plain.amax is not None
        assert_bitwise(own.amax.t() if own.transposed else own.amax, plain.amax, f"{label}: amax")
        if name in BY_BITS and not spec.hadamard and spec.scale != "two_level_fp32":
            assert used == {"_look_up"}, label
        elif name == "all float32" or spec.hadamard:
            assert used == {"_stochastic" if spec.rounding == "stochastic" else "_nearest"}, label


@pytest.mark.parametrize("counter", [0, (1 << 32) - 8])
def test_random_bits_match_the_reference(counter: int) -> None:
    """Counters above 2**32 have their upper part in the second word."""
    seed, tensor_id, count = NOISE
    key, upper = noise_stream(seed, tensor_id, count)

    def halves(counters: Tensor) -> Tensor:
        """[..., 4]"""
        g = counters.numpy().astype("uint64")
        words = philox2x32((g & 0xFFFFFFFF, g >> 32 ^ upper), key).astype("int32")
        both = torch.from_numpy(words)
        return torch.stack([both >> 16, both], -1).flatten(-2).bitwise_and_(0xFFFF)

    own = noise.bits_of_rows(4 * counter, 62, NOISE)
    assert_bitwise(own, halves(torch.arange(counter, counter + 16)).flatten()[:62])
    # Columns 8 to 24 of an operand [9, 32].
    own = noise.bits_of_columns((9, 32), 8 + 4 * counter, 16, NOISE)
    expected = halves(torch.arange(4) + 2 + counter + 8 * torch.arange(9)[:, None])  # [9, 4, 4]
    assert_bitwise(own, expected.flatten(1).t().contiguous())


def test_unsupported_inputs_use_another_implementation() -> None:
    x = torch.randn(8, 64)
    for text in ("e4m3[1x32]:e8m0", "e2m1[1x32]:e8m0:stochastic", "e2m1[1x32]:e8m0:hadamard", "e2m1[32x32]:e8m0"):
        assert few_bits.reason_e8m0(x, QuantSpec.parse(text))
    assert few_bits.reason_two_level(x, QuantSpec.parse("e2m1[1x32]:e8m0"))
    spec = QuantSpec.parse("e2m1[1x32]:e8m0")
    assert torch.equal(few_bits.e8m0(x, spec, amax=2.0).scale, reference.quantize(x, spec, amax=2.0).scale)  # type: ignore[arg-type]
    assert few_bits.e8m0(x[:0], spec).shape == (0, 64)


@pytest.mark.parametrize("amax", [1e-30, 0.5, 1e30])
@pytest.mark.parametrize("text", [text for text in FEW if QuantSpec.parse(text).two_level])
def test_a_passed_amax_of_the_tensor_gives_the_bits_of_plain_torch(text: str, amax: float) -> None:
    torch.manual_seed(0)
    spec = QuantSpec.parse(text)
    for x in (torch.randn(64, 96).bfloat16(), with_one(torch.nan)(), scaled(-124)()):
        for view in (x, x.t()):
            own = few_bits.two_level(view, spec, amax, None, NOISE)
            plain = reference.quantize(view, spec, amax, None, NOISE)
            assert_bitwise(own.data, plain.data)
            assert_bitwise(own.scales(), plain.scales())
