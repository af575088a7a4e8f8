"""One training run of `accept`, in a separate process: `python -m benchmarks.acceptance.training RUN.json`.

The file contains a `Run`. The run writes its checkpoints and, at its end, result.json into the same folder.
"""

import dataclasses
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import quaver.torch as qt
from quaver import E4M3, E5M2, GemmSpec, QuantSpec, Recipe
from quaver.reference.optimizer_state import PRESETS, Preset, StateSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.attention import DotProductAttention
from quaver.torch.optim import Optimizer
from quaver.train import TrainConfig, TrainResult, checkpoint, files, frameworks, metrics, run_training
from quaver.train import config as recipe_name
from quaver.train.config import to_toml
from quaver.train.data import load, training_batch, validation_batches
from quaver.train.learner import NonFiniteError
from quaver.train.loop import train_step, validate, write_run_files
from quaver.train.memory import parameters
from quaver.train.model_config import MODELS
from quaver.train.resume import MOMENTS
from quaver.train.torch.learner import TorchLearner

#: Trained like the others with every scale at 1: a comparison that could not tell it from bf16 would prove nothing.
CONTROL = "unit_scales"
#: The same with gradients in E4M3, for small batches: a mean over 256 tokens is nearly in the range of unscaled E5M2.
NARROW = "unit_scales_e4m3"
CONTROLS = {CONTROL: E5M2, NARROW: E4M3}
#: Trained like the first row, from weights that are moved by so much at most: what chance alone does.
NULL, NUDGE = "null", 1e-5
#: Optimizer states that are compared on the same codes of weights. The control stores second moments in E4M3 with one
#: scale a matrix and clamps no update.
FLOAT32_STATES, BAD_STATES = "float32_states", "control"
OPTIMIZERS: dict[str, Preset] = {
    FLOAT32_STATES: dataclasses.replace(PRESETS["float32"], name=FLOAT32_STATES, weights="codes"),
    "balanced": PRESETS["balanced"],
    "lean": PRESETS["lean"],
    BAD_STATES: dataclasses.replace(
        PRESETS["float32"],
        name=BAD_STATES,
        weights="codes",
        second=StateSpec(code="e4m3", block=None, scale="float32"),
        clamp=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Options of a training run."""

    # Row of the table that it belongs to.
    row: str
    recipe: str
    seed: int
    steps: int
    model: str
    # Text files and folders; none means the default text.
    text: tuple[str, ...]
    # Folder of all files of this run.
    folder: str
    framework: str = "torch"
    # Sequences of a step, and tokens of each.
    batch: int = 8
    sequence: int = 128
    # Maximum random change of each initial weight; measures what chance alone does to a loss.
    nudge: float = 0.0
    # Keep the checkpoint of this step in addition to the last one; 0 keeps only the last.
    keep: int = 0
    # Folder of a run with a kept checkpoint, from which this run resumes.
    after: str = ""
    # A row of `OPTIMIZERS`; none is torch's AdamW in the trainer's own loop.
    optimizer: str = ""

    @property
    def description(self) -> Path:
        return Path(self.folder) / "run.json"

    @property
    def result(self) -> Path:
        return Path(self.folder) / "result.json"

    @property
    def label(self) -> str:
        return f"{self.row} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run."""

    # Final validation loss in nats a token; None for a run that failed.
    loss: float | None = None
    # Relative RMS of dequantize(quantize(weight)) - weight by converted layer; empty for bf16.
    weight_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    # The share of the last validation's choices of experts that the same weights do not make under bf16.
    choices_differ: float | None = None
    # Updates of matrices that were clamped to their bound, and all of them; of quaver's optimizers alone.
    clamped: int = 0
    updates: int = 0
    # Why there is no loss, or "".
    failure: str = ""


def find(name: str) -> Recipe:
    return control(name) if name in CONTROLS else recipe_name.find_recipe(name)


def control(name: str) -> Recipe:
    value, gradient = QuantSpec(E4M3, scale="unit"), QuantSpec(CONTROLS[name], scale="unit")
    return Recipe(name, GemmSpec(value, value), GemmSpec(gradient, value), GemmSpec(gradient, value))


def train(run: Run) -> Outcome:
    """Train, or resume an interrupted run, and check what was quantized."""
    begun = time.perf_counter()
    if run.optimizer:
        return dataclasses.replace(train_optimizer(run), seconds=time.perf_counter() - begun)
    out = Path(run.folder) / "run"
    config = TrainConfig(
        model=run.model,
        steps=run.steps,
        batch=run.batch,
        sequence=run.sequence,
        seed=run.seed,
        text=run.text,
        framework=run.framework,
        device="cpu",
        threads=1,
        validate_every=0,
        keep=1,
        out=str(out),
    )
    try:
        if run.recipe not in CONTROLS:
            config = dataclasses.replace(config, recipe=run.recipe)
        # The last recipe, if the run changes its recipe.
        recipe = find(run.recipe if run.recipe in CONTROLS else recipe_name.parse_phases(run.recipe)[-1].text)
        if run.keep:
            config = dataclasses.replace(config, checkpoint_every=run.keep, keep=0)
        if not (out / "config.toml").exists():
            if run.after:
                begin_after(config, Path(run.after) / "run")
            elif run.nudge:
                begin_anew(config, recipe)
            if run.nudge:
                nudge_weights(config, run.nudge)
        resume = (out / "config.toml").exists()
        done = run_training(config, recipe if run.recipe in CONTROLS else None, resume=resume)
    except ValueError as error:
        return Outcome(failure=str(error), seconds=time.perf_counter() - begun)
    if run.framework == "jax":
        errors = check(weight_errors_of_jax(done, recipe))
    else:
        errors = weight_errors(done, recipe)
        check_attention(done.model, recipe)
    differ = metrics.read(done.folder / "metrics.jsonl")[-1].get("choices_differ")
    seconds = time.perf_counter() - begun
    return Outcome(loss=done.validation_loss, weight_errors=errors, seconds=seconds, choices_differ=differ)


def train_optimizer(run: Run) -> Outcome:
    """Train with a row of `OPTIMIZERS`, without checkpoints; the learning rate falls to 1 %."""
    PRESETS.update(OPTIMIZERS)  # of this process alone
    config = TrainConfig(
        model=run.model,
        recipe=run.recipe,
        optimizer=run.optimizer,
        steps=run.steps,
        warmup=run.steps // 10,
        final_lr=0.01,
        batch=run.batch,
        sequence=run.sequence,
        validation_batches=32,
        seed=run.seed,
        text=run.text,
        device="cpu",
        threads=1,
    )
    tokens = load(config)
    learner = TorchLearner(config, find(run.recipe), tokens.vocab)
    optimizer = learner.optimizer
    if isinstance(optimizer, Optimizer):
        optimizer.statistics = True
        if run.nudge:
            nudge_codes(learner.model, optimizer, run.nudge, run.seed)
    loss, failure = None, ""
    try:
        for step in range(1, config.steps + 1):
            train_step(learner, training_batch(tokens.train, config, step), step, config)
        loss = validate(learner, validation_batches(tokens.validation, config), config.steps)
    except NonFiniteError as error:
        failure = str(error)
    every = optimizer.counted if isinstance(optimizer, Optimizer) else {}
    counted = [(clamped.item(), number) for p, (clamped, number) in every.items() if p.dim() > 1]
    clamped, updates = (int(sum(each)) for each in zip(*counted, strict=True)) if counted else (0, 0)
    return Outcome(loss=loss, failure=failure, clamped=clamped, updates=updates)


@torch.no_grad()
def nudge_codes(model: nn.Module, optimizer: Optimizer, nudge: float, seed: int) -> None:
    """Move every weight by less than `nudge`; of codes, the master that they are quantized from."""
    random = torch.Generator().manual_seed(seed)
    stored = {m.weight: m for m in model.modules() if isinstance(m, Linear) and m.weight_spec is not None}
    for p in model.parameters():
        noise = (torch.rand(p.shape, generator=random) * 2 - 1) * nudge
        if p in stored:
            state = optimizer.state[p]
            stored_weight.write(stored[p], state["master"].add_(noise))
            # Measured anew before the first step.
            state.pop("amax", None)
        else:
            p.add_(noise)


def begin_anew(config: TrainConfig, recipe: Recipe) -> None:
    """Write the checkpoint of no step, from which a run goes as from its beginning."""
    folder = Path(config.out)
    tokens = load(config, None, folder)
    model, _ = frameworks.make_learner(config, recipe, tokens.vocab).tensors()
    shapes = parameters(MODELS[config.model], tokens.vocab)
    moments = {f"{name}/{key}": np.zeros(shape, np.float32) for name, shape in shapes.items() for key in MOMENTS}
    moments |= {f"{name}/step": np.zeros((), np.float32) for name in shapes}
    facts = {"model": config.model, "seed": config.seed, "text": tokens.fingerprint}
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder, 0, model, moments, facts | {"config": dataclasses.asdict(config)})
    write_run_files(folder, config, tokens)


def begin_after(config: TrainConfig, source: Path) -> None:
    """Begin where another run's oldest checkpoint is, with its records."""
    folder, first = Path(config.out), checkpoint.list_checkpoints(source)[0]
    shutil.copytree(first, folder / first.name)
    shutil.copy(source / "metrics.jsonl", folder)
    files.write(folder / "config.toml", to_toml(config))


def nudge_weights(config: TrainConfig, nudge: float) -> None:
    """Move each weight of a run's checkpoint by less than `nudge`, at random."""
    path = checkpoint.list_checkpoints(Path(config.out))[-1]
    saved, noise = checkpoint.load(path, {}), np.random.default_rng((config.seed, 1))
    weights = {name.partition("/")[0] for name in saved.optimizer}
    model = {
        name: (value + noise.uniform(-nudge, nudge, value.shape)).astype(np.float32) if name in weights else value
        for name, value in saved.model.items()
    }
    own = ("format", "step", "files", "digest")
    facts = {key: value for key, value in saved.state.items() if key not in own}
    checkpoint.save(path.parent, saved.step, model, saved.optimizer, facts)


def weight_errors(done: TrainResult, recipe: Recipe) -> dict[str, float]:
    """Return the quantization error of every converted layer's weight.

    Raises: RuntimeError if head or embedding are quantized, or a converted layer loses nothing, as if it were not.
    """
    model = done.model
    unquantized = set() if model.config.tied else {"head"}
    if type(model.embedding) is not nn.Embedding or (unquantized and type(model.head) is not nn.Linear):
        raise RuntimeError("embedding or head are not those of bf16")
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | qt.GroupedLinear)
    }
    left = {name for name, module in linears.items() if getattr(module, "recipe", None) is None}
    if left != unquantized or set(done.conversion.skipped) != unquantized:
        raise RuntimeError(f"left in high precision: {left}; only the head should be")
    spec = recipe.fprop.b
    if spec is None:
        return {}
    layers = {name: model.get_submodule(name) for name in done.conversion.converted}
    return check({name: relative_rms(layer.weight.detach(), spec) for name, layer in layers.items()})


