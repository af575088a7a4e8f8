"""Host time of an eager layer's step: `python -m benchmarks.host_cost`, in an environment of `stub_driver`.

quaver.torch.Linear runs on CPU tensors of 16 × 16 that are treated as tensors of a GPU: the same implementations are
chosen and the same kernels are launched by Triton's own launcher, with a driver that does nothing. Each scaled GEMM is
replaced by `torch.mm` of that size. Blocks of such layers are timed in the same way. Kernels are checked but not
compiled. Prints JSON: the ratios to torch's own layers by row.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import nn

import quaver.torch as qt
from benchmarks.measuring import stub_driver
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import Step, interleave_with_first
from benchmarks.subjects import blocks, linears
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import device, launch, quantize, scaled_mm
from quaver.torch.operations import ops
from quaver.torch.state.history import amax, roll_gpu
from quaver.torch.state.layer_state import state_of

SIZE = 16
#: Recipes whose GEMMs an architecture supports, by architecture.
RECIPES = {
    90: ["tensorwise", "delayed", "rowwise", "rowwise_bf16_wgrad", "blockwise"],
    100: ["tensorwise", "delayed", "rowwise", "rowwise_bf16_wgrad", "mxfp8", "nvfp4"],
}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def pretend(arch: int) -> None:
    """Make this process treat CPU tensors as those of a GPU of this architecture."""
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(stub_driver.Driver(arch))
    device._architecture = lambda _: arch  # type: ignore[assignment]
    launch.card = lambda device: (0, lambda: 0, lambda index: 0, nowhere)
    device.forced_implementations |= {"triton", "native"}
    # Check the architecture as on a GPU, where these results are cached, too.
    device.why_no_fp8 = lambda d, what: device._why_no_fp8(device.architecture(d))  # type: ignore[assignment]
    device.why_no_kernels = lambda d: "" if device.recorded_arch() else device._why_too_old(arch)  # type: ignore[assignment]
    products = {dtype: torch.randn(SIZE, SIZE).to(dtype) for dtype in DTYPES.values()}

    torch._scaled_mm_v2 = lambda a, b, *rest: torch.mm(products[rest[7]], products[rest[7]])  # type: ignore[assignment]
    # No probe, because it would compare values.
    scaled_mm._probe = lambda *_: ""  # type: ignore[assignment]


@contextmanager
def nowhere(_: Any) -> Iterator[None]:
    yield


def use_gpu_operations(recipe: Recipe) -> None:
    """Make a recipe use the operations that tensors on a GPU would use."""
    ops._resolved[id(recipe)] = ops.ResolvedOperations(
        recipe, quantize.quantize, scaled_mm.scaled_matmul, quantize.quantize_both
    )


def subjects(dtype: torch.dtype, names: list[str]) -> dict[str, Step]:
    base = linears.linear(SIZE, dtype)
    x = torch.randn(SIZE, SIZE, dtype=dtype, requires_grad=True)
    g = torch.randn(SIZE, SIZE, dtype=dtype)
    steps = {"nn.Linear": step_of(base, x, g, accumulating=True)}
    for name in names:
        recipe = recipes.get(name)
        layer = linears.ours(base)
        layer.recipe = recipe
        use_gpu_operations(recipe)
        if recipe.delayed is not None:
            settle(layer, recipe)
        steps[f"quaver {name}"] = step_of(layer, x, g, accumulating=True)
    return steps


#: Modules of several layers, and the dtype in which they are timed.
BLOCKS, BLOCK_DTYPE = ("LayerNormLinear", "LayerNormMLP", "TransformerLayer"), "bf16"


def plain_block(kind: str, dtype: torch.dtype) -> nn.Module:
    """Return a block of torch's own layers, with GEMMs of 16 × 16 × 16."""
    torch.manual_seed(0)
    if kind == "TransformerLayer":
        size = blocks.Size(SIZE, 2, 2, SIZE)
        return blocks.Plain(size, SIZE, gpt=True, fused=False, norm=nn.LayerNorm, dtype=dtype)
    parts = [nn.LayerNorm(SIZE, dtype=dtype), nn.Linear(SIZE, SIZE, dtype=dtype)]
    if kind == "LayerNormMLP":
        parts += [nn.GELU("tanh"), nn.Linear(SIZE, SIZE, dtype=dtype)]
    return nn.Sequential(*parts)


