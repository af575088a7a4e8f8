"""Two ways to run one block, step by step, and what they must agree on."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.quantized_tensor import memory_of
from tests.close import assert_bitwise

Run = Callable[[nn.Module, Tensor], Any]


def assert_same_training(
    block: nn.Module, runs: Sequence[Run], recipe: Any, inputs: Sequence[Tensor], input_grad: bool = True
) -> None:
    """Check that all runs, each on its own copy of a block, give the same outputs, gradients and buffers in each step.

    Args:
        block: the initial block.
        runs: called with a copy and an input; the others are compared with the first.
        recipe: recipe of the autocast around each step; None for no autocast.
        inputs: one per step.
    """
    blocks = [copy.deepcopy(block) for _ in runs]
    for step, value in enumerate(inputs):
        by_run = []
        leaves = [value.clone().requires_grad_(input_grad) for _ in runs]
        outputs: list[Any] = []
        for run, copied, x in zip(runs, blocks, leaves, strict=True):
            # One autocast each, as it numbers layers in the order of their first use.
            with qt.autocast(recipe, enabled=recipe is not None):
                outputs.append(run(copied, x))
        for copied, x, output in zip(blocks, leaves, outputs, strict=True):
            each = output if isinstance(output, tuple) else (output,)
            torch.manual_seed(step)
            torch.autograd.backward(each, [torch.randn(y.shape).to(y.dtype) for y in each])
            tensors = {f"output {i}": y.detach() for i, y in enumerate(each)}
            if input_grad:
                tensors["gradient of the input"] = x.grad
            tensors |= {f"gradient of {name}": p.grad for name, p in copied.named_parameters()}
            by_run.append(tensors | dict(copied.named_buffers()))
            for p in copied.parameters():
                p.grad = None
        for other in by_run[1:]:
            for name, expected in by_run[0].items():
                assert (other[name] is None) is (expected is None), name
                if expected is not None:
                    assert_bitwise(other[name], expected, f"step {step}, {name}")


def kept_bytes(block: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of activations saved by autograd: each storage once, without parameters."""
    parameters = {memory_of(p).untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = memory_of(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
