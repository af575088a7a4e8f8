"""Quantized attention in torch is the numpy specification: its codes, its output, its gradients, eager and compiled."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quaver.recipes import RECIPES, get
from quaver.recipes.spec import AttentionSpec
from quaver.reference import attention as specification
from quaver.torch.nn.attention import fp8
from quaver.torch.nn.attention.fp8 import Fp8AttentionOptions, dropout_mask, parts
from quaver.torch.nn.attention.op import attention
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.attention.quantized import attention_fp8


def _specs() -> dict[str, AttentionSpec]:
    """Every distinct way to quantize attention, and one by division."""
    names: dict[AttentionSpec, str] = {}
    for name in RECIPES:
        if name not in ("bf16", "delayed") and (spec := get(name, attention=True).attention) is not None:
            names.setdefault(spec, name)
    divided = get("tensorwise", power_of_two=False, attention=True).attention
    assert divided is not None
    return {name: spec for spec, name in names.items()} | {"tensorwise(power_of_two=False)": divided}


SPECS = _specs()
#: Inductor's decompositions and its cut between forward and backward, without the C++ that takes most of a compilation.
WITHOUT_CODE = "aot_eager_decomp_partition"
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
NAMES = ("q", "k", "v", "bias", "sinks")

#: B, H, G, Sq, Sk, D, Dv.
SHAPES = {
    "a layer": (2, 4, 2, 17, 33, 16, 24),
    "one head, square": (1, 1, 1, 64, 64, 64, 64),
    "MQA": (1, 3, 1, 5, 40, 8, 8),
    "one token": (1, 2, 2, 1, 9, 4, 4),
    "nothing but one": (1, 1, 1, 1, 1, 1, 1),
    "no queries": (2, 2, 1, 0, 5, 8, 8),
    "no keys": (2, 2, 1, 5, 0, 8, 8),
    "no batch": (0, 2, 1, 5, 5, 8, 8),
    "no tokens": (1, 2, 2, 0, 0, 4, 4),
}


def operands(shape: tuple[int, ...], seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """q, k, v, bias and sinks; the gradient of the output."""
    batch, heads, groups, queries, keys, dim, wide = shape
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, wide)]
    shapes += [(1, heads, queries, keys), (heads,)]
    drawn = [rng.normal(size=s).astype(np.float32) for s in shapes]
    return drawn, rng.normal(size=(batch, heads, queries, wide)).astype(np.float32)


def masked(queries: int, keys: int) -> np.ndarray:
    """Causal from the bottom right, and a query that sees nothing."""
    hidden = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
    hidden[queries // 2 : queries // 2 + 1] = True
    return hidden


def run(arrays: list[np.ndarray], grad: np.ndarray, spec: AttentionSpec, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of q, k, v, bias and sinks."""
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    q, k, v, bias, sinks = leaves
    out = attention_fp8(q, k, v, bias=bias, sinks=sinks, spec=spec, **options)
    return out.detach(), list(torch.autograd.grad(out, leaves, torch.tensor(grad)))


def expected(arrays: list[np.ndarray], grad: np.ndarray, spec: AttentionSpec, **options: Any) -> list[np.ndarray]:
    q, k, v, bias, sinks = arrays
    whole = {"bias": bias, "sinks": sinks, **options}
    out = specification.attention(q, k, v, spec, **whole)
    backward = specification.attention_backward(grad, q, k, v, spec, **whole)
    return [out, *backward[:3], backward[3].astype(np.float64).sum(0, keepdims=True), backward[4]]


@every_spec
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_and_gradients_are_the_specifications(spec: AttentionSpec, shape: tuple[int, ...]) -> None:
    arrays, grad = operands(shape)
    hidden = masked(shape[3], shape[4])
    want = expected(arrays, grad, spec, hidden=hidden, soft_cap=5.0, scale=0.4)
    out, grads = run(arrays, grad, spec, hidden=torch.tensor(hidden), soft_cap=5.0, scale=0.4)
    for name, got, exact in zip(("out", *NAMES), (out, *grads), want, strict=True):
        assert_close(name, got, exact, 1e-6)


@every_spec
@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38, 1e-40])
@pytest.mark.parametrize("which", range(4))
def test_nonfinite_values_spread_as_in_the_specification(spec: AttentionSpec, odd: float, which: int) -> None:
    arrays, grad = operands((2, 2, 2, 6, 6, 8, 8))
    [*arrays[:3], grad][which][0, 1, 2, 3] = odd
    hidden = masked(6, 6)
    want = expected(arrays, grad, spec, hidden=hidden)
    out, grads = run(arrays, grad, spec, hidden=torch.tensor(hidden))
    for name, got, exact in zip(("out", *NAMES), (out, *grads), want, strict=True):
        assert_close(name, got, exact, 1e-6)


@every_spec
def test_dropout_is_the_specification_with_its_mask(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, grad = operands((2, 4, 2, 9, 11, 8, 8))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor([7]))
    out, grads = run(arrays, grad, spec, dropout=0.25)
    options = Fp8AttentionOptions(None, torch.tensor([7]), 1.0, None, 0.25, spec)
    (part,) = parts(2, 4, 2, 9, 11)
    keep = dropout_mask(options, part, (2, 4, 9, 11))
    assert keep is not None and 0.65 < keep.float().mean() < 0.85
    want = expected(arrays, grad, spec, keep=keep.numpy(), dropout=0.25)
    for name, got, exact in zip(("out", *NAMES), (out, *grads), want, strict=True):
        assert_close(name, got, exact, 1e-6)


