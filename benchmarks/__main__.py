"""The command line, `python -m benchmarks`: CPU ratios, acceptance runs, and measurements of single effects."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What Quaver costs, keeps and loses, measured here.")


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds: does everything run?")] = False,
    only: Annotated[str | None, typer.Option(help="Cases whose name matches, such as 'memory*'.")] = None,
    write: Annotated[
        bool | None, typer.Option("--write/--no-write", help="Keep the results; by default only a full run's.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Of torch; with several the clock's time counts, and nothing else may run.")
    ] = 1,
) -> None:
    """Ratios side by side on this CPU, against nn.Linear and torchao."""
    from benchmarks.cpu import run

    try:
        run(quick, only, not quick and only is None if write is None else write, Console(), threads=threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def parallel(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and one round: does everything run?")] = False,
    only: Annotated[str | None, typer.Option(help="Cases whose name matches, such as 'ranks-fsdp'.")] = None,
    write: Annotated[
        bool | None,
        typer.Option(
            "--write/--no-write", help="Keep the results and their table in docs; only a full run's by default."
        ),
    ] = None,
) -> None:
    """Two ranks over gloo: steps and bytes under fully_shard and tensor parallelism, against the same in bf16."""
    from benchmarks.cpu import RANKS, run
    from benchmarks.pages import ranks

    keep = not quick and only is None if write is None else write
    try:
        run(quick, only, keep, Console(), suite=RANKS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if keep and not quick and only is None:
        ranks.write()


Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each recipe, paired by seed.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")]
Model = Annotated[str, typer.Option(help="Size of the model.")]
Runs = Annotated[Path, typer.Option(help="Where finished and interrupted runs are kept.")]


@app.command()
def accept(
    steps: Steps = 300,
    seeds: Seeds = 3,
    jobs: Jobs = 2,
    model: Model = "tiny",
    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    runs: Runs = Path("runs/accept"),
) -> None:
    """Train under every recipe, and judge the paired differences of the validation loss from bf16."""
    judge(jobs, steps=steps, seeds=seeds, model=model, framework=framework, folder=runs)


@app.command()
def accept_attention(
    steps: Steps = 300, seeds: Seeds = 3, jobs: Jobs = 2, model: Model = "tiny", runs: Runs = Path("runs/accept")
) -> None:
    """The same under the recipes with attention=True."""
    from benchmarks.acceptance.command import ATTENDING

    judge(jobs, steps=steps, seeds=seeds, model=model, folder=runs, recipes=ATTENDING, name="accept-attention")


@app.command()
def accept_blocks(
    steps: Steps = 300,
    seeds: Seeds = 6,
    jobs: Jobs = 2,
    model: Annotated[str, typer.Option(help="mixtral-tiny, mamba2-tiny, or another.")] = "mixtral-tiny",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 64,
    runs: Runs = Path("runs/accept"),
) -> None:
    """The same of a model with experts or state spaces, beside what chance alone does."""
    from benchmarks.acceptance.command import of_blocks

    options = {"steps": steps, "seeds": seeds, "batch": batch, "sequence": sequence, "folder": runs}
    judge(jobs, of_blocks, model=model, **options)


@app.command()
def accept_schedule(
    steps: Steps = 300,
    seeds: Seeds = 3,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Jobs = 2,
    model: Model = "tiny",
    runs: Runs = Path("runs/accept"),
) -> None:
    """Train in bf16, in NVFP4, and in NVFP4 with the last 15 % in bf16: judge whether that ends nearer bf16."""
    from benchmarks.acceptance import scheduled

    judge(jobs, scheduled.plan, steps=steps, seeds=seeds, first=first, model=model, folder=runs)


@app.command()
def accept_optimizers(
    steps: Steps = 200,
    seeds: Seeds = 6,
    jobs: Jobs = 2,
    model: Model = "tiny",
    recipe: Annotated[str, typer.Option(help="Whose weight codes are trained.")] = "tensorwise",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 64,
    runs: Runs = Path("runs/accept-optimizers"),
    write: Annotated[bool, typer.Option("--write", help="Write the table into docs/design/optimizer.md.")] = False,
) -> None:
    """Train with states in few bits and in float32 on the same eight-bit weights, and judge paired differences."""
    from benchmarks.acceptance import optimizers

    options = {"recipe": recipe, "steps": steps, "seeds": seeds, "model": model, "batch": batch, "sequence": sequence}
    judge(jobs, optimizers.plan, optimizers.write if write else None, **options, folder=runs)


@app.command()
def optimizers() -> None:
    """Bytes, errors and losses of optimizers' presets: docs/optimizer.md's table, of docs/design/optimizer.md's."""
    from benchmarks.acceptance import optimizers
    from benchmarks.measuring import results

    lines = optimizers.summary(optimizers.PAGE.read_text(encoding="utf-8"))
    results.write_between(optimizers.SUMMARY, optimizers.ALL_BEGIN, optimizers.ALL_END, lines)


@app.command()
def ledger(
    moe: Annotated[bool, typer.Option("--moe", help="Of a grouped layer, from recorded launches.")] = False,
) -> None:
    """Write the predicted tables of docs/performance.md and of its design page, or only that of grouped layers."""
    from benchmarks.pages import experts, performance

    if moe:
        Console().print(experts.write())
    else:
        performance.write()


@app.command()
def families(
    steps: Steps = 100,
    seeds: Seeds = 2,
    only: Annotated[str, typer.Option(help="Families, with commas between; all by default.")] = "",
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Write the table into docs/guides/loops.md.")
    ] = False,
) -> None:
    """Train models of transformers by its Trainer in bf16, under recipes, and from weights that were nudged."""
    from benchmarks.acceptance.families import run

    try:
        run(steps, seeds, [name for name in only.split(",") if name], write, Console())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def open_loop(
    steps: Steps = 300,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the noise.")] = 0,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Keep the figures, and the table in docs/design/optimizer.md.")
    ] = False,
) -> None:
    """What each way to keep optimizer states does to an update: all beside one run in float32, same gradients."""
    from benchmarks.acceptance.open_loop import run

    run(steps, seed, write, Console())


@app.command()
def remedies(
    quick: Annotated[bool, typer.Option("--quick", help="Ten steps of two seeds: does everything run?")] = False,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Write the table into docs/guides/diverged.md.")
    ] = False,
) -> None:
    """What helps a run that loses precision: SNR and loss before and after each remedy (several minutes)."""
    from benchmarks.remedies import run

    run(quick, write, Console())


def judge(
    jobs: int, make: Callable[..., Any] | None = None, write: Callable[[Any], None] | None = None, **options: Any
) -> None:
    """Train what a plan names and exit with 0 if all of it is accepted."""
    from benchmarks.acceptance.command import Plan, accept

    console = Console()
    try:
        plan = (make or Plan)(**options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        done = accept(plan, jobs, console)
    except KeyboardInterrupt:
        console.print("stopped, every run saved; the same command goes on")
        raise typer.Exit(130) from None
    if write is not None:
        write(done)
    raise typer.Exit(0 if done.accepted else 1)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
