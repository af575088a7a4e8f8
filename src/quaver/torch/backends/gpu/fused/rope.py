"""Rotary positions on a GPU: which tensors the kernel takes, over which grid it runs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.kernels.fused.rope import rope as kernel
from quaver.torch.backends.gpu.fused.producers import DTYPES
from quaver.torch.backends.gpu.launching.launch import power_above
from quaver.torch.backends.gpu.launching.passes import Launch, Pass, Passes
from quaver.torch.backends.gpu.launching.rooms import whole

#: Most elements of a program's block, and its warps.
BLOCK, WARPS = 2048, 4
#: The widest head.
WIDEST = 1024


def reason(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: bool) -> str:
    """Why the kernel does not turn these, or ""; the device has been asked before."""
    return _reason(q, cos, sin) or ("" if k is None else _reason(k, cos, sin))


def _reason(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    if x.dtype not in DTYPES or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
        return "it turns float32, bfloat16 and float16 by tables in float32"
    if x.dim() not in (3, 4) or x.numel() == 0 or x.shape[-1] > WIDEST or x.shape[:-2].numel() >= 2**31:
        return f"it takes [B, S, H, D] and [T, H, D], not empty, with D up to {WIDEST} and fewer than 2^31 tokens"
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.dim() > x.dim() or cos.dim() < 2:
        return "cosines and sines are not laid out alike"
    if cos.shape[-2] != 1 or cos.shape[-1] % 2 or cos.shape[-1] > x.shape[-1] or cos.stride(-1) != 1:
        return "the tables are not of one angle a pair, the same for all heads"
    shared = zip(reversed(cos.shape[:-2]), reversed(x.shape[:-2]), strict=False)
    if x.stride(-1) != 1 or any(of_table not in (1, of_x) for of_table, of_x in shared):
        return "features are not next to each other, or the tables do not fit the tokens"
    return ""


def turn(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor | None]:
    """q, and k of the same tokens if there is one, turned by the tables or back: contiguous results of their dtypes.

    Exact: the bits of the plain formula in `quaver.torch.blocks.attention.rope.rotary`.
    """
    q_out, k_out, _ = _passes((q, k, None, cos, sin), interleaved, back)
    return q_out, k_out


def turn_parts(x: Sequence[Tensor], heads: int, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """q, of so many heads, and k turned, and v copied, out of one tensor that holds all their heads; or those three, as
    gradients go, turned back and copied into one. Exact, as `turn`."""
    whole = x[0]
    together: tuple[Tensor, ...] = ()
    groups = (whole.shape[-2] - heads) // 2 if len(x) == 1 else x[1].shape[-2]
    sizes = heads, groups, groups
    if len(x) == 1:
        x = whole.split(sizes, -2)
    else:
        whole = whole.new_empty((*whole.shape[:-2], sum(sizes), whole.shape[-1]))
        together = whole.split(sizes, -2)
    parts = _passes((*x, cos, sin), interleaved, bool(together), own=together)
    return (whole,) if together else tuple(parts)


def _pass(given: Sequence[Any], interleaved: bool, back: bool) -> Pass:
    q, k, v, cos, sin, *outs = given
    half = cos.shape[-1] // 2
    wide = power_above(half)
    heads, k_heads = q.shape[-2], 0 if k is None else k.shape[-2]
    block = max(1, min(BLOCK // (2 * wide), power_above(max(heads, k_heads))))
    q_blocks, k_blocks = -(-heads // block), -(-k_heads // block)
    outer, inner = (1, *q.shape[:-2])[-2:]
    constants = {
        "HALF": half,
        "REST": q.shape[-1] - 2 * half,
        "BH": block,
        "BD": wide,
        "BR": power_above(q.shape[-1] - 2 * half),
        "INTERLEAVED": interleaved,
        "BACK": back,
        "EVEN_Q": heads % block == 0 and wide == half,
        "EVEN_K": k_heads % block == 0 and wide == half,
        "FAR": max(n * _strides(x)[2] for n, x in ((heads + block, q), (k_heads + block, k), (k_heads + block, v)))
        >= 2**31,
    }
    rooms = () if outs else tuple(None if x is None else whole(x.shape, x.dtype) for x in (q, k, v))
    rows = [outs[0].stride(-3)] * 2 if outs else [n * q.shape[-1] for n in (heads, k_heads)]
    strides = [stride for x in (q, k, v) for stride in _strides(x)]
    numbers = (inner, heads, k_heads, q_blocks, k_blocks, *rows, *strides, *_strides(cos)[:2])
    grid = outer * inner, q_blocks + (k_blocks if v is None else 2 * k_blocks)
    tensors = (q, k, v, *(outs or rooms), cos, sin)
    return Pass(given, rooms, [Launch(kernel, grid, tensors, numbers, constants, WARPS)])


_passes = Passes(_pass)


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """The strides of the outer tokens, the inner ones and the heads; 0 where an axis is missing or shared."""
    if x is None:
        return 0, 0, 0
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    outer, inner, head = (0, 0, *strides[:-1])[-3:]
    return outer, inner, head
