"""Test kernels of quantized attention against the numpy specification: output, gradients, masks, nonfinite values."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

import quaver.torch as qt
from quaver import E4M3, E5M2
from quaver.recipes import get
from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.reference import attention as specification
from quaver.torch.backends.gpu import attention as gpu
from quaver.torch.backends.gpu import device, launch
from quaver.torch.nn.attention import fp8
from quaver.torch.nn.attention.dot_product import explain_attention
from quaver.torch.nn.attention.inputs import outside_of, runs_of_keys
from quaver.torch.nn.attention.op import attention
from tests.close import assert_bitwise, assert_close
from tests.kernels.compare import DEVICE
from tests.pairs import pairs
from tests.torch.nn.attention.quantized import attention_fp8

#: Relative RMS of the specification: float32's rounding moves a few codes over a tie. The same where tensor cores sum
#: 32 FP8 products and the sum before with 13 bits below the largest of them, as Ada's and Hopper's do.
BOUND_OF_FLOAT32, BOUND_OF_13_BITS = 1e-3, 2e-2
SUMS_OF_13_BITS = DEVICE.type == "cuda" and torch.cuda.get_device_capability() in ((8, 9), (9, 0))
BOUND = BOUND_OF_13_BITS if SUMS_OF_13_BITS else BOUND_OF_FLOAT32
NAMES = ("out", "q", "k", "v", "sinks")


def _spec(name: str) -> AttentionSpec:
    spec = get(name, attention=True).attention
    assert spec is not None
    return spec


SPECS = {name: _spec(name) for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def operands(batch: int, heads: int, groups: int, queries: int, keys: int, dim: int, wide: int) -> list[np.ndarray]:
    """q, k, v, sinks, and the gradient of the output."""
    shapes = [(batch, heads, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, wide), (heads,)]
    return drawn(*shapes, (batch, heads, queries, wide))


def by_kernels(arrays: list[np.ndarray], spec: AttentionSpec, **options: Any) -> list[Tensor]:
    """The output, and the gradients of q, k, v and, if they are among the options, sinks."""
    *leaves, grad = (torch.tensor(x, device=DEVICE) for x in arrays)
    leaves = [x.requires_grad_() for x in leaves]
    if not options.pop("sinks", False):
        leaves.pop()
    with qt.only("triton"):
        sinks = leaves[3] if len(leaves) > 3 else None
        out = attention_fp8(*leaves[:3], sinks=sinks, spec=spec, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def specified(arrays: list[np.ndarray], spec: AttentionSpec, **options: Any) -> list[np.ndarray]:
    q, k, v, sinks, grad = arrays
    whole = {**options, "sinks": sinks if options.pop("sinks", False) else None}
    out = specification.attention(q, k, v, spec, **whole)
    *gradients, _, sinks_gradient = specification.attention_backward(grad, q, k, v, spec, **whole)
    return [out, *gradients, sinks_gradient][: 4 if whole["sinks"] is None else 5]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the calls of the kernels' implementation: a test without any would test nothing."""
    calls: list[str] = []
    for name in ("forward", "backward"):
        plain = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *a, name=name, plain=plain: calls.append(name) or plain(*a))
    yield calls
    assert calls, "no kernel ran"


#: Rows of the forward kernel's tile and their width, the same of the kernels for dQ and for dK with dV, by recipe.
TILES = {
    80: {"tensorwise": [(128, 64), (64, 32), (64, 64), (64, 64)], "rowwise": [(128, 64), (32, 64), (32, 64)]},
    89: {"tensorwise": [(128, 64), (128, 64), (128, 64), (64, 128)], "rowwise": [(128, 64), (128, 64), (32, 64)]},
    90: {"tensorwise": [(128, 128), (128, 128), (128, 64), (64, 128)], "rowwise": [(128, 128), (128, 64), (32, 64)]},
}


#: A GPU runs the tiles of its own architecture alone.
ARCHITECTURES = TILES if DEVICE.type == "cpu" else (device.architecture(DEVICE),)


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in ARCHITECTURES for name in SPECS])
def test_output_and_gradients_are_the_specifications(arch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, int]] = []

    def recorded(*args: Any) -> Any:
        tiles.append((args[4]["BM"], args[4]["BN"]))
        return launch.LaunchSpec(*args)

    monkeypatch.setattr(device, "_architecture", lambda _: arch)
    monkeypatch.setattr(gpu, "LaunchSpec", recorded)
    for one in (gpu._forward, gpu._backward):
        monkeypatch.setattr(one, "plans", {})
    # Some tiles are whole, which need no mask.
    arrays = operands(1, 2, 1, 131, 150, 32, 64)
    ours, want = by_kernels(arrays, SPECS[name], scale=0.3), specified(arrays, SPECS[name], scale=0.3)
    for label, got, exact in zip(NAMES, ours, want, strict=False):
        assert_close(label, got, exact, BOUND)
    if name in TILES.get(arch, {}):
        assert tiles == TILES[arch][name]


