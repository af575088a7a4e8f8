"""Predicted scaling from 8 to 16,384 GPUs: `python -m benchmarks.pages.curves` draws docs/scaling.png.

For each number of GPUs the fastest mesh that fits is used, with a limited batch size. Nothing of it was measured.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.pages.runs import MODELS
from quaver import recipes
from quaver.costs import hardware, steps
from quaver.costs.decoder import DecoderShape
from quaver.costs.steps import StepCost

PICTURE = Path(__file__).parents[2] / "docs" / "scaling.png"
COLOURS = dict(zip(MODELS, ("#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))
#: GPUs of the table, and of the picture.
COUNTS = (8, 64, 512, 2048, 16_384)
DRAWN = tuple(2**power for power in range(3, 15))
#: Maximum predicted bytes on a GPU of 80 GB; the prediction is a lower bound.
ROOM = 60 * 2**30
#: Maximum sequences of 8192 tokens in a step over all ranks: 16 million tokens, as Llama 3 405B was trained
#: with (arXiv:2407.21783, table 4), and 67 million for experts: DeepSeek-V3 had 63 (arXiv:2412.19437, section 4.2).
BATCH, BATCH_OF_EXPERTS = 2048, 8192
AXES = [(tp, pp) for tp in (1, 4, 8) for pp in (1, 4, 16)]


def fastest(model: DecoderShape, recipe: str, gpus: int) -> StepCost | None:
    """Return the fastest step that fits on this number of H100, or None.

    Each GPU has two sequences of a step where the batch allows it.
    """
    steps_that_fit = [step for how in _ways(model, gpus) if (step := _tried(model, recipe, how)) is not None]
    return max(steps_that_fit, key=lambda step: step.tokens_per_second, default=None)


def _ways(model: DecoderShape, gpus: int) -> Iterator[dict[str, Any]]:
    experts = any(block.chosen for _, block in model.blocks)
    batch = min(BATCH_OF_EXPERTS if experts else BATCH, max(32, 2 * gpus))
    for tp, pp in AXES:
        if gpus % (tp * pp) or (experts and tp > 1):
            continue
        data = gpus // (tp * pp)
        micro_batches = batch // data
        if not micro_batches:
            continue
        fsdp = min(data, 512 // tp)
        ep = min(64, fsdp) if experts else 1
        for checkpoints in ("selective", "full"):
            yield {
                "mesh": hardware.over(gpus, tp=tp, pp=pp, fsdp=fsdp, ep=ep),
                "micro_batches": micro_batches,
                "checkpoints": checkpoints,
                # Parts of a stage take turns where there are micro-batches for all stages.
                "interleaved": 4 if micro_batches >= pp else 1,
            }


def _tried(model: DecoderShape, recipe: str, how: dict[str, Any]) -> StepCost | None:
    try:
        step = steps.predict(
            model,
            recipes.get(recipe),
            "h100",
            how.pop("mesh"),
            hardware.get_interconnect("hgx-h100"),
            overlapped=True,
            **how,
        )
    except ValueError:
        # Axes that do not fit the model.
        return None
    return step if sum(step.memory.values()) <= ROOM else None


def curves(recipe: str, counts: tuple[int, ...] = COUNTS) -> dict[str, dict[int, StepCost]]:
    """Return the fastest step that fits, by model and number of GPUs."""
    return {
        name: {gpus: step for gpus in counts if (step := fastest(model, recipe, gpus)) is not None}
        for name, model in MODELS.items()
    }


def cells() -> Iterator[list[str]]:
    """Yield the rows of the table of curves: tokens/s per GPU in bf16, and the gain of tensorwise."""
    plain, narrow = curves("bf16"), curves("tensorwise")
    for name in MODELS:
        row = [name]
        for gpus in COUNTS:
            one, other = plain[name].get(gpus), narrow[name].get(gpus)
            if one is None or other is None:
                row.append("–")  # noqa: RUF001
                continue
            gain = 100 * (other.tokens_per_second / one.tokens_per_second - 1)
            row.append(f"{one.tokens_per_second:,.0f} ({gain:+.0f} %)")
        yield row


def figure() -> Figure:
    """Plot tokens/s of all GPUs, and of one GPU relative to its maximum over the numbers of GPUs."""
    drawn = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    left, right = drawn.subplots(1, 2)
    for recipe, line in (("bf16", "--"), ("tensorwise", "-")):
        for name, by_count in curves(recipe, DRAWN).items():
            counts = list(by_count)
            speeds = [step.tokens_per_second for step in by_count.values()]
            label = name if line == "-" else None
            together = [speed * gpus for speed, gpus in zip(speeds, counts, strict=True)]
            left.plot(counts, together, line, color=COLOURS[name], label=label, marker="o", markersize=3)
            efficiency = [100 * speed / max(speeds) for speed in speeds]
            right.plot(counts, efficiency, line, color=COLOURS[name], marker="o", markersize=3)
    left.set(xscale="log", yscale="log", xlabel="H100", ylabel="tokens a second, all GPUs", title="Speed, predicted")
    right.set(xscale="log", xlabel="H100", ylabel="% of a GPU's highest rate", title="What scaling keeps, predicted")
    right.set_ylim(0, 110)
    for axes in (left, right):
        axes.set_xticks(DRAWN[::2], [f"{count:,}" for count in DRAWN[::2]])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    left.legend(frameon=False, title="bf16 dashed, tensorwise solid")
    return drawn


if __name__ == "__main__":
    FigureCanvasAgg(figure()).print_png(str(PICTURE))
