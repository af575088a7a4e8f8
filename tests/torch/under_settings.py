"""Layers' steps under settings of the process, each in a process of its own: `python -m tests.torch.under_settings`.

Every setting is applied before quaver is imported, so that what a module or a first call keeps is made under it too. A
default of another dtype once let C write beyond a tensor; a process of its own keeps that from the tests.
"""

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Tokens, input and output features, dtype, bias: a shape for every path of a CPU.
SHAPES = {
    "decided": (8, 48, 32, torch.float32, True),
    "decided, bf16": (8, 48, 32, torch.bfloat16, False),
    "blocks compiled by libtorch": (130, 256, 256, torch.float32, True),
    "plain float32": (40, 256, 128, torch.float32, True),
    "bf16 products": (72, 256, 128, torch.bfloat16, False),
    "bf16 with a bias": (72, 256, 128, torch.bfloat16, True),
    "float16": (40, 128, 96, torch.float16, True),
    "few rows": (3, 640, 512, torch.float32, True),
    "few rows of a large weight": (12, 2048, 2112, torch.bfloat16, False),
    "ragged": (37, 70, 50, torch.float32, True),
}


def _nothing() -> None:
    pass


def _deterministic(on: bool, **options: bool) -> Callable[[], None]:
    return lambda: torch.use_deterministic_algorithms(on, **options)


#: Settings of a process. Threads change the order of float32 sums; reduced-precision matmuls change high-precision
#: products on CPUs with bf16 instructions (AMX), as intended; all other settings change no bit.
SETTINGS: dict[str, Callable[[], Any]] = {
    "none": _nothing,
    "default dtype float64": lambda: torch.set_default_dtype(torch.float64),
    "default dtype bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "default dtype float16": lambda: torch.set_default_dtype(torch.float16),
    "default device meta": lambda: torch.set_default_device("meta"),
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "deterministic algorithms": _deterministic(True),
    "deterministic algorithms, warnings": _deterministic(True, warn_only=True),
    "swap_module_params": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "warnings as errors": lambda: warnings.simplefilter("error"),
    "two threads": lambda: torch.set_num_threads(2),
    "rounded products": lambda: torch.set_float32_matmul_precision("medium"),
    "inference first": _nothing,
}
BOUNDED = {"two threads", "rounded products"}


def step(recipe: Any, shape: tuple[int, int, int, torch.dtype, bool], inference: bool) -> dict[str, Tensor]:
    """Outputs and gradients of two steps of a layer."""
    import quaver.torch as qt

    tokens, k, n, dtype, bias = shape
    torch.manual_seed(0)
    layer = qt.Linear(k, n, bias=bias, device="cpu", dtype=torch.float32).to(dtype)
    tensors: dict[str, Tensor] = {}
    for i in range(2):
        x, g = (torch.randn(tokens, size, dtype=torch.float32, device="cpu").to(dtype) for size in (k, n))
        if inference:
            with torch.inference_mode(), qt.autocast(recipe=recipe):
                layer(x)
        x.requires_grad_()
        layer.zero_grad()
        with qt.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        tensors |= {f"output {i}": y.detach(), f"grad_input {i}": x.grad}  # type: ignore[dict-item]
        tensors |= {f"grad_{name} {i}": p.grad for name, p in layer.named_parameters()}  # type: ignore[misc]
    return tensors


def block(recipe: Any, inference: bool) -> dict[str, Tensor]:
    """A Transformer layer with rope, and a loss."""
    import quaver.torch as qt

    torch.manual_seed(0)
    placed: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    rope = qt.RotaryEmbedding(16, device="cpu")
    layer = qt.TransformerLayer(64, 4, 96, groups=2, activation="swiglu", normalization="RMSNorm", rope=rope, **placed)
    x = torch.randn(2, 24, 64, dtype=torch.float32, device="cpu", requires_grad=True)
    context: AbstractContextManager[Any] = torch.inference_mode() if inference else nullcontext()
    with qt.autocast(recipe=recipe):
        with context:
            layer(x)
        y = layer(x)
    y.square().mean().backward()
    tensors = {"output": y.detach(), "grad_input": x.grad}
    return tensors | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}  # type: ignore[return-value]


def run(setting: str, cases: list[tuple[str, str]], file: Path) -> None:
    """Every (recipe, shape) under one setting, into a file."""
    SETTINGS[setting]()
    from tests.operands import variants

    recipes, inference = variants(), setting == "inference first"
    every_tensor: dict[str, Tensor] = {}
    for name, shape in cases:
        tensors = block(recipes[name], inference) if shape == "block" else step(recipes[name], SHAPES[shape], inference)
        every_tensor |= {f"{name}, {shape}, {what}": t for what, t in tensors.items()}
    torch.save(every_tensor, file)


def main(settings: list[str], cases: list[tuple[str, str]], folder: str) -> None:
    """Run each setting in a fork of a process that has imported only torch; return the settings that failed."""
    # Modules that torch imports in a first backward and in deterministic mode, half or more of a fork's time.
    import torch._inductor.config
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    # Import numpy here, which quaver needs, and exclude torch's million objects from collections in the forks.
    importlib.import_module("numpy.random")
    gc.collect()
    gc.freeze()
    for setting in settings:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                run(setting, cases, Path(folder) / f"{setting}.pt")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            print(f"{setting}: {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*json.loads(sys.argv[1]))
