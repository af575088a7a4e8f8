"""What a training step launches on a GPU, counted: `python -m tests.torch.backends.gpu.launch_counts` writes the table
of docs/design/kernels.md anew.

A CPU passes for a GPU (`pretend`): kernels are noted where the driver would launch them, GEMMs where torch is asked for
one, and of torch's own operations each one that computes or copies counts as a launch. Attention, which another package
computes, counts as one launch forward and one backward.
"""

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Decided when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import capture, scaled_mm
from quaver.torch.backends.gpu.scaled_mm import wide
from quaver.torch.linear import plan_emulated
from quaver.torch.state.history import amax
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu, become

#: Recipes where their GEMMs are native and their steps decided beforehand, by architecture.
NATIVE = {
    90: ("tensorwise", "delayed", "rowwise", "rowwise_bf16_wgrad", "blockwise"),
    100: ("tensorwise", "mxfp8", "nvfp4"),
}
#: Recipes where their GEMMs are emulated, by architecture; their steps are decided beforehand too.
EMULATED = {89: ("blockwise", "mxfp8", "nvfp4"), 90: ("mxfp8", "mxfp6", "nvfp4")}
#: How a layer of an emulated recipe runs besides: forward alone, in a CUDA graph, under torch.compile.
MODES = ("training", "no gradients", "captured", "compiled")
MODES_OF = ("mxfp8", "mxfp6", "mxfp4", "nvfp4")
#: Operations of torch that launch nothing: they make room, or look at what is there in another way.
FREE = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "reshape", "resize_"),
    *(
        "lift_fresh",
        "select",
        "set_",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    ),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    # Of delayed scaling's factors, as the host has them.
    "ne",
}
STEPS = 4
PAGE = Path(__file__).parents[4] / "docs" / "design" / "kernels.md"
BEGIN, END = "<!-- python -m tests.torch.backends.gpu.launch_counts writes from here -->", "<!-- to here -->"


