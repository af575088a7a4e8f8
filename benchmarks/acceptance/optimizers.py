"""Training with optimizer states in few bits, against float32 states on the same eight-bit weights, paired by seed.

All runs have the same recipe, text, batches and first weights, which exist only as the recipe's codes and what is kept
beside them; the learning rate falls to 1 % of its highest. Beside them is torch's AdamW, whose weights are float32 and
quantized anew each step. A null model, whose first weights differ by 1e-5 at most, says how far apart two runs come by
themselves; a control, whose second moments are e4m3 with one scale a matrix and whose updates nothing holds, shows that
the comparison can fail. Runs are done one after the other, a seed at a time, and each ended one is kept.
"""

import json
import re
import statistics
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import quaver
from benchmarks.acceptance import open_loop, optimizer_bytes
from benchmarks.measuring import machine, results
from quaver.recipes.text import shown
from quaver.reference.optimizer_state import PRESETS, Preset, StateSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Linear
from quaver.torch.optim import Optimizer
from quaver.train import TrainConfig
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.compare import paired
from quaver.train.data import TokenizedText, load, training_batch, validation_batches
from quaver.train.learner import NonFiniteError
from quaver.train.loop import train_step, validate
from quaver.train.torch.learner import TorchLearner

#: The page of all tables, and the page that has the one of all presets.
PAGE = Path(__file__).parents[2] / "docs" / "design" / "optimizer.md"
SUMMARY = Path(__file__).parents[2] / "docs" / "optimizer.md"
BEGIN = "<!-- python -m benchmarks accept-optimizers --write writes from here -->"
END = "<!-- to here, accept-optimizers -->"
#: All states in float32, and a float32 master beside the codes that GEMMs read.
BASELINE = "float32_states"
NULL, CONTROL = "null", "control"
#: How far the null model's first weights are from the others'.
NUDGE = 1e-5
#: What a mean may be above the baseline's, and what the control's must be, in nats a token.
WORSE, SEEN = 0.01, 0.3
#: Updates that `lean` may hold to their bound.
HELD = 1e-3
KINDS: dict[str, Preset | None] = {
    BASELINE: replace(PRESETS["float32"], name=BASELINE, weights="codes"),
    NULL: replace(PRESETS["float32"], name=NULL, weights="codes"),
    "balanced": PRESETS["balanced"],
    "lean": PRESETS["lean"],
    CONTROL: replace(
        PRESETS["float32"],
        name=CONTROL,
        weights="codes",
        second=StateSpec(code="e4m3", block=None, scale="float32"),
        clamp=False,
    ),
    optimizer_name.TORCH_ADAMW: None,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared."""

    steps: int = 200
    seeds: int = 6
    model: str = "tiny"
    recipe: str = "tensorwise"
    batch: int = 4
    sequence: int = 64
    # Where ended runs are kept.
    folder: Path = Path("runs/accept-optimizers")

    def config(self, kind: str, seed: int) -> TrainConfig:
        return TrainConfig(
            model=self.model,
            recipe=self.recipe,
            optimizer=kind,
            steps=self.steps,
            warmup=self.steps // 10,
            final_lr=0.01,
            batch=self.batch,
            sequence=self.sequence,
            validation_batches=32,
            seed=seed,
            device="cpu",
            threads=1,
        )

    def result(self, kind: str, seed: int) -> Path:
        recipe = recipe_name.folder_name(self.recipe)
        own = f"{self.model}-{recipe}-{self.steps}x{self.batch}x{self.sequence}-{checksum()}"
        return self.folder / own / f"{kind}-seed{seed}.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to."""

    # Validation loss in nats a token; None where it became NaN, and why.
    loss: float | None = None
    failure: str = ""
    # Updates of matrices that were held to their bound, and all of them.
    held: int = 0
    updates: int = 0
    # Seconds of a busy or quiet CPU, and what of them was this process's own.
    seconds: float = 0.0
    own_seconds: float = 0.0


@cache
def checksum() -> str:
    """Of the sources that optimizers and layers are made of."""
    package, total = Path(quaver.__file__).parent, 0
    for buffer in ("core", "recipes", "torch"):
        for path in sorted((package / buffer).rglob("*.py")):
            total = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(package)).encode(), total))
    return f"{total:08x}"


