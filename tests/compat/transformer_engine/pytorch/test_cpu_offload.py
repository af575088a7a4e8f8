"""A loop over layers as Transformer Engine's documentation has it, on a simulated device."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver.compat.transformer_engine.pytorch import Linear, get_cpu_offload_context, mark_not_offload
from tests.pairs import alternating
from tests.torch.offload.simulated import Simulated

LAYERS, TOKENS, DIM = 4, 64, 64


def layers(kind: type[nn.Module] = Linear) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(DIM, DIM) for _ in range(LAYERS)]


def gradients(blocks: list[nn.Module], context: Any, synchronize: Any) -> list[Tensor]:
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y: Tensor = x
    for block in blocks:
        quantized = qt.autocast("tensorwise") if isinstance(block, Linear | qt.Linear) else contextlib.nullcontext()
        with quantized, context:
            y = block(y)
        y = synchronize(y)
    y.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None)]


def same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(("count", "kind"), alternating([0, 2, LAYERS], [Linear, nn.Linear], [2]))
def test_a_loop_over_layers(count: int, kind: Any) -> None:
    simulated = Simulated()
    context, synchronize = get_cpu_offload_context(True, count, LAYERS, True, False, _transfers=simulated)
    blocks, others = layers(kind), layers(kind)
    for _ in range(2):
        expected = gradients(blocks, contextlib.nullcontext(), same)
        results = gradients(others, context, synchronize)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    # The input of each layer, in float32 or in codes, and no weight.
    size = TOKENS * DIM * (1 if kind is Linear else 4)
    assert simulated.log == ([("out", size)] * count + [("back", size)] * count) * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_context(reentrant: bool) -> None:
    """Recomputation runs the layers in another order, and enters the context again."""
    simulated = Simulated()
    context, synchronize = get_cpu_offload_context(True, 2, LAYERS, _transfers=simulated)
    blocks, others = layers(nn.Linear), layers(nn.Linear)

    class InContext(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def run(self, x: Tensor) -> Tensor:
            with context:
                y: Tensor = self.block(x)
            return y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.run, x, use_reentrant=reentrant)
            return synchronize(y)

    for _ in range(2):
        expected = gradients(blocks, contextlib.nullcontext(), same)
        results = gradients([InContext(block) for block in others], contextlib.nullcontext(), same)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_codes_of_stored_weights_stay() -> None:
    simulated = Simulated()
    context, synchronize = get_cpu_offload_context(True, LAYERS, LAYERS, _transfers=simulated)
    with qt.quantized_init("tensorwise"):
        blocks = [qt.Linear(DIM, DIM) for _ in range(LAYERS)]
    gradients(blocks, context, synchronize)
    assert simulated.log == [("out", TOKENS * DIM)] * LAYERS + [("back", TOKENS * DIM)] * LAYERS


def test_marked_tensors_stay() -> None:
    simulated = Simulated()
    context, synchronize = get_cpu_offload_context(True, LAYERS, LAYERS, _transfers=simulated)

    class Marks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            mark_not_offload(x, None)
            return super().forward(x)

    gradients(layers(Marks), context, synchronize)
    assert not simulated.log


def test_without_enabled_nothing_happens() -> None:
    context, synchronize = get_cpu_offload_context()
    assert isinstance(context, contextlib.nullcontext)
    x = torch.zeros(1)
    assert synchronize(x) is x


def test_weights_are_never_moved() -> None:
    with pytest.warns(DeprecationWarning, match="weights stay on the device"):
        context, _ = get_cpu_offload_context(True, 1, 2, False, True)
    assert isinstance(context, contextlib.nullcontext)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_activations": False}, "both False; pass offload_activations=True"),
        ({"manual_synchronization": True}, "manual_synchronization is not supported"),
        ({"num_layers": 3, "model_layers": 2}, "num_layers is 3; pass a number from 0 to model_layers, which is 2"),
        ({"num_layers": None}, "num_layers is None"),
    ],
)
def test_wrong_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_cpu_offload_context(True, **options)


def test_the_context_is_left_after_each_layer() -> None:
    context, _ = get_cpu_offload_context(True, 2, 2, _transfers=Simulated())
    with context, pytest.raises(RuntimeError, match="leave it after each layer"):
        context.__enter__()
