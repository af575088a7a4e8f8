"""Cases of two processes: layers after a norm whose kernel also quantizes its output."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.nn.norm import normalized_projections
from quaver.torch.parallel import ColwiseParallel, SequenceParallel
from quaver.torch.parallel.tensor import layers
from tests import two_ranks
from tests.close import assert_bitwise
from tests.interpreting import spare
from tests.torch.parallel.tensor.split import tokens
from tests.two_ranks import RANKS

#: Recipes with a fused norm and quantization for trained weights, whose gradients read the same codes.
IN_ONE_PASS = {"tensorwise", "delayed"}
#: The same for frozen weights.
FROZEN = IN_ONE_PASS | {"rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8"}


#: Recipe, how many layers read the norm, and whether their weights are frozen.
CASES_OF_RECIPES = [("tensorwise", 2, False), ("delayed", 1, False), ("mxfp8", 1, True), ("nvfp4", 1, False)]


def mesh() -> Any:
    return two_ranks.mesh(RANKS)


def width_of(name: str) -> int:
    specs = [spec for spec in recipes.get(name).operands().values() if spec is not None]
    return max([32, *(side for spec in specs for side in spec.block if side is not None)])


class Normed(nn.Module):
    def __init__(self, width: int, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm: Any = (qt.LayerNorm if count > 1 else qt.RMSNorm)(width, dtype=dtype)
        self.each = nn.ModuleList(qt.Linear(width, RANKS * width, dtype=dtype) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        outputs = normalized_projections(self.norm, x, [*self.each])  # type: ignore[list-item]
        return torch.cat(outputs, -1)


def model_of(name: str, count: int, dtype: torch.dtype, frozen: bool) -> Any:
    torch.manual_seed(0)
    model = Normed(width_of(name), count, dtype)
    # Gives the noise streams their names.
    qt.convert(model, name)
    model.each.requires_grad_(not frozen)
    return parallelize_module(model, mesh(), {"each.*": ColwiseParallel(sequence=True), "norm": SequenceParallel()})


def trained(name: str, model: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Train some steps; return outputs, gradients and histories."""
    results = []
    for x in inputs:
        own = x.clone().requires_grad_()
        with qt.autocast(name):
            y = model(own)
        y.float().square().sum().backward()
        results += [y.detach(), own.grad]
        for p in model.parameters():
            if p.grad is not None:
                results.append(p.grad.to_local().clone())
                p.grad = None
    return results + [buffer.clone() for key, buffer in model.named_buffers() if "history" in key]


def a_norm_and_its_layers_in_one_pass(rank: int) -> None:
    """A fused norm equals the norm followed by each layer; its kernel scales codes by the amax of all ranks."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    for name, count, frozen in CASES_OF_RECIPES:
        dtype = torch.float32 if count > 1 else torch.bfloat16
        width, values = width_of(name), (0.0, torch.nan) if name == "tensorwise" else (0.0,)
        inputs = []
        for step, value in enumerate(values):
            x = torch.randn(1, RANKS * width, width, generator=torch.Generator().manual_seed(step)) * (1 + step)
            x[0, 3] = value
            inputs.append(tokens(x.to(dtype), rank, RANKS))
        results, counted = [], []
        for unfused in (False, True):
            taken: list[bool] = []

            def operand(*args: Any, taken: list[bool] = taken) -> Any:
                result = OPERAND(*args)
                taken.append(result is not None)
                return result

            with pytest.MonkeyPatch.context() as patch, qt.only("triton"):
                if unfused:
                    patch.setattr(layers, "may_fuse", lambda dtype, x: False)
                patch.setattr(fused_quantize, "operand", operand)
                results.append(trained(name, model_of(name, count, dtype, frozen), inputs))
            counted.append(taken)
        label = f"{name}, {count} layers, frozen {frozen}"
        one_pass = name in (FROZEN if frozen else IN_ONE_PASS)
        quantizes = recipes.get(name).fprop.a is not None
        assert counted == [[one_pass] * len(values) if quantizes else [], []], f"{label}: {counted}"
        for number, (one, other) in enumerate(zip(*results, strict=True)):
            assert_bitwise(one, other, f"{label}: {number}")


#: The original function, before it is patched.
OPERAND = fused_quantize.operand
CASES = [a_norm_and_its_layers_in_one_pass]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels of ranks on a CPU are interpreted")
@pytest.mark.ranks
def test_a_norm_in_parts_is_quantized_by_the_kernel_that_makes_it(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    spare()
    two_ranks.main(CASES, 120)
