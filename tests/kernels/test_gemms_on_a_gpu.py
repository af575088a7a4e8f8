"""Only on a GPU: native and decoded GEMMs against the reference, layers, a captured step, and no synchronization."""

import copy
import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import E4M3, QuantSpec, recipes
from quaver.recipes.spec import GemmSpec
from quaver.torch.backends.gpu import capture, scaled_mm
from quaver.torch.numerics import reference
from quaver.torch.operations import ops
from tests.operands import GEMMS

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
RECIPES = [name for name in recipes.RECIPES if name != "bf16"]
#: Relative RMS of a native GEMM: fast accumulation keeps 13 bits of a sum, the other about float32's.
BOUNDS = {True: 2e-3, False: 2e-5}


@pytest.fixture(autouse=True)
def emulation_is_no_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*GEMMs of decoded operands.*")
        yield


@pytest.mark.parametrize("shape", [(64, 256, 128), (33, 400, 96), (256, 1024, 512)], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_a_gemm_is_within_its_bound_of_the_reference(name: str, shape: tuple[int, int, int]) -> None:
    gemm: GemmSpec = GEMMS[name]
    m, k, n = shape
    assert gemm.a is not None and gemm.b is not None
    a, b = ops.QUANTIZE(torch.randn(m, k, device=CARD), gemm.a), ops.QUANTIZE(torch.randn(n, k, device=CARD), gemm.b)
    expected = reference.matmul(a, b, torch.float32).double()
    for fast, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        bias = torch.randn(n, device=CARD, dtype=dtype)
        reasons = dict(ops.MATMUL.explain(a, b, dtype, bias, fast))
        y = ops.MATMUL(a, b, dtype, bias, fast).double()
        off = ((y - expected - bias.double()).norm() / expected.norm()).item()
        bound = 1e-6 if reasons["native"] else BOUNDS[fast]
        assert off < bound + (4e-3 if dtype is torch.bfloat16 else 0), (name, fast, dtype, reasons)


@pytest.mark.parametrize("m", [16, 24, 36, 38, 37])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, True)], ids=str)
def test_transposes_and_any_number_of_rows_are_within_the_bound(transposed: tuple[bool, bool], m: int) -> None:
    """Operands may be used as stored or copied, and the GEMM native or decoded, as a probe has decided."""
    spec = QuantSpec(E4M3)
    x, w = torch.randn(m, 256, device=CARD), torch.randn(64, 256, device=CARD)
    a, b = (
        reference.quantize(v.t().contiguous(), spec).T if is_transposed else reference.quantize(v, spec)
        for v, is_transposed in zip((x, w), transposed, strict=True)
    )
    bias = torch.randn(64, device=CARD, dtype=torch.bfloat16)
    expected = reference.matmul(a, b, torch.float32).double() + bias.double()
    y = ops.MATMUL(a, b, torch.bfloat16, bias).double()
    assert ((y - expected).norm() / expected.norm()).item() < 4e-3
    # Most layers have a multiple of 16 rows, which is native wherever there are eight-bit GEMMs.
    assert m % 16 or not scaled_mm.reason(a, b, torch.bfloat16, bias)


@pytest.mark.parametrize("tokens", [128, 100])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_equals_the_emulated_one(recipe: str, tokens: int) -> None:
    layer = qt.Linear(256, 128, device=CARD, dtype=torch.bfloat16, recipe=recipe)
    cached_transpose = copy.deepcopy(layer)
    x = torch.randn(tokens, 256, device=CARD, dtype=torch.bfloat16)
    g = torch.randn(tokens, 128, device=CARD, dtype=torch.bfloat16)

    def run(model: qt.Linear) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(g)
        assert leaf.grad is not None and model.weight.grad is not None
        return [y.detach(), leaf.grad, model.weight.grad]

    results = run(layer)
    with qt.only("reference"):
        expected = run(cached_transpose)
    for one, other in zip(results, expected, strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < 6e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_equals_the_eager_one(recipe: str) -> None:
    layer = qt.Linear(256, 128, device=CARD, dtype=torch.bfloat16, recipe=recipe)
    if recipes.get(recipe).stochastic:
        pytest.skip("noise is drawn anew at each run")
    x = torch.randn(64, 256, device=CARD, dtype=torch.bfloat16, requires_grad=True)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=False)
        y: Tensor = layer(x)
        y.sum().backward()
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), capture.rehearsing(CARD):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = step()
    for scale in (1.0, 3.0):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * scale)
            layer.weight.mul_(0.5)
        graph.replay()
        captured = y.clone(), layer.weight.grad.clone()  # type: ignore[union-attr]
        eager = step().detach(), layer.weight.grad.clone()  # type: ignore[union-attr]
        for one, other in zip(captured, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_a_step_does_not_synchronize(recipe: str) -> None:
    layer = qt.Linear(256, 128, device=CARD, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(64, 256, device=CARD, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_compiled_results_equal_eager(recipe: str) -> None:
    layer = qt.Linear(256, 128, device=CARD, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(64, 256, device=CARD, dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=0, atol=0)
