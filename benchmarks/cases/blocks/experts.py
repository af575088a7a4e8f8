"""A mixture of experts over a plain loop over experts: time of forward and backward, and bytes saved for backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure
from benchmarks.measuring.memory import kept_bytes
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import interleave

#: Tokens, features, hidden features of an expert, experts, and how many each token goes to.
SIZE, QUICK_SIZE = (1024, 512, 256, 16, 4), (32, 32, 16, 4, 2)
LOOP = "a loop of torch's"
NAMES = ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


class Loop(nn.Module):
    """Softmax of the best, and for each expert what transformers' eager experts do."""

    def __init__(self, moe: qt.MoE) -> None:
        super().__init__()
        experts_layer: Any = moe
        self.router, self.k = experts_layer.router.weight, moe.mixture.k
        self.up, self.down = experts_layer.experts.gate_up_proj.weight, experts_layer.experts.down_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x.float(), self.router.float())
        best, chosen = logits.topk(self.k, -1)
        weights = best.softmax(-1).to(x.dtype)
        y = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.up[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.down[expert])
            y = y.index_add(0, token, out * weights[token, choice, None])
        return y


def shown(name: str) -> str:
    return name if name == LOOP else f"quaver {name}"


def measure(quick: bool) -> list[Figure]:
    tokens, dim, hidden, experts, k = QUICK_SIZE if quick else SIZE
    torch.manual_seed(0)
    modules = {}
    for name in (*NAMES, "mxfp8 codes"):
        mixture = qt.MixtureConfig(experts=experts, k=k, codes_alone=name.endswith(" codes"))
        modules[name] = qt.MoE(dim, hidden, mixture, dtype=torch.bfloat16)
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, dim, dtype=torch.bfloat16)
    loop = Loop(modules["bf16"])
    steps = {LOOP: step_of(loop, x, g)}
    bytes_kept = {LOOP: kept_bytes(loop, x)}
    for name, module in modules.items():
        recipe = name.partition(" ")[0]
        steps[name] = step_of(module, x, g, recipe)
        with qt.autocast(recipe):
            bytes_kept[name] = kept_bytes(module, x)
    figures = []
    for name, timing in interleave(steps, rounds=2 if quick else 7, steps=1).items():
        figures.append(Figure(shown(name), "ratio", timing.ratio, "x"))
        figures.append(Figure(shown(name), "time", timing.seconds * 1e3, "ms"))
        figures.append(Figure(shown(name), "kept", bytes_kept[name] / 2**20, "MiB"))
        figures.append(Figure(shown(name), f"of {LOOP}", 100 * bytes_kept[name] / bytes_kept[LOOP], "%"))
    return figures


CASE = Case(
    name="experts",
    title="A mixture of 16 experts, 4 a token, forward + backward, 1024 tokens of 512 features, bf16, against a loop",
    notes=(
        "Gated experts of 256 hidden features, eager, interleaved; the median of each round's ratio. The loop is what "
        "transformers' eager experts do, with the router in float32. Weights are kept from step to step. Each storage "
        "saved for backward counts once, parameters apart; 'codes' keeps tokens as codes alone."
    ),
    measure=measure,
    of_threads=True,
)
