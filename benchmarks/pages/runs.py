"""Training runs on many GPUs that others published, and what the ledger predicts for them.

Two constants of `quaver.costs.steps` are fitted, each on one run that is marked and not counted: `REACHED` on both
speeds of the first, `HIDDEN` on what asynchronous tensor parallelism gains in bf16. Where a source names neither batch
nor checkpoints, they are those of torchtitan's runs: two sequences of a rank, and the fewest checkpoints that fit into
the memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

from quaver import recipes
from quaver.costs import hardware, steps
from quaver.costs.decoder import deepseek_v3_like, llama
from quaver.costs.steps import StepCost

MODELS = {
    "1.8B": llama("1.8B", 24, 2048, 16, 16, 128, 8192),
    "8B": llama("8B", 32, 4096, 32, 8, 128, 14_336),
    "70B": llama("70B", 80, 8192, 64, 8, 128, 28_672),
    "405B": llama("405B", 126, 16_384, 128, 8, 128, 53_248),
    "DeepSeek-V3-like": deepseek_v3_like(),
}
#: torchtitan benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06; pytorch.org's blog of 2024-11-25 by IBM and
#: Meta; AWS's blog on torchtitan on SageMaker.
TITAN, ASYNC, IBM, AWS = "torchtitan 2024-12", "torchtitan 2025-06", "IBM and Meta 2024-11", "AWS 2024-10"


class Run(NamedTuple):
    """A published run: tokens/s per GPU in bf16 and in eight bits."""

    source: str
    model: str
    gpus: int
    bf16: float
    narrow: float
    sequences: int = 2
    checkpoints: str = "selective"
    tp: int = 1
    overlapped: bool = False
    #: torchao's machines have slower memory and a power limit.
    gpu: str = "h100-hbm2e"
    #: A constant was fitted with it.
    fitted: bool = False
    recipe: str = "tensorwise"


RUNS = (
    Run(TITAN, "8B", 8, 6667, 8532, fitted=True),
    Run(TITAN, "8B", 128, 6514, 8380),
    Run(ASYNC, "70B", 256, 597.3, 809.8, 16, "full", 8),
    Run(ASYNC, "70B", 256, 652.4, 942.4, 16, "full", 8, overlapped=True, fitted=True),
    Run(ASYNC, "8B", 64, 4378, 5078, 12, "selective", 8),
    Run(ASYNC, "8B", 64, 4809, 5570, 12, "selective", 8, overlapped=True),
    Run(IBM, "1.8B", 128, 29_000, 35_000, checkpoints="selective", gpu="h100"),
    Run(IBM, "8B", 128, 8000, 10_000, gpu="h100"),
    Run(IBM, "70B", 256, 956, 1430, checkpoints="full", gpu="h100"),
    Run(IBM, "405B", 256, 149, 227, checkpoints="full", tp=4, gpu="h100"),
    Run(IBM, "70B", 512, 960, 1448, checkpoints="full", gpu="h100"),
    Run(IBM, "405B", 512, 152, 217, checkpoints="full", tp=4, gpu="h100"),
    Run(AWS, "8B", 32, 7166, 8950, sequences=1, gpu="h100"),
    # Weights and activations travel in bf16 there.
    Run(ASYNC, "70B", 256, 597.3, 599.6, 16, "full", 8, recipe="rowwise"),
    Run(ASYNC, "8B", 64, 4378, 3708, 12, "selective", 8, recipe="rowwise"),
)
#: Maximum errors of predictions: of tokens/s, relative, and of the gain, in percentage points.
SPEED, GAIN = 0.20, 10.0


class Judged(NamedTuple):
    """A run and its prediction."""

    run: Run
    bf16: StepCost
    narrow: StepCost

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of tokens/s in bf16 and in eight bits."""
        return (
            self.bf16.tokens_per_second / self.run.bf16 - 1,
            self.narrow.tokens_per_second / self.run.narrow - 1,
        )

    @property
    def gains(self) -> tuple[float, float]:
        """Published and predicted gain of eight bits over bf16 in percent."""
        predicted = self.narrow.tokens_per_second / self.bf16.tokens_per_second
        return 100 * (self.run.narrow / self.run.bf16 - 1), 100 * (predicted - 1)

    @property
    def within(self) -> bool:
        published, predicted = self.gains
        return all(abs(error) <= SPEED for error in self.errors) and abs(published - predicted) <= GAIN


def predicted(run: Run, recipe: str) -> StepCost:
    return steps.predict(
        MODELS[run.model],
        recipes.get(recipe),
        run.gpu,
        hardware.over(run.gpus, tp=run.tp),
        hardware.get_interconnect("hgx-h100"),
        sequences=run.sequences,
        checkpoints=run.checkpoints,
        overlapped=run.overlapped,
        narrow_wire=run.recipe != "rowwise",
    )


def judged() -> list[Judged]:
    return [Judged(run, predicted(run, "bf16"), predicted(run, run.recipe)) for run in RUNS]


def counted(rows: list[Judged]) -> list[Judged]:
    """Return tensorwise rows that were not used to fit a constant."""
    return [row for row in rows if not row.run.fitted and row.run.recipe == "tensorwise"]


def cells(rows: list[Judged]) -> Iterator[list[str]]:
    """Yield the rows of the table of published runs."""
    for row in rows:
        run = row.run
        how = f"{run.sequences} x 8192" + f", tp {run.tp}" * (run.tp > 1) + ", asynchronous" * run.overlapped
        verdict = "fitted" if run.fitted else "within" if row.within else "**missed**"
        yield [
            f"{run.model}, {run.gpus} {run.gpu}, {how}, {run.checkpoints} checkpoints: {run.recipe} ({run.source})",
            *(f"{one:,.0f}" for one in (run.bf16, row.bf16.tokens_per_second)),
            *(f"{one:,.0f}" for one in (run.narrow, row.narrow.tokens_per_second)),
            *(f"{one:+.0f} %" for one in row.gains),
            verdict,
        ]
