"""A captured and an eager step of the trainer: the same results, and the host time of both."""

import os
import statistics
import time

import numpy as np
import torch

from benchmarks.gpu.measuring.clock import Step
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.linears import some
from benchmarks.gpu.sections.training.runs import without_extras

#: Steps that are compared, that are timed, and that come before these.
COMPARED, TIMED, WARM_UP = 8, 20, 5


def measure(recipe: str, setting: Setting, findings: Findings) -> None:
    """Under one recipe; without a GPU both are eager, which shows that the comparison runs."""
    without_extras()
    from quaver.recipes import get
    from quaver.train.config import TrainConfig
    from quaver.train.torch.learner import TorchLearner

    # Read by cuBLAS when the first GEMM of this process runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = {"model": "nano", "batch": 1, "sequence": 16} if setting.toy else {"model": "small", "sequence": 256}

    def learner(capture: str) -> TorchLearner:
        config = TrainConfig(recipe=recipe, device=str(setting.device), capture=capture, **sizes)
        return TorchLearner(config, get(recipe), 256)

    eager, captured = learner("none"), learner("step" if setting.cuda else "none")
    shape = 1, eager.config.batch, eager.config.sequence + 1
    compared = 1 if setting.toy else 2 if setting.hollow else COMPARED
    batches = np.random.default_rng(0).integers(0, 256, (compared, *shape))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        wrong = sum(captured.step(batch, 1e-3) != eager.step(batch, 1e-3) for batch in batches)
    finally:
        torch.use_deterministic_algorithms(before)
    pairs = zip(eager.model.state_dict().values(), captured.model.state_dict().values(), strict=True)
    wrong += sum(int((a != b).sum()) for a, b in pairs)
    findings.add(recipe, "differing", wrong, "elements")
    # Others, since a graph stays as it was captured: deterministic.
    for column, capture in (("eager", "none"), ("captured", "step" if setting.cuda else "none")):
        step = learner(capture).step
        seconds = step_seconds(lambda step=step: step(batches[0], 1e-3), setting)
        findings.add(recipe, f"{column} step", 1e3 * seconds, "ms")


def step_seconds(step: Step, setting: Setting) -> float:
    """Return the wall-clock seconds of a step, including reading its loss; the first steps do not count."""
    times = []
    for _ in range(1 if setting.toy or setting.hollow else WARM_UP + TIMED):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[-TIMED:])


SECTION = Section(
    name="graph",
    title="A step of the trainer, captured as a CUDA graph",
    notes=(
        "The trainer's `small` Llama, 8 sequences of 256 bytes; eager and captured see the same eight batches from the "
        "same weights. `differing`: steps whose loss or norm is not the same, and elements of parameters and buffers "
        "after them, in deterministic mode. Steps are timed by the wall clock outside it, their loss read."
    ),
    seconds=30,
    # cuBLAS reads its workspace's size at the first GEMM of a process.
    alone=True,
    cases=lambda setting: [
        Case(name, lambda s, findings, name=name: measure(name, s, findings)) for name in ("bf16", *some(setting))
    ],
)