def test_dropout_draws_another_mask_each_time_and_the_same_from_the_same_seed() -> None:
    q = torch.ones(1, 1, 4, 8)
    torch.manual_seed(0)
    first, second = (attention_fp8(q, q, q, spec=SPECS["mxfp8"], dropout=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert not torch.equal(first, second)
    assert torch.equal(attention_fp8(q, q, q, spec=SPECS["mxfp8"], dropout=0.5), first)


@pytest.mark.parametrize("scores", [1, 200, 800])
def test_heads_worked_on_a_few_at_a_time_give_the_same(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, grad = operands((3, 4, 2, 9, 11, 8, 8))
    hidden = torch.tensor(masked(9, 11))
    for bias in (arrays[3], arrays[3][:, :1], arrays[3][0, :, :1, :]):
        arrays[3] = bias
        whole = run(arrays, grad, SPECS["tensorwise"], hidden=hidden)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "SCORES", scores)
            assert len(list(parts(3, 4, 2, 9, 11))) > 1
            out, grads = run(arrays, grad, SPECS["tensorwise"], hidden=hidden)
        assert_bitwise(out, whole[0], "out")
        for name, got, exact in zip(NAMES, grads, whole[1], strict=True):
            assert got.shape == exact.shape
            assert_close(name, got, exact, 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_have_one_rounding_at_the_output(dtype: torch.dtype) -> None:
    arrays, grad = operands((2, 4, 2, 9, 11, 8, 8))
    leaves = [torch.tensor(x).to(dtype).requires_grad_() for x in arrays[:3]]
    g = torch.tensor(grad).to(dtype)
    out = attention_fp8(*leaves, spec=SPECS["mxfp8"])
    q, k, v = (x.detach().float().numpy() for x in leaves)
    want = torch.tensor(specification.attention(q, k, v, SPECS["mxfp8"])).to(dtype)
    assert out.dtype == dtype
    assert_bitwise(out.detach(), want)
    gradients = specification.attention_backward(g.float().numpy(), q, k, v, SPECS["mxfp8"])
    for name, got, exact in zip(NAMES, torch.autograd.grad(out, leaves, g), gradients[:3], strict=False):
        assert_bitwise(got, torch.tensor(exact).to(dtype), name)


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_backward_keeps_eight_bits_and_no_scores(name: str) -> None:
    q, k, v = (torch.randn(2, h, 64, 32, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        attention_fp8(q, k, v, spec=SPECS[name])
    codes = q.numel() + k.numel() + v.numel() + (q.numel() + k.numel() if name == "mxfp8" else 0)
    scales = 4 * (4 + 2 + 2) * 2 if name == "tensorwise" else codes // 32
    assert sum(sizes) == codes + scales + 8 * 2 * 4 * 64


def test_only_required_gradients_are_computed() -> None:
    (q, k, v, bias, sinks), grad = operands((1, 2, 1, 5, 6, 4, 4))
    for which in range(5):
        leaves = [torch.tensor(x, requires_grad=i == which) for i, x in enumerate((q, k, v, bias, sinks))]
        out = attention_fp8(*leaves[:3], bias=leaves[3], sinks=leaves[4], spec=SPECS["rowwise"])
        (alone,) = torch.autograd.grad(out, leaves[which], torch.tensor(grad))
        _, together = run([q, k, v, bias, sinks], grad, SPECS["rowwise"])
        assert_bitwise(alone, together[which], NAMES[which])
    with torch.no_grad():
        assert_bitwise(attention_fp8(*leaves[:3], bias=leaves[3], sinks=leaves[4], spec=SPECS["rowwise"]), out.detach())


@every_spec
def test_compiled_is_one_graph_with_eager_bits(spec: AttentionSpec) -> None:
    arrays, grad = operands((2, 4, 2, 17, 33, 16, 24))
    hidden = torch.tensor(masked(17, 33))

    def step(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return attention_fp8(q, k, v, bias=bias, sinks=sinks, hidden=hidden, soft_cap=5.0, spec=spec)

    torch._dynamo.reset()
    results = []
    # The operators hide from Inductor what a spec is: up to where it would write C++ for all, and to the end for one.
    backend = "inductor" if spec is SPECS["rowwise"] else WITHOUT_CODE
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, torch.tensor(grad))])
    for name, eager, compiled in zip(("out", *NAMES), *results, strict=True):
        assert_bitwise(compiled, eager, name)


def test_float64_gives_a_clear_error() -> None:
    q = torch.ones(1, 3, 4, 8).double()
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, not torch\.float64"):
        attention(q, q, q, recipe=get("mxfp8", attention=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_gpu_gives_the_specifications_output(name: str) -> None:
    arrays, grad = operands((2, 4, 2, 17, 33, 16, 24))
    hidden = masked(17, 33)
    want = expected(arrays, grad, SPECS[name], hidden=hidden)
    leaves = [torch.tensor(x, device="cuda", requires_grad=True) for x in arrays]
    mask = torch.tensor(hidden, device="cuda")
    out = attention_fp8(*leaves[:3], bias=leaves[3], sinks=leaves[4], hidden=mask, spec=SPECS[name])
    grads = torch.autograd.grad(out, leaves, torch.tensor(grad, device="cuda"))
    for label, got, exact in zip(("out", *NAMES), (out, *grads), want, strict=True):
        assert_close(label, got, exact, 1e-6)