#: Scales of heads beside scales of rows, and blocks that are narrower than the widest tiles.
OTHER_SPECS = {
    "heads and rows": AttentionSpec(QuantSpec(E4M3), QuantSpec(E5M2, (1, None))),
    "rows and heads": AttentionSpec(QuantSpec(E4M3, (1, None)), QuantSpec(E5M2)),
    "1x64": AttentionSpec(QuantSpec(E4M3, (1, 64)), QuantSpec(E4M3, (1, 64))),
}


@pytest.mark.parametrize("spec", OTHER_SPECS.values(), ids=OTHER_SPECS)
def test_mixed_scales_give_the_specification(spec: AttentionSpec) -> None:
    arrays = operands(1, 2, 1, 131, 150, 64, 64)
    ours, want = by_kernels(arrays, spec, scale=0.3), specified(arrays, spec, scale=0.3)
    for name, got, exact in zip(NAMES, ours, want, strict=False):
        assert_close(name, got, exact, BOUND)


def _dot_of_13_bits(plain: Any) -> Any:
    """Return the interpreter's product with sums as on Hopper and Ada: each term cut off below the largest."""

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar not in (tl.float8e4nv, tl.float8e5):
            return plain(self, a, b, d, *rest)
        wide = [interpreter._convert_float(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b)]
        left, right = (x.astype(np.float64) for x in wide)
        total = d.data.astype(np.float64)
        for k in range(0, left.shape[1], 32):
            products = left[:, k : k + 32, None] * right[None, k : k + 32]
            terms = np.concatenate([products, total[:, None]], 1)
            unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - 14)
            total = (np.trunc(terms / unit) * unit).sum(1)
        return interpreter.TensorHandle(total.astype(np.float32), tl.float32)

    return dot


@pytest.mark.skipif(DEVICE.type != "cpu", reason="it replaces products of the interpreter")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_tensor_cores_that_sum_with_13_bits_stay_within_their_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = operands(1, 1, 1, 40, 150, 64, 64)
    exact = by_kernels(arrays, SPECS[name])
    plain = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_of_13_bits(plain))
    ours, want = by_kernels(arrays, SPECS[name]), specified(arrays, SPECS[name])
    assert not torch.equal(ours[0], exact[0]), "no FP8 product ran"
    for label, got, wanted in zip(NAMES, ours, want, strict=False):
        assert_close(label, got, wanted, BOUND_OF_13_BITS)


@every_spec
def test_causal_heads_with_sinks_that_share_keys(spec: AttentionSpec) -> None:
    queries, keys = 131, 140
    arrays = operands(2, 2, 1, queries, keys, 32, 32)
    where = runs_of_keys("causal_bottom_right", None, queries, keys, DEVICE)
    assert where is not None
    hidden = outside_of(where, keys).cpu().numpy()
    ours = by_kernels(arrays, spec, mask_type="causal_bottom_right", sinks=True)
    want = specified(arrays, spec, hidden=hidden, sinks=True)
    for name, got, exact in zip(NAMES, ours, want, strict=True):
        assert_close(name, got, exact, BOUND)


#: Kind of mask, layout, and lengths.
MASKS: dict[str, dict[str, Any]] = {
    "window": {"mask_type": "causal", "window": (40, 0)},
    "both ways": {"window": (3, 9)},
    "bottom right": {"mask_type": "causal_bottom_right"},
    "ragged": {"layout": "thd", "cu_seqlens": torch.tensor([0, 3, 3, 90, 150], device=DEVICE), "mask_type": "causal"},
    "ragged window": {
        "layout": "thd",
        "window": (5, 2),
        "cu_seqlens": (torch.tensor([0, 70, 150], device=DEVICE), torch.tensor([0, 1, 131], device=DEVICE)),
    },
    "padding": {"mask_type": "padding_causal", "mask": None},
    "pairs": {"mask_type": "arbitrary", "mask": None},
}


