"""Bytes a parameter in training, counted on live tensors: weight and scales, what is beside it, gradient, moments.

Of matrices that a preset covers, after one step, under recipes whose codes of a weight serve both GEMMs, and under one
whose do not; and of what a step needs above what stays: the live bytes of all tensors, at their highest.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quaver.torch as qt
from benchmarks.measuring import machine, results
from quaver.reference.optimizer_state import PRESETS
from quaver.torch.optim import AdamW
from quaver.torch.optim.quantized_gradient import QuantizedGradient
from quaver.torch.optim.step import CHUNK_ELEMENTS
from quaver.train import config, memory
from quaver.train.memory import parameters
from quaver.train.model_config import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "optimizer.md"
BEGIN, END = "<!-- python -m benchmarks optimizer-bytes writes from here -->", "<!-- to here, bytes -->"
#: Of the matrix that is stepped: [out, in].
SHAPE = (2048, 1024)
#: Whose codes serve both GEMMs, and one that quantizes a second copy for dgrad.
RECIPES = ("tensorwise", "blockwise", "mxfp8(weight_2d=True)", "mxfp8")
#: Bytes a parameter at most, where one set of codes serves both.
MOST = {"lean": 5.1, "balanced": 7.1, "exact": 10.1}
#: Bytes that a step moves, at most.
MOVED = {"lean": 10.0}
ORDER = ("exact", "balanced", "lean")
#: Whole models, and the words of their vocabulary.
WHOLE = {"tiny": 256, "125m": 32_000, "8b": 128_256}
#: Of matrices that are stepped in backward, and how many there are.
WIDE, DEEP = 512, 16
#: Bytes of gradients that wait for a step.
THRESHOLDS = (("after backward", None), ("2 MiB", 1 << 21), ("each at once", 1))


class Live(TorchDispatchMode):
    """Bytes of the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.seen:
                    self.seen.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def gone(self, key: int, bytes: int) -> None:
        self.seen.discard(key)
        self.now -= bytes


def layer(kept: str, recipe: str, shape: tuple[int, int] = SHAPE) -> nn.Sequential:
    """One matrix, its weight as it is kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    if kept == "codes":
        qt.quantize_weights(model, config.find_recipe(recipe))
    return model.bfloat16() if kept == "bfloat16" else model


def stepped(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward and a step."""
    weight: Any = model[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(32, SHAPE[1])).square().mean().backward()
    optimizer.step()
    assert weight is model[0].weight


