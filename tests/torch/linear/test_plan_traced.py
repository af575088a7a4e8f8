"""Compiled layers whose GEMMs a GPU does not have: eager mode's bits, by the kernels that eager mode launches."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from tests.close import assert_bitwise
from tests.torch.backends.gpu.pretend import as_on_a_gpu, become

T, K, N = 32, 48, 64
BACKEND = "aot_eager_decomp_partition"
#: Blocks in each direction of a weight and square ones, packed codes, and two levels with noise and rotation.
RECIPES = [
    *("mxfp8", "mxfp8(weight_2d=True)", "mxfp6", "mxfp4", "nvfp4"),
    "nvfp4(stochastic_rounding=False, hadamard=False, weight_2d=False)",
]


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    with as_on_a_gpu(monkeypatch):
        become(90, monkeypatch)
        yield
    torch._dynamo.reset()


def trained(module: nn.Module, run: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients and buffers of some steps."""
    results: list[Tensor] = []
    for value in inputs:
        x = value.clone().requires_grad_()
        y = run(x)
        y.float().mul(torch.linspace(-1, 1, y.shape[-1])).square().sum().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        results += [b.clone() for b in module.buffers()]
        module.zero_grad()
    return results


def operators(module: nn.Module, x: Tensor) -> dict[str, int]:
    """Count our operators in the forward and backward graphs of a module, up to where Inductor writes code."""
    counts: dict[str, int] = {}

    def count(graph: Any, *_: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("quaver."):
                name = str(node.target).split(".")[1]
                counts[name] = counts.get(name, 0) + 1
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch.compile(module, fullgraph=True, backend=backend)(x.clone().requires_grad_()).sum().backward()
    return counts


def layers(recipe: str, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = nn.Sequential(nn.Linear(K, N, bias), nn.ReLU(), nn.Linear(N, K, bias)).to(dtype)
    qt.convert(model, recipe)
    return model


def assert_compiled_alike(module: nn.Module, tokens: tuple[int, ...] = (T, T), dtype: Any = torch.bfloat16) -> None:
    inputs = [torch.randn(2, number // 2, K).to(dtype) for number in tokens]
    other = copy.deepcopy(module)
    # Within a checkpoint a compiler lets nobody prepare a layer.
    other(inputs[0])
    compiled = torch.compile(other, fullgraph=True, backend=BACKEND)
    for ours, eager in zip(trained(other, compiled, inputs), trained(module, module, inputs), strict=True):
        assert_bitwise(ours, eager)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_layer_has_eager_bits(recipe: str) -> None:
    module = layers(recipe)
    assert_compiled_alike(module)
    counts = operators(module, torch.randn(T, K).bfloat16())
    # Two inputs, two weights forward and again backward, two gradients; codes of inputs are decoded.
    assert counts == {"emulated_values": 8, "emulated_saved_values": 2, "matmul": 6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_have_eager_bits(dtype: torch.dtype) -> None:
    # A bias gradient is a sum whose order is the compiler's.
    assert_compiled_alike(layers("mxfp6", bias=False, dtype=dtype), dtype=dtype)


def test_token_counts_that_the_kernels_do_not_take_are_quantized_to_codes() -> None:
    module = layers("mxfp8", bias=False)
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert_compiled_alike(module, (T, T + 2, T))
    assert "emulated_values" not in operators(module, torch.randn(T + 1, K).bfloat16())


def test_features_that_the_kernels_do_not_take_are_quantized_to_codes() -> None:
    module = nn.Sequential(nn.Linear(K, N + 8), nn.Linear(N + 8, K)).bfloat16()
    qt.convert(module, "mxfp8")
    assert_compiled_alike(module)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_shared_inputs_recomputation_and_checkpoints_have_eager_bits(recipe: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = qt.MultiheadAttention(K, 3, dtype=torch.bfloat16)
            self.mlp = qt.LayerNormMLP(K, N, activation="swiglu", normalization="RMSNorm", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.mlp, self.attention(x), use_reentrant=False)
            return y

    block = Block()
    qt.convert(block, recipe)
    assert_compiled_alike(block)


def test_forwards_without_gradients_have_eager_bits() -> None:
    module, x = layers("mxfp6"), torch.randn(T, K).bfloat16()
    expected = module(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        assert_bitwise(module(x), expected)
        assert_bitwise(torch.compile(module, fullgraph=True, backend=BACKEND)(x), expected)


def test_a_native_gemm_reads_codes() -> None:
    assert "emulated_values" not in operators(layers("rowwise"), torch.randn(T, K).bfloat16())


@pytest.mark.parametrize("saves_codes", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[::2])
def test_the_operators_declare_what_they_return(recipe: str, saves_codes: bool) -> None:
    chosen = recipes.get(recipe)
    a, c = chosen.dgrad.a, chosen.wgrad.a
    assert a is not None and c is not None
    drawn: tuple[Any, ...] = (0, None, None, None)
    if chosen.stochastic:
        drawn = 3, *(torch.tensor(v) for v in (5, 6)), torch.tensor([1, 2, 3])
    x, ops = torch.randn(T, K).bfloat16(), torch.ops.quaver
    checks = {"test_utils": "test_faketensor"}
    arguments = (x, a.text, c.text, saves_codes)
    for straight, transposed in ((True, False), (False, True), (True, True)):
        torch.library.opcheck(ops.emulated_values.default, (*arguments, straight, transposed, *drawn), **checks)
    _, down, codes, scales = ops.emulated_values(*arguments, True, True, *drawn)
    assert (down.numel() > 0) is not saves_codes
    if saves_codes:
        torch.library.opcheck(ops.emulated_saved_values.default, (codes, scales, a.text, c.text), **checks)
