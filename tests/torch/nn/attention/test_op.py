"""Test the attention operation: layouts, ragged batches, implementations, autocast, recipes, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.attention import attention, explain_attention
from quaver.torch.operations import ops
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.attention.cases import DV, D, H, gradients, mask_of, operands

NAMES = ["sdpa", "reference"]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 3.0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask_type", ["none", "causal", "padding_causal", "arbitrary"])
def test_sbhd_gives_the_transposed_result_of_bshd(name: str, mask_type: str) -> None:
    q, k, v = operands(5, 7)
    options = {"mask_type": mask_type, "mask": mask_of(mask_type, 5, 7)}
    with qt.only(name):
        y = attention(q, k, v, **options)
        transposed = attention(*(x.transpose(0, 1) for x in (q, k, v)), layout="sbhd", **options)
    assert_bitwise(transposed.transpose(0, 1), y)


OF_QUERIES, OF_KEYS = [3, 0, 5, 1, 2], [3, 2, 4, 6, 0]


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_type": "causal"},
        {"mask_type": "causal_bottom_right"},
        {"mask_type": "causal", "window": (1, 0)},
        {"mask_type": "causal_bottom_right", "window": (2, -1), "alibi_slopes": SLOPES},
        {"window": (1, 1), "alibi_slopes": SLOPES},
        {"mask_type": "causal_bottom_right", "chunk": 2},
    ],
)
def test_ragged_sequences_equal_each_alone(name: str, options: dict[str, Any]) -> None:
    queries, keys = sum(OF_QUERIES), sum(OF_KEYS)
    shapes = (queries, H, D), (keys, 2, D), (keys, 2, DV)
    inputs = tuple(torch.randn(s, requires_grad=True) for s in shapes)
    cu_seqlens = ends(OF_QUERIES), ends(OF_KEYS).int()
    with qt.only(name):
        y = attention(*inputs, layout="thd", cu_seqlens=cu_seqlens, **options)
    with qt.only("reference"):
        parts = zip(*(x.split(n) for x, n in zip(inputs, (OF_QUERIES, OF_KEYS, OF_KEYS), strict=True)), strict=True)
        alone = torch.cat([attention(*(x[None] for x in part), **options)[0] for part in parts])
    assert y.shape == (queries, H, DV)
    assert_close("output", y, alone, 1e-6)
    for what, a, b in zip("qkv", gradients(y, *inputs), gradients(alone, *inputs), strict=True):
        assert_close(f"gradient of {what}", a, b, 2e-6)


def test_one_cu_seqlens_applies_to_queries_and_keys_and_zero_sequences_work() -> None:
    q, k, v = (torch.randn(5, n, D) for n in (H, 2, 2))
    at = torch.tensor([0, 2, 5], dtype=torch.int32)
    y = attention(q, k, v, mask_type="causal", layout="thd", cu_seqlens=at)
    assert_bitwise(y, attention(q, k, v, mask_type="causal", layout="thd", cu_seqlens=(at, at)))
    empty = attention(q[:0], k[:0], v[:0], layout="thd", cu_seqlens=torch.tensor([0]))
    assert empty.shape == (0, H, D)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_biases_and_masks_of_pairs_are_over_all_tokens(name: str) -> None:
    q, k, v = (torch.randn(5, n, D) for n in (H, 2, 2))
    bias, mask = torch.randn(1, H, 5, 5), torch.rand(1, 1, 5, 5) < 0.3
    with qt.only(name):
        y = attention(
            q, k, v, mask_type="arbitrary", mask=mask, bias=bias, layout="thd", cu_seqlens=torch.tensor([0, 2, 5])
        )
    other = torch.tensor([0, 0, 1, 1, 1])
    blocks = mask | (other[:, None] != other)
    whole = attention(q[None], k[None], v[None], mask_type="arbitrary", mask=blocks, bias=bias)[0]
    assert_close("output", y, whole, 1e-6)


@pytest.mark.parametrize("options", [{"layout": "thd"}, {"layout": "thd", "mask_type": "causal_bottom_right"}])
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batches_compile_whole(options: dict[str, Any], name: str) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(7, n, D) for n in (H, 2, 2))
    at = torch.tensor([0, 2, 2, 7])

    def run(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return attention(q, k, v, cu_seqlens=at, **options)

    with qt.only(name):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert_close("compiled", compiled(q, k, v, at), run(q, k, v, at), 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"mask_type": "padding_causal_bottom_right", "chunk": 3},
        {"mask_type": "arbitrary", "window": (2, 2)},
        {"mask_type": "causal", "soft_cap": 2.0, "sinks": "off_by_one", "alibi_slopes": SLOPES},
    ],
)
def test_masks_and_options_compile_whole(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    inputs = operands(5, 7)
    mask = mask_of(options["mask_type"], 5, 7)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, **options)

    y, compiled = run(*inputs), torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert_close("compiled", compiled, y, 1e-6)
    for name, a, b in zip("qkv", gradients(compiled, *inputs), gradients(y, *inputs), strict=True):
        assert_close(f"gradient of {name}", a, b, 2e-6)


def test_only_leaves_an_operation_alone_that_has_no_such_implementation() -> None:
    q, k, v = operands(5, 7)
    y = attention(q, k, v, soft_cap=2.0)
    with qt.only("cpu"):
        assert_bitwise(attention(q, k, v, soft_cap=2.0), y)
    with qt.only("sdpa"):
        assert ops.MATMUL.enabled is ops.MATMUL.implementations
        with pytest.raises(ValueError, match=r"no implementation of attention supports this call.*no soft cap"):
            attention(q, k, v, soft_cap=2.0)


def test_explain_says_which_runs_and_why_not_the_others() -> None:
    q, k, v = operands(5, 7)
    plain = explain_attention(q, k, v, mask_type="causal", window=(3, 0), dropout=0.1)
    assert plain.runs == "sdpa"
    assert "2x4/2 heads of 8/6, 5 on 7, float32, causal, window (3, -1), dropout" in str(plain)
    capped = dict((choice := explain_attention(q, k, v, soft_cap=2.0)).passed_over)
    assert choice.runs == "reference"
    assert "no soft cap" in capped["sdpa"] and "no backward" in capped["flex"]
    with qt.only("reference"):
        assert dict(explain_attention(q, k, v).passed_over)["sdpa"] == "switched off by only()"


def test_autocast_computes_in_the_narrow_type_and_adds_biases_in_float32() -> None:
    q, k, v = operands(5, 7)
    bias = torch.linspace(-300, 300, H * 5 * 7).reshape(1, H, 5, 7)
    narrow = tuple(x.detach().bfloat16() for x in (q, k, v))
    for name in NAMES:
        for options in ({"mask_type": "causal"}, {"bias": bias}):
            with qt.only(name):
                with torch.autocast("cpu", torch.bfloat16):
                    y = attention(q, k, v, **options)
                assert_bitwise(y, attention(*narrow, **options), f"{name} {list(options)}")


def test_a_recipe_is_accepted_by_name() -> None:
    q, k, v = operands(5, 7)
    assert_bitwise(attention(q, k, v, recipe="mxfp8"), attention(q, k, v))
    assert explain_attention(q, k, v, recipe="mxfp8").runs == "sdpa"
    with pytest.raises(ValueError, match="no recipe 'mxfp9'; did you mean 'mxfp8'"):
        attention(q, k, v, recipe="mxfp9")


Q, K, V = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8), torch.zeros(2, 7, 2, 6)
T = {"layout": "thd"}


@pytest.mark.parametrize(
    "q, k, v, options, message",
    [
        (Q, K, V, {"layout": "bsh"}, "no layout 'bsh'; did you mean 'bshd'"),
        (Q, K, V, T, r"'thd' takes \[tokens, heads, features\]; got q \[2, 5, 4, 8\]"),
        (Q[0], K, V, {}, r"takes \[batch, tokens, heads, features\]; got q \[5, 4, 8\]"),
        (Q[:1], K, V, {}, "q and k share batch and features"),
        (Q, K, V[:, :6], {}, "k and v share batch, tokens and heads"),
        (Q, K[..., :7], V, {}, "q and k share batch and features"),
        (Q[:, :, :3], K, V, {}, "3 query heads cannot share 2 heads.*make the first number a multiple of the second"),
        (Q, K[:, :, :0], V[:, :, :0], {}, "4 query heads cannot share 0 heads"),
        (Q, K.half(), V, {}, "q is torch.float32, k torch.float16.*one floating-point dtype"),
        (Q.int(), K.int(), V.int(), {}, "one floating-point dtype"),
        (Q, K, V, {"mask_type": "casual"}, "did you mean 'causal'"),
        (Q, K, V, {"mask_type": "causal", "window": (2, 3)}, "looks ahead"),
        (Q, K, V, {"bias": torch.zeros(4, 7, 5)}, r"the bias has shape \[4, 7, 5\].*\[2, 4, 5, 7\]"),
        (Q, K, V, {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes has shape \[3\]; give \[heads\] = \[4\]"),
        (Q, K, V, {"sinks": torch.zeros(2)}, r"sinks is of shape \[2\]; give 'off_by_one', or a tensor"),
        (Q, K, V, {"sinks": "learnable"}, "sinks is 'learnable'; give 'off_by_one'"),
        (Q, K, V, {"soft_cap": 0.0}, "soft_cap is 0.0; give a positive number, or None"),
        (Q, K, V, {"dropout": 1.0}, "dropout is 1.0; give a probability"),
        (Q, K, K, {"dropout": 1.0}, "dropout is 1.0; give a probability"),
        (Q, K, K, {"dropout": -0.1}, "dropout is -0.1; give a probability"),
        (Q.int(), K.int(), K.int(), {}, "one floating-point dtype"),
        (Q, K, V, {"window": 3}, "window is 3; give .left, right."),
        (Q, K, V, {"mask_type": "arbitrary", "mask": [[True]]}, "the mask is a list; a mask is a boolean tensor"),
        (Q, K, V, {"bias": [1.0]}, "the bias is a list; give a tensor"),
        (Q, K, V, {"bias": torch.ones(5, 7) > 0}, "the bias is boolean; give a mask of pairs as `mask`"),
        (Q, K, V, {"sinks": True}, "sinks is True; give 'off_by_one'"),
        (Q, K, V, {"alibi_slopes": True}, "alibi_slopes is True; give .heads. = .4."),
        (Q, K, V, {"cu_seqlens": ends([5])}, "requires layout 'thd'; 'bshd' has a batch axis"),
        (Q[0], K[0], V[0], T, "'thd' needs cu_seqlens"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": ends([5]).float()}, "give int32 or int64"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": ends([2, 3])}, "keys ends at 5 and there are 7 tokens"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": (ends([5]), ends([3, 4]))}, "1 sequences of queries and 2 of keys"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": [0, 5]}, "cu_seqlens is a list; give an int tensor"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": (ends([5]),) * 3}, "cu_seqlens is 3 of them; give an int tensor"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": torch.tensor([1, 5])}, "starts at 1; it starts at 0"),
        (Q[0], K[0], V[0], T | {"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "falls from 4 to 3 at position 2"),
        (
            Q[0],
            K[0],
            V[0],
            T | {"cu_seqlens": (ends([5]), ends([7])), "mask_type": "padding"},
            "have no padding.*give 'none'",
        ),
    ],
)
def test_mismatched_arguments_are_refused(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **options)