@pytest.mark.parametrize("how", MASKS)
def test_masks_hide_the_same_positions_as_in_the_plain_passes(how: str) -> None:
    options = dict(MASKS[how])
    queries, keys = 150, 131 if how in ("bottom right", "ragged window", "pairs") else 150
    if how == "padding":
        options["mask"] = torch.arange(keys, device=DEVICE) >= torch.tensor([[100], [0]], device=DEVICE)
    if how == "pairs":
        options["mask"] = torch.rand(2, 1, queries, keys, device=DEVICE) < 0.5
        options["mask"][:, :, 7] = True
    # Two sequences where a mask separates them.
    batch = () if "layout" in options else (2,) if "mask" in options else (1,)
    q, k, v, g = (
        torch.randn(*batch, n, h, 32, device=DEVICE) for n, h in ((queries, 2), (keys, 1), (keys, 1), (queries, 2))
    )
    results = []
    for name in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with qt.only(name):
            out = attention(*leaves, recipe=get("mxfp8", attention=True), **options)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
    for name, ours, plain in zip(NAMES, *results, strict=False):
        assert_close(name, ours, plain, BOUND)


ODD = {"nan": np.nan, "inf": np.inf, "an outlier": 1e18, "a subnormal": 1e-40, "zero": 0.0}


@pytest.mark.parametrize(("name", "which", "odd"), pairs(["tensorwise", "mxfp8"], ["q", "k", "v", "grad"], ODD))
def test_nonfinite_values_spread_as_in_the_specification(name: str, which: str, odd: str) -> None:
    q, k, v, _, grad = arrays = operands(1, 2, 2, 40, 70, 32, 32)
    {"q": q, "k": k, "v": v, "grad": grad}[which][0, 1, 2, 3] = ODD[odd]
    for label, got, exact in zip(NAMES, by_kernels(arrays, SPECS[name]), specified(arrays, SPECS[name]), strict=False):
        assert_close(label, got, exact, BOUND)


#: Factors of a standard normal: beyond 1.3e36, 256 times a number overflows float32.
HUGE = {"v": {"v": 1e37, "grad": 1e-3}, "grad": {"grad": 1e37, "v": 0.1}, "q and k": {"q": 1e18, "k": 1e18}}


@every_spec
@pytest.mark.parametrize("how", HUGE)
def test_huge_values_match_the_specification(spec: AttentionSpec, how: str) -> None:
    q, k, v, _, grad = arrays = operands(1, 2, 1, 40, 70, 32, 32)
    for name, factor in HUGE[how].items():
        {"q": q, "k": k, "v": v, "grad": grad}[name][...] *= np.float32(factor)
    ours, want = by_kernels(arrays, spec), specified(arrays, spec)
    for name, got, exact in zip(NAMES, ours, want, strict=False):
        assert np.isfinite(exact).all(), name
        assert_close(name, got, exact, BOUND)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_all_zeros_give_zeros(name: str) -> None:
    arrays = [np.zeros_like(x) for x in operands(1, 1, 1, 5, 70, 32, 32)]
    for result in by_kernels(arrays, SPECS[name]):
        assert not result.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_results_are_rounded_once_in_the_layout_projections_read(dtype: torch.dtype) -> None:
    q, k, v, _, g = (torch.tensor(x, device=DEVICE).to(dtype) for x in operands(1, 2, 1, 20, 70, 32, 32))
    results = []
    for given in ((q, k, v, g), (q.float(), k.float(), v.float(), g.float())):
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        with qt.only("triton"):
            out = attention_fp8(*leaves, spec=SPECS["mxfp8"])
            results.append([out.detach(), *torch.autograd.grad(out, leaves, given[3])])
        assert out.transpose(1, 2).is_contiguous()
    for name, narrow, wide in zip(NAMES, *results, strict=False):
        assert_bitwise(narrow, wide.to(dtype), name)


def test_backward_saves_the_same_tensors_as_the_passes(launched: list[str]) -> None:
    q, k, v = (torch.randn(1, h, 40, 32, device=DEVICE) for h in (2, 1, 1))
    for spec in SPECS.values():
        texts = spec.input.text, spec.grad_output.text
        results = []
        for name in ("triton", "reference"):
            with qt.only(name):
                results.append(fp8.FORWARD(q, k, v, None, None, None, None, None, 0.2, None, 0.0, *texts, True))
        for place, (ours, plain) in enumerate(zip(*results, strict=True)):
            assert ours.shape == plain.shape and ours.dtype == plain.dtype
            if place > 1:
                assert_bitwise(ours.flatten().view(torch.uint8), plain.flatten().view(torch.uint8), f"tensor {place}")
        assert_close("logarithms", results[0][1], results[1][1], 1e-6)


