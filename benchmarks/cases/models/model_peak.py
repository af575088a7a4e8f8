"""The most memory of a training step of a Hugging Face Llama, as `convert` leaves it and with blocks in place.

A step is forward, backward and a fused SGD without state, so that weights change and are quantized anew. Products of
bf16 run in float32 here, in memory that is not counted, so that a row takes seconds on any processor; emulation's
intermediate results are counted, where a GPU has none.
"""

from collections.abc import Iterator

import torch

from benchmarks.measuring.figure import Case, Figure, at_most
from benchmarks.measuring.memory import Peak, peak
from benchmarks.measuring.products import WideProducts
from benchmarks.subjects.llama import PLAIN, QUICK_SIZE, RECIPES, SIZE, Subject, copied, llama, loss_of, subjects, texts


def of_step(model: torch.nn.Module, tokens: torch.Tensor) -> Peak:
    """Of forward, backward and an optimizer that changes each weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    sizes = [tokens.numel(), *(side for p in model.parameters() for side in p.shape)]
    with WideProducts(max(sizes) * sorted(sizes)[-2]):
        # What operations on a CPU hold for their next call is there before the trace begins.
        step()
        return peak(step)


def measure(quick: bool) -> Iterator[Figure]:
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, (tokens,) = llama(features, hidden, layers), texts(1, *text)
    peaks: dict[str, Peak] = {}
    for subject in subjects(RECIPES[:1] if quick else RECIPES):
        why = subject.reason_unsupported()
        if why:
            yield Figure(subject.shown, "peak of a step", 0.0, "MiB", instead=why)
            continue
        peaks[subject.shown] = of_step(copied(base, subject), tokens)
        yield from row(subject, peaks)


def row(subject: Subject, peaks: dict[str, Peak]) -> Iterator[Figure]:
    name, alone = subject.shown, peaks.get(subject.alone)
    share, own = 100 / peaks[PLAIN].bytes, peaks[subject.shown]
    target = None if alone is None else at_most(round(share * alone.bytes, 1))
    yield Figure(name, "peak of a step", own.bytes / 2**20, "MiB")
    yield Figure(name, "of bf16's", round(share * own.bytes, 1), "%", target)
    yield Figure(name, "left for the next step", own.left / 2**20, "MiB")


CASE = Case(
    name="peak-llama",
    title="Peak memory of a training step: a Hugging Face Llama, eager",
    notes=(
        f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
        f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head; forward, backward and SGD, the second "
        "of two steps. Bytes of torch's allocator at once, beyond parameters: activations, gradients, intermediate "
        "results, and codes of weights, which a step leaves for the next. All blocks: the head with its loss, and "
        "eight-bit activations. Products of bf16 run in float32, in memory that is not counted. Rows of blocks are "
        "judged against rows without."
    ),
    measure=measure,
)
