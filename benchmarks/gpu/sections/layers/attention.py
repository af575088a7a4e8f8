"""Attention by itself, its products in bf16 and in eight bits, forward and backward, against torch's."""

import inspect

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import Step, interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.layer import BASE, LLAMA, TOKENS, TOY, report
from benchmarks.measuring.steps import step_of
from benchmarks.subjects.blocks import Attend
from quaver import recipes
from quaver.recipes.spec import AttentionSpec

TOY_TOKENS = 32


class Joined(nn.Module):
    """Attention of one tensor [B, S, H + 2 G, D], as a fused projection leaves queries, keys and values."""

    def __init__(self, attend: nn.Module, parts: tuple[int, int, int]) -> None:
        super().__init__()
        self.attend, self.parts = attend, parts

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attend(*x.split(self.parts, 2)).flatten(2)
        return y


def quantizing() -> list[str]:
    """Return one recipe for each way to quantize attention; delayed recipes do it like tensorwise."""
    ways: dict[AttentionSpec, str] = {}
    for name, build in recipes.RECIPES.items():
        if "attention" in inspect.signature(build).parameters and recipes.get(name).delayed is None:
            spec = recipes.get(name, attention=True).attention
            assert spec is not None
            ways.setdefault(spec, name)
    return list(ways.values())


def causal(setting: Setting, findings: Findings) -> None:
    """Eight key-value heads for 32 queries', as a Llama-8B layer has them."""
    size, tokens = (TOY, TOY_TOKENS) if setting.toy else (LLAMA, TOKENS)
    parts = size.heads, size.groups, size.groups
    torch.manual_seed(0)
    with torch.device(setting.device):
        x = torch.randn(1, tokens, sum(parts), size.head_dim, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(1, tokens, size.dim, dtype=torch.bfloat16)
    ours = qt.DotProductAttention(size.heads, size.head_dim, groups=size.groups, mask_type="causal")
    steps: dict[str, Step] = {BASE: step_of(Joined(Attend(), parts), x, g)}
    steps["quaver bf16"] = step_of(Joined(ours, parts), x, g)
    for name in quantizing():
        steps[f"quaver {name}"] = step_of(Joined(ours, parts), x, g, recipes.get(name, attention=True))
    with setting.kernels():
        report(interleave(steps, setting, findings), findings)


SECTION = Section(
    name="attention",
    title="Causal attention of a Llama-8B layer forward + backward, 8192 tokens",
    notes=(
        "32 heads of 128 features, 8 of keys and values, bf16; torch is scaled_dot_product_attention. A recipe's rows "
        "are with attention=True: queries, keys, values, probabilities and gradients in eight bits."
    ),
    seconds=15,
    cases=lambda setting: [Case("causal", causal)],
)
