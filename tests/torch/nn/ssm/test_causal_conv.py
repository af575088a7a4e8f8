"""Test the causal convolution: values and gradients against float64, separate sequences, carried state."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.nn.ssm.causal_conv import causal_conv1d, last_tokens
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.ssm.drawn import drawn_gradient

ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def drawn(tokens: int = 9, channels: int = 5, taps: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    values = {
        "x": torch.randn(2, tokens, channels).to(dtype),
        "weight": torch.randn(channels, taps),
        "bias": torch.randn(channels),
        "initial": torch.randn(2, taps - 1, channels).to(dtype),
    }
    return {name: value.requires_grad_() for name, value in values.items()}


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, activation: str) -> Tensor:
    """By torch's own convolution."""
    taps = weight.shape[1]
    if not x.shape[1]:
        return x
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if initial is None else initial
    z = F.conv1d(torch.cat((before, x), 1).mT, weight[:, None], bias, groups=weight.shape[0]).mT
    return F.silu(z) if activation == "silu" else z


def results(run: Any, values: dict[str, Tensor]) -> list[Tensor]:
    y = run(*values.values())
    grads = torch.autograd.grad(y, [v for v in values.values() if v is not None], drawn_gradient(y, 0))
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", ONE_ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "taps", "left_out", "activation"),
    [(9, 4, (), "silu"), (2, 4, ("bias",), "linear"), (1, 2, ("initial",), "silu"), (7, 1, (), "silu")],
    ids=str,
)
def test_values_and_gradients_are_float64s(
    dtype: torch.dtype, tokens: int, taps: int, left_out: tuple[str, ...], activation: str
) -> None:
    values: Any = {n: None if n in left_out else v for n, v in drawn(tokens, taps=taps, dtype=dtype).items()}
    wide = {n: None if v is None else v.detach().double().requires_grad_() for n, v in values.items()}
    ours = results(
        lambda x, w, b, i: causal_conv1d(x, w, b, activation=activation, initial=i),
        values,
    )
    expected = results(partial(plain, activation=activation), wide)
    names = ["y", *(f"gradient of {n}" for n, v in values.items() if v is not None)]
    for name, one, other in zip(names, ours, expected, strict=True):
        assert_close(name, one, other, ONE_ROUNDING[one.dtype])
    assert ours[0].dtype is dtype


def test_packed_sequences_are_independent() -> None:
    x, weight, bias = torch.randn(20, 5), torch.randn(5, 4), torch.randn(5)
    ends, initial = [0, 2, 2, 11, 20], torch.randn(4, 3, 5)
    for before in (None, initial):
        y = causal_conv1d(x, weight, bias, initial=before, cu_seqlens=torch.tensor(ends))
        for n, (start, end) in enumerate(pairwise(ends)):
            own = None if before is None else before[n, None]
            alone = causal_conv1d(x[None, start:end], weight, bias, initial=own)[0]
            # Vectors multiply and add in one rounding, and what is left of a row in two.
            assert_close(f"{n}", y[start:end], alone, 1e-6)
    spoiled = x.clone()
    spoiled[2:11] = torch.nan
    z = causal_conv1d(spoiled, weight, bias, initial=initial, cu_seqlens=torch.tensor(ends))
    assert_bitwise(torch.cat((z[:2], z[11:])), torch.cat((y[:2], y[11:])))


def test_gradients_of_packed_sequences() -> None:
    x, weight, bias = torch.randn(20, 5), torch.randn(5, 4), torch.randn(5)
    ends, initial = [0, 2, 2, 11, 20], torch.randn(4, 3, 5)
    given = [t.clone().requires_grad_() for t in (x, weight, bias, initial)]
    wide = [t.double().requires_grad_() for t in (x, weight, bias, initial)]
    y = causal_conv1d(*given[:3], initial=given[3], cu_seqlens=torch.tensor(ends))
    parts = [
        plain(wide[0][None, start:end], wide[1], wide[2], wide[3][n, None], "silu")[0]
        for n, (start, end) in enumerate(pairwise(ends))
    ]
    g = drawn_gradient(y, 0)
    ours = torch.autograd.grad(y, given, g)
    for name, one, other in zip("xwbi", ours, torch.autograd.grad(torch.cat(parts), wide, g.double()), strict=True):
        assert_close(name, one, other, 1e-6)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_state_carries_over_to_the_next_part(cut: int) -> None:
    values = {name: value.detach() for name, value in drawn().items()}
    x, initial = values["x"], values["initial"]
    run = partial(causal_conv1d, weight=values["weight"], bias=values["bias"])
    whole = run(x, initial=initial)
    state = last_tokens(x[:, :cut], 4, initial)
    parts = [run(x[:, :cut], initial=initial), run(x[:, cut:], initial=state)]
    assert_close("parts", torch.cat(parts, 1), whole, 1e-6)
    assert_bitwise(last_tokens(x[:, :cut], 4), last_tokens(x[:, :cut], 4, torch.zeros_like(initial)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_stay_with_the_tokens_that_read_them(value: float) -> None:
    values = {name: value.detach() for name, value in drawn().items()}
    clean = causal_conv1d(**values)
    values["x"][0, 3, 1] = value
    y = causal_conv1d(**values)
    same = torch.ones_like(y, dtype=torch.bool)
    same[0, 3:7, 1] = False
    assert_bitwise(y[same], clean[same])
    assert not y[0, 3, 1].isfinite() or value > 0


def test_only_inputs_are_saved_and_frozen_inputs_get_no_gradients() -> None:
    values, saved = drawn(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        causal_conv1d(**values)
    assert {t.data_ptr() for t in saved} == {v.data_ptr() for v in values.values()}
    empty = torch.empty(2, 0, 5, requires_grad=True)
    y = causal_conv1d(empty, values["weight"], values["bias"])
    y.sum().backward()
    assert y.shape == (2, 0, 5) and not values["weight"].grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.randn(9, 5)}, r"give \[B, T, channels\], or with cu_seqlens"),
        ({"weight": torch.randn(4, 4)}, r"give \[B, T, channels\]"),
        ({"weight": torch.randn(5, 0)}, r"\[channels, K\]"),
        ({"bias": torch.randn(4)}, r"give \[channels\] = \[5\]"),
        ({"initial": torch.randn(2, 4, 5)}, r"give \[sequences, K - 1, channels\] = \[2, 3, 5\]"),
        ({"activation": "swiglu"}, "takes two tensors"),
        ({"activation": "silo"}, "did you mean 'silu'"),
    ],
)
def test_invalid_arguments_give_a_clear_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**(drawn() | given))
