"""What eight bits cost the gradients of a Llama layer: relative errors against the same layer in float32.

`eight_bit_activations` leaves outputs alone; its error is what the rows with it have beyond those without.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure
from benchmarks.subjects import blocks
from benchmarks.subjects.blocks import Plain, Size

#: Batch and tokens, and the layer.
SIZE = (2, 256), Size(dim=512, heads=8, groups=2, hidden=1792)
QUICK_SIZE = (1, 32), Size(dim=64, heads=4, groups=2, hidden=224)
SEEDS = 3
RECIPES = ("tensorwise", "mxfp8")
#: Column and the parameter that it is the gradient of; the input's is without the residual stream's own part.
PARAMETERS = {
    "qkv_proj": "attention.qkv_proj.weight",
    "o_proj": "attention.o_proj.weight",
    "gate_up_proj": "mlp.gate_up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "attention's norm": "attention.norm.weight",
    "MLP's norm": "mlp.norm.weight",
}
OUTPUT, INPUT = "output", "input"


def subjects() -> Iterator[tuple[str, Callable[[Plain, Size], nn.Module], str | None]]:
    """(the name shown, what makes the layer of a plain one, the recipe)."""
    yield "torch in bf16", lambda plain, size: plain, None
    for recipe in RECIPES:
        for eight_bits in (False, True):
            yield f"quaver {recipe}" + ", eight_bit_activations" * eight_bits, making(eight_bits), recipe


def making(eight_bits: bool) -> Callable[[Plain, Size], nn.Module]:
    def make(plain: Plain, size: Size) -> nn.Module:
        return blocks.ours(plain, size, eight_bit_activations=eight_bits)

    return make


def results(layer: nn.Module, x: Tensor, g: Tensor, recipe: str | None) -> dict[str, Tensor]:
    """What the layer adds to the residual stream, and the gradients, by column."""
    leaf = x.clone().requires_grad_()
    with qt.autocast(recipe, enabled=recipe is not None):
        y = layer(leaf)
    y.backward(g)
    assert leaf.grad is not None
    grads: dict[str, Any] = {column: layer.get_parameter(name).grad for column, name in PARAMETERS.items()}
    return {OUTPUT: y.detach().float() - x.float(), INPUT: leaf.grad.float() - g.float(), **grads}


def errors(quick: bool) -> list[Figure]:
    (batch, tokens), size = QUICK_SIZE if quick else SIZE
    seen: dict[tuple[str, str], list[float]] = {}
    for seed in range(1 if quick else SEEDS):
        torch.manual_seed(seed)
        plain = Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm)
        x, g = (torch.randn(batch, tokens, size.dim).bfloat16() for _ in range(2))
        wide = Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm, dtype=torch.float32)
        wide.load_state_dict(plain.state_dict())
        exact = results(wide, x.float(), g.float(), None)
        for subject, make, recipe in subjects():
            for column, value in results(make(plain, size), x, g, recipe).items():
                error = (value.float() - exact[column]).norm() / exact[column].norm()
                seen.setdefault((subject, column), []).append(100 * error.item())
    return [Figure(subject, column, statistics.fmean(each), "%") for (subject, column), each in seen.items()]


CASE = Case(
    name="block-gradients",
    title="Error of the gradients of a Llama layer",
    notes=(
        f"{SIZE[1].dim} features, {SIZE[1].heads} heads in {SIZE[1].groups} groups, MLP {SIZE[1].hidden}, "
        f"{SIZE[0][0]} sequences of {SIZE[0][1]} tokens; input and gradient of the output standard normal in bf16, "
        "weights as nn.Linear begins; relative RMS error of each gradient against the layer in float32 with the same "
        f"weights, mean of {SEEDS} seeds. Output and input are without the residual stream, which would hide their "
        "errors; that they were rounded to bf16 beside it is most of torch's error there."
    ),
    measure=errors,
)