class _Operations(TorchDispatchMode):
    """Notes what torch computes itself."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self.launched = launched

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "quaver":
            # An operator of a compiled graph: its kernels are launched inside.
            with self:
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
        if name not in FREE:
            self.launched.append("attention" if "scaled_dot_product" in name else f"torch.{name}")
        return function(*args, **(kwargs or {}))


def linear(bias: bool = False, features: int = 512) -> tuple[nn.Module, torch.Tensor]:
    return qt.Linear(features, features, bias=bias, dtype=torch.bfloat16), torch.randn(32, features)


def llama_layer() -> tuple[nn.Module, torch.Tensor]:
    options = {"groups": 2, "bias": False, "activation": "swiglu", "normalization": "RMSNorm", "mask_type": "causal"}
    layer = qt.TransformerLayer(64, 4, 96, rope=qt.RotaryEmbedding(16), dtype=torch.bfloat16, **options)
    return layer, torch.randn(1, 32, 64)


def launches(
    arch: int, name: str, module: nn.Module, x: torch.Tensor, changing: bool = True, mode: str = "training"
) -> list[str]:
    """What the last of some steps launches, forward and backward, in order: kernels, "GEMM" and torch's operations.

    Args:
        changing: whether the weight changes before it; else it is that of the step before, whose gradients are there.
        mode: one of `MODES`; the recipe of a compiled layer must be emulated.
    """
    launched: list[str] = []
    graphs = CompiledGraphs()
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        become(arch, patch)
        recipe = recipes.delayed(history=4) if name == "delayed" else recipes.get(name)
        driver = Driver(patch, runs=recipe.delayed is not None)
        multiply, counting = torch._scaled_mm_v2, False

        def gemm(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
            if not counting:
                return multiply(a, b, *rest)
            launched.append("GEMM")
            return torch.empty(a.shape[0], b.shape[1], dtype=rest[7])

        patch.setattr(torch, "_scaled_mm_v2", gemm)
        for of_values in ("wide", "narrow"):
            recorded_product = _recorded_amax(getattr(plan_emulated, of_values), launched, lambda: counting)
            patch.setattr(plan_emulated, of_values, recorded_product)
            if mode == "compiled":
                patch.setattr(scaled_mm, of_values, recorded_product)
        # Another test's layers, which a cycle keeps alive, would roll here too.
        alive, ours = amax.layers, set(module.modules())
        patch.setattr(amax, "layers", lambda: [layer for layer in alive() if layer in ours])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        run: Any = module
        if mode == "compiled":
            # Dynamo would ask a GPU that is not there for its random state.
            patch.setattr(torch.cuda, "is_available", lambda: False)
            run = torch.compile(module, fullgraph=True, backend=graphs.backend)
        for number in range(STEPS):
            counting = number == STEPS - 1
            given = x.bfloat16().requires_grad_()
            if counting:
                driver.launched, driver.runs = _Kernels(launched), False
            recorded = launched if counting else []
            # A mode around a compiled function would keep it from running: its graphs enter it.
            graphs.operations = _Operations(recorded)
            around = nullcontext() if mode == "compiled" else graphs.operations
            with capture.rehearsing(torch.device("cpu")) if mode == "captured" else nullcontext():
                with around, torch.set_grad_enabled(mode != "no gradients"), qt.autocast(recipe):
                    y = run(given)
                if mode != "no gradients":
                    g = torch.ones_like(y)
                    with around:
                        y.backward(g)
            # A copy of delayed scaling's factors arrives at the host.
            driver._wait()
            if changing:
                optimizer.step()
                optimizer.zero_grad()
    return launched


class CompiledGraphs:
    """A backend of torch.compile whose graphs run under a mode, and what is inside of operators too."""

    operations: Any = nullcontext()

    def backend(self, *args: Any) -> Any:
        return aot_autograd(fw_compiler=self._compiled, bw_compiler=self._compiled)(*args)

    def _compiled(self, graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            with self.operations:
                return graph(*args)

        return make_boxed_func(run)


def _recorded_amax(multiply: Any, launched: list[str], counting: Any) -> Any:
    """A product of bf16 values, which a CPU computes by more operations than a GPU."""

    def recorded(x: torch.Tensor, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not counting():
            product: torch.Tensor = multiply(x, y, *rest)
            return product
        launched.append("GEMM")
        dtype = torch.float32 if multiply is wide else torch.bfloat16
        return torch.empty(x.shape[0], y.shape[1], dtype=dtype)

    return recorded


class _Kernels(list[Any]):
    """Maps the records of a `Driver` to the names of all launches."""

    def __init__(self, launched: list[str]) -> None:
        self.launched = launched

    def append(self, kernel: Any) -> None:
        self.launched.append(kernel[0].__name__)


def counted(arch: int, name: str) -> tuple[int, ...]:
    """Count launches of a Linear, of one with a bias, and of one with a weight cached from the step before."""
    # Of delayed scaling the steps before are interpreted, which takes seconds a step of a larger layer.
    features = 128 if name == "delayed" else 512
    counts = [len(launches(arch, name, *linear(bias, features))) for bias in (False, True)]
    # Gradients of the step before are there: torch adds to them, whatever made them.
    cached = [one for one in launches(arch, name, *linear(features=features), changing=False) if one != "torch.add_"]
    return (*counts, len(cached))


def by_mode(arch: int, name: str) -> tuple[int, ...]:
    """Count launches of a Linear in each of `MODES`."""
    counts = []
    for mode in MODES:
        torch._dynamo.reset()
        # Of no launch: the stream of noise is read on the host, where it is.
        counts.append(sum(one != "torch.item" for one in launches(arch, name, *linear(), mode=mode)))
    torch._dynamo.reset()
    return tuple(counts)


def rows() -> dict[str, tuple[str, ...]]:
    """The cells of the table as the page has them, by recipe and architecture."""
    lines = PAGE.read_text().split(BEGIN)[1].split("Those of a Linear")[0].splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if "| sm_" in line]
    return {f"{row[0].removesuffix(', emulated')} {row[1]}": row[2:] for row in cells}


def rows_by_mode() -> dict[str, tuple[str, ...]]:
    """The cells of the table of modes as the page has them, by recipe."""
    lines = PAGE.read_text().split("Those of a Linear")[1].split("Those of the Llama")[0].splitlines()
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if "| sm_" in line]
    return {row[0]: row[2:] for row in cells}


def table() -> str:
    """In markdown: how many launches each recipe takes, and what those of a Llama layer are."""
    lines = ["| launches, forward and backward | GPU | Linear | with a bias | weight cached | Llama layer |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    of_layers = {}
    for arch, names in (*NATIVE.items(), *EMULATED.items()):
        for name in names:
            layer = of_layers[name, arch] = Counter(launches(arch, name, *llama_layer()))
            cells = (*counted(arch, name), layer.total())
            how = ", emulated" * (name in EMULATED.get(arch, ()))
            lines.append(f"| {name}{how} | sm_{arch} | {' | '.join(map(str, cells))} |")
    lines += ["", "Those of a Linear whose GEMMs are emulated, by how it runs:", ""]
    lines += [f"| emulated | GPU | {' | '.join(MODES)} |", f"| --- | --- |{' ---: |' * len(MODES)}"]
    for name in MODES_OF:
        lines.append(f"| {name} | sm_90 | {' | '.join(map(str, by_mode(90, name)))} |")
    lines += [
        "",
        "Those of the Llama layer on sm_90:",
        "",
        "| launches | tensorwise | rowwise |",
        "| --- | ---: | ---: |",
    ]
    tensorwise, rowwise = (of_layers[name, 90] for name in ("tensorwise", "rowwise"))
    lines += [f"| {kind} | {tensorwise[kind]} | {rowwise[kind]} |" for kind in sorted(tensorwise | rowwise)]
    return "\n".join(lines)


def written(text: str) -> str:
    """The page with an updated table."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
