"""Test the scan kernels against a float64 recurrence: outputs, last states, gradients, nonfinite values."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.backends.gpu import ssm as gpu
from quaver.torch.nn.ssm import scan
from quaver.torch.nn.ssm.scan import ssd
from tests.close import assert_bitwise, assert_close
from tests.kernels.compare import DEVICE
from tests.torch.nn.ssm.drawn import differentiated, drawn_gradient, exact, leaves, named, tensors

#: RMS relative to the recurrence in float64, as documented in `gpu.forward`.
BOUND = 3e-6
#: The same where products round their operands.
ROUNDED = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def by_kernels(values: dict[str, Tensor], **options: Any) -> list[Tensor]:
    given = leaves({name: value.to(DEVICE) for name, value in values.items()})
    with qt.only("triton"):
        return [t.cpu() for t in differentiated(ssd(**given, **options), given)]


def assert_near(values: dict[str, Tensor], bound: float, **options: Any) -> None:
    expected = exact(values, **options)
    for name, one, other in zip(named(values), by_kernels(values, **options), expected, strict=True):
        assert_close(name, one, other, bound)


@pytest.mark.parametrize(
    ("size", "scale", "left_out", "options"),
    [
        # Whole chunks of whole tiles; ragged ones; a chunk of one token.
        ((1, 64, 2, 16, 1, 16), 20.0, (), {}),
        ((2, 37, 4, 5, 2, 3), 0.05, (), {}),
        ((1, 35, 2, 20, 2, 32), 1.0, ("D", "initial_states"), {"dt_limit": (0.05, 0.4), "chunk_size": 16}),
        ((1, 1, 2, 3, 1, 4), 1.0, ("dt_bias",), {"dt_softplus": False, "dt_limit": (-1.0, 0.5)}),
    ],
    ids=["whole", "ragged", "limits", "one token"],
)
def test_outputs_and_gradients_match_a_float64_recurrence(
    size: tuple[int, ...], scale: float, left_out: tuple[str, ...], options: dict[str, Any]
) -> None:
    values = tensors(size, scale=scale)
    assert scan.FORWARD.explain(*values.values(), None, True, "0.0,inf", 0)[0][0] == "triton"
    assert_near({name: value for name, value in values.items() if name not in left_out}, BOUND, **options)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_heads_that_share_a_program_and_few_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROGRAMS", 0)
    for passes in (gpu._forwards_scan, gpu._backwards_scan):
        monkeypatch.setattr(passes, "plans", {})
    assert_near(tensors((1, 70, 4, 16, 2, 20), dtype=dtype), ROUNDED[dtype])


def test_packed_sequences_are_independent() -> None:
    values, ends = tensors((1, 80, 2, 5, 1, 3)), [0, 2, 2, 43, 80]
    flat = {name: value[0] if name in ("x", "dt", "B", "C") else value for name, value in values.items()}
    flat["initial_states"] = torch.randn(4, 2, 5, 3)
    ours = by_kernels(flat, cu_seqlens=torch.tensor(ends, device=DEVICE))
    wide = leaves({name: value.double() for name, value in flat.items()})
    expected = differentiated(ssd(**wide, cu_seqlens=torch.tensor(ends)), wide)
    for name, one, other in zip(named(flat), ours, expected, strict=True):
        assert_close(name, one, other, BOUND)
    # The state of a sequence without tokens, and its gradient, pass through unchanged.
    assert_bitwise(ours[1][1], flat["initial_states"][1])
    assert_bitwise(ours[-1][1], drawn_gradient(ours[1], 1)[1])


def test_edge_case_values_in_each_sequence_and_head() -> None:
    """By sequence: steps of 0, few large ones, larger, x large, tiny and 0, B 0, a large state; decays by head."""
    values = tensors((8, 34, 4, 4, 1, 4))
    values["dt"][0] = -1e9
    values["dt"][1, 10:20] = 1e4
    values["dt"][2, ::3] = 1e25
    values["x"][3, 3] = 1e20
    values["x"][4] = 1e-30
    values["x"][5] = 0
    values["B"][6] = 0
    values["initial_states"][7] = 1e25
    values["A"][:3] = torch.tensor([-1e-30, -1e30, 0.0])
    names, expected = named(values), exact(values)
    for name, one, other in zip(names, by_kernels(values), expected, strict=True):
        if one.dim() == 1:
            continue
        for sequence in range(8):
            # With such large steps most gradients of dt are differences of nearly equal terms.
            if not (name == "gradient of dt" and sequence in (1, 2)):
                assert_close(f"{name}, sequence {sequence}", one[sequence], other[sequence], BOUND)


def test_nonfinite_values_spoil_no_earlier_chunk_and_no_other_sequence() -> None:
    values = tensors((5, 38, 2, 4, 1, 4))
    clean = by_kernels(values)
    for sequence, (name, value) in enumerate(
        [("x", torch.nan), ("dt", torch.inf), ("B", -torch.inf), ("C", torch.nan)]
    ):
        values[name][sequence, 35] = value
    spoiled, truth = by_kernels(values), exact(values)
    assert_bitwise(spoiled[0][4], clean[0][4])
    assert_bitwise(spoiled[0][:, :32], clean[0][:, :32])
    assert spoiled[1][4].isfinite().all()
    # An infinity may come out as NaN, and the other way round, by the order of sums.
    assert (~spoiled[0][:, 35:].isfinite() | truth[0][:, 35:].isfinite()).all()
    for name, one, other in zip(named(values), spoiled, clean, strict=True):
        if one.dim() > 1:
            assert_bitwise(one[4], other[4], name)


def test_softplus_keeps_its_precision_for_both_signs() -> None:
    """With one token a sequence, so that no larger step hides a small one."""
    dt = torch.tensor([-1e4, -80.0, -20.0, -16.7, -15.0, -12.0, -9.0, -5.0, -1e-3, 0.0, 1e-3, 3.0, 19.9, 20.1, 90.0])
    values = tensors((len(dt), 1, 1, 4, 1, 4)) | {"dt": dt.view(-1, 1, 1), "A": torch.tensor([-1e-6])}
    values = {name: value for name, value in values.items() if name not in ("dt_bias", "initial_states", "D")}
    expected = exact(values)
    for name, one, other in zip(named(values), by_kernels(values), expected, strict=True):
        for step, ours, truth in zip(dt.tolist(), one, other, strict=False):
            assert_close(f"{name} where dt is {step}", ours, truth, BOUND)


def test_unsupported_inputs_use_the_plain_implementation() -> None:
    taken = tensors((1, 4, 2, 8, 1, 8))
    refused = {
        "float64": {name: value.double() for name, value in taken.items()},
        "a skip for each feature": taken | {"D": torch.ones(2, 8)},
        "no tokens": tensors((1, 0, 2, 8, 1, 8)),
        "wide heads in float32": tensors((1, 4, 2, 64, 1, 8)),
        "wide states": tensors((1, 4, 2, 8, 1, 300), dtype=torch.bfloat16),
    }
    for name, values in {"taken": taken, **refused}.items():
        why = gpu.reason_scan(*values.values(), None, True, "0.0,inf", 0)
        assert bool(why) == (name in refused), (name, why)
    with qt.only("triton"):
        y, _ = ssd(**{name: value.to(DEVICE) for name, value in refused["wide heads in float32"].items()})
    assert_close("y", y.cpu(), exact(refused["wide heads in float32"])[0], BOUND)


def test_a_block_computes_the_same_with_kernels() -> None:
    """With heads inside the output of a projection, next to other features."""
    torch.manual_seed(0)
    block = qt.Mamba2(16, inner=16, head_dim=8, state=6, groups=1, normalization="RMSNorm").to(DEVICE)
    x, runs = torch.randn(2, 35, 16), []
    for name in ("triton", "reference"):
        given = x.to(DEVICE).requires_grad_()
        with qt.only(name):
            y = block(given)
            grads = torch.autograd.grad(y, [given, *block.parameters()], drawn_gradient(y.cpu(), 0).to(DEVICE))
        runs.append([t.detach().cpu() for t in (y, *grads)])
    for name, one, other in zip(("y", "x", *dict(block.named_parameters())), *runs, strict=True):
        assert_close(name, one, other, BOUND)
