"""A training step of a Hugging Face Llama with blocks in place: its time, its peak memory and its gradients' noise.

A step is forward, backward and a fused AdamW, so that weights change and are quantized anew. The peak is of what
torch's allocator gives out during a step, beyond what was there before: parameters, optimizer state and the memory
that operations on a CPU hold for their next call are not in it.
"""

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.cases.blocks.model_memory import HEAD, QUICK_SIZE, SIZE, llama
from benchmarks.measuring.figure import Case, Figure, Target, at_least, at_most
from benchmarks.measuring.timing import Step, interleave
from benchmarks.subjects import peer

ROUNDS = 5
#: Batches that gradients are compared on.
BATCHES = 3
RECIPES = ("tensorwise", "mxfp8")
#: Of transformers' own in bf16, eager too.
TIMES = {"tensorwise": at_most(1.1), "mxfp8": at_most(1.4)}
#: By how many decibels gradients with blocks may be noisier than those of `convert` alone.
NOISIER = 0.5
PLAIN = "bf16"


@dataclass(frozen=True)
class Subject:
    """What is done to the plain model."""

    shown: str
    of: Callable[[Any], Any]
    #: Of ours, the recipe, and whether blocks are in place.
    recipe: str = ""
    blocks: bool = False


def subjects() -> Iterator[Subject]:
    """transformers' own first; then peers, ours as `convert` leaves it, and ours with blocks in place."""
    yield Subject(PLAIN, lambda model: model)
    for name in peer.RECIPES:
        yield Subject(f"torchao {name}", lambda model, name=name: peer.convert(model, name, skip=HEAD))
    with contextlib.suppress(ImportError):
        yield Subject("liger", _liger())
    for blocks in (False, True):
        for recipe in (PLAIN, *RECIPES) if blocks else RECIPES:
            yield Subject(f"quaver {recipe}" + ", blocks" * blocks, _ours(recipe, blocks), recipe, blocks)


def _liger() -> Callable[[Any], Any]:
    """Raises: ImportError where it is not installed, or asks for what this machine has not."""
    with peer.silence():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

    def of(model: Any) -> Any:
        apply_liger_kernel_to_llama(model=model)
        return model

    return of


def _ours(recipe: str, blocks: bool) -> Callable[[Any], Any]:
    def of(model: Any) -> Any:
        qt.convert(model, recipe, skip=[HEAD], blocks=blocks)
        return model

    return of


@dataclass
class Trained:
    """A model, what runs its forward, and its optimizer."""

    model: nn.Module
    run: Any
    tokens: Tensor

    def __post_init__(self) -> None:
        # A rate of 0 would leave the weights alone, and this one leaves all steps' numbers alike.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def backward(self) -> None:
        self.run(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def peak(step: Step) -> int:
    """Bytes that torch's allocator has given out at once during a step, beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    return int(max(totals))


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """All of a step's, in one vector of float32."""
    model.zero_grad()
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    parts = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def noise(base: nn.Module, models: Mapping[str, nn.Module], batches: list[Tensor]) -> dict[str, float]:
    """Decibels of the gradients over their distance from those of the model in float32, of the same weights."""
    wide = copy.deepcopy(base).float()
    exact = [gradients(wide, tokens) for tokens in batches]
    decibels = {}
    for name, model in models.items():
        off = [(gradients(model, tokens) - of).norm() / of.norm() for tokens, of in zip(batches, exact, strict=True)]
        decibels[name] = -20 * torch.stack(off).log10().mean().item()
    return decibels


def batches(quick: bool) -> list[Tensor]:
    *_, batch, length = QUICK_SIZE if quick else SIZE
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 2048, (batch, length), generator=generator) for _ in range(BATCHES)]


def measure(quick: bool) -> list[Figure]:
    """Times and peaks in eager mode, and the noise."""
    base, tokens = llama(*(QUICK_SIZE if quick else SIZE)[:3]), batches(quick)
    of = {subject.shown: subject for subject in subjects()}
    models = {name: subject.of(copy.deepcopy(base)) for name, subject in of.items()}
    decibels = noise(base, models, tokens)
    steps = {name: Trained(model, model, tokens[0]) for name, model in models.items()}
    timings = interleave(steps, rounds=2 if quick else ROUNDS, steps=1)
    peaks = {name: peak(step) for name, step in steps.items()}
    figures = []
    for name, subject in of.items():
        alone = f"quaver {subject.recipe}" if subject.blocks else ""
        of_time = of_peak = of_noise = None
        if alone in of and not quick:
            of_time = TIMES.get(subject.recipe)
            of_peak = at_most(round(100 * peaks[alone] / peaks[PLAIN], 1))
            of_noise = at_least(round(decibels[alone] - NOISIER, 1))
        figures += row(name, timings[name].ratio, timings[name].seconds, of_time)
        figures.append(Figure(name, "peak of a step", peaks[name] / 2**20, "MiB"))
        figures.append(Figure(name, "peak of bf16's", round(100 * peaks[name] / peaks[PLAIN], 1), "%", of_peak))
        figures.append(Figure(name, "gradients over noise", round(decibels[name], 1), "dB", of_noise))
    return figures


def row(name: str, ratio: float, seconds: float, target: Target | None) -> list[Figure]:
    return [Figure(name, "of bf16's time", ratio, "x", target), Figure(name, "time", seconds * 1e3, "ms")]


_OF = (
    f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
    f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head; forward, backward and a fused AdamW, which "
    "changes the weights; interleaved, the median of each round's ratio."
)
CASE = Case(
    name="blocks-llama",
    title="A training step of a Hugging Face Llama: time, peak memory, noise of the gradients",
    notes=(
        f"{_OF} The peak is of torch's allocator, beyond what was there before the step. Gradients: all of them "
        f"against those of the model in float32 with the same weights, mean of {BATCHES} batches. Rows of blocks are "
        "judged against rows without: no higher peak, and no more than 0.5 dB noisier."
    ),
    measure=measure,
)
