"""Noise of a Llama's gradients with blocks in place, beside that of `convert` alone.

Weights are in bf16. Gradients are those of a step, all of them, against the model in float32 with the same weights.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.measuring.figure import Case, Figure, at_least
from benchmarks.measuring.products import WideProducts
from benchmarks.subjects.llama import QUICK_SIZE, RECIPES, SIZE, copied, gradients, llama, subjects, texts

#: Batches that gradients are compared on, and by how many decibels those with blocks may be noisier.
BATCHES, NOISIER = 3, 0.5
#: Of products that run in float32, elements of an operand at most.
ELEMENTS = 1 << 22


def noise(exact: Sequence[Tensor], model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Decibels of the gradients over their distance from the exact ones, mean of the batches."""
    with WideProducts(ELEMENTS):
        off = [(gradients(model, x) - of).norm() / of.norm() for x, of in zip(batches, exact, strict=True)]
    return -20 * torch.stack(off).log10().mean().item()


def measure(quick: bool) -> Iterator[Figure]:
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
        # Eight-bit activations are a loss that one asks for.
        target = None if least is None or subject.blocks != "blocks" else at_least(round(least - NOISIER, 1))
        yield Figure(name, "gradients over noise", decibels[name], "dB", target)


CASE = Case(
    name="gradients-llama",
    title="Noise of all gradients: a Hugging Face Llama, eager",
    notes=(
        f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
        f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head. Decibels of the gradients over their "
        f"distance from those of the model in float32 with the same weights, mean of {BATCHES} batches. Products of "
        f"bf16 are sums in float32, rounded once. Blocks may be {NOISIER} dB noisier than `convert` alone; all blocks "
        "keep eight-bit activations, whose noise is asked for."
    ),
    measure=measure,
)
