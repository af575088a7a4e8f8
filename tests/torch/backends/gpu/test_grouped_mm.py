"""Test grouped GEMM arguments for a GPU with a stand-in that makes the checks of CUDA and multiplies the same way."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

import quaver.torch as qt
from quaver import E4M3, E5M2, QuantSpec, recipes
from quaver.torch.backends.gpu import device, grouped_block_scaled, grouped_gemm, grouped_mm
from quaver.torch.linear.grouped.operands import GROUPED_MATMUL, GROUPED_QUANTIZE, GROUPED_WEIGHTS, GROUPED_WGRAD
from quaver.torch.linear.grouped.products import stacked
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets
from quaver.torch.numerics.quantized import Quantized, decode_scales, unpack, unswizzle, values_of
from quaver.torch.operations import ops
from quaver.torch.state.noise import name_streams
from tests.torch.backends.gpu.cublaslt import torchs_own

SPECS = grouped_mm.SPECS
ROWS = SPECS["row"]
T, K, N, G = 40, 96, 32, 3
ENDS = torch.tensor([7, 7, 30], dtype=torch.int32)
AS_TORCH_HAS_THEM = grouped_mm.KINDS
KINDS = {
    (ScalingType.RowWise,): "row",
    (ScalingType.BlockWise1x32,): "mx",
    (ScalingType.BlockWise1x16, ScalingType.TensorWise): "nv",
}
#: What a call that reached torch was: its kind, whether it sums over groups, and whether it accumulates fast.
Call = tuple[str, bool, bool]


def stand_in(calls: list[Call]) -> Any:
    """Written from torch's aten/src/ATen/native/cuda/GroupedBlas.cpp and GroupedMMUtils.h, and from the layout that its
    own tests make of each group's scales."""

    def scaled_grouped_mm(
        a: Tensor,
        b: Tensor,
        scale_a: list[Tensor],
        kind_a: list[ScalingType],
        scale_b: list[Tensor],
        kind_b: list[ScalingType],
        swizzle_a: list[SwizzleType] | None = None,
        swizzle_b: list[SwizzleType] | None = None,
        *,
        offs: Tensor,
        output_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        kind, for_wgrad = KINDS[tuple(kind_a)], b.dim() == 2
        assert kind_a == kind_b and swizzle_a == swizzle_b and output_dtype is torch.bfloat16
        assert swizzle_a == (
            None if kind == "row" else [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(kind_a)]
        )
        dtype = torch.float4_e2m1fn_x2 if kind == "nv" else torch.float8_e4m3fn
        assert a.dtype is b.dtype is dtype
        a, b = a.view(torch.uint8), b.view(torch.uint8)
        assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
        assert a.stride(1) == 1 and a.stride(0) % 16 == 0 and a.data_ptr() % 16 == 0, "mat1 row by row"
        assert b.stride(-2) == 1 and b.stride(-1) % 16 == 0 and b.data_ptr() % 16 == 0, "mat2 transposed"
        groups = offs.shape[0]
        assert offs.dtype is torch.int32 and (for_wgrad or b.shape[0] == groups)
        for scale, matrix in ((scale_a, a), (scale_b, b)):
            check_scales(kind, scale, matrix, groups, for_wgrad, matrix is a)
        y = product(kind, a, b, scale_a, scale_b, offs.tolist(), for_wgrad)
        calls.append((kind, for_wgrad, use_fast_accum))
        return y.to(torch.bfloat16)

    return scaled_grouped_mm


def check_scales(kind: str, scales: list[Tensor], matrix: Tensor, groups: int, for_wgrad: bool, left: bool) -> None:
    scale, rows = scales[0], matrix.shape[0] if left else matrix.shape[-1]
    if kind == "row":
        assert scale.dtype is torch.float32 and scale.is_contiguous()
        assert scale.shape == ((groups * rows,) if for_wgrad else (rows,) if left else (groups, rows))
        return
    assert scale.dtype is (torch.float8_e8m0fnu if kind == "mx" else torch.float8_e4m3fn)
    if for_wgrad or left:
        assert scale.dim() == 2 and scale.shape[0] >= rows
    else:
        k = matrix.shape[1] * (2 if kind == "nv" else 1)
        across = -(-(k // (16 if kind == "nv" else 32)) // 4) * 4
        assert scale.shape == (groups, -(-rows // 128) * 128 * across)
    if kind == "nv":
        assert scales[1].dtype is torch.float32 and scales[1].numel() == groups


def product(
    kind: str, a: Tensor, b: Tensor, of_a: list[Tensor], of_b: list[Tensor], ends: list[int], for_wgrad: bool
) -> Tensor:
    """Each group's own scaled GEMM, its scales where that begins to read them."""
    n = b.shape[-1]
    y = torch.full((len(ends), a.shape[0], n) if for_wgrad else (a.shape[0], n), float("nan"))
    start, at = 0, [0, 0]
    for group, end in enumerate(ends):
        left, right = (
            (a[:, cut(kind, start, end)], b[cut(kind, start, end)].t()) if for_wgrad else (a[start:end], b[group].t())
        )
        if end > start:
            sides = [
                dequantized(kind, codes, scale, at, i, group, for_wgrad, (start, end))
                for i, (codes, scale) in enumerate(((left, of_a), (right, of_b)))
            ]
            result = sides[0] @ sides[1].t()
            y[group if for_wgrad else slice(start, end)] = result.float()
        start = end
    return y


def cut(kind: str, start: int, end: int) -> slice:
    """Bytes of the slots of a group."""
    size = 2 if kind == "nv" else 1
    return slice(start // size, end // size)


def dequantized(
    kind: str, codes: Tensor, scales: list[Tensor], at: list[int], side: int, group: int, for_wgrad: bool, rows: Any
) -> Tensor:
    """Codes [rows, k] times the scales of one group, float64."""
    if kind == "row":
        flat = scales[0].reshape(-1)
        first = group * codes.shape[0] if for_wgrad or side else rows[0]
        return codes.contiguous().view(torch.float8_e4m3fn).double() * flat[first : first + codes.shape[0], None]
    packed = kind == "nv"
    count, k = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    width, tall = (16 if packed else 32), -(-count // 128) * 128
    across = -(-k // width)
    size = tall * (-(-across // 4) * 4)
    flat = scales[0].view(torch.uint8).reshape(-1)
    if side and not for_wgrad:
        flat = scales[0][group].view(torch.uint8)
        first = 0
    else:
        first, at[side] = at[side], at[side] + size
    stored = unswizzle(flat[first : first + size], count, across)
    spec = SPECS[kind]
    factor = 1.0 / scales[1].view(-1)[group].view(1, 1) if packed else None
    scale = decode_scales(stored, spec, factor).double().repeat_interleave(width, 1)[:, :k]
    values = (
        values_of(unpack(codes.contiguous(), k), spec.format)
        if packed
        else codes.contiguous().view(torch.float8_e4m3fn)
    )
    return values.double() * scale


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What reached torch; the first of a kind is the probe."""
    reached: list[Call] = []
    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in(reached))
    monkeypatch.setattr(grouped_mm, "_probes", {})
    # A GPU that has them all, which no card is.
    monkeypatch.setattr(grouped_mm, "architecture", lambda _: 100)
    kinds = {name: kind._replace(majors=(9, 10)) for name, kind in grouped_mm.KINDS.items()}
    monkeypatch.setattr(grouped_mm, "KINDS", kinds)
    yield reached


def operands(spec: QuantSpec = ROWS, n: int = N, k: int = K) -> tuple[GroupedOperand, Quantized, GroupOffsets]:
    torch.manual_seed(0)
    x, w = torch.randn(T, k) * torch.logspace(-3, 3, T)[:, None], torch.randn(G, n, k)
    offsets = GroupOffsets(ENDS, T)
    stack = stacked([reference.quantize(one, spec) for one in w])
    assert stack is not None
    return grouped.quantize(x, spec, offsets, False), stack, offsets


def transposes(spec: QuantSpec = ROWS, n: int = N, k: int = 48) -> tuple[GroupedOperand, GroupedOperand]:
    torch.manual_seed(0)
    offsets = GroupOffsets(ENDS, T)
    x, g = (torch.randn(T, size) * torch.logspace(-2, 2, T)[:, None] for size in (k, n))
    return grouped.quantize(g, spec, offsets, True), grouped.quantize(x, spec, offsets, True)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("k", [64, 96])
def test_one_call_multiplies_all_groups(kind: str, k: int, calls: list[Call]) -> None:
    a, b, offsets = operands(SPECS[kind], k=k)
    with qt.only("reference"):
        expected = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, None, True)
        assert not calls
    offsets._bounds = None
    with qt.only("native"):
        y = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, None, True)
        assert calls == [(kind, False, True)] * 2, "a probe, and the call itself"
        GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, None, True)
        assert calls == [(kind, False, True)] * 3
    assert offsets._bounds is None, "nobody has waited for the offsets"
    assert not y[30:].any(), "tokens of no group, which are not written"
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("kind", SPECS)
def test_one_call_sums_over_all_groups(kind: str, calls: list[Call]) -> None:
    a, b = transposes(SPECS[kind])
    with qt.only("reference"):
        expected = GROUPED_WGRAD(a, b, torch.bfloat16, False)
        assert not calls
    with qt.only("native"):
        y = GROUPED_WGRAD(a, b, torch.bfloat16, False)
    assert calls == [(kind, True, False)] * 2, "a probe, and the call itself"
    assert not y[1].any(), "a group without tokens"
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=1e-4)


def test_groups_of_several_tiles_find_their_scales(calls: list[Call]) -> None:
    """More than 128 rows and four blocks per group, with tiles of scales stored group after group."""
    torch.manual_seed(0)
    offsets = GroupOffsets(torch.tensor([150, 160, 500], dtype=torch.int32), 520)
    x, g = torch.randn(520, 64), torch.randn(520, 272)
    for spec in (SPECS["mx"], SPECS["nv"]):
        a, b = grouped.quantize(g, spec, offsets, True), grouped.quantize(x, spec, offsets, True)
        stack = stacked([reference.quantize(one, spec) for one in torch.randn(3, 144, 64)])
        rows = grouped.quantize(x, spec, offsets, False)
        results = []
        for name in ("reference", "native"):
            with qt.only(name):
                y = GROUPED_MATMUL(rows, stack, offsets, 144, torch.bfloat16, None, False)
                results.append((GROUPED_WGRAD(a, b, torch.bfloat16, False), y))
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "nvfp4"])
def test_a_layers_gemms_take_it(recipe: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = GroupOffsets.bounds

    def waits(offsets: GroupOffsets) -> list[tuple[int, int]]:
        assert offsets.ends is not ENDS, "the host has waited for the offsets"
        return bounds(offsets)

    monkeypatch.setattr(GroupOffsets, "bounds", waits)
    runs: list[list[Tensor]] = []
    for name in ("native", "decoded"):
        torch.manual_seed(0)
        layer = qt.GroupedLinear(G, 96, N, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(T, 96).bfloat16().requires_grad_()
        with qt.only(name):
            y = layer(x, ENDS)
            y.backward(torch.randn(T, N).bfloat16())
        assert x.grad is not None and layer.weight.grad is not None and layer.bias is not None
        runs.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    kind = {"rowwise": "row", "mxfp8": "mx", "nvfp4": "nv"}[recipe]
    assert sorted({call[:2] for call in calls}) == [(kind, False), (kind, True)], "fprop and dgrad, and wgrad"
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2.0**-6, atol=2.0**-5)


@pytest.mark.parametrize("how", ["eager", "compiled", "refused"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_blackwells_gemms_take_what_kernels_write(
    recipe: str, how: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and swizzled scales straight from the kernels; decoded if torch's GEMM is refused after all."""
    monkeypatch.setattr(grouped_block_scaled, "architecture", lambda _: 100)
    monkeypatch.setattr(grouped_gemm, "architecture", lambda _: 100)
    written: list[Any] = []
    quantize = grouped_block_scaled.quantize
    monkeypatch.setattr(grouped_block_scaled, "quantize", lambda *args: written.append(args) or quantize(*args))
    for operation in (GROUPED_QUANTIZE, GROUPED_WEIGHTS):
        for impl in operation.implementations:
            impl.__dict__.pop("run", None)
    if how == "refused":
        monkeypatch.setattr(grouped_mm, "_probe", lambda *_: "it is refused")
    runs: list[list[Tensor]] = []
    for kernels in (True, False):
        torch.manual_seed(0)
        layer = qt.GroupedLinear(G, 128, 256, recipe=recipe, dtype=torch.bfloat16)
        layer.__dict__["qualified_name"] = "experts"
        name_streams(layer)
        run: Any = layer
        if how == "compiled":
            torch._dynamo.reset()
            run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        x = torch.randn(T, 128).bfloat16().requires_grad_()
        with qt.only("native"), device.asking("triton" if kernels else ""):
            y = run(x, ENDS)
            y.backward(torch.randn(T, 256).bfloat16())
        assert x.grad is not None and layer.weight.grad is not None and layer.bias is not None
        runs.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    assert len(written) == 2, "forward and backward"
    assert bool(calls) is (how != "refused")
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2.0**-6, atol=2.0**-5)


def test_unsupported_inputs_run_elsewhere_and_say_why(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    def why(
        a: GroupedOperand, b: Quantized, offsets: GroupOffsets, n: int = N, dtype: torch.dtype = torch.bfloat16
    ) -> str:
        (native, reason), *others = GROUPED_MATMUL.explain(a, b, offsets, n, dtype, None, False)
        assert native == "native" and not others[-1][1]
        return reason

    a, b, offsets = operands()
    assert why(a, b, offsets) == "the tensor is not on a GPU"
    with qt.only("reference"):
        assert why(a, b, offsets) == "switched off by only()"
    with qt.only("native"):
        assert why(a, b, offsets) == ""
        assert "must be torch.float32" in why(a, b, offsets, dtype=torch.float32)
        assert "multiples of 16" in why(*operands(n=24), n=24)
        assert why(*operands(QuantSpec(E4M3))) == "", "a scale of a group is one of each of its rows"
        assert "no grouped GEMM" in why(*operands(QuantSpec(E5M2)))
        assert "no grouped GEMM" in why(*operands(QuantSpec(E4M3, (1, 128))))
        odd = transposes(n=24)
        assert "multiples of 16" in dict(GROUPED_WGRAD.explain(*odd, torch.bfloat16, False))["native"]
        assert "whole blocks of 32" in why(*operands(SPECS["mx"], k=144))
        assert why(*operands(SPECS["mx"], k=160)) == ""
        monkeypatch.setattr(grouped_mm, "KINDS", AS_TORCH_HAS_THEM)
        for arch in device.TRAITS:
            monkeypatch.setattr(grouped_mm, "architecture", lambda _, arch=arch: arch)
            # On 10.x torch's kernels for a scale a row trap, so that they may not even be tried.
            for kind, there in (("row", (90,)), ("mx", (100, 101, 103)), ("nv", (100, 101, 103))):
                reason = why(*operands(SPECS[kind]))
                assert (reason == "") is (arch in there) and (reason == "" or f"this GPU is sm_{arch}" in reason)


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
        reason = GROUPED_MATMUL.explain(a, b, offsets, N, torch.bfloat16, None, False)[0][1]
        assert reason == "no kernel image" if wrong == "raises" else "off by" in reason
        y = GROUPED_MATMUL(a, b, offsets, N, torch.bfloat16, None, False)
    assert y.isfinite().all()


@torchs_own
def test_explain_names_it(calls: list[Call]) -> None:
    x, w = torch.randn(T, 48).bfloat16(), torch.randn(G, N, 48).bfloat16()
    with qt.only("native"):
        explained = qt.explain(qt.grouped_matmul, x, w, ENDS, recipe="rowwise")
        layer = qt.explain(qt.GroupedLinear(G, 48, N, dtype=torch.bfloat16, recipe="tensorwise"), x)
    runs = {row.what: row.runs for row in explained.rows if row.what.endswith("GEMM")}
    assert runs == dict.fromkeys(("fprop GEMM", "dgrad GEMM", "wgrad GEMM"), "native, grouped")
    rows = {row.what: row for row in layer.rows}
    assert rows["fprop GEMM"].runs == "native, grouped" and rows["dgrad GEMM"].runs != "native, grouped"
    assert "no grouped GEMM for e5m2" in dict(rows["dgrad GEMM"].passed_over)["native, grouped"]
    assert rows["input"].runs == "torch, all groups at once"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning")
def test_on_a_gpu_it_runs_or_explain_says_why_not() -> None:
    ends = ENDS.cuda()
    x = torch.randn(T, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for recipe in recipes.RECIPES:
        layer = qt.GroupedLinear(G, 64, N, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        y = layer(x, ends)
        y.float().sum().backward()
        with ops.only("reference"):
            expected = layer(x, ends)
        assert (y - expected).float().norm() < 1e-2 * expected.float().norm()
    if device.architecture(x.device) == 90:
        w = torch.randn(G, N, 64, device="cuda", dtype=torch.bfloat16)
        runs = {row.what: row.runs for row in qt.explain(qt.grouped_matmul, x, w, ends, recipe="rowwise").rows}
        assert runs["fprop GEMM"] == "native, grouped"
