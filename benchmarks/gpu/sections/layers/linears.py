"""Forward and backward through one linear layer, against nn.Linear in bf16 and torchao."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.gpu.measuring import card
from benchmarks.gpu.measuring.clock import Step, interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import Timing
from benchmarks.subjects import peer
from quaver import recipes
from quaver.costs import ledger

#: Tokens, in, out; the judged one first.
MATRICES = ((4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 28_672))
SHAPES = tuple((tokens, k, n) for tokens in (8192, 16_384) for k, n in MATRICES)
#: Shape of emulated recipes, which docs/performance.md predicts.
EMULATED = (4096, 4096, 4096)
BASE = "bf16 nn.Linear"


def native() -> list[str]:
    """Return the recipes whose GEMMs the GPU supports, according to the ledger."""
    wanted = {name: recipes.get(name) for name, build in recipes.RECIPES.items() if build().quantizes}
    gpu = card.nearest()
    return [name for name, recipe in wanted.items() if not ledger.layer(recipe, *SHAPES[0], gpu).emulated]


def emulated() -> list[str]:
    """Return recipes with different blocks whose GEMMs the GPU lacks; narrower formats cost the same as MXFP8."""
    return [name for name in ("blockwise", "mxfp8", "nvfp4") if name not in native()]


def some(setting: Setting) -> list[str]:
    """Return the native recipes; a single one for toy sizes, which only check that a section runs."""
    return native()[:1] if setting.toy and setting.quick else native()


def layer(shape: tuple[int, int, int], setting: Setting) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return nn.Linear without bias, its input and the gradient of its output."""
    tokens, k, n = shape
    torch.manual_seed(0)
    base = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device=setting.device)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=setting.device, requires_grad=True)
    return base, x, torch.randn(tokens, n, dtype=torch.bfloat16, device=setting.device)


def ours(base: nn.Linear, *, own: bool = False) -> qt.Linear:
    """Return our layer with the same weight, or a copy of it if steps of other layers must not count as changes."""
    layer = qt.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype, device="meta")
    layer.weight = nn.Parameter(base.weight.detach().clone()) if own else base.weight
    return layer


def quantized(names: list[str], base: nn.Linear, x: Tensor, g: Tensor) -> dict[str, Step]:
    """Return steps of our layer under these recipes, with a changing and an unchanged weight."""
    steps: dict[str, Step] = {}
    for name in names:
        recipe = recipes.get(name)
        steps[f"quaver {name}, changing"] = step_of(ours(base), x, g, recipe, changing=True)
        steps[f"quaver {name}, unchanged"] = step_of(ours(base, own=True), x, g, recipe)
    return steps


def timed(
    shape: tuple[int, int, int],
    steps: dict[str, Step],
    setting: Setting,
    findings: Findings,
    shown: Callable[[str], bool] = lambda name: True,
) -> dict[str, Timing]:
    """Time the steps, and add those that are shown."""
    with setting.kernels():
        timings = interleave(steps, setting, findings)
    add(shape, {name: timing for name, timing in timings.items() if shown(name)}, findings)
    return timings


def eager(shape: tuple[int, int, int], setting: Setting, findings: Findings) -> None:
    """Everything that needs no compiler."""
    base, x, g = layer(shape, setting)
    steps: dict[str, Step] = {BASE: step_of(base, x, g)}
    if why := setting.why_no_peer():
        findings.failures.append(why)
    else:
        for name in peer.RECIPES:
            steps[f"torchao {name} eager"] = step_of(peer.converted_copy(base, name, emulate=not setting.cuda), x, g)
    steps |= quantized(native() if shape == first(setting) else some(setting), base, x, g)
    compare(shape, timed(shape, steps, setting, findings), "eager", findings)


def emulating(shape: tuple[int, int, int], setting: Setting, findings: Findings) -> None:
    """Training with a recipe of another card on this one."""
    base, x, g = layer(shape, setting)
    steps = {BASE: step_of(base, x, g), **quantized(emulated(), base, x, g)}
    timed(shape, steps, setting, findings, lambda name: name != BASE)


