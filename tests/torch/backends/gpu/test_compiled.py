"""torch.compile over kernels whose scales are swizzled: the graph sees plain scales, and the bits are eager mode's."""

import copy

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise


def trained(layer: nn.Module, step: nn.Module) -> list[Tensor]:
    """Outputs and gradients of two steps."""
    torch.manual_seed(3)
    tensors = []
    for _ in range(2):
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        y = step(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        tensors += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
        layer.zero_grad()
    return tensors


# To Inductor's end once, where a layer that keeps nothing leaves it no C++ to write: calls of operators, whose sizes
# and strides the code that it writes checks.
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("mxfp8", "inductor"),
        ("nvfp4", "aot_eager_decomp_partition"),
        pytest.param("nvfp4", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_layer_on_kernels_is_compiled_to_the_same_bits(
    recipe: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    swizzled: list[bool] = []
    plain = Quantized.plain_scale
    monkeypatch.setattr(Quantized, "plain_scale", lambda self: swizzled.append(self.swizzled) or plain(self))
    layer = qt.Linear(64, 32, bias=False, dtype=torch.bfloat16, recipe=recipe)
    cached_transpose = copy.deepcopy(layer)
    with qt.only("triton"):
        eager = trained(layer, layer)
        swizzled.clear()
        compiled = trained(cached_transpose, torch.compile(cached_transpose, fullgraph=True, backend=backend))  # type: ignore[arg-type]
    torch._dynamo.reset()
    assert any(swizzled), "no kernel made what the graph takes"
    for ours, expected in zip(compiled, eager, strict=True):
        assert_bitwise(ours, expected)
