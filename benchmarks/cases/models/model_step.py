"""The time of a training step of a Hugging Face Llama with blocks in place, eager and compiled.

A step is forward, backward and a fused AdamW, so that weights change and are quantized anew.
"""

import contextlib
from collections.abc import Iterator

import torch

from benchmarks.measuring import machine
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, at_most
from benchmarks.measuring.products import WideProducts
from benchmarks.measuring.timing import Step, interleave
from benchmarks.subjects.llama import PLAIN, QUICK_SIZE, SIZE, copied, llama, loss_of, subjects, texts

ROUNDS = 5
RECIPES = ("tensorwise", "mxfp8")
#: Of transformers' own in bf16, eager as well, and compiled as well.
TIMES = {"tensorwise": at_most(1.1), "mxfp8": at_most(1.4)}
COMPILED_TIMES = {"tensorwise": at_most(1.25), "mxfp8": at_most(1.45)}
#: Of products that run in float32, elements of an operand at most.
ELEMENTS = 1 << 22
#: What a processor has that multiplies bf16.
MULTIPLIES_BF16 = {"avx512_bf16", "amx_bf16"}


def trained(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    # A rate of 0 would leave the weights alone, and this one leaves all steps' numbers alike.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(quick: bool) -> Iterator[Figure]:
    """A row after the other: each subject by turns with transformers' own."""
    emulated = not MULTIPLIES_BF16 & machine.flags()
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, (tokens,) = llama(features, hidden, layers), texts(1, *text)
    plain, *others = subjects(RECIPES[:1] if quick else RECIPES)
    step = trained(copied(base, plain), tokens)
    for subject in others:
        name = subject.shown
        why = subject.reason_unsupported()
        if why:
            yield Figure(name, "of bf16's time", 0.0, "x", instead=why)
            continue
        steps = {PLAIN: step, name: trained(copied(base, subject), tokens)}
        with WideProducts(ELEMENTS) if emulated else contextlib.nullcontext():
            timing = interleave(steps, rounds=1 if quick else ROUNDS, steps=1)[name]
        judged = subject.blocks == "blocks" and not quick and not emulated
        yield Figure(name, "of bf16's time", timing.ratio, "x", TIMES.get(subject.recipe) if judged else None)
        yield Figure(name, "time", timing.seconds * 1e3, "ms")
    if emulated and not quick:
        raise NotMeasurable(
            "not judged: this processor does not multiply bf16, so that all such products are float32's here; where it "
            "does, products are a smaller part of a step and ratios are higher"
        )


def measure_compiled(quick: bool) -> Iterator[Figure]:
    """Rows of blocks alone, each by turns with transformers' own."""
    if quick:
        for recipe in RECIPES:
            yield Figure(f"quaver {recipe}, blocks", "of bf16's time", 0.0, "x", instead="compiling takes minutes")
        return
    if not MULTIPLIES_BF16 & machine.flags():
        raise NotMeasurable("this processor does not multiply bf16, so that all such products are float32's here")
    base, (tokens,) = llama(*SIZE[:3]), texts(1, *SIZE[3:])
    plain, *others = subjects(RECIPES)
    step = trained(compiled(copied(base, plain)), tokens)
    for subject in others:
        if subject.blocks != "blocks":
            continue
        steps = {PLAIN: step, subject.shown: trained(compiled(copied(base, subject)), tokens)}
        timing = interleave(steps, rounds=2 * ROUNDS, steps=1)[subject.shown]
        yield Figure(subject.shown, "of bf16's time", timing.ratio, "x", COMPILED_TIMES.get(subject.recipe))
        yield Figure(subject.shown, "time", timing.seconds * 1e3, "ms")


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    whole: torch.nn.Module = torch.compile(model, dynamic=False, fullgraph=True)
    return whole


CASE = Case(
    name="blocks-llama",
    title="Time of a training step: a Hugging Face Llama, eager",
    notes=(
        f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
        f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head; forward, backward and a fused AdamW, "
        "which changes the weights; each row by turns with transformers' own, the median of each round's ratio. "
        "Where the processor has no instructions for bf16 its products are float32's, and nothing is judged."
    ),
    measure=measure,
)
COMPILED = Case(
    name="compiled-llama",
    title="Time of a training step: a Hugging Face Llama, compiled",
    notes=(
        "The model of blocks-llama with blocks in place, under torch.compile as one graph for these lengths, of "
        "transformers' own under torch.compile; forward, backward and a fused AdamW, by turns, the median of each "
        "round's ratio."
    ),
    measure=measure_compiled,
)
