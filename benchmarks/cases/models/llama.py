"""A Hugging Face Llama, converted and with blocks in place: saved bytes, peak memory, noise of gradients, step times.

A step is forward, backward and a fused optimizer, so that weights change and are quantized anew.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.cases.linear.memory import SAVING
from benchmarks.measuring import machine
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, at_least, at_most
from benchmarks.measuring.memory import Peak, bytes_of, peak, saved_for_backward
from benchmarks.measuring.products import WideProducts
from benchmarks.measuring.timing import Step, interleave
from benchmarks.subjects.llama import (
    PLAIN,
    QUICK_SIZE,
    RECIPES,
    SIZE,
    Subject,
    copied,
    gradients,
    llama,
    loss_of,
    subjects,
    texts,
)

#: Highest shares of the bf16 model's saved bytes, by recipe: as `convert` leaves it, with blocks, with all blocks.
BY_TENSOR, BY_BLOCKS = ("tensorwise", "delayed"), ("rowwise", "blockwise", "mxfp8")
SAVED = {
    "": {**dict.fromkeys(BY_TENSOR, 93.0), **dict.fromkeys(BY_BLOCKS, 93.5)},
    "blocks": {**dict.fromkeys(BY_TENSOR, 60.0), **dict.fromkeys(BY_BLOCKS, 65.0)},
    "all blocks": dict.fromkeys(BY_TENSOR, 50.0),
}
#: Recipes of the quick case: scales of a tensor, of a row and of a block, and a history.
QUICK_RECIPES = "tensorwise", "delayed", "rowwise", "mxfp8"
#: Batches that gradients are compared on, and by how many decibels those with blocks may be noisier.
BATCHES, NOISIER = 3, 0.5
#: Maximum elements of an operand of products in float32.
ELEMENTS = 1 << 22
ROUNDS = 5
TIMED = ("tensorwise", "mxfp8")
#: Maximum time over transformers' own in bf16, both eager, and both compiled.
TIMES = {"tensorwise": at_most(1.1), "mxfp8": at_most(1.4)}
COMPILED_TIMES = {"tensorwise": at_most(1.25), "mxfp8": at_most(1.45)}
#: CPU flags of processors that multiply bf16.
MULTIPLIES_BF16 = {"avx512_bf16", "amx_bf16"}
MODEL = (
    f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
    f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head"
)


def saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Return the bytes that autograd saves for backward; each storage counts once, parameters do not count."""
    with saved_for_backward(model.parameters()) as saved:
        loss = loss_of(model, tokens)
    assert loss.requires_grad
    return bytes_of(saved.values())


def saved_shares(quick: bool) -> Iterator[Figure]:
    """Yield bytes and shares of bf16, with targets unless quick."""
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, (tokens,) = llama(features, hidden, layers), texts(1, *text)
    plain = 0
    for subject in subjects(QUICK_RECIPES if quick else SAVING):
        why = subject.reason_unsupported()
        if why:
            yield Figure(subject.shown, "of bf16", 0.0, "%", instead=why)
            continue
        count = saved_bytes(copied(base, subject), tokens)
        plain = plain or count
        highest = None if quick else SAVED[subject.blocks].get(subject.recipe)
        yield Figure(subject.shown, "kept", count / 2**20, "MiB")
        share = 100 * count / plain
        yield Figure(subject.shown, "of bf16", share, "%", None if highest is None else at_most(highest))


def step_peak(model: torch.nn.Module, tokens: torch.Tensor) -> Peak:
    """Return the peak memory of forward, backward and an optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    sizes = [tokens.numel(), *(side for p in model.parameters() for side in p.shape)]
    with WideProducts(max(sizes) * sorted(sizes)[-2]):
        # Operations on a CPU allocate buffers that they reuse, which the trace must not count.
        step()
        return peak(step)


def peaks(quick: bool) -> Iterator[Figure]:
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, (tokens,) = llama(features, hidden, layers), texts(1, *text)
    seen: dict[str, Peak] = {}
    for subject in subjects(RECIPES[:1] if quick else RECIPES):
        why = subject.reason_unsupported()
        if why:
            yield Figure(subject.shown, "peak of a step", 0.0, "MiB", instead=why)
            continue
        seen[subject.shown] = step_peak(copied(base, subject), tokens)
        yield from peak_row(subject, seen)


def peak_row(subject: Subject, peaks: dict[str, Peak]) -> Iterator[Figure]:
    name, alone = subject.shown, peaks.get(subject.alone)
    share, own = 100 / peaks[PLAIN].bytes, peaks[subject.shown]
    target = None if alone is None else at_most(round(share * alone.bytes, 1))
    yield Figure(name, "peak of a step", own.bytes / 2**20, "MiB")
    yield Figure(name, "of bf16's", round(share * own.bytes, 1), "%", target)
    yield Figure(name, "left for the next step", own.left / 2**20, "MiB")


def noise(exact: Sequence[Tensor], model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Return the signal-to-noise ratio of gradients in dB, averaged over batches."""
    with WideProducts(ELEMENTS):
        off = [(gradients(model, x) - of).norm() / of.norm() for x, of in zip(batches, exact, strict=True)]
    return -20 * torch.stack(off).log10().mean().item()


