"""On a card: a whole Transformer layer on kernels and cuBLASLt against the reference, eager and compiled."""

import copy
import math

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.recipes import RECIPES, get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
QUANTIZING = [name for name, build in RECIPES.items() if build().quantizes]
#: Relative RMS. Where a bf16 value in between is rounded the other way its code may be the next one, an eighth away in
#: E5M2 and a third in E2M1: on a CPU up to 0.05 and 0.12. A wrong layout or scale is off by 1 and more.
BOUND, FOUR_BITS = 0.15, 0.3


def layer_of(kind: str) -> qt.TransformerLayer:
    placed = {"dtype": torch.bfloat16, "device": "cuda"}
    if kind == "gpt":
        return qt.TransformerLayer(256, 4, 512, activation="gelu", normalization="LayerNorm", **placed)
    options = {"groups": 2, "bias": False, "activation": "swiglu", "normalization": "RMSNorm"}
    return qt.TransformerLayer(256, 4, 512, rope=qt.RotaryEmbedding(64, device="cuda"), **options, **placed)


def run(layer: torch.nn.Module, x: Tensor, g: Tensor, recipe: str) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    with qt.autocast(get(recipe)):
        y = layer(leaf)
    y.backward(g)
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}


def operands(tokens: int) -> tuple[Tensor, Tensor]:
    x, g = torch.randn(2, 2, tokens, 256, device="cuda", dtype=torch.bfloat16)
    return x, g


@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("tokens", [64, 37])
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_a_transformer_layer_is_the_references(recipe: str, tokens: int, kind: str) -> None:
    layer = layer_of(kind)
    twin = copy.deepcopy(layer)
    x, g = operands(tokens)
    for _ in range(2):  # delayed scaling takes one pass over a tensor only once its factors are set
        layer.zero_grad()
        twin.zero_grad()
        results = run(layer, x, g, recipe)
        with qt.only("reference"):
            expected = run(twin, x, g, recipe)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        off = ((results[name].double() - value.double()).norm() / value.double().norm()).item()
        assert off < (FOUR_BITS if recipe in ("nvfp4", "mxfp4") else BOUND), name


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_an_overflow_reaches_the_output_and_the_gradients(recipe: str) -> None:
    layer = qt.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = math.inf
    results = run(layer, x, torch.randn_like(x), recipe)
    assert results["y"][3].isnan().all() and not results["weight"].isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_a_compiled_transformer_layer_is_within_the_same_bound(recipe: str) -> None:
    torch.compiler.reset()
    layer = layer_of("llama")
    twin = copy.deepcopy(layer)
    x, g = operands(64)
    compiled, expected = run(torch.compile(layer), x, g, recipe), run(twin, x, g, recipe)
    for name, value in expected.items():
        ours = compiled[name if name in compiled else f"_orig_mod.{name}"]
        assert ((ours.double() - value.double()).norm() / value.double().norm()).item() < BOUND, name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_backward_saves_eight_bit_codes(recipe: str) -> None:
    """The input of a layer stays in one byte an element: no copy in bf16 is alive."""
    layer = qt.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with qt.autocast(get(recipe)):
        layer(x).sum().backward()  # workspaces and the weight's codes are there afterwards
        before = torch.cuda.memory_allocated()
        y = layer(x)
    saved_bytes = torch.cuda.memory_allocated() - before - y.numel() * 2
    assert saved_bytes < 1.1 * x.numel(), f"{saved_bytes} bytes for {x.numel()} elements"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_micro_batches_on_two_streams_share_a_quantized_weight(recipe: str) -> None:
    layer = qt.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    twin, streams = copy.deepcopy(layer), [torch.cuda.Stream() for _ in range(2)]
    x, g = torch.randn(2, 512, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for number in range(6):
        with torch.cuda.stream(streams[number % 2]):
            # What keeps the other stream busy must not be read through.
            torch.cuda._sleep(1_000_000)
            results = run(layer, x, g, recipe)
        torch.cuda.synchronize()
        expected = run(twin, x, g, recipe)
        qt.refresh(twin)
        for name in ("y", "x"):
            assert torch.equal(results[name], expected[name]), f"{name} of micro-batch {number}"
