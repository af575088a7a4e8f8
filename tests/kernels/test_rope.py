"""Queries and keys rotated in one launch have the bits of the plain formula, forward and backward."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch import RotaryEmbedding
from quaver.torch.backends.gpu import norm as gpu
from quaver.torch.nn.attention.rope import (
    ROTATE,
    ROTATE_PARTS,
    _rotate,
    apply_rotary_to_both,
    apply_rotary_to_parts,
)
from tests.close import assert_bitwise, assert_close
from tests.kernels.compare import DEVICE

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])
#: head_dim, fraction: powers of two and others, also with features that are not rotated.
HEADS = [(16, 1.0), (24, 1.0), (16, 0.5), (20, 0.4)]
LENGTHS = torch.tensor([0, 2, 2, 5], device=DEVICE)
#: Layout, shape before the heads, and the dimension of the tokens.
WHERE: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "bshd": ("bshd", (2, 3), {}),
    "sbhd": ("sbhd", (3, 2), {"offset": 5}),
    "of each sequence": ("bshd", (2, 3), {"positions": torch.tensor([[4, 0, 2], [9, 9, 1]], device=DEVICE)}),
    "of each sequence, sbhd": ("sbhd", (3, 2), {"offset": torch.tensor([3, 7], device=DEVICE)}),
    "thd": ("thd", (5,), {"cu_seqlens": LENGTHS}),
}


def nasty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape)
    flat = x.view(-1)
    flat[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-42, -1e-38])
    return x[..., torch.randperm(shape[-1])].to(dtype).to(DEVICE)


@INTERLEAVED
@pytest.mark.parametrize(
    "where, head_dim, fraction", [*(("bshd", *heads) for heads in HEADS), *((where, 16, 0.5) for where in WHERE)]
)
def test_turning_there_and_back_gives_the_bits_of_the_plain_formula(
    where: str, head_dim: int, fraction: float, interleaved: bool
) -> None:
    layout, tokens, options = WHERE[where]
    rope = RotaryEmbedding(head_dim, fraction=fraction, interleaved=interleaved, device=DEVICE)
    q, k = nasty((*tokens, 3, head_dim), torch.bfloat16), nasty((*tokens, 1, head_dim), torch.bfloat16)
    cos, sin = rope.tables(q, layout=layout, **options)
    for back in (False, True):
        transposed = gpu.turn(q, k, cos, sin, interleaved, back)
        for name, ours, given in zip("qk", transposed, (q, k), strict=True):
            assert ours is not None
            assert_bitwise(ours, _rotate(given, cos, sin, interleaved, back), f"{name}, back={back}")


@INTERLEAVED
@pytest.mark.parametrize("dtype", gpu.DTYPES_rope, ids=str)
def test_every_dtype_and_more_heads_than_a_block(dtype: torch.dtype, interleaved: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu, "BLOCK", 64)
    rope = RotaryEmbedding(8, interleaved=interleaved, device=DEVICE)
    q, k = nasty((1, 2, 11, 8), dtype), nasty((1, 2, 8, 8), dtype)
    cos, sin = rope.tables(q)
    gpu._passes.plans.clear()
    for ours, given in zip(gpu.turn(q, k, cos, sin, interleaved, False), (q, k), strict=True):
        assert ours is not None
        assert_bitwise(ours, _rotate(given, cos, sin, interleaved, False))
    gpu._passes.plans.clear()


def test_parts_of_a_fused_projection_are_rotated_in_place() -> None:
    fused = torch.randn(2, 3, 5 * 16, device=DEVICE)
    q, k = (part.unflatten(-1, (-1, 16)) for part in fused.split([48, 32], -1))
    cos, sin = RotaryEmbedding(16, device=DEVICE).tables(q)
    for ours, given in zip(gpu.turn(q, k, cos, sin, False, False), (q, k), strict=True):
        assert ours is not None and ours.is_contiguous()
        assert_bitwise(ours, _rotate(given, cos, sin, False, False))


@INTERLEAVED
@pytest.mark.parametrize("where, head_dim, fraction", [("bshd", 16, 1.0), ("sbhd", 20, 0.4), ("thd", 24, 1.0)])
def test_heads_of_one_projection_are_split_and_joined_by_one_launch(
    where: str, head_dim: int, fraction: float, interleaved: bool, monkeypatch: Any
) -> None:
    """The bits of splitting, rotating and joining, in forward, backward and double backward."""
    layout, tokens, options = WHERE[where]
    monkeypatch.setattr(gpu, "BLOCK", 64)
    gpu._passes.plans.clear()
    rope = RotaryEmbedding(head_dim, fraction=fraction, interleaved=interleaved, device=DEVICE)
    runs = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        x = nasty((*tokens, 3 + 2 + 2, head_dim), torch.bfloat16).requires_grad_()
        cos, sin = rope.tables(x, layout=layout, **options)
        with qt.only(name):
            assert next(n for n, why in ROTATE_PARTS.explain(x, 3, cos, sin, interleaved) if not why) == name
            parts = apply_rotary_to_parts(x, 3, cos, sin, interleaved)
            # The layout of attention's own gradients.
            gs = [nasty((*tokens, heads, head_dim), torch.bfloat16).transpose(-2, -3) for heads in (3, 2, 2)]
            gs = [g.contiguous().transpose(-2, -3).requires_grad_() for g in gs]
            (whole,) = torch.autograd.grad(parts, x, gs, create_graph=True)
            again = torch.autograd.grad(whole, gs, x.detach())
            (alone,) = torch.autograd.grad(apply_rotary_to_parts(x, 3, cos, sin, interleaved)[2], x, gs[2].detach())
        assert all(part.is_contiguous() for part in (*parts, whole))
        # Where autograd sums gradients of the plain version, zeros have lost their signs.
        runs.append((*parts, whole + 0.0, *again, alone + 0.0))
        assert torch.equal(parts[2].view(torch.int16), x[..., 5:, :].reshape(parts[2].shape).view(torch.int16))
    for ours, plain in zip(*runs, strict=True):
        assert_bitwise(ours.detach(), plain.detach())
    gpu._passes.plans.clear()


@INTERLEAVED
def test_gradients_of_both_and_their_gradients_match_the_plain_formula(interleaved: bool) -> None:
    rope = RotaryEmbedding(8, fraction=0.5, interleaved=interleaved, device=DEVICE)
    runs = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        q, k = (torch.randn(1, 2, h, 8, device=DEVICE, requires_grad=True) for h in (2, 1))
        cos, sin = rope.tables(q)
        with qt.only(name):
            assert next(n for n, why in ROTATE.explain(q, k, cos, sin) if not why) == name
            transposed = apply_rotary_to_both(q, k, cos, sin, interleaved)
            loss = sum((t * torch.randn_like(t)).sum() for t in transposed)
            first = torch.autograd.grad(loss, (q, k))
            cubed = sum((t**3).sum() for t in apply_rotary_to_both(q, k, cos, sin, interleaved))
            second = torch.autograd.grad(cubed, (q, k), create_graph=True)
            third = torch.autograd.grad(sum(g.square().sum() for g in second), (q, k))
            (alone,) = torch.autograd.grad(apply_rotary_to_both(q, k, cos, sin, interleaved)[1].sum(), (k,))
        runs.append((*transposed, *first, *second, *third, alone))
    for ours, plain in zip(*runs, strict=True):
        assert_bitwise(ours.detach(), plain.detach())


def test_unsupported_inputs_use_the_plain_path() -> None:
    cos = sin = torch.ones(3, 1, 8, device=DEVICE)
    x = torch.randn(2, 3, 4, 8, device=DEVICE)
    taken: dict[str, tuple[Tensor, Tensor]] = {"as it is": (x, cos)}
    refused = {
        "float64": (x.double(), cos),
        "empty": (x[:0], cos),
        "features apart": (x.transpose(-1, -2).contiguous().transpose(-1, -2), cos),
        "an angle a head": (x, torch.ones(3, 4, 8, device=DEVICE)),
        "float16 tables": (x, cos.half()),
        "two axes": (x[0, 0], cos[0]),
    }
    for name, (given, table) in (taken | refused).items():
        tables = table, sin if table is cos else table
        why = gpu.reason(given, None, *tables)
        assert bool(why) == (name in refused), (name, why)
        if table is cos:
            assert gpu.reason(x, given, *tables) == why, "keys have the same reasons as queries"


@INTERLEAVED
def test_a_module_computes_the_same_with_kernels(interleaved: bool) -> None:
    layer = qt.MultiheadAttention(32, 2, rope=RotaryEmbedding(16, interleaved=interleaved), bias=False).to(DEVICE)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 4, 32), np.float32)).to(DEVICE)
    runs = []
    for name in ("triton", "reference"):
        given = x.clone().requires_grad_()
        with qt.only(name):
            y = layer(given)
        y.sum().backward()
        assert given.grad is not None
        runs.append((y.detach(), given.grad))
    for ours, plain in zip(*runs, strict=True):
        assert_close("under the kernels", ours, plain.cpu().numpy(), 1e-6)


@pytest.mark.parametrize(("tokens", "far"), [(2**16, False), (2**20, True)])
def test_heads_beyond_32_bit_offsets_are_read(monkeypatch: pytest.MonkeyPatch, tokens: int, far: bool) -> None:
    """[B, H, S, D] seen as [B, S, H, D]: the stride between heads of a million tokens is 2**27 elements."""
    x = torch.empty((1, 32, tokens, 128), dtype=torch.bfloat16, device="meta").transpose(1, 2)
    table = torch.empty((tokens, 1, 128), device="meta")
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu._passes, "plans", {})

    def decided(given: Any, buffers: Any, launches: Any) -> Any:
        launched.extend(launch.constants for launch in launches)
        return lambda *_: buffers

    monkeypatch.setattr(gpu, "LaunchPlan", decided)
    gpu.turn(x, None, table, table, False, False)
    assert [constants["FAR"] for constants in launched] == [far]
