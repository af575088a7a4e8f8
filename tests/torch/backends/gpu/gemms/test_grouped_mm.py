"""Grouped GEMMs as torch's takes them on a GPU, by a stand-in that checks what CUDA's checks and multiplies alike."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

import quaver.torch as qt
from quaver import E4M3, QuantSpec
from quaver.torch.backends.gpu.gemms import grouped_mm
from quaver.torch.backends.gpu.launching import device
from quaver.torch.linear.grouped.matmul import GROUPED_MATMUL
from quaver.torch.linear.grouped.operands import quantize_experts, quantize_tokens
from quaver.torch.numerics.groups import Groups, Offsets
from quaver.torch.operations import ops
from tests.close import assert_bitwise
from tests.torch.backends.gpu.cublaslt import torchs_own

ROWS = QuantSpec(E4M3, (1, None))
T, K, N, G = 40, 72, 32, 3


def stand_in(calls: list[bool]) -> Any:
    """Written from torch's aten/src/ATen/native/cuda/GroupedBlas.cpp and GroupedMMUtils.h."""

    def scaled_grouped_mm(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        kind_a: ScalingType,
        scale_b: Tensor,
        kind_b: ScalingType,
        *,
        offs: Tensor,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert kind_a is kind_b is ScalingType.RowWise
        assert a.dtype is b.dtype is torch.float8_e4m3fn and output_dtype is torch.bfloat16
        (t, k), (groups, _, n) = a.shape, b.shape
        assert b.shape[1] == k and k % 16 == n % 16 == 0
        assert a.stride(1) == 1 and a.stride(0) % 16 == 0 and a.data_ptr() % 16 == 0, "mat1 row by row"
        assert b.stride(1) == 1 and b.stride(2) % 16 == 0 and b.data_ptr() % 16 == 0, "mat2 transposed"
        assert offs.dtype is torch.int32 and offs.shape == (groups,)
        assert scale_a.shape == (t,) and scale_a.is_contiguous() and scale_a.dtype is torch.float32
        assert scale_b.shape == (groups, n) and scale_b.stride(1) == 1 and scale_b.dtype is torch.float32
        y, start = torch.full((t, n), float("nan")), 0
        for group, end in enumerate(offs.tolist()):
            rows = a[start:end].double() * scale_a[start:end, None], b[group].double() * scale_b[group]
            y[start:end] = (rows[0] @ rows[1]).float()
            start = end
        calls.append(use_fast_accum)
        return y.to(torch.bfloat16)

    return scaled_grouped_mm


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call that reached torch accumulates fast; the first of a kind is the probe."""
    fast_accumulation: list[bool] = []
    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in(fast_accumulation))
    monkeypatch.setattr(grouped_mm, "_probes", {})
    yield fast_accumulation


def operands(spec: QuantSpec = ROWS, n: int = N, k: int = K) -> tuple[Groups, Groups, Offsets]:
    torch.manual_seed(0)
    x, w = torch.randn(T, k) * torch.logspace(-3, 3, T)[:, None], torch.randn(G, n, k)
    offsets = Offsets(torch.tensor([7, 7, 30], dtype=torch.int32), T)
    return quantize_tokens(x, spec, offsets), quantize_experts(w, spec), offsets


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("k", [64, 72])
def test_one_call_multiplies_all_groups(name: str, k: int, calls: list[bool]) -> None:
    with qt.only(name):
        a, b, offsets = operands(k=k)
        expected = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, True)
        assert not calls
    offsets._bounds = None
    with qt.only("native"):
        y = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, True)
        assert calls == [True, True], "a probe, and the call itself"
        GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, True)
        assert calls == [True] * 3
    assert offsets._bounds is None, "nobody has waited for the offsets"
    assert not y[30:].any(), "tokens of no group, which are not written"
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=0)


def test_a_layers_forward_and_input_gradient_take_it(calls: list[bool]) -> None:
    ends = torch.tensor([7, 7, 30], dtype=torch.int32)
    runs: list[list[Tensor]] = []
    for name in ("native", "reference"):
        torch.manual_seed(0)
        x, w = torch.randn(T, 48).bfloat16().requires_grad_(), torch.randn(G, N, 48).bfloat16().requires_grad_()
        with qt.only(name):
            y = qt.grouped_matmul(x, w, ends, recipe="rowwise")
            y.backward(torch.randn(T, N).bfloat16())
        assert x.grad is not None and w.grad is not None
        runs.append([y.detach(), x.grad, w.grad])
    assert calls == [True, True, False, False], "fprop and dgrad, each with its probe"
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=2.0**-7)


def test_what_it_does_not_take_runs_group_by_group_and_says_why(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(a: Groups, b: Groups, offsets: Offsets, n: int = N, dtype: torch.dtype = torch.bfloat16) -> str:
        (native, reason), (_, none) = GROUPED_MATMUL.explain(a, b, offsets, n, dtype)
        assert native == "native" and not none
        return reason

    a, b, offsets = operands()
    assert why(a, b, offsets) == "the tensor is not on a GPU"
    with qt.only("reference"):
        assert why(a, b, offsets) == "switched off by only()"
    with qt.only("native"):
        assert why(a, b, offsets) == ""
        assert "to be torch.float32" in why(a, b, offsets, dtype=torch.float32)
        assert "multiples of 16" in why(*operands(n=24), n=24)
        assert "rows of a group together" in why(*operands(QuantSpec(E4M3)))
        assert "swizzled group by group" in why(*operands(QuantSpec(E4M3, (1, 32), "e8m0")))
        assert "no grouped GEMM" in why(*operands(QuantSpec(E4M3, (1, 128))))
        for arch in device.TRAITS:
            monkeypatch.setattr(grouped_mm, "architecture", lambda _, arch=arch: arch)
            there = arch in (90, 100, 101, 103)
            assert (why(a, b, offsets) == "") is there and (there or f"this GPU is sm_{arch}" in why(a, b, offsets))


@pytest.mark.parametrize("wrong", ["raises", "is off", "writes NaN for an empty group"])
def test_a_gemm_that_refuses_or_differs_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = stand_in([])

    def broken(*args: Any, **how: Any) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("no kernel image\nis available")
        y: Tensor = right(*args, **how)
        return y * 1.1 if wrong == "is off" else y.index_fill_(0, torch.tensor([21]), float("nan"))

    monkeypatch.setattr(F, "scaled_grouped_mm", broken)
    monkeypatch.setattr(grouped_mm, "_probes", {})
    a, b, offsets = operands()
    with qt.only("native"):
        reason = GROUPED_MATMUL.explain(a, b, offsets, N, torch.bfloat16)[0][1]
        assert reason == "no kernel image" if wrong == "raises" else "off by" in reason
        y = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16)
    assert y.isfinite().all()


@torchs_own
def test_explain_names_it(calls: list[bool]) -> None:
    x, w = torch.randn(T, 48).bfloat16(), torch.randn(G, N, 48).bfloat16()
    with qt.only("native"):
        explained = qt.explain(qt.grouped_matmul, x, w, torch.tensor([7, 7, 30], dtype=torch.int32), recipe="rowwise")
    runs = {row.what: row.runs for row in explained.rows if row.what.endswith("GEMM")}
    assert runs == {
        "fprop GEMM": "native, grouped",
        "dgrad GEMM": "native, grouped",
        "wgrad GEMM": "native, group by group",
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_the_kernels_give_the_bits_of_the_reference(recipe: str) -> None:
    runs: list[list[Tensor]] = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        x, w = torch.randn(T, 48, requires_grad=True), torch.randn(G, 128, 48, requires_grad=True)
        with qt.only("reference"), qt.only(name):
            y = qt.grouped_matmul(x, w, torch.tensor([7, 7, 30], dtype=torch.int32), recipe=recipe)
            y.backward(torch.randn(T, 128))
        assert x.grad is not None and w.grad is not None
        runs.append([y.detach(), x.grad, w.grad])
    for ours, expected in zip(*runs, strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_runs_or_explain_says_why() -> None:
    x = torch.randn(T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(G, N, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([7, 7, 30], dtype=torch.int32, device="cuda")
    y = qt.grouped_matmul(x, w, ends, recipe="rowwise")
    y.float().sum().backward()
    assert x.grad is not None and w.grad is not None
    with ops.only("reference"):
        expected = qt.grouped_matmul(x, w, ends, recipe="rowwise")
    assert (y - expected).float().norm() < 1e-2 * expected.float().norm()
    if device.architecture(x.device) == 90:
        runs = {row.what: row.runs for row in qt.explain(qt.grouped_matmul, x, w, ends, recipe="rowwise").rows}
        assert runs["fprop GEMM"] == "native, grouped"