def counted(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> tuple[float, float, float, float]:
    """Bytes a parameter: weight with scales, beside it, gradient, moments."""
    weight = model[0].weight
    own = optimizer.state[weight]
    gradient = weight.grad.tensors() if isinstance(weight.grad, QuantizedGradient) else [weight.grad]
    moments = [tensors for name, tensors in own.items() if name.startswith("exp_avg")]
    beside = [t for name, t in own.items() if isinstance(t, Tensor) and not name.startswith("exp_avg") and t.dim()]
    parts = ([weight], beside, gradient, moments)
    total = weight.numel()
    return tuple(sum(size_of(t) for t in each) / total for each in parts)  # type: ignore[return-value]


def size_of(tensor: Any) -> int:
    """Bytes, of tensors made of others too."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(size_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def peers() -> Iterator[tuple[str, tuple[float, ...]]]:
    """torch's AdamW, and torchao's of bfloat16 weights; theirs step without a compiler."""
    from torchao.optim import AdamW8bit, AdamWFp8

    for name, kept, kind in (
        ("torch AdamW, float32", "float32", torch.optim.AdamW),
        ("torchao AdamW8bit, bfloat16 weights, no master", "bfloat16", AdamW8bit),
        ("torchao AdamWFp8, bfloat16 weights, no master", "bfloat16", AdamWFp8),
    ):
        model = layer(kept, "")
        optimizer = kind(model.parameters(), lr=1e-3)
        with torch.compiler.set_stance("force_eager"):
            stepped(model, optimizer)
        yield name, counted(model, optimizer)


@contextmanager
def live() -> Iterator[Live]:
    mode = Live()
    with mode:
        yield mode


def above(preset: str, recipe: str, shape: tuple[int, int]) -> int:
    """Bytes that a step needs above what stays."""
    model = layer(config.find_optimizer(preset).weights(config.find_recipe(recipe), "bfloat16"), recipe, shape)
    optimizer = AdamW(model.parameters(), lr=1e-3, preset=preset)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(32, shape[1])).square().mean().backward()
        with live() as seen:
            optimizer.step()
    return seen.peak


def run(console: Console, write: bool = False) -> bool:
    """Count all, show the tables, and write them into docs/design/optimizer.md; returns whether all is as promised."""
    rows, holds = [], True
    for preset in PRESETS:
        ways: dict[str, list[str]] = {}
        for recipe in RECIPES:
            kept = config.find_optimizer(preset).weights(config.find_recipe(recipe), "bfloat16")
            ways.setdefault(recipe if kept == "codes" else kept, []).append(recipe)
        for way in ways:
            kept = "codes" if way in RECIPES else way
            model = layer(kept, way)
            optimizer = AdamW(model.parameters(), lr=1e-3, preset=preset)
            stepped(model, optimizer)
            own = counted(model, optimizer)
            if way != "mxfp8":
                holds = holds and sum(own) <= MOST.get(preset, 99.0) and moved(own) <= MOVED.get(preset, 99.0)
            note = f"codes of {way}" + (", and a copy for dgrad: + 1.03" if way == "mxfp8" else "")
            rows.append([f"`{preset}`", note if kept == "codes" else kept, *numbers(own)])
    for name, own in peers():
        rows.append([name, "", *numbers(own)])
    rows += [
        ["AMP as Megatron has it (arithmetic)", "bfloat16", *numbers((2, 4, 2, 8))],
        ["bitsandbytes AdamW8bit, AMP (arithmetic)", "bfloat16", *numbers((2, 4, 2, 2 + 8 / 256))],
        ["FlashOptim (arithmetic)", "bfloat16", *numbers((2, 1, 2, 2 + 4 / 32))],
    ]
    columns = (
        "states",
        "weight",
        "weight and scales",
        "residual",
        "gradient",
        "moments",
        "bytes a parameter",
        "bytes a step moves",
    )
    lines = [
        f"Live tensors of a matrix {list(SHAPE)} after a step. {machine.cpu()}, torch {torch.__version__}, "
        f"{machine.today()}.",
        "",
        *results.table(columns, rows),
        "",
        "Of whole models under tensorwise, embedding, norms and small tensors in float32, by the arithmetic that "
        "`quaver plan` uses and a test compares with live tensors; GB (bytes a parameter):",
        "",
        *results.table(("model", "adamw", "exact", "balanced", "lean"), whole()),
        "",
        "What a step needs above what stays, at its highest, in MB; a piece in float32 is "
        f"{4 * CHUNK_ELEMENTS / 1e6:.2f} MB, and whole matrices are 8.4 and 33.6:",
        "",
        *results.table(("states, recipe", "2048 x 1024", "4096 x 2048"), peaks()),
        "",
        f"What backward and step need together above what stays, in MB, of {DEEP} matrices of {WIDE} by {WIDE} and "
        "eight tokens, a float32 gradient of one being 1.05: `step_in_backward(outstanding_bytes)` steps whenever so "
        "many bytes of gradients wait.",
        "",
        *results.table(("states", *(title for title, _ in THRESHOLDS)), in_backward()),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        before, begin, rest = page.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise ValueError(f"{PAGE} lacks the line {BEGIN} or {END}")
        PAGE.write_text("\n".join([before + BEGIN, "", *results.wrapped(lines), "", END + after]), encoding="utf-8")
    return holds


def numbers(own: tuple[float, ...]) -> list[str]:
    return [f"{each:.3f}" for each in (*own, sum(own), moved(own))]


def moved(own: tuple[float, ...]) -> float:
    """Bytes that a step in one pass reads and writes: all, and all but the gradient."""
    weight, beside, gradient, moments = own
    return 2 * (weight + beside + moments) + gradient


def whole() -> list[list[str]]:
    recipe, rows = config.find_recipe("tensorwise"), []
    for name, vocab in WHOLE.items():
        sizes = MODELS[name]
        count = sum(int(torch.Size(shape).numel()) for shape in parameters(sizes, vocab).values())
        cells = [memory.training_footprint(sizes, vocab, each, recipe, "bfloat16").total for each in ("adamw", *ORDER)]
        rows.append([f"`{name}`", *(f"{total / 1e9:.3g} ({total / count:.2f})" for total in cells)])
    return rows


def in_backward() -> list[list[str]]:
    return [
        [f"`{preset}`", *(f"{above_in_backward(preset, threshold) / 1e6:.2f}" for _, threshold in THRESHOLDS)]
        for preset in ("lean", "balanced", "exact")
    ]


def above_in_backward(preset: str, threshold: int | None, wide: int = WIDE, deep: int = DEEP) -> int:
    """Bytes that backward and step need above what stays, gradients among them.

    Args:
        threshold: bytes of gradients that may wait; None steps once backward has ended.
    """
    kept = config.find_optimizer(preset).weights(config.find_recipe("tensorwise"), "bfloat16")
    model = nn.Sequential(*(layer(kept, "tensorwise", (wide, wide)) for _ in range(deep)))
    optimizer = AdamW(model.parameters(), lr=1e-3, preset=preset)
    if threshold is not None:
        optimizer.step_in_backward(outstanding_bytes=threshold)
    x = torch.randn(8, wide)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        with live() as seen:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    return seen.peak


def peaks() -> list[list[str]]:
    ways = (("exact", "tensorwise"), ("balanced", "tensorwise"), ("lean", "tensorwise"), ("lean", "blockwise"))
    return [
        [f"`{preset}`, {recipe}", *(f"{above(preset, recipe, s) / 1e6:.2f}" for s in (SHAPE, (4096, 2048)))]
        for preset, recipe in ways
    ]
