"""torch's own attention against the reference: outputs, gradients, what backward keeps, strides, compiled bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.attention import attention
from tests.close import assert_close
from tests.pairs import case_name, pairs
from tests.torch.nn.attention.cases import DV, GROUPS, LENGTHS, D, H, cases, gradients, mask_of, operands

#: Relative RMS of outputs and gradients from the float32 reference on the same values.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def compare(dtype: torch.dtype, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """sdpa in dtype against the reference in float32, on the same values."""
    with qt.only("sdpa"):
        y = attention(*inputs, **options)
    exact = tuple(x.detach().float().requires_grad_() for x in inputs)
    with qt.only("reference"):
        right = attention(*exact, **options)
    assert y.dtype is dtype
    assert_close("output", y, right, CLOSE[dtype])
    for name, g, good in zip("qkv", gradients(y, *inputs), gradients(right, *exact), strict=True):
        # Of one key alone the probability is 1 whatever q and k are; there only roundings are left.
        assert good.any() or g.abs().max() < 1e-5, f"gradient of {name}"
        if good.any():
            assert_close(f"gradient of {name}", g, good, CLOSE[dtype])


def by_turns() -> list[Any]:
    """Every mask, window and pair of lengths, each with a dtype and two of the head counts; each mask, each window and
    each pair of lengths meets each of those, and each dtype each head count."""
    rows = []
    for number, case in enumerate(cases()):
        of_mask, of_lengths = divmod(number, len(LENGTHS))
        dtype, turn = list(CLOSE)[(of_mask + of_lengths) % 3], of_mask + 2 * of_lengths
        rows.append((*case, dtype, GROUPS[turn % 3], GROUPS[(turn + 1) % 3]))
    return rows


@pytest.mark.parametrize("mask_type, window, queries, keys, dtype, narrow, wide", by_turns())
def test_it_equals_the_reference(
    mask_type: str, window: Any, queries: int, keys: int, dtype: torch.dtype, narrow: int, wide: int
) -> None:
    mask = mask_of(mask_type, queries, keys)
    for groups, width in ((narrow, DV), (wide, D)):
        inputs = operands(queries, keys, groups, width, dtype)
        compare(dtype, inputs, mask_type=mask_type, mask=mask, window=window)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [D, DV, 2 * D])
def test_biases_scales_and_slopes_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    inputs = operands(5, 7, 2, width, dtype)
    bias = torch.linspace(-2, 2, H * 5 * 7).reshape(1, H, 5, 7)
    slopes = torch.tensor([0.5, 0.25, 0.125, 3.0])
    compare(dtype, inputs, scale=0.3, bias=bias, mask_type="causal_bottom_right", alibi_slopes=slopes)
    compare(dtype, inputs, bias=bias[:, :1, :1])
    compare(dtype, inputs, alibi_slopes=slopes, mask_type="padding", mask=mask_of("padding", 5, 7))


def test_a_bias_gets_its_gradient() -> None:
    inputs = operands(5, 7)
    bias = torch.linspace(-2, 2, H * 5 * 7).reshape(1, H, 5, 7).requires_grad_()
    grads = []
    for name in ("sdpa", "reference"):
        with qt.only(name):
            grads.append(gradients(attention(*inputs, mask_type="causal", bias=bias), bias)[0])
    assert_close("bias", *grads, 2e-6)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("groups", [4, 2])
def test_a_query_that_sees_no_key_gets_zero_and_so_do_its_gradients(dtype: torch.dtype, groups: int) -> None:
    q, k, v = operands(7, 5, groups, dtype=dtype)
    mask = torch.zeros(2, 1, 7, 5, dtype=torch.bool)
    mask[0, :, 3] = True
    for options in (
        {"mask_type": "arbitrary", "mask": mask},
        {"mask_type": "arbitrary", "mask": mask.expand(2, H, 7, 5), "bias": torch.ones(1, H, 7, 5)},
        {"mask_type": "arbitrary", "mask": torch.ones(2, 1, 7, 5, dtype=torch.bool)},
        {"mask_type": "causal_bottom_right"},
        {"mask_type": "causal", "window": (0, 0)},
    ):
        with qt.only("sdpa"):
            y = attention(q, k, v, **options)
        with qt.only("reference"):
            empty = ~attention(q, k, v, **options).any(-1)
        assert empty.any()
        assert not y[empty].any()
        grads = gradients(y, q, k, v)
        assert all(g.isfinite().all() for g in grads)
        assert not grads[0][empty].any()


@pytest.mark.parametrize(
    ("mask_type", "shape", "name"),
    pairs(("none", "causal", "causal_bottom_right"), ((0, 5, 7), (2, 0, 7), (2, 5, 0)), ("sdpa", "reference")),
    ids=case_name,
)
def test_no_batch_no_query_and_no_key_are_no_error(name: str, shape: tuple[int, int, int], mask_type: str) -> None:
    batch, queries, keys = shape
    q, k, v = (torch.randn(batch, n, h, D, requires_grad=True) for n, h in ((queries, H), (keys, 2), (keys, 2)))
    with qt.only(name):
        y = attention(q, k, v, mask_type=mask_type)
    assert y.shape == (batch, queries, H, D) and not y.any()
    assert not any(g.any() for g in gradients(y, q, k, v))


@contextmanager
def saved_tensors() -> Iterator[list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Distinct storages saved for backward, as (dtype, shape)."""
    packed: list[tuple[torch.dtype, tuple[int, ...]]] = []
    seen = set()

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            packed.append((x.dtype, tuple(x.shape)))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield packed


