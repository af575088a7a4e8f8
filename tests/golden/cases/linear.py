"""`qt.Linear` and its relatives: outputs, gradients, histories and counters of three steps, every recipe and mode."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from tests.golden.inputs import values
from tests.golden.record import Record
from tests.golden.rows import rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Tokens, inputs, outputs.
SHAPES = {"whole": (64, 128, 96), "ragged": (37, 80, 48), "one token": (1, 64, 32)}
MODES = ("eager", "recompute", "reference", "triton", "bias")
STEPS = 3
#: Compiled by Inductor, which takes seconds each.
COMPILED = ("delayed", "mxfp8", "nvfp4")


def cases() -> dict[str, Callable[[Record], None]]:
    found: dict[str, Callable[[Record], None]] = {}
    for recipe, dtype, shape, mode in rows(recipes.RECIPES, DTYPES, SHAPES, MODES):
        found[f"{recipe}, {dtype}, {shape}, {mode}"] = partial(steps, recipe, DTYPES[dtype], SHAPES[shape], mode)
    for recipe in COMPILED:
        found[f"{recipe}, compiled"] = partial(steps, recipe, torch.bfloat16, SHAPES["whole"], "compiled")
    for recipe in recipes.RECIPES:
        found[f"{recipe}, grouped"] = partial(grouped, recipe)
        found[f"{recipe}, one input"] = partial(one_input, recipe)
        found[f"{recipe}, frozen"] = partial(frozen, recipe)
    for recipe in ("tensorwise", "blockwise", "mxfp8", "nvfp4"):
        found[f"{recipe}, stored"] = partial(stored, recipe)
    return found


def fill(module: nn.Module, seed: int = 10) -> None:
    """Give parameters values that every machine has."""
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(torch.from_numpy(values(*p.shape, seed=seed + number)))


def note(record: Record, model: nn.Module, fixed: bool = False, **outputs: Tensor | None) -> None:
    """Outputs, gradients, buffers and the keys of the state dict.

    Args:
        fixed: inputs, weights and gradients of outputs follow no sum, and so histories and factors are exact.
    """
    record.sum(**outputs)
    record.sum(**{f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
    buffers = dict(model.named_buffers())
    for name, p in model.named_parameters():
        # An earlier commit has the scales in buffers.
        if isinstance(p, getattr(qt, "QuantizedTensor", ())):
            buffers |= {f"{name}_scale": p.scale} | ({} if p.factor is None else {f"{name}_factor": p.factor})
    for name, buffer in buffers.items():
        exact = name.endswith("count") or (fixed and name.endswith(("history", "factor")))
        (record.exact if exact else record.sum)(**{f"buffer {name}": buffer})
    record.keys(model.state_dict())


def steps(recipe: str, dtype: torch.dtype, shape: tuple[int, int, int], mode: str, record: Record) -> None:
    tokens, n_in, n_out = shape
    layer = qt.Linear(n_in, n_out, bias=mode == "bias", dtype=dtype, recipe=recipe)
    fill(layer)
    run: Any = torch.compile(layer) if mode == "compiled" else layer
    only: Any = partial(qt.only, mode) if mode in ("reference", "triton") else nullcontext
    for step in range(STEPS):
        x = torch.from_numpy(values(tokens, n_in, seed=step)).to(dtype).requires_grad_()
        # Histories roll where it is entered: without it, the first layer of a process rolls a step later.
        with only(), qt.autocast(recipe):
            y = qt.checkpoint(run, x) if mode == "recompute" else run(x)
        with only():
            y.backward(torch.from_numpy(values(tokens, n_out, seed=50 + step)).to(dtype))
        record.sum(**{f"y{step}": y, f"dx{step}": x.grad})
    note(record, layer, fixed=True)


def grouped(recipe: str, record: Record) -> None:
    layer = qt.GroupedLinear(3, 64, 48, bias=False, recipe=recipe)
    fill(layer)
    x = torch.from_numpy(values(40, 64, seed=1)).requires_grad_()
    with qt.autocast(recipe):
        y = layer(x, torch.tensor([16, 16, 40], dtype=torch.int32))
    y.backward(torch.from_numpy(values(*y.shape, seed=2)))
    note(record, layer, fixed=True, y=y, dx=x.grad)


def one_input(recipe: str, record: Record) -> None:
    """Two layers that read one tensor share its codes, which both save for backward."""
    layers = nn.ModuleList([qt.Linear(64, 48, bias=False, recipe=recipe) for _ in range(2)])
    fill(layers)
    x = torch.from_numpy(values(32, 64, seed=1)).requires_grad_()
    h = x * 1.0
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with qt.autocast(recipe), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layers[0](h) + layers[1](h)
    of_input = [
        t.untyped_storage().data_ptr() for t in saved if t.element_size() == 1 and t.numel() in (32 * 64, 32 * 32)
    ]
    # Sorted by how often each is saved.
    record.exact(shared=str(sorted(Counter(of_input).values())))
    y.backward(torch.from_numpy(values(*y.shape, seed=2)))
    note(record, layers, fixed=True, y=y, dx=x.grad)


def frozen(recipe: str, record: Record) -> None:
    """Two steps quantize the weight once."""
    layer = qt.Linear(64, 48, recipe=recipe).requires_grad_(False)
    fill(layer)
    with qt.count(layer) as counts, qt.frozen(layer):
        for seed in range(2):
            x = torch.from_numpy(values(32, 64, seed=seed)).requires_grad_()
            y = layer(x)
            y.backward(torch.from_numpy(values(*y.shape, seed=2)))
            record.sum(**{f"y{seed}": y, f"dx{seed}": x.grad})
    record.exact(counts=str(counts))
    record.keys(layer.state_dict())


def stored(recipe: str, record: Record) -> None:
    """Weights that exist only in eight or four bits."""
    with qt.quantized_init(recipe):
        layer = qt.Linear(64, 48, bias=False, recipe=recipe)
    layer.set_weight(torch.from_numpy(values(48, 64, seed=3)))
    x = torch.from_numpy(values(32, 64, seed=1)).requires_grad_()
    y = layer(x)
    y.backward(torch.from_numpy(values(*y.shape, seed=2)))
    note(record, layer, y=y, dx=x.grad)
    record.exact(weight=qt.plain_state_dict(layer)["weight"])
