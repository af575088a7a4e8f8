"""Bytes that a grouped linear layer, and the experts of a mixture, move on a GPU, recorded without one.

Run as a child process in an environment of `stub_driver`: `python -m benchmarks.gpu.ahead.traffic 90`. It trains both
modules of docs/performance.md under each recipe on a stand-in GPU and prints, as JSON, what a step launches.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quaver.torch as qt
from benchmarks.gpu.ahead import standin
from benchmarks.gpu.ahead.hollow import CARD
from benchmarks.gpu.sections.layers.experts import RECIPES, SHAPE, recipe_of
from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import launch

#: Choices per token of the mixture, whose hidden features are the output features of the layer.
CHOICES = 2
#: torch's GEMMs, and our kernels that are GEMMs.
TORCH_GEMMS = "mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"
KERNEL_GEMMS = "multiply_groups", "sum_groups", "multiply_codes", "sum_codes"
#: Kernels that write only rows or groups without tokens; this layer has none.
ONLY_EMPTY = "finish_rows", "finish_groups"
#: Operations that copy nothing: they allocate, or view.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"}


class Recorded(NamedTuple):
    """One launch outside of the GEMMs, or one GEMM."""

    name: str
    #: True for a Triton kernel, False for an operation of torch.
    kernel: bool
    #: dtypes of the operands of a GEMM, such as "float8_e4m3fn by float8_e4m3fn"; "" for other launches.
    gemm: str
    bytes: int


class Traffic(TorchDispatchMode):
    """Records the launches of our kernels, and torch's operations with the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Recorded] = []
        launch._loaded = self._loaded  # type: ignore[assignment]

    def _loaded(self, one: launch.KernelLaunch, index: int) -> launch._LoadedKernel:
        name = one.fn.__name__
        gemm = ""
        if name in KERNEL_GEMMS:
            gemm = " by ".join(one.signature[operand].lstrip("*") for operand in ("x", "w"))
        moved = 0 if name in ONLY_EMPTY else sum(one.sizes.values())
        recorded = Recorded(name, True, gemm, moved)
        return launch._LoadedKernel(None, lambda *_: self.recorded.append(recorded), None, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        same = len(read) == len(written) == 1 and read[0] is written[0]
        if views or same or name in FREE or any(t.is_meta for t in (*read, *written)):
            return result
        if name.removesuffix("_v2") in TORCH_GEMMS:
            operands = " by ".join(str(t.dtype).removeprefix("torch.") for t in read[:2])
            self.recorded.append(Recorded(name, False, operands, 0))
            return result
        reads = written if name in ("index_select", "gather") else read
        moved = sum(map(size, reads)) + sum(map(size, written))
        if moved:
            self.recorded.append(Recorded(name, False, "", moved))
        return result


def size(t: Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded one has fewer than its shape says."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def layer_step(recipe: Recipe, traffic: Traffic) -> list[Recorded]:
    """Return the launches of a training step of a `GroupedLinear`."""
    groups, tokens, k, n = SHAPE
    layer = qt.GroupedLinear(groups, k, n, bias=False, dtype=torch.bfloat16, device=CARD)
    offsets = torch.arange(1, groups + 1, dtype=torch.int32, device=CARD) * (tokens // groups)
    return _last_step(layer, lambda x: layer(x, offsets), (tokens, k), recipe, traffic)


def experts_step(recipe: Recipe, traffic: Traffic) -> list[Recorded]:
    """Return the launches of a training step of `Experts` with as many rows, which includes their permutation."""
    groups, rows, k, n = SHAPE
    experts = qt.Experts(groups, k, n, dtype=torch.bfloat16, device=CARD)
    choices = rows // CHOICES, CHOICES
    indices = torch.zeros(choices, dtype=torch.int64, device=CARD)
    weights = torch.zeros(choices, dtype=torch.bfloat16, device=CARD, requires_grad=True)
    return _last_step(experts, lambda x: experts(x, indices, weights), (choices[0], k), recipe, traffic)


def _last_step(
    module: nn.Module, run: Callable[[Tensor], Tensor], shape: tuple[int, int], recipe: Recipe, traffic: Traffic
) -> list[Recorded]:
    """Return the launches of a step after others that plan and probe."""
    x = torch.zeros(shape, dtype=torch.bfloat16, device=CARD, requires_grad=True)
    g: Tensor | None = None
    for _ in range(4):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.0)
        x.grad = None
        module.zero_grad()
        traffic.recorded.clear()
        with qt.autocast(recipe=recipe):
            y = run(x)
        g = torch.zeros_like(y) if g is None else g
        y.backward(g)
    return list(traffic.recorded)


def counted(recorded: Sequence[Recorded]) -> dict[str, Any]:
    """Return the figures of a step."""
    other = [one for one in recorded if not one.gemm]
    return {
        "kernels": sum(one.kernel for one in other),
        "operations": sum(not one.kernel for one in other),
        "bytes": sum(one.bytes for one in other),
        "gemms": [one.gemm for one in recorded if one.gemm],
        "launches": Counter(one.name for one in other),
        "largest": sorted(([one.name, one.bytes] for one in other), key=lambda x: -x[1])[:12],
    }


def main(arch: int) -> None:
    standin.become(arch)
    with Traffic() as traffic:
        steps = {"layer": layer_step, "experts": experts_step}
        figures = {
            module: {name: counted(step(recipe_of(name), traffic)) for name in RECIPES}
            for module, step in steps.items()
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
