"""The command line: `python -m benchmarks cpu` and `python -m benchmarks accept`."""

from pathlib import Path
from typing import Annotated

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
) -> None:
    """Ratios side by side on this CPU, against nn.Linear and torchao."""
    from benchmarks.cpu import run

    try:
        run(quick, only, not quick and only is None if write is None else write, Console())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def accept(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe, paired by seed.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    model: Annotated[str, typer.Option(help="Size of the model.")] = "tiny",
    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    runs: Annotated[Path, typer.Option(help="Where finished and interrupted runs are kept.")] = Path("runs/accept"),
) -> None:
    """Train under every recipe, and judge the paired differences of the validation loss from bf16."""
    from benchmarks.accept import Plan, accept

    console = Console()
    try:
        plan = Plan(steps=steps, seeds=seeds, model=model, framework=framework, folder=runs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        done = accept(plan, jobs, console)
    except KeyboardInterrupt:
        console.print("stopped, every run saved; the same command goes on")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if done.accepted else 1)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
