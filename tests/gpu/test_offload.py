"""On a card: activations in pinned memory between forward and backward; the same bits, and less device memory."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*decoded operands:UserWarning"),
]


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(
            qt.TransformerLayer(256, 4, 512, bias=False, activation="swiglu", dtype=torch.bfloat16, device="cuda")
            for _ in range(4)
        )
    )


def steps(model: nn.Module, context: Any, recipe: str) -> tuple[list[Tensor], int]:
    """Return results and gradients, and bytes allocated by the last forward for its backward."""
    x, results, size = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16), [], 0
    # Weights are quantized, and memory is pinned, in the first step.
    for _ in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with context, qt.autocast(recipe):
            y = model(x)
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated() - before
        y.float().square().mean().backward()
        results = [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return results, size


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "delayed", "mxfp8", "nvfp4"])
def test_offloaded_layers_have_the_same_bits_in_less_memory(recipe: str) -> None:
    model = layers()
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    expected, whole = steps(model, contextlib.nullcontext(), recipe)
    torch.manual_seed(0)
    results, between = steps(other, qt.offload(other, layers=list(other)), recipe)
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(a, b), number
    assert between <= 0.25 * whole


def test_a_captured_step_refuses_it() -> None:
    model = layers()
    offload = qt.offload(model, layers=list(model))

    def step(x: Tensor) -> Tensor:
        with offload, qt.autocast("tensorwise"):
            y: Tensor = model(x)
        y.float().sum().backward()
        return y

    with pytest.raises(RuntimeError, match=r"runs inside a CUDA graph .*CapturedStep"):
        qt.CapturedStep(step)(torch.randn(1, 64, 256, device="cuda", dtype=torch.bfloat16))