def test_only_required_gradients_are_computed_and_frozen_forwards_save_nothing() -> None:
    arrays = operands(1, 2, 1, 20, 70, 32, 32)
    together = by_kernels(arrays, SPECS["rowwise"], sinks=True)
    for which in range(4):
        leaves = [torch.tensor(x, device=DEVICE).requires_grad_(i == which) for i, x in enumerate(arrays[:4])]
        with qt.only("triton"):
            out = attention_fp8(*leaves[:3], sinks=leaves[3], spec=SPECS["rowwise"])
            (alone,) = torch.autograd.grad(out, leaves[which], torch.tensor(arrays[4], device=DEVICE))
            assert_bitwise(alone, together[which + 1], NAMES[which + 1])
            with torch.no_grad():
                assert_bitwise(attention_fp8(*leaves[:3], sinks=leaves[3], spec=SPECS["rowwise"]), out.detach())


@pytest.mark.parametrize("way", ["quaver", "torch", "reentrant"])
def test_recomputed_attention_has_the_bits_of_saved_attention(way: str, launched: list[str]) -> None:
    arrays = operands(1, 2, 1, 20, 70, 32, 32)
    recompute: Any = {
        "quaver": qt.checkpoint,
        "torch": lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=False),
        "reentrant": lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=True),
    }[way]

    def attend(*leaves: Tensor) -> Tensor:
        q, k, v, sinks = leaves
        # Also with recomputation, which runs in backward.
        with qt.only("triton"):
            return attention_fp8(q, k, v, sinks=sinks, spec=SPECS["tensorwise"])

    results = []
    for run in (lambda *leaves: attend(*leaves), lambda *leaves: recompute(attend, *leaves)):
        *leaves, grad = (torch.tensor(x, device=DEVICE) for x in arrays)
        leaves = [x.requires_grad_() for x in leaves]
        launched.clear()
        with qt.only("triton"):
            out = run(*leaves)
            out.backward(grad)
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert launched == ["forward", "forward", "backward"]
    for name, first, again in zip(NAMES, *results, strict=True):
        assert_bitwise(again, first, name)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a bias": ("no bias", {"bias": torch.zeros(1, 1, 4, 4, device=DEVICE)}),
    "a soft cap": ("cap no scores", {"soft_cap": 3.0}),
    "dropout": ("drop no probabilities", {"dropout": 0.5}),
}


@pytest.mark.parametrize("sentence, options", REFUSED.values(), ids=REFUSED)
def test_unsupported_calls_give_a_reason_and_run_by_the_passes(
    sentence: str, options: dict[str, Any], launched: list[str]
) -> None:
    x = torch.randn(1, 4, 2, 32, device=DEVICE)
    recipe = get("mxfp8", attention=True)
    with qt.only("triton"):
        explained = explain_attention(x, x, x, recipe=recipe, **options)
        assert explained.runs == "fp8" and sentence in dict(explained.passed_over)["fp8 triton"]
        attention(x, x, x, recipe=recipe, **options)
        assert not launched
        assert explain_attention(x, x, x, recipe=recipe).runs == "fp8 triton"
        attention(x, x, x, recipe=recipe)


def test_unsupported_specs_and_heads_give_a_clear_error(launched: list[str]) -> None:
    x, narrow = torch.randn(1, 2, 40, 32, device=DEVICE), torch.randn(1, 2, 40, 24, device=DEVICE)
    divided = get("tensorwise", power_of_two=False, attention=True).attention
    assert divided is not None
    odd = AttentionSpec(QuantSpec(E4M3, (1, 48)), QuantSpec(E4M3, (1, 32)))
    assert "power-of-two" in gpu.reason(x, x, x, divided)
    assert "not 48" in gpu.reason(x, x, x, odd)
    assert "not 24 and 32" in gpu.reason(narrow, narrow, x, SPECS["mxfp8"])
    assert "nothing to attend" in gpu.reason(x[:, :, :0], x, x, SPECS["mxfp8"])
    by_kernels(operands(1, 1, 1, 3, 3, 32, 32), SPECS["mxfp8"])


# Inductor takes twenty seconds to import and to compile the code around one opaque operation.
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_one_graph_with_eager_bits(backend: str) -> None:
    q, k, v, _, g = (torch.tensor(x, device=DEVICE) for x in operands(1, 2, 1, 40, 70, 32, 32))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"mask_type": "causal_bottom_right", "recipe": get("rowwise", attention=True)}
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)

    torch._dynamo.reset()
    results = []
    with qt.only("triton"):
        for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = function(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, g.transpose(1, 2))])
    for name, eager, compiled in zip(NAMES, *results, strict=False):
        assert_bitwise(compiled, eager, name)