def weight_errors_of_jax(done: TrainResult, recipe: Recipe) -> dict[str, float]:
    """Return the weight errors of a run in JAX."""
    from quaver.jax import quantize

    params = done.model.params
    matrices = [name.removesuffix(".weight") for name, parameter in params.items() if parameter.ndim == 2]
    left = [name for name in matrices if name not in done.conversion.converted]
    if left != ["embedding", "head"] or done.model.decoder.recipe != recipe:
        raise RuntimeError(f"left in high precision: {left}; only embedding and head should be")
    spec = recipe.fprop.b
    errors = {}
    for name in done.conversion.converted if spec is not None else ():
        weight = params[f"{name}.weight"]
        wide = np.asarray(weight, np.float64)
        difference = np.asarray(quantize(weight, spec).dequantize(), np.float64) - wide
        errors[name] = float(np.sqrt(np.square(difference).mean() / np.square(wide).mean()))
    return errors


def relative_rms(weight: torch.Tensor, spec: QuantSpec) -> float:
    """Return the relative RMS error of a quantized weight, or of a stack whose matrices are quantized separately."""
    stack = weight.unsqueeze(0) if weight.dim() == 2 else weight
    back = torch.stack([qt.quantize(each, spec).dequantize() for each in stack])
    return ((back - stack).double().square().mean() / stack.double().square().mean()).sqrt().item()


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
    """Return the errors by layer. Raises: RuntimeError if one is 0, as if the layer were not quantized."""
    for name, error in errors.items():
        if not error > 0:
            raise RuntimeError(f"the weight of {name} has a quantization error of {error}: is it quantized?")
    return errors


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