def compiled(name: str, shape: tuple[int, int, int], setting: Setting, findings: Findings) -> None:
    """Time nn.Linear or torchao's under torch.compile, the latter together with our eager layer."""
    torch.compiler.reset()
    base, x, g = layer(shape, setting)
    other = base if name == BASE else peer.converted_copy(base, name, emulate=not setting.cuda)
    title = f"{BASE} compiled" if name == BASE else f"torchao {name} compiled"
    steps: dict[str, Step] = {BASE: step_of(base, x, g), title: step_of(setting.compiled(other), x, g)}
    if name != BASE:
        steps[f"quaver {name}, changing"] = step_of(ours(base), x, g, recipes.get(name), changing=True)
    compare(shape, timed(shape, steps, setting, findings, lambda name: "compiled" in name), "compiled", findings)


def label(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]}, {shape[1]} → {shape[2]}"


def add(shape: tuple[int, int, int], timings: dict[str, Timing], findings: Findings) -> None:
    """Add times and speed-ups, and for our layers the ledger's prediction for this GPU."""
    gpu = card.known()
    for name, timing in timings.items():
        subject, _, column = name.partition(", ")
        subject, prefix = f"{label(shape)}: {subject}", f"{column}, " if column else ""
        findings.add(subject, f"{prefix}time", timing.seconds * 1e3, "ms")
        findings.add(subject, f"{prefix}speed-up", 1 / timing.ratio, "x")
        if gpu is not None and column == "changing":
            predicted = ledger.layer(recipes.get(subject.rpartition(" ")[2]), *shape, gpu).speedup
            findings.add(subject, "predicted speed-up", predicted, "x")


def compare(shape: tuple[int, int, int], timings: dict[str, Timing], how: str, findings: Findings) -> None:
    """Add the speed-up of our layers over torchao's with the same recipe."""
    for name in peer.RECIPES:
        quavers, theirs = timings.get(f"quaver {name}, changing"), timings.get(f"torchao {name} {how}")
        if quavers and theirs:
            ratio = theirs.seconds / quavers.seconds
            findings.add(f"{label(shape)}: quaver {name}", f"over torchao {how}", ratio, "x")


def cases(setting: Setting) -> list[Case]:
    """Return the cases: the shape with a target first, eager and compiled, then emulated recipes. torchao's layer is
    compiled once per shape under its main recipe; its other recipe and nn.Linear only at the first shape, last."""
    shapes = SHAPES[:2] if setting.quick else SHAPES
    shapes = tuple(map(toy, shapes)) if setting.toy else shapes
    judged, has_peer = peer.RECIPES[0], not setting.why_no_peer()
    by_shape = [
        case
        for shape in shapes
        for case in (
            Case(f"{label(shape)} eager", lambda s, findings, shape=shape: eager(shape, s, findings)),
            *([peer_case(judged, shape)] if has_peer else []),
        )
    ]
    at = toy(EMULATED) if setting.toy else EMULATED
    by_shape.insert(1 + has_peer, Case(f"{label(at)} emulated", lambda s, findings: emulating(at, s, findings)))
    others = [peer_case(name, shapes[0]) for name in peer.RECIPES[1:] if has_peer]
    alone = Case(f"{label(shapes[0])} compiled", lambda s, findings: compiled(BASE, shapes[0], s, findings))
    return [*by_shape, *others, *([] if setting.hollow else [alone])]


def peer_case(name: str, shape: tuple[int, int, int]) -> Case:
    return Case(f"{label(shape)} torchao {name} compiled", lambda s, findings: compiled(name, shape, s, findings))


def toy(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a small shape that a CPU interprets in a second: 32 or 64 tokens of 16 to 112 features."""
    tokens, k, n = shape
    return tokens // 256, -(-k // 4096) * 16, -(-n // 4096) * 16


def first(setting: Setting) -> tuple[int, int, int]:
    """Return the shape with a target."""
    return toy(SHAPES[0]) if setting.toy else SHAPES[0]


SECTION = Section(
    name="linears",
    title="Linear forward + backward against bf16",
    notes=(
        "Tokens, in → out, without bias, bf16, eager unless it says compiled; GPU time with the host's hidden, "
        "interleaved; the speed-up is the median over rounds of nn.Linear's time over it. `changing`: the weight "
        "counts as changed after every step, as in training without accumulation, and is quantized anew; `unchanged`: "
        "what was made of it is used again, as in further micro-batches. torchao quantizes it every time."
    ),
    seconds=170,
    cases=cases,
)
