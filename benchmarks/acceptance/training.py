"""One training run of `accept`, in a process of its own: `python -m benchmarks.acceptance.training RUN.json`.

The file holds a `Run`; beside it the run leaves its checkpoints and, once it has ended, result.json.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quaver.torch as qt
from quaver import E4M3, E5M2, GemmSpec, QuantSpec, Recipe
from quaver.torch.blocks.attention import DotProductAttention
from quaver.train import TrainConfig, TrainResult, run_training
from quaver.train.configuration import recipe_name

#: Trained like the others with every scale at 1: a comparison that could not tell it from bf16 would prove nothing.
CONTROL = "unit_scales"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained."""

    recipe: str
    seed: int
    steps: int
    model: str
    # Of text files and folders; none is the default text.
    text: tuple[str, ...]
    # Where everything about this run is kept.
    folder: str
    framework: str = "torch"

    @property
    def description(self) -> Path:
        return Path(self.folder) / "run.json"

    @property
    def result(self) -> Path:
        return Path(self.folder) / "result.json"

    @property
    def label(self) -> str:
        return f"{self.recipe} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run found."""

    # Final validation loss in nats a token; None for a run that failed.
    loss: float | None = None
    # Relative RMS of dequantize(quantize(weight)) - weight by converted layer; empty for bf16.
    weight_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    # Why there is no loss, or "".
    failure: str = ""


def find(name: str) -> Recipe:
    return control() if name == CONTROL else recipe_name.find(name)


def control() -> Recipe:
    value, gradient = QuantSpec(E4M3, scale="unit"), QuantSpec(E5M2, scale="unit")
    return Recipe(CONTROL, GemmSpec(value, value), GemmSpec(gradient, value), GemmSpec(gradient, value))


def train(run: Run) -> Outcome:
    """Train, going on where an interrupted run stopped, and look at what was quantized."""
    begun = time.perf_counter()
    out = Path(run.folder) / "run"
    config = TrainConfig(
        model=run.model,
        steps=run.steps,
        seed=run.seed,
        text=run.text,
        framework=run.framework,
        device="cpu",
        threads=1,
        validate_every=0,
        keep=1,
        out=str(out),
    )
    recipe = find(run.recipe)
    try:
        done = run_training(config, recipe, resume=(out / "config.toml").exists())
    except ValueError as error:
        return Outcome(failure=str(error), seconds=time.perf_counter() - begun)
    if run.framework == "jax":
        from benchmarks.acceptance import jax_weights

        errors = check(jax_weights.weight_errors(done, recipe))
    else:
        errors = weight_errors(done, recipe)
        check_attention(done.model, recipe)
    return Outcome(loss=done.validation_loss, weight_errors=errors, seconds=time.perf_counter() - begun)


def weight_errors(done: TrainResult, recipe: Recipe) -> dict[str, float]:
    """The quantization error of every converted layer's weight.

    Raises: RuntimeError if head or embedding are quantized, or a converted layer loses nothing, as if it were not.
    """
    model = done.model
    if type(model.embedding) is not nn.Embedding or type(model.head) is not nn.Linear:
        raise RuntimeError("embedding or head are not those of bf16")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    left = [name for name, module in linears.items() if getattr(module, "recipe", None) is None]
    if left != ["head"] or set(done.conversion.skipped) != {"head"}:
        raise RuntimeError(f"left in high precision: {left}; only the head should be")
    spec = recipe.fprop.b
    if spec is None:
        return {}
    layers = {name: model.get_submodule(name) for name in done.conversion.converted}
    return check({name: relative_rms(layer.weight.detach(), spec) for name, layer in layers.items()})


def check_attention(model: nn.Module, recipe: Recipe) -> None:
    """Raise a RuntimeError unless every layer's attention loses something exactly where the recipe quantizes it."""
    quantizes = recipe.attention is not None
    attentions = {n: module for n, module in model.named_modules() if isinstance(module, DotProductAttention)}
    if quantizes and not attentions:
        raise RuntimeError("no layer has an attention that could be quantized")
    random = torch.Generator().manual_seed(0)
    for name, attention in attentions.items():
        (wide, narrow), tokens = attention.head_dim, 32
        sizes = ((attention.heads, wide), (attention.groups, wide), (attention.groups, narrow))
        q, k, v = (torch.randn(1, tokens, heads, size, generator=random) for heads, size in sizes)
        with torch.no_grad():
            y = attention(q, k, v)
            with qt.autocast(enabled=False):
                exact = attention(q, k, v)
        if torch.equal(y, exact) is quantizes:
            raise RuntimeError(f"{name} {'is not' if quantizes else 'is'} quantized under {recipe}")


def check(errors: dict[str, float]) -> dict[str, float]:
    """The errors by layer. Raises: RuntimeError if one is no loss at all, as if the layer were not quantized."""
    for name, error in errors.items():
        if not error > 0:
            raise RuntimeError(f"the weight of {name} has a quantization error of {error}: is it quantized?")
    return errors


def relative_rms(weight: torch.Tensor, spec: QuantSpec) -> float:
    difference = qt.quantize(weight, spec).dequantize() - weight
    return (difference.double().square().mean() / weight.double().square().mean()).sqrt().item()


def write(path: Path, data: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(data), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def main(description: Path) -> None:
    fields = read(description)
    run = Run(**(fields | {"text": tuple(fields["text"])}))
    write(run.result, train(run))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
