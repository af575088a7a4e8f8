"""Training with optimizer states in few bits, against float32 states on the same eight-bit weights, paired by seed.

All runs have the same recipe, text, batches and first weights, which exist only as the recipe's codes and the masters
beside them. One more run uses torch's AdamW, whose weights are float32 and quantized again in each step.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance import open_loop
from benchmarks.acceptance.command import Plan
from benchmarks.acceptance.report import CLOSE, Acceptance, Rule, setting
from benchmarks.acceptance.training import BAD_STATES, FLOAT32_STATES, NUDGE, NULL
from benchmarks.measuring import machine, results
from quaver.reference.optimizer_state import PRESETS, matrix_footprint
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name

#: The page of the tables of errors and losses, and the page that has the one of all presets.
PAGE = Path(__file__).parents[2] / "docs" / "design" / "optimizer.md"
SUMMARY = Path(__file__).parents[2] / "docs" / "optimizer.md"
BEGIN = "<!-- python -m benchmarks accept-optimizers --write writes from here -->"
END = "<!-- to here, accept-optimizers -->"
ALL_BEGIN, ALL_END = "<!-- python -m benchmarks optimizers writes from here -->", "<!-- to here, all of them -->"
RULES = {"balanced": CLOSE, "lean": CLOSE, BAD_STATES: Rule(limit=0.3, above=True)}
#: Share of updates that `lean` may clamp.
CLAMPED = 1e-3
#: The matrix whose bytes are in the summary, and its recipe.
SHAPE, RECIPE = (2048, 1024), "tensorwise"


def plan(recipe: str = RECIPE, **options: Any) -> Plan:
    """Return the plan of the optimizers' rows, with six seeds of small batches."""
    rows = (FLOAT32_STATES, NULL, "balanced", "lean", BAD_STATES, optimizer_name.TORCH_ADAMW)
    variants: dict[str, dict[str, Any]] = {row: {"recipe": recipe, "optimizer": row} for row in rows}
    variants[NULL] = {"recipe": recipe, "optimizer": FLOAT32_STATES, "nudge": NUDGE}
    own = {"steps": 200, "seeds": 6, "batch": 4, "sequence": 64, "folder": Path("runs/accept-optimizers")}
    own |= {"recipes": rows, "variants": variants, "rules": RULES, "verdict": verdict, "name": "accept-optimizers"}
    return Plan(**own | options)


def verdict(done: Acceptance) -> tuple[bool, str]:
    """Return whether `lean` clamps few updates and float32 states none, and a sentence."""
    clamped = {row: done.row(row).clamped or 0.0 for row in ("lean", FLOAT32_STATES, NULL)}
    few = clamped["lean"] < CLAMPED and not clamped[FLOAT32_STATES] and not clamped[NULL]
    text = f"`lean` clamps {clamped['lean']:.1e} of its updates (rule: below {CLAMPED:g}); float32 states clamp none."
    return few, text if few else f"Clamped shares are not as ruled: {clamped}."


def write(done: Acceptance) -> None:
    """Write the table into docs/design/optimizer.md."""
    cost = statistics.fmean(outcome.seconds for outcome in done.outcomes.values())
    text = (
        f"{setting(done)}; learning rate to 1 %, {cost:.0f} s of a core a run. {machine.cpu()}, torch "
        f"{torch.__version__}, {machine.today()}."
    )
    results.write_between(PAGE, BEGIN, END, [text.capitalize(), "", *results.table(*done.table())])


def summary(page: str) -> list[str]:
    """Bytes, error and loss of each preset in one table; errors and losses are those of docs/design/optimizer.md."""
    states: dict[str, list[str]] = {}
    for label, _, error, _, largest, _, bounded, stops, wide, _, _, _, wide_bounded, _ in _rows(page, open_loop.MARKS):
        for name in re.findall(r"`(\w+)`", label) or [label]:
            clamps = name in PRESETS and PRESETS[name].clamp
            states[name] = [*([bounded, wide_bounded, "clamped"] if clamps else [error, wide, largest]), stops]
    losses = {name.strip("`"): difference for name, _, difference, *_ in _rows(page, (BEGIN, END))}
    recipe, rows = recipe_name.find_recipe(RECIPE), []
    for name, preset in PRESETS.items():
        storage = optimizer_name.find_optimizer(name).weights(recipe, "bfloat16")
        size, number = matrix_footprint(preset, SHAPE, storage, recipe.fprop.b), SHAPE[0] * SHAPE[1]
        sizes = [f"{count / number:.3f}" for count in (size.total, size.moved)]
        shown = f"codes of {RECIPE}" if storage == "codes" else storage
        rows.append([f"`{name}`", shown, *sizes, *states.get(name, [""] * 4), losses.get(name, "")])
    columns = (
        *("states", "weight", "bytes a parameter", "bytes a step moves", "error, β2 = 0.95", "β2 = 0.999"),
        *("largest u", "gradient stops, β2 = 0.95", "loss minus float32 states ± std. error"),
    )
    return results.table(columns, rows)


def _rows(page: str, marks: tuple[str, str]) -> Iterator[list[str]]:
    """Yield the cells of a section's first table."""
    inside = page.partition(marks[0])[2].partition(marks[1])[0].strip().split("\n\n")[1]
    for line in inside.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]
