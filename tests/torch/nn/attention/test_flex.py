"""FlexAttention's functions of positions mean the masks and biases; on a CPU they run unfused and forward only."""

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

import quaver.torch as qt
from quaver.torch.nn.attention import attention, backends
from quaver.torch.nn.attention.op import AttentionOpOptions, prepare
from tests.close import assert_close
from tests.pairs import pairs
from tests.torch.nn.attention.cases import MASK_TYPES, B, H, mask_of

SLOPES = torch.tensor([0.5, 0.25, 0.125, 3.0])
SINKS = torch.tensor([-1.0, 0.0, 0.5, 3.0])
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that computes the scores is called, and not traced anew for each case; it is torch's way to debug
    such functions, and has no backward."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def operands(queries: int, keys: int, groups: int = 2) -> tuple[torch.Tensor, ...]:
    shapes = (B, queries, H, 16), (B, keys, groups, 16), (B, keys, groups, 32)
    return tuple(torch.randn(s) for s in shapes)


def compare(inputs: tuple[torch.Tensor, ...], **options: Any) -> None:
    q, k, v, call = prepare(*inputs, AttentionOpOptions(**options))
    assert backends.unsupported_flex(q, k, v, call) == ""
    y = backends.attend_flex(q, k, v, call)
    with qt.only("reference"):
        right = attention(*inputs, **options)
    assert_close("output", y, right.transpose(1, 2) if call.ragged is None else right.transpose(0, 1)[None], 2e-6)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("mask_type", "lengths", "window", "groups"),
    pairs(MASK_TYPES, [(7, 7), (5, 7), (7, 5)], [None, (2, -1)], [4, 2]),
)
def test_masks_equal_the_reference(mask_type: str, lengths: tuple[int, int], window: Any, groups: int) -> None:
    queries, keys = lengths
    mask = mask_of(mask_type, queries, keys)
    compare(operands(queries, keys, groups), mask_type=mask_type, mask=mask, window=window)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3, "soft_cap": 0.7},
        {"bias": torch.linspace(-2, 2, 35).reshape(5, 7)},
        {"alibi_slopes": SLOPES, "mask_type": "causal_bottom_right"},
        {"alibi_slopes": SLOPES.expand(B, H), "mask_type": "padding_causal_bottom_right", "soft_cap": 2.0},
        {"sinks": SINKS, "mask_type": "arbitrary", "soft_cap": 2.0},
        {"sinks": "off_by_one", "window": (1, 2)},
        {"chunk": 3, "mask_type": "causal_bottom_right"},
        {"chunk": 2, "mask_type": "padding_causal", "window": (0, -1)},
    ],
)
def test_options_equal_the_reference(options: dict[str, Any]) -> None:
    mask = mask_of(options.get("mask_type", "none"), 5, 7)
    compare(operands(5, 7), mask=mask, **options)


@UNFUSED
@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
def test_ragged_batches_equal_the_reference(mask_type: str) -> None:
    inputs = tuple(x[0] for x in operands(6, 7))
    ends = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 3, 4, 7])
    chunk = 2 if mask_type == "causal" else None
    compare(inputs, layout="thd", cu_seqlens=ends, mask_type=mask_type, alibi_slopes=SLOPES, chunk=chunk)


def test_unsupported_arguments_give_a_clear_error() -> None:
    q, k, v = operands(5, 7)
    bias = torch.zeros(5, 7, requires_grad=True)
    for options, message in (
        ({"dropout": 0.5}, "no dropout"),
        ({"bias": bias}, "no gradient of a bias"),
        ({"alibi_slopes": SLOPES.clone().requires_grad_()}, "no gradient of a bias or of ALiBi's slopes"),
    ):
        assert message in backends.unsupported_flex(*prepare(q, k, v, AttentionOpOptions(**options)))
    assert "at least 16 features" in backends.unsupported_flex(
        *prepare(q[..., :8], k[..., :8], v, AttentionOpOptions())
    )
    assert "does not support float64" in backends.unsupported_flex(
        *prepare(q.double(), k.double(), v.double(), AttentionOpOptions())
    )
    assert "no query or no key" in backends.unsupported_flex(*prepare(q[:, :0], k, v, AttentionOpOptions()))
    assert "no backward" in backends.reason_flex(*prepare(q, k, v, AttentionOpOptions()))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"soft_cap": 2.0}, {"sinks": SINKS}, {"mask_type": "causal", "window": (40, 0)}])
def test_on_a_gpu_outputs_and_gradients_equal_the_reference(options: dict[str, Any]) -> None:
    shapes = (2, 200, H, 64), (2, 200, 2, 64), (2, 200, 2, 64)
    inputs = tuple(torch.randn(s, device="cuda", requires_grad=True) for s in shapes)
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    runs = []
    for name in ("flex", "reference"):
        with qt.only(name):
            y = attention(*inputs, **options)
        runs.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for a, b in zip(*runs, strict=True):
        assert_close("flex", a, b, 5e-3)
