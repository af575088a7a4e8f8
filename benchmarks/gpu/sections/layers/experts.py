"""A grouped linear layer, as the experts of a mixture have it, forward and backward, beside its prediction."""

import torch

import quaver.torch as qt
from benchmarks.gpu.measuring import card
from benchmarks.gpu.measuring.clock import interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.measuring.steps import step_of
from quaver import recipes
from quaver.costs import experts
from quaver.recipes.spec import Recipe

#: Experts, tokens, and features of the input and output.
SHAPE, TOY = (8, 16_384, 4096, 14_336), (4, 64, 32, 48)
#: Recipes, those with an option as name-format.
RECIPES = ("bf16", "tensorwise", "tensorwise-e4m3", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
#: The expert without tokens.
EMPTY = 2
BASE = "bf16"


def recipe_of(name: str) -> Recipe:
    plain, _, option = name.partition("-")
    return recipes.get(plain, format=option) if option else recipes.get(plain)


def measure(name: str, setting: Setting, findings: Findings) -> None:
    """Check what one recipe gives for the expert without tokens, then time it beside bf16."""
    groups, tokens, k, n = shape = TOY if setting.toy else SHAPE
    torch.manual_seed(0)
    device, dtype, recipe = setting.device, torch.bfloat16, recipe_of(name)
    layer = qt.GroupedLinear(groups, k, n, bias=False, dtype=dtype, device=device)
    x = torch.randn(tokens, k, dtype=dtype, device=device, requires_grad=True)
    g = torch.randn(tokens, n, dtype=dtype, device=device)
    ends = [tokens * (group + (group != EMPTY)) // groups for group in range(groups)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    with setting.kernels():
        with qt.autocast(recipe):
            y = layer(x, offsets)
        y.backward(g)
        assert x.grad is not None and layer.weight.grad is not None
        wrong = sum(int((~t.isfinite()).sum()) for t in (y, x.grad)) + int(layer.weight.grad[EMPTY].count_nonzero())
        findings.add(name, "wrong", wrong, "elements")
        del y
        steps = {
            BASE: step_of(lambda x: layer(x, offsets), x, g, parameters=[layer.weight], changing=True),
            name: step_of(lambda x: layer(x, offsets), x, g, recipe, parameters=[layer.weight], changing=True),
        }
        timings = interleave(steps, setting, findings)
    gpu = card.known()
    if name not in timings:
        return
    if BASE in timings:
        findings.add(name, f"{BASE} beside it", timings[BASE].seconds * 1e3, "ms")
    findings.add(name, "time", timings[name].seconds * 1e3, "ms")
    findings.add(name, "speed-up", 1 / timings[name].ratio, "x")
    if gpu is not None:
        findings.add(name, "predicted speed-up", experts.layer(recipe, *shape, gpu).speedup, "x")


def cases(setting: Setting) -> list[Case]:
    names = [name for name in RECIPES if name != BASE][: 1 if setting.toy and setting.quick else None]
    return [Case(name, lambda s, findings, name=name: measure(name, s, findings)) for name in names]


SECTION = Section(
    name="experts",
    title="GroupedLinear of 8 experts forward + backward against bf16",
    notes=(
        "16,384 tokens, 4096 → 14336, bf16, eager, without bias; one expert has no tokens and its neighbour twice as "
        "many. Weights count as changed after every step. `wrong`: elements of the output and of the input's gradient "
        "that are not finite, and of the empty expert's weight gradient that are not zero. tensorwise-e4m3 is "
        'tensorwise(format="e4m3").'
    ),
    seconds=25,
    cases=cases,
    # A grouped GEMM that mishandles an expert without tokens breaks the context.
    alone=True,
)
