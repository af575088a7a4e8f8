"""Whole layers on the kernels, interpreted: the bits of the reference, forward and backward, under every recipe."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear import general
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation
from tests.operands import SPECS
from tests.pairs import case_name, pairs
from tests.torch.backends.gpu.cublaslt import torchs_own

RECIPES = [name for name in recipes.RECIPES if name != "bf16"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was asked of the kernels: "quantize", or "both" for one read that serves two GEMMs."""
    calls: list[str] = []

    def noting(name: str, impl: Implementation) -> Implementation:
        def run(*args: Any) -> Any:
            calls.append(name)
            return impl.run(*args)

        return Implementation(impl.name, run, impl.reason) if impl.name == "triton" else impl

    for op, name in ((ops.QUANTIZE, "quantize"), (ops.QUANTIZE_BOTH, "both")):
        impls = [noting(name, impl) for impl in op.implementations]
        monkeypatch.setattr(op, "implementations", impls)
        monkeypatch.setattr(op, "enabled", impls)
    ops.clear_resolved()
    yield calls
    ops.clear_resolved()


def run(layer: qt.Linear, recipe: str, tokens: int, steps: int = 2) -> list[Tensor]:
    """Outputs, gradients and state of a few steps."""
    tensors: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        x = (torch.randn(tokens, layer.in_features, dtype=layer.weight.dtype) * 10.0**step).requires_grad_()
        with qt.autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.randn_like(y) / 8)
        tensors += [y.detach(), x.grad, layer.weight.grad.clone()]  # type: ignore[list-item,union-attr]
        layer.zero_grad()
        with torch.no_grad():
            layer.weight.mul_(0.5)
    return tensors + [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize(
    ("recipe", "tokens", "dtype"), pairs(RECIPES, (32, 5), (torch.float32, torch.bfloat16)), ids=case_name
)
def test_a_layer_on_the_kernels_has_the_bits_of_the_reference(
    recipe: str, tokens: int, dtype: torch.dtype, reads: list[str]
) -> None:
    layer = qt.Linear(48, 32, dtype=dtype)
    cached_transpose = copy.deepcopy(layer)
    with qt.only("reference"):
        expected = run(layer, recipe, tokens)
        assert not reads
        with qt.only("triton"):
            by_kernels = run(cached_transpose, recipe, tokens)
    for one, other in zip(by_kernels, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    if recipe in ("tensorwise", "delayed"):
        # Input, weight and grad_output of two steps, each from one read; nothing was quantized apart.
        assert reads == ["both"] * 6


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_on_torchs_own_gemms_is_within_the_bound(recipe: str) -> None:
    layer = qt.Linear(48, 32)
    cached_transpose = copy.deepcopy(layer)
    with qt.only("reference"):
        expected = run(layer, recipe, 37)
        with qt.only("native"):
            by_torch = run(cached_transpose, recipe, 37)
    for one, other in zip(by_torch, expected, strict=True):
        assert (one - other).double().norm() <= 1e-6 * other.double().norm()


@torchs_own
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_explain_names_the_native_gemms(recipe: str) -> None:
    layer = qt.Linear(48, 32, recipe=recipe)
    with qt.only("native"):
        rows = {row.what: row for row in qt.explain(layer, torch.randn(37, 48)).rows}
    for name in ("fprop", "dgrad", "wgrad"):
        row = rows[f"{name} GEMM"]
        assert row.runs == "native"
        assert row.how == ("fast accumulation, 13 bits of a sum" if name == "fprop" else "float32 accumulation")
    with qt.only("native"):
        explained = qt.explain(qt.Linear(48, 32, recipe="mxfp8"), torch.randn(37, 48)).rows
    gemm_rows = [row for row in explained if row.what.endswith("GEMM")]
    assert all(row.runs == "decoded" and "from sm_100 on" in dict(row.passed_over)["native"] for row in gemm_rows)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_backward_keeps_the_transpose_of_the_input_and_nothing_else_of_it(recipe: str) -> None:
    layer = qt.Linear(48, 32, dtype=torch.bfloat16)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with qt.only("triton"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qt.autocast(recipe=recipe):
        layer(torch.randn(40, 48, dtype=torch.bfloat16))
    codes = [t for t in saved if t.element_size() == 1]
    assert [tuple(t.shape) for t in codes] == [(48, 40)]
    assert codes[0].untyped_storage().nbytes() == 48 * 48, "rows of 40 bytes are filled up to 48"
    assert sum(t.numel() for t in saved if t.dtype is torch.bfloat16 and t is not layer.weight) == 0


#: Names of specs, one of each kind of result.
TRACED = {
    (spec.format.packed, spec.two_level, spec.transposable): name
    for name, spec in reversed(SPECS.items())
    if spec.rounding == "nearest"
}


@pytest.mark.parametrize("name", SPECS)
def test_two_operands_in_one_operator_match_two_calls(name: str) -> None:
    spec = SPECS[name]
    if spec.rounding != "nearest":
        return
    x = torch.randn(40, 48)
    args = x, spec.text, spec.text, None, None, None
    # Tracing is checked for the first of each kind of result.
    checks = {} if name in TRACED.values() else {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(torch.ops.quaver.quantize_both.default, args, **checks)
    operands = ops.QUANTIZE_BOTH.traced(x, spec, spec)
    for q, expected in zip(operands, (ops.QUANTIZE(x, spec), ops.QUANTIZE(x.t(), spec)), strict=True):
        assert torch.equal(q.codes(), expected.codes()) and torch.equal(q.scales(), expected.scales())


def test_a_warning_names_a_layer_with_unsupported_feature_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.backends.gpu import device

    monkeypatch.setattr(device, "why_no_fp8", lambda *_: "")
    layer = qt.Linear(48, 30)
    layer.qualified_name = "blocks.0.out"
    with pytest.warns(UserWarning, match=r"blocks\.0\.out has a weight \[30, 48\]"):
        general.warn_once_features(layer, layer.weight)
    general.warn_once_features(layer, layer.weight)


@torchs_own
def test_a_warning_names_emulated_gemms_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.backends.gpu import device, fused_quantize

    monkeypatch.setattr(fused_quantize, "_announced", set())
    monkeypatch.setattr(device, "why_no_fp8", lambda *_: "")
    with pytest.warns(UserWarning, match="fprop, dgrad, wgrad run as bf16 GEMMs of decoded operands.* from sm_100 on"):
        fused_quantize.warn_once(recipes.get("mxfp8"), torch.empty(0))
    fused_quantize.warn_once(recipes.get("mxfp8"), torch.empty(0))
    fused_quantize.warn_once(recipes.get("rowwise"), torch.empty(0))


def test_out_of_memory_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.backends.gpu import quantize

    def fails(*_: object) -> Quantized:
        raise torch.OutOfMemoryError("CUDA out of memory")

    layer = qt.Linear(48, 32, recipe="delayed")
    monkeypatch.setattr(quantize, "family_of", lambda *_: quantize.QuantizeKernels(lambda *_: True, fails))
    with qt.only("triton"), torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="smaller batch"):
        layer(torch.randn(5, 48))
    history = layer.get_buffer("history")
    assert not history.any(), "nothing was recorded"


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen input"])
def test_a_history_continues_when_one_operand_has_no_kernel(frozen: bool) -> None:
    plain = recipes.delayed(history=4)
    noisy = dataclasses.replace(plain.dgrad.a, rounding="stochastic")  # type: ignore[type-var]
    gemms_of_g = {name: dataclasses.replace(plain.gemms[name], a=noisy) for name in ("dgrad", "wgrad")}
    recipe = dataclasses.replace(plain, name="noisy", **gemms_of_g)
    layer = qt.Linear(48, 32)
    cached_transpose = copy.deepcopy(layer)

    def steps(layer: qt.Linear) -> list[Tensor]:
        torch.manual_seed(0)
        for _ in range(3):
            with qt.autocast(recipe=recipe):
                y = layer(torch.randn(5, 48, requires_grad=not frozen))
            y.backward(torch.randn_like(y))
        return [y.detach(), layer.weight.grad, *(b.clone() for b in layer.buffers())]  # type: ignore[list-item]

    with qt.only("reference"):
        expected = steps(layer)
        del layer
        with qt.only("triton"):
            by_kernels = steps(cached_transpose)
    for one, other in zip(by_kernels, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