def our_block(kind: str, recipe: Recipe, dtype: torch.dtype) -> nn.Module:
    if kind == "TransformerLayer":
        options = {"activation": "gelu", "fused": False, "mask_type": "causal", "groups": 2}
        layer: nn.Module = qt.TransformerLayer(SIZE, 2, SIZE, recipe=recipe, dtype=dtype, **options)
    elif kind == "LayerNormMLP":
        layer = qt.LayerNormMLP(SIZE, SIZE, "gelu", recipe=recipe, dtype=dtype)
    else:
        layer = qt.LayerNormLinear(SIZE, SIZE, recipe=recipe, dtype=dtype)
    use_gpu_operations(recipe)
    for part in layer.modules():
        if recipe.delayed is not None and isinstance(part, qt.Linear):
            settle(part, recipe)
    return layer


def block_subjects(kind: str, dtype: torch.dtype, names: list[str]) -> dict[str, Step]:
    x = torch.randn(1, SIZE, SIZE, dtype=dtype, requires_grad=True)
    g = torch.randn(1, SIZE, SIZE, dtype=dtype)
    steps = {f"{kind} of torch's parts": step_of(plain_block(kind, dtype), x, g, accumulating=True)}
    for name in names:
        steps[f"{kind} {name}"] = step_of(our_block(kind, recipes.get(name), dtype), x, g, accumulating=True)
    return steps


def settle(layer: qt.Linear, recipe: Recipe) -> None:
    """Set the factors of delayed scaling, and have them read as on a GPU after some steps."""
    amax.create_history(layer, recipe)
    amax.saved_factors = lambda layer: amax._on_device(layer, layer._buffers["factor"])
    amax.is_set = lambda column, factors: factors.known_set[column]
    assert recipe.delayed is not None
    roll_gpu.roll([layer], recipe.delayed, recipe.history_specs)
    state_of(layer).stacked[0].known = [[True] * 3]


def measure(
    rounds: int, steps: int, names: list[str], arch: int = 90, dtypes: Iterable[str] = DTYPES
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (ratio to torch's own layers, microseconds of a step) by dtype and subject."""
    pretend(arch)
    by_dtype = {}
    for dtype in dtypes:
        timed = [subjects(DTYPES[dtype], names)]
        if dtype == BLOCK_DTYPE:
            timed += [block_subjects(kind, DTYPES[dtype], names) for kind in BLOCKS]
        # All in one step of delayed scaling, as between micro-batches: outside of an autocast each backward would end a
        # step, and histories roll once per step of a model.
        with qt.autocast("bf16"):
            by_dtype[dtype] = {
                name: (timing.ratio, timing.seconds * 1e6)
                for each in timed
                for name, timing in interleave_with_first(each, rounds=rounds, steps=steps).items()
            }
    return by_dtype


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arch", type=int, default=90, choices=RECIPES)
    parser.add_argument("--recipes", nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--launchers", help="a folder that keeps them for the next process")
    parser.add_argument("--unoptimized", action="store_true", help="compile them quickly, and time them as they are")
    args = parser.parse_args()
    names = args.recipes or RECIPES[args.arch]
    if args.unoptimized:
        stub_driver.make_launchers_quickly()
    with tempfile.TemporaryDirectory() as elsewhere:
        stub_driver.make_no_code(Path(args.launchers or elsewhere))
        print(json.dumps(measure(args.rounds, args.steps, names, args.arch, args.dtypes)))
