"""Test the convolution kernels against float64: values, gradients, packed sequences, nonfinite values."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.backends.gpu import ssm as gpu
from quaver.torch.nn.ssm.causal_conv import FORWARD, causal_conv1d
from tests.close import assert_bitwise, assert_close
from tests.kernels.compare import DEVICE
from tests.torch.nn.ssm.drawn import drawn_gradient

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def drawn(tokens: int, channels: int, taps: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Any]:
    """Random inputs; x is a part of a wider tensor, as in the output of a projection."""
    x = torch.randn(batch, tokens, channels + 8).to(dtype)[..., 4 : 4 + channels]
    weight, bias = torch.randn(channels, taps), torch.randn(channels)
    return {"x": x, "weight": weight, "bias": bias, "initial": torch.randn(batch, taps - 1, channels).to(dtype)}


def results(values: dict[str, Any], **options: Any) -> list[Tensor]:
    given = {name: None if t is None else t.detach().requires_grad_() for name, t in values.items()}
    y = causal_conv1d(**given, **options)
    wanted = [t for t in given.values() if t is not None]
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, wanted, drawn_gradient(y.cpu(), 0).to(y.device)))]


def by_kernels(values: dict[str, Any], **options: Any) -> list[Tensor]:
    with qt.only("triton"):
        return results({name: None if t is None else t.to(DEVICE) for name, t in values.items()}, **options)


@pytest.mark.parametrize(
    ("tokens", "channels", "taps", "dtype", "left_out", "activation"),
    [
        (64, 64, 4, torch.float32, ("initial",), "silu"),
        (67, 5, 4, torch.float32, (), "silu"),
        (130, 70, 3, torch.bfloat16, ("bias",), "linear"),
        (9, 6, 2, torch.float16, ("initial",), "gelu"),
        (7, 3, 1, torch.float32, (), "silu"),
        (2, 3, 5, torch.float32, (), "silu"),
    ],
    ids=["whole", "ragged", "bfloat16", "float16", "one tap", "fewer tokens than taps"],
)
def test_values_and_gradients_are_float64s(
    tokens: int, channels: int, taps: int, dtype: torch.dtype, left_out: tuple[str, ...], activation: str
) -> None:
    values = {name: None if name in left_out else t for name, t in drawn(tokens, channels, taps, dtype).items()}
    assert FORWARD.explain(*values.values(), None, activation)[0][0] == "triton"
    wide = {name: None if t is None else t.double() for name, t in values.items()}
    ours, expected = by_kernels(values, activation=activation), results(wide, activation=activation)
    for name, one, other in zip(("y", *(n for n, t in values.items() if t is not None)), ours, expected, strict=True):
        assert one.dtype is (dtype if name in ("y", "x", "initial") else torch.float32)
        assert_close(name, one, other, BOUNDS[one.dtype])


def test_packed_sequences_are_independent() -> None:
    ends, values = torch.tensor([0, 2, 2, 67, 69, 140]), drawn(140, 5, 4, batch=1)
    values |= {"x": values["x"][0], "initial": torch.randn(5, 3, 5)}
    wide = {name: t.double() for name, t in values.items()}
    ours, expected = by_kernels(values, cu_seqlens=ends.to(DEVICE)), results(wide, cu_seqlens=ends)
    for name, one, other in zip(("y", *values), ours, expected, strict=True):
        assert_close(name, one, other, BOUNDS[torch.float32])
    assert not ours[4][1].any(), "nothing goes back to what stands before a sequence without tokens"
    values["x"][2:67] = torch.nan
    spoiled = by_kernels(values, cu_seqlens=ends.to(DEVICE))
    for one, other in ((spoiled[0], ours[0]), (spoiled[1], ours[1])):
        assert_bitwise(torch.cat((one[:2], one[67:])), torch.cat((other[:2], other[67:])))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_stay_with_the_tokens_that_read_them(value: float) -> None:
    values = drawn(70, 3, 4, batch=1)
    clean = by_kernels(values)
    values["x"][0, 62, 1] = value
    ours = by_kernels(values)
    for name, one, other, reach in zip(("y", "x"), ours, clean, (slice(62, 66), slice(59, 66)), strict=False):
        same = torch.ones_like(one, dtype=torch.bool)
        same[0, reach, 1] = False
        assert_bitwise(one[same], other[same], name)
    plain = results(values)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


def test_unsupported_inputs_use_the_plain_implementation() -> None:
    taken = drawn(3, 4, 4)
    refused = {
        "float64": taken | {"x": taken["x"].double()},
        "no tokens": drawn(0, 4, 4),
        "many taps": drawn(3, 4, gpu.TAPS + 1),
    }
    for name, values in {"taken": taken, **refused}.items():
        why = gpu.reason(*values.values(), None, "silu")
        assert bool(why) == (name in refused), (name, why)
    assert gpu.reason(*taken.values(), None, "swiglu")
    by_kernels(refused["many taps"])