@pytest.mark.parametrize(
    ("dtype", "mask_type", "layout"),
    pairs((torch.float32, torch.bfloat16, torch.float16), ("none", "causal"), ("bshd", "sbhd", "thd")),
    ids=case_name,
)
def test_backward_keeps_q_k_v_unexpanded_the_output_and_a_logarithm_a_row(
    layout: str, mask_type: str, dtype: torch.dtype
) -> None:
    batch, tokens, heads, groups = (1 if layout == "thd" else 2), 32, 8, 2
    shape = {"bshd": (batch, tokens), "sbhd": (tokens, batch), "thd": (tokens,)}[layout]
    q, k, v = (torch.randn(*shape, n, 16).to(dtype).requires_grad_() for n in (heads, groups, groups))
    ends = torch.tensor([0, tokens]) if layout == "thd" else None
    with saved_tensors() as packed:
        attention(q, k, v, mask_type=mask_type, layout=layout, cu_seqlens=ends)
    wide, narrow = (dtype, (batch, heads, tokens, 16)), (dtype, (batch, groups, tokens, 16))
    logarithms = dtype if dtype is torch.float64 else torch.float32, (batch, heads, tokens)
    assert sorted(map(str, packed)) == sorted(map(str, [wide, narrow, narrow, wide, logarithms]))


@pytest.mark.parametrize("groups", [8, 2])
def test_the_output_flattens_without_a_copy(groups: int) -> None:
    q, k, v = (torch.randn(2, 33, n, 16) for n in (8, groups, groups))
    for options in ({}, {"mask_type": "causal"}, {"mask_type": "causal", "window": (3, 0)}):
        y = attention(q, k, v, **options)
        assert y.is_contiguous()
        assert y.flatten(2).untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("mask_type, window, queries, keys", cases())
@pytest.mark.parametrize("dtype", CLOSE)
def test_on_a_gpu_it_equals_the_reference(
    mask_type: str, window: Any, queries: int, keys: int, dtype: torch.dtype
) -> None:
    mask = mask_of(mask_type, queries, keys)
    mask = tuple(m.cuda() for m in mask) if isinstance(mask, tuple) else None if mask is None else mask.cuda()
    for groups in GROUPS:
        inputs = tuple(x.detach().cuda().requires_grad_() for x in operands(queries, keys, groups, D, dtype))
        compare(dtype, inputs, mask_type=mask_type, mask=mask, window=window)