def trained(config: TrainConfig, tokens: TokenizedText) -> Outcome:
    """One run, without checkpoints."""
    begun, own = time.perf_counter(), time.process_time()
    recipe = recipe_name.find_recipe(config.recipe)
    learner = TorchLearner(config, recipe, tokens.vocab)
    optimizer = learner.optimizer
    if isinstance(optimizer, Optimizer):
        optimizer.statistics = True
        if config.optimizer == NULL:
            nudge(learner.model, optimizer, config.seed)
    loss, failure = None, ""
    try:
        for step in range(1, config.steps + 1):
            train_step(learner, training_batch(tokens.train, config, step), step, config)
        loss = validate(learner, validation_batches(tokens.validation, config), config.steps)
    except NonFiniteError as error:
        failure = str(error)
    every = optimizer.counted if isinstance(optimizer, Optimizer) else {}
    counted = [(held.item(), number) for p, (held, number) in every.items() if p.dim() > 1]
    return Outcome(
        loss=loss,
        failure=failure,
        held=int(sum(held for held, _ in counted)),
        updates=sum(number for _, number in counted),
        seconds=time.perf_counter() - begun,
        own_seconds=time.process_time() - own,
    )


@torch.no_grad()
def nudge(model: torch.nn.Module, optimizer: Optimizer, seed: int) -> None:
    """Move every weight by less than `NUDGE`; of codes, the master that they are quantized from."""
    random = torch.Generator().manual_seed(seed)
    stored = {m.weight: m for m in model.modules() if isinstance(m, Linear) and m.weight_spec is not None}
    for p in model.parameters():
        noise = (torch.rand(p.shape, generator=random) * 2 - 1) * NUDGE
        if p in stored:
            state = optimizer.state[p]
            stored_weight.write(stored[p], state["master"].add_(noise))
            # Measured anew before the first step.
            state.pop("amax", None)
        else:
            p.add_(noise)


def run(plan: Plan, console: Console, write: bool = False) -> bool:
    """Train what is missing, show the table, write it into docs/design/optimizer.md; returns whether all rules hold."""
    PRESETS.update(presets())  # rows of this process alone
    tokens = None
    for seed in range(plan.seeds):
        for kind in KINDS:
            path = plan.result(kind, seed)
            if path.exists():
                continue
            config = plan.config(kind, seed)
            tokens = tokens or load(config)
            outcome = trained(config, tokens)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            partial.replace(path)
            said = outcome.failure or f"loss {outcome.loss:.4f}"
            console.print(f"{kind} seed {seed}: {said} ({outcome.own_seconds:.0f} s)", highlight=False)
    lines, holds = table(plan)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, lines), encoding="utf-8")
    return holds


def presets() -> dict[str, Preset]:
    """Those of `KINDS`."""
    return {kind: preset for kind, preset in KINDS.items() if preset is not None}


def outcomes(plan: Plan) -> dict[str, list[Outcome]]:
    """By kind, of the seeds of which every kind has ended."""
    seeds = [seed for seed in range(plan.seeds) if all(plan.result(kind, seed).exists() for kind in KINDS)]
    return {kind: [Outcome(**read(plan.result(kind, seed))) for seed in seeds] for kind in KINDS}


def read(path: Path) -> dict[str, Any]:
    own: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return own


