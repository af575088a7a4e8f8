"""Training the trainer's smallest useful model on the default text under each recipe, paired with bf16."""

import sys
import time
import types
from pathlib import Path

import numpy as np
import torch

import quaver
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.linears import some

STEPS, QUICK_STEPS, BATCH, SEQUENCE = 300, 200, 16, 256
#: Packages that the trainer's command line needs in addition to torch, but a run of its loop here does not.
EXTRAS = ("tokenizers", "safetensors")


def without_extras() -> None:
    """Let `quaver.train`'s parts be imported where what its commands need is not installed: without its front page."""
    if "quaver.train" in sys.modules:
        return
    try:
        for name in EXTRAS:
            __import__(name)
    except ImportError:
        package = types.ModuleType("quaver.train")
        package.__path__ = [str(Path(quaver.__file__).parent / "train")]
        sys.modules["quaver.train"] = package


def run(recipe: str, setting: Setting) -> tuple[float, float]:
    """(validation loss, tokens in a second) of one run: the trainer's model, batches, schedule and optimizer."""
    without_extras()
    from quaver.train.config import TrainConfig, lr_at
    from quaver.train.data import read_text, split, training_batch, validation_batches
    from quaver.train.torch.learner import TorchLearner

    config = TrainConfig(
        recipe=recipe,
        model="nano" if setting.toy else "small",
        device=str(setting.device),
        steps=2 if setting.toy or setting.hollow else QUICK_STEPS if setting.quick else STEPS,
        batch=2 if setting.toy else BATCH,
        sequence=16 if setting.toy else SEQUENCE,
        validation_batches=1 if setting.toy else 16,
    )
    train, held_out = (
        np.frombuffer(b"\0".join(document.data for document in part), dtype=np.uint8) for part in split(read_text(()))
    )
    learner = TorchLearner(config, quaver.recipes.get(recipe), 256)
    begun, tokens = time.perf_counter(), 0
    for step in range(1, config.steps + 1):
        batch = training_batch(train, config, step)
        loss, _ = learner.step(batch, lr_at(step, config))
        if not np.isfinite(loss):
            raise ValueError(f"the loss of step {step} is {loss}")
        tokens += batch[..., 1:].size
    speed = tokens / (time.perf_counter() - begun)
    return learner.loss(validation_batches(held_out, config)), speed


def measure(recipe: str, setting: Setting, findings: Findings) -> None:
    torch.manual_seed(0)
    loss, speed = run(recipe, setting)
    findings.add(recipe, "validation loss", loss, "nats")
    findings.add(recipe, "speed", speed, "tokens/s")
    if recipe == "bf16":
        baseline[setting.toy] = loss
    elif setting.toy in baseline:
        findings.add(recipe, "minus bf16's", loss - baseline[setting.toy], "nats")


#: The validation loss of bf16, by whether sizes are a toy's.
baseline: dict[bool, float] = {}

SECTION = Section(
    name="training",
    title="Training on the default text",
    notes=(
        "300 steps, or 200 under three recipes if quick. The trainer's `small` Llama of 256 features, 16 sequences of "
        "256 bytes a step, float32 parameters under torch.autocast, the same weights and batches for every recipe; one "
        "seed. A model of this size is bound by the host: the speed says nothing of large ones."
    ),
    seconds=75,
    cases=lambda setting: [
        Case(name, lambda s, findings, name=name: measure(name, s, findings))
        for name in ("bf16", *some(setting)[: 3 if setting.quick else None])
    ],
)
