"""Bytes that autograd saves for the backward of a Llama layer, compared with layers of torch's own modules."""

from collections.abc import Iterator

import torch
from torch import nn

import quaver.torch as qt
from benchmarks.cases.linear.memory import SAVING
from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.measuring.memory import kept_bytes
from benchmarks.subjects import blocks
from benchmarks.subjects.blocks import Plain, Size
from quaver.torch.nn.norm import RMSNorm

#: Batch and tokens, and the layer.
SIZE = (4, 64), Size(dim=4096, heads=32, groups=8, hidden=14336)
QUICK_SIZE = (8, 16), Size(dim=512, heads=8, groups=2, hidden=1792)
#: Highest shares of a plain layer's bytes: by default, and with eight_bit_activations; and who is judged.
DEFAULT, EIGHT_BITS = at_most(64.0), at_most(57.0)
JUDGED = ("tensorwise", "mxfp8")


def measure(quick: bool) -> Iterator[Figure]:
    (batch, tokens), size = QUICK_SIZE if quick else SIZE
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, size.dim, dtype=torch.bfloat16)
    against: dict[str, int] = {}

    def row(subject: str, count: int, target: Target | None = None) -> Iterator[Figure]:
        yield Figure(subject, "kept", count / 2**20, "MiB")
        for column, base in against.items():
            yield Figure(subject, f"of {column}", 100 * count / base, "%", target)

    for shown, norm in (("torch's RMSNorm", nn.RMSNorm), ("a lean RMSNorm", RMSNorm)):
        against[shown] = kept_bytes(Plain(size, tokens, gpt=False, fused=False, norm=norm), x)
        yield from row(shown, against[shown])
    base = Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm)
    for eight_bits in (False, True):
        for name in JUDGED if eight_bits else ["bf16", *SAVING]:
            layer = blocks.ours(base, size, eight_bit_activations=eight_bits)
            with qt.autocast(name):
                count = kept_bytes(layer, x)
            target = (EIGHT_BITS if eight_bits else DEFAULT) if name in JUDGED else None
            yield from row(f"quaver {name}" + ", eight_bit_activations" * eight_bits, count, target)


NOTES = (
    f"A Llama layer in bf16, {SIZE[1].dim} features, {SIZE[1].heads} heads in {SIZE[1].groups} groups, MLP "
    f"{SIZE[1].hidden}, {SIZE[0][0]} sequences of {SIZE[0][1]} tokens. The plain layers are nn.Linear, F.silu and "
    "scaled_dot_product_attention, q, k and v apart, one with nn.RMSNorm, which on a CPU keeps float32 copies, and "
    "one with a norm that keeps its input and a number a row. Each storage saved for backward counts once, parameters "
    "apart. The rope tables serve every sequence of a batch and every layer of a model; here they are this layer's."
)
CASE = Case(
    name="memory-block",
    title="Activation bytes saved for backward: a Llama layer, eager",
    notes=NOTES,
    measure=measure,
)