def table(plan: Plan) -> tuple[list[str], bool]:
    """The page's lines, and whether every rule holds."""
    kept = outcomes(plan)
    base = [outcome.loss for outcome in kept[BASELINE]]
    rows, verdicts = [], []
    for kind, own in kept.items():
        apart = [a.loss - b for a, b in zip(own, base, strict=True) if a.loss is not None and b is not None]
        mean, error = paired(apart)
        failed = sum(outcome.loss is None for outcome in own)
        losses = [outcome.loss for outcome in own if outcome.loss is not None]
        rule, holds = judged(kind, mean, failed)
        verdicts.append(holds)
        share = sum(outcome.held for outcome in own) / max(sum(outcome.updates for outcome in own), 1)
        verdicts.append(share < HELD if kind == "lean" else share == 0 if kind in (BASELINE, NULL) else True)
        rows.append(
            [
                f"`{kind}`",
                f"{statistics.fmean(losses):.4f}" if losses else "",
                "" if kind == BASELINE or mean is None else f"{mean:+.4f}" + (f" ± {error:.4f}" if error else ""),
                "" if kind == BASELINE or len(apart) < 2 else f"{statistics.stdev(apart):.4f}",
                "" if kind == BASELINE else " ".join(f"{d:+.4f}" for d in apart) + f" ({failed} NaN)" * bool(failed),
                rule,
                how_held(KINDS[kind], share),
            ]
        )
    columns = (
        *("states", "validation loss", "minus float32 states ± std. error", "std. deviation", "by seed", "rule"),
        "share of clamped updates",
    )
    number = len(base)
    runs = [outcome for own in kept.values() for outcome in own]
    cost = statistics.fmean(outcome.own_seconds for outcome in runs) if runs else 0.0
    said = (
        f"`{plan.model}`, default text, recipe {plan.recipe}, {plan.steps} steps of {plan.batch} x {plan.sequence} "
        f"tokens, learning rate to 1 %, **{number} seeds**{'' if number == plan.seeds else f' of {plan.seeds}'}; "
        f"{cost:.0f} s of a core a run. {machine.cpu()}, torch {torch.__version__}, {machine.today()}."
    )
    return [said, "", *results.table(columns, rows)], bool(number) and all(verdicts)


def how_held(preset: Preset | None, share: float) -> str:
    """The share of updates that were held to their bound, in a cell."""
    if preset is None or not preset.clamp:
        return "not clamped"
    return f"{share:.1e}" if share else "0"


def judged(kind: str, mean: float | None, failed: int) -> tuple[str, bool]:
    """A kind's rule in words, and whether it holds."""
    if kind == CONTROL:
        return f"≥ +{SEEN}", bool(failed) or (mean is not None and mean >= SEEN)
    if kind in (BASELINE, NULL, optimizer_name.TORCH_ADAMW):
        return "", not failed
    return f"≤ +{WORSE}", not failed and mean is not None and mean <= WORSE


def written(page: str, lines: list[str], first: str = BEGIN, last: str = END) -> str:
    """The page with this table. Raises: ValueError without the marks."""
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"{shown(str(PAGE))} lacks the line {first} or {last}")
    return "\n".join([before + first, "", *results.wrapped(lines), "", last + after])


def together(page: str) -> list[str]:
    """Bytes, error and loss of each preset in one table, from the page's three, as they stand there."""
    weight = {"codes of tensorwise": 2, "bfloat16": 1, "float32": 1}
    size: dict[str, list[str]] = {}
    for name, kept, *_, total, moved in _rows(page, "of_bytes"):
        if kept in weight and (name not in size or weight[kept] > weight[size[name][0]]):
            size[name] = [kept, total, moved]
    states: dict[str, list[str]] = {}
    for label, _, error, _, largest, _, held, stops, wide, _, _, _, wide_held, _ in _rows(page, "of_states"):
        for name in _NAMES.findall(label) or [f"`{label}`"]:
            clamps = name.strip("`") in PRESETS and PRESETS[name.strip("`")].clamp
            states[name] = [*([held, wide_held, "clamped"] if clamps else [error, wide, largest]), stops]
    losses = {name: apart for name, _, apart, *_ in _rows(page, "of_losses")}
    rows = []
    for name, (kept, total, moved) in size.items():
        if name.strip("`") in PRESETS:
            own = states.get(name, [""] * 4)
            rows.append([name, kept, total, moved, *own, losses.get(name, "")])
    columns = (
        *("states", "weight", "bytes a parameter", "bytes a step moves", "error, β2 = 0.95", "β2 = 0.999"),
        *("largest u", "gradient stops, β2 = 0.95", "loss minus float32 states ± std. error"),
    )
    return results.table(columns, rows)


_NAMES = re.compile(r"`\w+`")
#: The page's tables, by their marks.
MARKS = {
    "of_bytes": (optimizer_bytes.BEGIN, optimizer_bytes.END),
    "of_states": (open_loop.BEGIN, open_loop.END),
    "of_losses": (BEGIN, END),
}
ALL_BEGIN, ALL_END = "<!-- python -m benchmarks optimizers writes from here -->", "<!-- to here, all of them -->"


def _rows(page: str, which: str) -> Iterator[list[str]]:
    """The cells of a section's first table."""
    first, last = MARKS[which]
    inside = page.partition(first)[2].partition(last)[0].strip().split("\n\n")[1]
    for line in inside.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]
