"""Test calls of flash-attn with a stand-in that follows its documentation: everything is aligned bottom right."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.attention import attention, backends
from quaver.torch.nn.attention.op import AttentionOpOptions, prepare
from tests.close import assert_close
from tests.torch.nn.attention.cases import D, H, operands

SLOPES = torch.tensor([0.5, 0.25, 0.125, 3.0])
ENDS = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """`flash_attn_func` as documented, from pairs of positions."""
    assert dropout_p == 0 and not return_attn_probs and deterministic == torch.are_deterministic_algorithms_enabled()
    queries, keys = q.shape[1], k.shape[1]
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window_size
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden |= (ahead > 0) & causal
    hidden |= (ahead > right) & (right >= 0)
    hidden |= (ahead < -left) & (left >= 0)
    bias = None if alibi_slopes is None else -alibi_slopes.reshape(-1, q.shape[2], 1, 1) * ahead.abs()
    cap = softcap or None
    with qt.only("reference"):
        return attention(
            q, k, v, mask_type="arbitrary", mask=hidden, bias=bias, soft_cap=cap, scale=softmax_scale
        ).contiguous()


def ragged_stand_in(
    q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor, longest_q: int, longest_k: int, **options: Any
) -> Tensor:
    assert at_q.dtype is at_k.dtype is torch.int32
    of_q, of_k = at_q.diff().tolist(), at_k.diff().tolist()
    assert (longest_q, longest_k) == (max(of_q), max(of_k))
    parts = zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
    return torch.cat([stand_in(*(x[None] for x in part), **options)[0] for part in parts])


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(flash_attn_func=stand_in, flash_attn_varlen_func=ragged_stand_in)
    monkeypatch.setitem(sys.modules, "flash_attn", module)  # type: ignore[arg-type]


def calls() -> list[Any]:
    plain = [
        {"queries": 7},
        {"queries": 5},
        {"queries": 7, "mask_type": "causal"},
        {"queries": 5, "mask_type": "causal_bottom_right"},
        {"queries": 1, "mask_type": "causal_bottom_right"},
        {"queries": 7, "mask_type": "causal", "window": (2, 0), "soft_cap": 2.0, "scale": 0.3},
        {"queries": 5, "mask_type": "causal_bottom_right", "window": (2, -1), "alibi_slopes": SLOPES},
        {"queries": 7, "window": (2, 1), "alibi_slopes": SLOPES.expand(2, H)},
    ]
    ragged = [
        {"cu_seqlens": ENDS, "layout": "thd"},
        {"cu_seqlens": ENDS, "layout": "thd", "mask_type": "causal_bottom_right", "window": (1, -1)},
        {"cu_seqlens": ENDS[1], "layout": "thd", "mask_type": "causal"},
    ]
    return plain + ragged


def of(options: dict[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    options = dict(options)
    queries = options.pop("queries", 7)
    q, k, v = operands(queries, 7, width=D, dtype=torch.bfloat16)
    if "cu_seqlens" in options:
        at = options["cu_seqlens"]
        q, k, v = q[0, : int(at[0][-1])] if isinstance(at, tuple) else q[0], k[0], v[0]
    return (q, k, v), options


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("options", calls(), ids=lambda options: "-".join(options))
def test_the_flash_call_receives_equivalent_arguments(options: dict[str, Any]) -> None:
    inputs, options = of(options)
    q, k, v, call = prepare(*inputs, AttentionOpOptions(**options))
    assert backends.unsupported(q, k, v, call) == ""
    y = backends.attend(q, k, v, call)
    with qt.only("reference"):
        right = attention(*inputs, **options)
    right = right.transpose(1, 2) if call.ragged is None else right.transpose(0, 1)[None]
    assert_close("output", y, right, 1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"queries": 5, "mask_type": "causal"}, "aligns bottom right, and 'causal' of unequal lengths aligns top left"),
        ({"queries": 5, "window": (1, 1)}, "aligns bottom right"),
        ({"queries": 5, "alibi_slopes": SLOPES}, "aligns bottom right"),
        ({"cu_seqlens": ENDS, "layout": "thd", "mask_type": "causal"}, "aligns bottom right"),
        ({"mask_type": "arbitrary", "mask": torch.zeros(7, 7, dtype=torch.bool)}, "no mask of tokens or pairs"),
        ({"bias": torch.zeros(7, 7)}, "no bias"),
        ({"sinks": "off_by_one"}, "no sinks"),
        ({"chunk": 3}, "no chunks"),
        ({"soft_cap": 1.0, "dropout": 0.5}, "no soft cap with dropout"),
        ({"alibi_slopes": SLOPES.clone().requires_grad_()}, "no gradient of ALiBi's slopes"),
    ],
)
def test_unsupported_arguments_give_a_clear_error(options: dict[str, Any], message: str) -> None:
    inputs, options = of(options)
    assert message in backends.unsupported(*prepare(*inputs, AttentionOpOptions(**options)))


def test_invalid_inputs_give_a_clear_error() -> None:
    inputs = operands(7, 7, width=D)
    assert "float16 and bfloat16, not torch.float32" in backends.unsupported(*prepare(*inputs, AttentionOpOptions()))
    inputs = operands(7, 7, dtype=torch.bfloat16)
    assert "the same head size for q, k and v, at most 256; these are 8 and 6" in backends.unsupported(
        *prepare(*inputs, AttentionOpOptions())
    )