def noises(quick: bool) -> Iterator[Figure]:
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, batches = llama(features, hidden, layers), texts(BATCHES, *text)
    wide = copy.deepcopy(base).float()
    exact = [gradients(wide, tokens) for tokens in batches]
    decibels: dict[str, float] = {}
    for subject in subjects(RECIPES[:1] if quick else RECIPES):
        name, least = subject.shown, decibels.get(subject.alone)
        why = subject.reason_unsupported()
        if why:
            yield Figure(name, "gradients over noise", 0.0, "dB", instead=why)
            continue
        decibels[name] = round(noise(exact, copied(base, subject), batches), 1)
        # Eight-bit activations are an intended loss of accuracy.
        target = None if least is None or subject.blocks != "blocks" else at_least(round(least - NOISIER, 1))
        yield Figure(name, "gradients over noise", decibels[name], "dB", target)


def trained(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    # Changes the weights, but so little that all steps compute nearly the same values.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def times(quick: bool) -> Iterator[Figure]:
    """Time each subject alternately with transformers' own model."""
    emulated = not MULTIPLIES_BF16 & machine.flags()
    features, hidden, layers, *text = QUICK_SIZE if quick else SIZE
    base, (tokens,) = llama(features, hidden, layers), texts(1, *text)
    plain, *others = subjects(TIMED[:1] if quick else TIMED)
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


def compiled_times(quick: bool) -> Iterator[Figure]:
    """Time blocks alone, alternately with transformers' own."""
    if quick:
        for recipe in TIMED:
            yield Figure(f"quaver {recipe}, blocks", "of bf16's time", 0.0, "x", instead="compiling takes minutes")
        return
    if not MULTIPLIES_BF16 & machine.flags():
        raise NotMeasurable("this processor does not multiply bf16, so that all such products are float32's here")
    base, (tokens,) = llama(*SIZE[:3]), texts(1, *SIZE[3:])
    plain, *others = subjects(TIMED)
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


SAVED_BYTES = Case(
    name="memory-llama",
    title="Activation bytes saved for backward: a Hugging Face Llama, eager",
    notes=(
        f"{MODEL}; q, k and v quantize their input once, and so do gate and up. Norms, activations and attention are "
        "transformers' own and keep what they keep, but in the rows of blocks: there norms and MLPs are computed in "
        "place (`blocks=True`), and in those of all blocks the head with its loss too, with eight-bit activations. "
        "Each storage saved for backward counts once, parameters apart."
    ),
    measure=saved_shares,
)
PEAK = Case(
    name="peak-llama",
    title="Peak memory of a training step: a Hugging Face Llama, eager",
    notes=(
        f"{MODEL}; forward, backward and SGD, the second of two steps. Bytes of torch's allocator at once, beyond "
        "parameters: activations, gradients, intermediate results (emulation's too, where a GPU has none), and codes "
        "of weights, which a step leaves for the next. All blocks: the head with its loss, and eight-bit activations. "
        "Products of bf16 run in float32, in memory that is not counted. Rows of blocks are judged against rows "
        "without."
    ),
    measure=peaks,
)
GRADIENTS = Case(
    name="gradients-llama",
    title="Noise of all gradients: a Hugging Face Llama, eager",
    notes=(
        f"{MODEL}. Decibels of the gradients over their distance from those of the model in float32 with the same "
        f"weights, mean of {BATCHES} batches. Products of bf16 are sums in float32, rounded once. Blocks may be "
        f"{NOISIER} dB noisier than `convert` alone; all blocks keep eight-bit activations, whose noise is asked for."
    ),
    measure=noises,
)
TIME = Case(
    name="blocks-llama",
    title="Time of a training step: a Hugging Face Llama, eager",
    notes=(
        f"{MODEL}; forward, backward and a fused AdamW, which changes the weights; each row by turns with "
        "transformers' own, the median of each round's ratio. Where the processor has no instructions for bf16 its "
        "products are float32's, and nothing is judged."
    ),
    measure=times,
)
COMPILED = Case(
    name="compiled-llama",
    title="Time of a training step: a Hugging Face Llama, compiled",
    notes=(
        "The model of blocks-llama with blocks in place, under torch.compile as one graph for these lengths, of "
        "transformers' own under torch.compile; forward, backward and a fused AdamW, by turns, the median of each "
        "round's ratio."
    ),
    measure=compiled_times,
)
