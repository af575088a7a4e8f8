"""torch's FlopCounterMode counts 2 m n k for a GEMM of a layer, as of the same model of nn.Linear."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from quaver import recipes
from quaver.torch.nn import loss as chunked
from quaver.torch.nn.attention import fp8
from quaver.torch.operations import operation as counting
from quaver.torch.operations.operation import Operation
from tests.pairs import pairs
from tests.torch.backends.gpu.cublaslt import torchs_own

T, K, N = 32, 64, 96


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


def step(net: nn.Module, x: Tensor) -> None:
    net(x).square().mean().backward()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False)),
    "mlp": lambda: qt.MLP(K, N, activation="swiglu"),
    "layer": lambda: qt.TransformerLayer(K, 4, hidden=N, activation="gelu"),
}


@pytest.mark.parametrize(
    ("recipe", "model", "dtype"), pairs(recipes.RECIPES, MODELS, (torch.float32, torch.bfloat16)), ids=str
)
def test_a_step_has_the_flops_of_the_unconverted_model(recipe: str, model: str, dtype: torch.dtype) -> None:
    net = MODELS[model]().to(dtype)
    x = torch.randn(2, T // 2, K, dtype=dtype, requires_grad=True)
    expected, evaluated = flops(lambda: step(net, x)), flops(lambda: net.eval()(x))
    if model == "linear":
        assert expected == 3 * evaluated == 3 * 2 * 2 * T * K * N
    qt.convert(net.train(), recipe)
    for _ in range(2):
        assert flops(lambda: step(net, x)) == expected
    with torch.no_grad():
        assert flops(lambda: net.eval()(x)) == evaluated


@pytest.mark.parametrize("tokens", [0, 1, 3, 65])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_ragged_tokens_count_as_they_are(recipe: str, tokens: int) -> None:
    """Equal FLOPs, except that a Hadamard transform pads tokens to a multiple of 16 in wgrad."""
    layer = qt.Linear(100, 36, recipe=recipe)
    x = torch.randn(tokens, 100, requires_grad=True)
    filled = -(-tokens // 16) * 16 if recipe == "nvfp4" else tokens
    assert flops(lambda: step(layer, x)) == 2 * (2 * tokens + filled) * 100 * 36


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_an_exported_program_counts_its_operators(recipe: str) -> None:
    net = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).eval()
    qt.convert(net, recipe)
    x = torch.randn(T, K)
    program = torch.export.export(net, (x,)).module()
    assert flops(lambda: program(x)) == flops(lambda: net(x)) == 2 * 2 * T * K * N


def same_inside(operation: Operation[Any], *args: Any) -> None:
    """The operator counts the FLOPs of its kernel."""
    inside, outside = flops(lambda: operation.eager(*args)), flops(lambda: operation.operator(*args))
    assert outside == inside > 0


def test_attention_in_eight_bits_counts_the_products_that_it_computes() -> None:
    counting.register_flop_formulas()
    spec = recipes.mxfp8(attention=True).attention
    assert spec is not None
    q, k, v = (torch.randn(2, heads, 16, size) for heads, size in ((4, 32), (2, 32), (2, 64)))
    options = None, None, None, 0.2, None, 0.0, spec.input.text, spec.grad_output.text
    same_inside(fp8.FORWARD, q, k, v, None, None, *options, True)
    out, *saved = fp8.FORWARD.operator(q, k, v, None, None, *options, True)
    same_inside(fp8.BACKWARD, out, saved, None, None, *options, [True, True, True, False, False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, False)])
def test_a_head_and_its_loss_count_all_chunks(needs: tuple[bool, bool], dtype: torch.dtype) -> None:
    counting.register_flop_formulas()
    x, weight, targets = torch.randn(T, K).to(dtype), torch.randn(N, K).to(dtype), torch.randint(0, N, (T,))
    rule = -100, 0.0, 0.0, 0.0
    same_inside(chunked.LINEAR_CROSS_ENTROPY, x, weight, None, targets, None, dtype, *rule, 8, *needs, False)
    x.requires_grad_(needs[0])
    loss = lambda: qt.linear_cross_entropy(x, weight.requires_grad_(needs[1]), targets)  # noqa: E731
    backward = (lambda: loss().backward()) if any(needs) else loss
    assert flops(backward) == 2 * T * K * N * (1 + sum(needs))


@torchs_own
@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch's public scaled GEMM")
def test_torchs_scaled_gemms_are_counted() -> None:
    """The operators of a GPU; here on meta, and with per-tensor scales on the CPU."""
    a, b = torch.randn(T, K).to(torch.float8_e4m3fn), torch.randn(N, K).to(torch.float8_e4m3fn)
    one, by_tensor = torch.ones(()), ScalingType.TensorWise
    counting.register_flop_formulas()

    def run(device: str) -> Tensor:
        left, right = a.to(device), b.to(device).t()
        y: Tensor = F.scaled_mm(left, right, one.to(device), by_tensor, one.to(device), by_tensor)
        return y

    assert flops(lambda: run("cpu")) == flops(lambda: run("meta")) == 2 * T * K * N
    packed = torch.zeros(T, K // 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    formula = counting.FORMULAS[torch.ops.aten._scaled_mm_v2]
    assert formula(packed, None, out_val=torch.empty(T, N)) == 2 * T * K * N


def test_formulas_are_registered_by_a_model_and_imported_by_nobody() -> None:
    code = (
        "import sys, torch, quaver.torch as qt\n"
        "name = 'torch.utils.flop_counter'\n"
        "qt.convert(torch.nn.Linear(16, 16), 'mxfp8')\n"
        "assert name not in sys.modules\n"
        "import torch.utils.flop_counter as counter\n"
        "assert torch.ops.quaver.matmul not in counter.flop_registry\n"
        "qt.convert(torch.nn.Linear(16, 16), 'mxfp8')\n"
        "assert torch.ops.quaver.matmul in counter.flop_registry\n"
        "qt.Linear(16, 16)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not hasattr(F, "scaled_grouped_mm"), reason="torch's public grouped GEMM")
def test_torchs_grouped_gemms_are_counted() -> None:
    formula = counting.FORMULAS[torch.ops.aten._scaled_grouped_mm_v2]
    tokens, weights, out = torch.empty(T, K), torch.empty(4, K, N), torch.empty(T, N)
    assert formula(tokens, weights, out_val=out) == 2 * T * K * N
    assert formula(torch.empty(N, T), torch.empty(T, K), out_val=torch.empty(4, N, K)) == 2 * T * K * N
    assert formula(torch.empty(4, T, K), weights, out_val=torch.empty(4, T, N)) == 4 * 2 * T * K * N
