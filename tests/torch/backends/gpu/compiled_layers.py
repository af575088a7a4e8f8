"""Every launch of a layer's step, compiled: `python -m tests.torch.backends.gpu.compiled_layers --arch 80`.

A CPU passes for a GPU of the architecture (`pretend`); kernels are recorded and not run, so that operands hold nothing.
Prints JSON: for each recipe the kernels that its step launches, and the compiler's message for each that fails to
compile. Arguments after a `+` are a further request, run in the same process and printed on a line of its own.
"""

import argparse
import json
import os
import sys

# Decided when a kernel is defined.
os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import scaled_mm
from quaver.torch.backends.gpu.launch import KernelLaunch, recording
from tests.kernels.gate.machine_code import compiled
from tests.torch.backends.gpu.pretend import as_on_a_gpu, become

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RECIPES = [name for name, build in recipes.RECIPES.items() if build().quantizes]


def linear(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    return qt.Linear(256, 128, dtype=dtype), torch.randn(256, 256, dtype=dtype)


def transformer_layer(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    options = {"groups": 2, "bias": False, "activation": "swiglu", "normalization": "RMSNorm", "mask_type": "causal"}
    layer = qt.TransformerLayer(256, 4, 384, rope=qt.RotaryEmbedding(64), dtype=dtype, **options)
    return layer, torch.randn(1, 128, 256, dtype=dtype)


LAYERS = {"Linear": linear, "TransformerLayer": transformer_layer}


def recorded(arch: int, recipe: str, layer: str, dtype: torch.dtype, attention: bool = False) -> list[KernelLaunch]:
    """The launches of one step on sm_`arch`, forward and backward, each kernel once."""
    module, x = LAYERS[layer](dtype)
    recipe_used = recipes.get(recipe, attention=True) if attention else recipes.get(recipe)
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        # Recording assumes that GEMMs read transposes from Blackwell on, consumer GPUs included.
        become(arch, patch, either=arch >= 100)
        # Kernels do not run, so a probe has no values to compare.
        patch.setattr(scaled_mm, "_probe", lambda *_: "")
        with recording(arch) as launches, qt.autocast(recipe_used):
            y = module(x.requires_grad_())
            y.backward(torch.ones_like(y))
    return list({launch.kernel: launch for launch in launches}.values())


def failures(launches: list[KernelLaunch], arch: int) -> dict[str, str]:
    """The compiler's error for each kernel that does not compile for sm_`arch`, by name."""
    refused = {}
    for launch in launches:
        try:
            compiled(launch, arch)
        except Exception as error:
            # Compilers raise many kinds of errors.
            refused[launch.fn.__name__] = f"{type(error).__name__}: {error}"
    return refused


def main(arguments: list[str]) -> None:
    while arguments:
        end = arguments.index("+") if "+" in arguments else len(arguments)
        compile_and_print(arguments[:end])
        arguments = arguments[end + 1 :]


def compile_and_print(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch.backends.gpu.compiled_layers", description=__doc__)
    parser.add_argument("--arch", type=int, required=True, help="what the launches are for")
    parser.add_argument("--target", type=int, help="what they are compiled for, if not that")
    parser.add_argument("--layer", default="Linear", choices=LAYERS)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--attention", action="store_true", help="in eight bits too")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    options = parser.parse_args(arguments)
    report = {}
    for recipe in options.recipes:
        launches = recorded(options.arch, recipe, options.layer, DTYPES[options.dtype], options.attention)
        names = sorted({launch.fn.__name__ for launch in launches})
        report[recipe] = {"kernels": names, "refused": failures(launches, options.target or options.arch)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
