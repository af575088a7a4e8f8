"""RMSNorm with a gate: float64's values and gradients, in groups, the gate before or after; and before a layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.ssm.gated_norm import GatedRMSNorm, gated_projection
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs
from tests.torch.nn.pairs import assert_same_training

ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def exact(x: Tensor, gate: Tensor, gamma: Tensor, groups: int, first: bool) -> Tensor:
    """The formula, in x's dtype."""
    v = x if first else x * F.silu(gate)
    parts = v.unflatten(-1, (groups, -1))
    y = (parts / (parts.square().mean(-1, True) + 1e-5).sqrt()).flatten(-2) * gamma
    return y * F.silu(gate) if first else y


@pytest.mark.parametrize(
    ("dtype", "shape", "groups", "first"),
    pairs(ONE_ROUNDING, [(5, 24), (2, 3, 24), (1, 24), (0, 24)], [1, 3, 24], [False, True]),
)
def test_values_and_gradients_are_float64s(
    dtype: torch.dtype, shape: tuple[int, ...], groups: int, first: bool
) -> None:
    norm = GatedRMSNorm(24, groups, norm_before_gate=first)
    with torch.no_grad():
        norm.weight.normal_()
    x, gate = ((torch.randn(shape) * 2).to(dtype).requires_grad_() for _ in range(2))
    wide = [t.detach().double().requires_grad_() for t in (x, gate, norm.weight)]
    y, truth = norm(x, gate), exact(*wide, groups, first)
    g = torch.randn(shape).bfloat16()
    assert y.dtype is dtype
    assert_close("output", y, truth, ONE_ROUNDING[dtype])
    ours = torch.autograd.grad(y, (x, gate, norm.weight), g.to(dtype))
    for name, one, other in zip(
        ("x", "gate", "gamma"), ours, torch.autograd.grad(truth, wide, g.double()), strict=True
    ):
        # Of groups of one feature nothing but its sign is left, and of x's gradient rounding errors.
        if name not in ("x", "gate") or groups < 24:
            assert_close(f"gradient of {name}", one, other, 2 * ONE_ROUNDING[one.dtype])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("first", [False, True])
def test_nonfinite_values_stay_in_their_group(value: float, first: bool) -> None:
    norm = GatedRMSNorm(12, 3, norm_before_gate=first)
    for which in range(2):
        given = [torch.randn(2, 12) for _ in range(2)]
        clean = norm(*given)
        given[which][0, 5] = value
        y, same = norm(*given), torch.ones(2, 12, dtype=torch.bool)
        same[0, 4:8] = False
        assert_bitwise(y[same], clean[same])


def test_no_bit_depends_on_how_the_operands_lie() -> None:
    norm = GatedRMSNorm(24, 3)
    x, gate = (torch.randn(4, 60)[:, 20:44] for _ in range(2))
    results = [norm(x, gate), norm(x.clone(), gate), norm(x, gate.contiguous())]
    for other in results[1:]:
        assert_bitwise(other, results[0])


@pytest.mark.parametrize("recipe", [None, "mxfp8", "delayed", "rowwise"])
def test_before_a_layer_it_gives_the_bits_of_both_one_after_the_other(recipe: str | None) -> None:
    block: Any = torch.nn.ModuleDict({"norm": GatedRMSNorm(32, 2), "layer": qt.Linear(32, 16, bias=False)})

    def fused(block: Any, x: Tensor) -> Tensor:
        return gated_projection(block["norm"], x, x * 1.5, block["layer"])

    def unfused(block: Any, x: Tensor) -> Tensor:
        y: Tensor = block["layer"](block["norm"](x, x * 1.5))
        return y

    def watched(block: Any, x: Tensor) -> Tensor:
        handle = block["norm"].register_forward_hook(lambda *_: None)
        try:
            return fused(block, x)
        finally:
            handle.remove()

    assert_same_training(block, [fused, unfused, watched], recipe, [torch.randn(6, 32) for _ in range(2)])


def test_the_inputs_and_eight_bit_outputs_are_saved() -> None:
    norm, layer, saved = GatedRMSNorm(64, dtype=torch.bfloat16), qt.Linear(64, 8, dtype=torch.bfloat16), []
    x, gate = (torch.randn(128, 64).bfloat16().requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), qt.autocast("mxfp8"):
        gated_projection(norm, x, gate, layer)
    weights = sum(p.numel() * 2 for p in (norm.weight, layer.weight))
    assert sum(t.numel() * t.element_size() for t in saved) <= 2 * 128 * 64 * 2 + 128 * 4 + 1.1 * 128 * 64 + weights


def test_invalid_arguments_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match="do not divide into 5 groups"):
        GatedRMSNorm(24, 5)
    norm, x = GatedRMSNorm(24), torch.randn(2, 24)
    for other in (torch.randn(2, 23), x.bfloat16(), torch.randn(1, 24)):
        with pytest.raises(ValueError, match=r"give both one dtype and shape, whose last axis is 24"):
            norm(x, other)
    with pytest.raises(NotImplementedError, match=r"no torch\.func"):
        torch.func.grad(lambda t: norm(t, x).sum())(x)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(norm(leaf, x).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
