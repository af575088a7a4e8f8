"""Codes of four and six bits with E8M0 scales: those of plain torch operations, whatever the numbers are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quaver.recipes import RECIPES
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.cpu import quantize
from quaver.torch.numerics import reference
from quaver.torch.operations import ops

SPECS = sorted({spec.text for name in ("mxfp4", "mxfp6") for spec in RECIPES[name]().operands().values() if spec})


def everything() -> Tensor:
    """All bf16 numbers, those near each other in one block."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def mixed() -> Tensor:
    """The same, far ones in one block."""
    return everything().flatten()[torch.randperm(65536)].view(64, 1024)


def any_float() -> Tensor:
    """float32 of any bits, NaN and infinities of all kinds among them."""
    return torch.randint(-(2**31), 2**31, (512, 512), dtype=torch.int64).to(torch.int32).view(torch.float32)


def spread_rows() -> Tensor:
    return (torch.randn(300, 96) * 2.0 ** torch.randint(-125, 126, (300, 1))).bfloat16()


DRAWN = {
    "every bf16": everything,
    "every bf16, mixed": mixed,
    "any float32": any_float,
    "rows far apart": spread_rows,
    "several pieces": lambda: torch.randn(1000, 700) * torch.randn(1000, 700).exp(),
    "ragged": lambda: torch.randn(5, 33, dtype=torch.bfloat16),
    "one odd row": lambda: torch.randn(1, 7),
    "subnormal": lambda: torch.randn(40, 96) * 1e-38,
    "float16": lambda: torch.randn(64, 64).half() * 100,
    "zeros": lambda: torch.zeros(4, 64) * torch.tensor([[1.0], [-1.0]]).repeat(2, 1),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("text", SPECS)
def test_codes_and_scales_match_plain_torch(text: str, draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    spec, x = QuantSpec.parse(text), draw()
    for view in (x, x.t(), x[:, ::2]):
        assert ops.QUANTIZE.pick(view, spec) is quantize.e8m0
        own, wanted = quantize.e8m0(view, spec), reference.quantize(view, spec)
        assert own.shape == wanted.shape and own.amax is not None and wanted.amax is not None
        wrong = (own.data != wanted.data).nonzero()
        assert not len(wrong), f"{wrong[0].tolist()}: {own.data[tuple(wrong[0])]}, {wanted.data[tuple(wrong[0])]}"
        assert torch.equal(own.scale, wanted.scale)  # type: ignore[arg-type]
        assert torch.equal(own.amax.view(torch.int32), wanted.amax.view(torch.int32))


def test_unsupported_inputs_use_another_implementation() -> None:
    x = torch.randn(8, 64)
    for text in ("e4m3[1x32]:e8m0", "e2m1[1x32]:e8m0:stochastic", "e2m1[1x32]:e8m0:hadamard", "e2m1[32x32]:e8m0"):
        assert quantize.reason_e8m0(x, QuantSpec.parse(text))
    spec = QuantSpec.parse(SPECS[0])
    assert torch.equal(quantize.e8m0(x, spec, amax=2.0).scale, reference.quantize(x, spec, amax=2.0).scale)  # type: ignore[arg-type]
    assert quantize.e8m0(x[:0], spec).shape == (0, 64)
