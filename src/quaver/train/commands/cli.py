"""The `quaver` command: train, compare, plot, inspect, generate, export, kernels, doctor, plan.

The options of `train` and `compare` are the fields of `TrainConfig`. An option on the command line overrides the
`--config` file, which overrides the default. A user's mistake is reported as one sentence on stderr with exit code 1.
Under torchrun the rank that found it reports it; all other output comes from the first rank.
"""

import functools
import inspect
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_type_hints

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import quaver
from quaver.comparison import Comparison, compare_files
from quaver.comparison.report import PICTURE, save
from quaver.train import config as recipe_name
from quaver.train import frameworks, mesh
from quaver.train.commands import doctor as machine
from quaver.train.commands import failing, inspecting, offloading, optimizer_offloading, scaling
from quaver.train.commands import kernels as compiling
from quaver.train.commands import plan as planning
from quaver.train.compare import SeedRun, compare_runs
from quaver.train.compare import folder_of as comparison_folder
from quaver.train.config import TrainConfig, error_text, read_run, read_toml
from quaver.train.data import load, open_tokenizer, validation_batches
from quaver.train.generate import (
    Sampling,
    Vocabulary,
    config_of,
    generate,
    load_matching,
    newest_checkpoint,
    saved_recipe,
)
from quaver.train.inspection_table import STATISTICS
from quaver.train.loop import Interrupted, folder_of, run_training
from quaver.train.memory import hf_config, hf_family, hf_name
from quaver.train.mesh import OtherRankFailed, RankError
from quaver.train.metrics import Record, losses, phase_starts, read
from quaver.train.model_config import MODELS
from quaver.train.progress import ProgressLines, format_step, time_left

# ---- export ----
# `quaver export` writes the newest checkpoint of a run, under the recipe that it was saved with, for inference servers.


def export_run(run: Path, folder: Path, format: str, check: bool) -> list[str]:
    """Export a run and its tokenizer.

    Args:
        run: folder of the run.
        folder: new folder to write.
        format: as in `quaver.torch.export`.
        check: compare the distribution of the next token on held-out text. This also calibrates input scales for
            formats that store them.
    Returns:
        Lines that describe the files.
    Raises: ValueError for bad input, before anything is written.
    """
    config = config_of(run)
    recipe = saved_recipe(run, config)
    if not recipe.quantizes:
        raise ValueError(
            f"{run} was trained under {recipe}, which quantizes no weight, so there are no codes to export; train one "
            f"that does, such as: quaver train --recipe mxfp8 --model {config.model}"
        )
    saved_tokenizer = run / "tokenizer.json"
    vocabulary = Vocabulary(None if config.tokens == "byte" else open_tokenizer(saved_tokenizer))
    frameworks.check_installed("torch", "quaver export")
    import torch

    from quaver.torch.conversion.export.export import export
    from quaver.train.torch.learner import NextTokenLogits

    sizes = MODELS[config.model]
    positions = max(sizes.positions, config.sequence)
    model = NextTokenLogits(
        config, recipe, vocabulary.size, load_matching(newest_checkpoint(run), config, vocabulary.size), "none", 1
    ).model
    model.checkpoint_names = lambda name: hf_name(name, sizes)  # type: ignore[assignment]
    model.checkpoint_config = {**hf_config(sizes, vocabulary.size, positions), "dtype": config.dtype}  # type: ignore[assignment]
    inputs = _validation_share(config, saved_tokenizer) if check else None
    sample = None if inputs is None else torch.from_numpy(inputs).to(next(model.parameters()).device)
    with torch.autocast(
        sample.device.type if sample is not None else "cpu", torch.bfloat16, enabled=config.dtype == "bfloat16"
    ):
        result = export(model, folder, format=format, check=sample, calibrate=sample)
    if saved_tokenizer.exists():
        shutil.copy(saved_tokenizer, folder / "tokenizer.json")
    lines = str(result).splitlines()
    if not hf_family(sizes):
        lines.append(f"{config.model} has no counterpart among Llama, Mistral and Qwen3: names are the trainer's own")
    return lines


def _validation_share(config: TrainConfig, saved_tokenizer: Path) -> np.ndarray:
    """Return held-out tokens of the run, int64 [B, S]."""
    tokens = load(config, saved_tokenizer if saved_tokenizer.exists() else None)
    return np.ascontiguousarray(validation_batches(tokens.validation, config)[0][:, :-1].astype(np.int64))


# ---- commands ----

app = typer.Typer(
    help="Train Transformers in FP8, MXFP8 and NVFP4, by exact emulation where the hardware cannot.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
#: Options for several ranks, which a comparison does not have.
RANKS = ("fsdp", "pp", "pp_schedule", "pp_stages", "cp", "cp_how", "tp", "sp", "async_save", "timeout")
out = Console()
err = Console(stderr=True)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report errors that a user can fix as one sentence and an exit code, and warnings as a sentence."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            yield
    except OtherRankFailed as failure:
        raise typer.Exit(1) from failure
    except Interrupted as stopped:
        print_on_stderr(str(stopped), "yellow")
        raise typer.Exit(stopped.exit_code) from stopped
    except (ValueError, OSError, Warning, MemoryError) as error:
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        sentence = (error_text(error) or "there is not enough memory") + where
        if not isinstance(error, RankError) and mesh.rank():
            sentence = f"rank {mesh.rank()}: {sentence}"
        if mesh.reports_errors() or isinstance(error, RankError):  # else another rank reports the same
            failing.record_error(sentence)
            print_on_stderr(sentence, "red")
        raise typer.Exit(1) from error


def warn(message: Warning | str, *where: object, **options: object) -> None:
    """Show a warning as one sentence, without its location in the code."""
    if mesh.rank() == 0:
        print_on_stderr(str(message), "yellow")


def print_on_stderr(line: str, style: str) -> None:
    """Print a line on stderr; does nothing if the terminal is gone."""
    with suppress(OSError):
        err.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def with_options(
    record: type = TrainConfig, without: Sequence[str] = (), panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds an option to a command for each field of a dataclass.

    Args:
        record: the dataclass.
        without: fields to leave out.
        panel: title of the options in the help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        table = [option(record, field, panel) for field in fields(record) if field.name not in without]
        names = [parameter.name for parameter in table]

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            typed = {name: arguments.pop(name) for name in names}
            with report_errors():
                command({name: value for name, value in typed.items() if value not in (None, [])}, **arguments)

        run.__signature__ = inspect.Signature([*own, *table])  # type: ignore[attr-defined]
        return run

    return decorate


def option(record: type, field: Any, panel: str | None) -> inspect.Parameter:
    """Convert a field of a dataclass to an option that is None unless given."""
    kind, sentence = get_args(get_type_hints(record, include_extras=True)[field.name])
    name = f"--{field.name.replace('_', '-')}"
    if kind is bool:
        shown = typer.Option(f"{name}/--no-{name[2:]}", help=sentence, show_default=False, rich_help_panel=panel)
        annotation: Any = Annotated[Optional[bool], shown]  # noqa: UP045
    else:
        help_text = f"{sentence} (default {field.default})" if field.default not in ("", ()) else sentence
        kind = kind if kind in (int, float, str) else list[str]
        shown = typer.Option(help=help_text, show_default=False, rich_help_panel=panel)
        annotation = Annotated[Optional[kind], shown]  # noqa: UP045
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def config_of_options(typed: dict[str, Any], file: Path | None, more_text: list[str] | None) -> TrainConfig:
    """Combine the options of a TOML file, if any, with those on the command line."""
    options = (read_toml(file) if file else {}) | typed
    if more_text and "text" not in typed:
        raise ValueError(
            f"{more_text[0]!r} belongs to no option; text goes after --text, everything else after its own"
        )
    if "text" in typed:
        options["text"] = (*typed["text"], *(more_text or ()))
    return TrainConfig(**options)


def show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"quaver {quaver.__version__}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", help="show the version and exit", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Train Transformers in FP8, MXFP8 and NVFP4, by exact emulation where the hardware cannot."""


ConfigFile = Annotated[Path | None, typer.Option(help="TOML file with any of these options", metavar="FILE")]
MoreText = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="PATH")]


@app.command()
@with_options()
def train(
    typed: dict[str, Any],
    *,
    more_text: MoreText = None,
    config: ConfigFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint in --out")] = False,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="as --resume where --out holds a run, else begin one")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, bar or lines")] = False,
) -> None:
    """Train a language model under a recipe."""
    from quaver.train.plots import plot_loss  # slow to import

    quiet = quiet or mesh.rank() > 0
    settings = config_of_options(typed, config, more_text)
    before = folder_of(settings) / "config.toml"
    if (resume or auto_resume) and config is None and before.exists():
        read_run(before)
        settings = config_of_options({**typed, "out": str(before.parent)}, before, more_text)
    with progress_bars(quiet) as progress:
        task = progress.add_task(settings.recipe, total=settings.steps, numbers="")
        parts = phase_texts(settings)
        line = progress_lines("", settings, quiet)

        def watch(record: Record) -> None:
            if "loss" in record:
                line(record)
                progress.start()
                progress.update(task, completed=record["step"], numbers=format_step(record, parts))

        result = run_training(settings, resume="auto" if auto_resume else resume, watch=watch)
    if mesh.rank():
        return
    title = f"{settings.model}, {settings.recipe}, seed {settings.seed}"
    records = read(result.folder / "metrics.jsonl")
    picture = plot_loss(records, result.folder / "loss.png", title, settings.recipe)
    print_line(str(result.conversion))
    for step, part in phase_starts(records).items():
        print_line(f"from step {step} on: {parts[part - 1]}")
    print_line(f"validation loss {result.validation_loss:.4f} nats a token after {settings.steps} steps")
    print_line(f"picture: {picture}")


@app.command()
@with_options(without=("recipe", "nudge", *RANKS))
def compare(
    typed: dict[str, Any],
    *,
    more_text: MoreText = None,
    recipes: Annotated[
        str, typer.Option(help="separated by commas; bf16 is always among them; 'nvfp4 until 85%, bf16' is one")
    ] = "bf16,delayed,tensorwise,mxfp8,nvfp4",
    seeds: Annotated[int, typer.Option(help="runs per recipe, with seeds --seed, --seed + 1, ...")] = 1,
    jobs: Annotated[int, typer.Option(help="runs at a time; 0: as many as fill the cores")] = 0,
    margin: Annotated[float, typer.Option(help="largest difference from bf16 in nats that counts as none")] = 0.01,
    files: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE...: runs to compare, a name again for its next seed; a step and loss per line"),
    ] = None,
    config: ConfigFile = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the runs that are not finished")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, bars or lines")] = False,
) -> None:
    """Train under several recipes with the same data and seeds, and report the differences from bf16; or, with --files,
    those of any runs from the first.
    """
    if files:
        compare_losses([*files, *(more_text or ())], margin, typed)
        return
    settings = config_of_options(typed, config, more_text)
    with progress_bars(quiet) as progress:
        tasks: dict[str, TaskID] = {}
        line: dict[str, Callable[[Record], None]] = {}
        began = time.monotonic()
        done_before, left = -1, ""

        def watch(runs: Sequence[SeedRun]) -> None:
            nonlocal done_before, left
            progress.start()
            done = sum(max(run.losses, default=0) for run in runs)
            done_before = done if done_before < 0 else done_before
            total = sum(run.config.steps for run in runs) - done_before
            left = time_left(time.monotonic() - began, done - done_before, total)
            for number, run in enumerate(runs, 1):
                if run.label not in tasks:
                    label = f"run {number} of {len(runs)}, {run.label}"
                    line[run.label] = progress_lines(label, run.config, quiet, lambda: left)
                    tasks[run.label] = progress.add_task(label, total=run.config.steps, start=False, numbers="")
                update_bar(progress, tasks[run.label], run)
                for record in [record for record in run.records if "loss" in record][-1:]:
                    line[run.label](record)

        comparison = compare_runs(
            settings,
            recipe_name.split_recipes(recipes),
            seeds=seeds,
            jobs=jobs,
            margin=margin,
            resume=resume,
            watch=watch,
        )
    print_comparison(comparison, comparison_folder(settings))
    if comparison.failures:
        raise ValueError("\n".join(comparison.failures))


def compare_losses(files: Sequence[str], margin: float, typed: Mapping[str, Any]) -> None:
    """Compare runs by files given as NAME=FILE or FILE, and print the result."""
    if others := sorted(set(typed) - {"out"}):
        raise ValueError(f"--files compares runs that were trained before; leave out --{others[0].replace('_', '-')}")
    named: dict[str, list[str]] = {}
    for text in files:
        name, _, path = text.rpartition("=")
        named.setdefault(name or path, []).append(path)
    print_comparison(compare_files(named, margin=margin), Path(typed["out"]) if "out" in typed else None)


def print_comparison(comparison: Comparison, folder: Path | None) -> None:
    """Print the table and notes of a comparison, and write report and picture into a folder."""
    for line in (*str(comparison).splitlines(), *comparison.notes):
        print_line(line)
    for path in save(comparison, folder) if folder else ():
        print_line(f"{'picture' if path.name == PICTURE else 'report'}: {path}")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs of quaver train", metavar="RUN_DIR...")],
    picture: Annotated[Path, typer.Option(help="the file to write, a PNG")] = Path("runs.png"),
) -> None:
    """Draw the losses of several runs, and their differences from the first one's."""
    from quaver.train.plots import plot_runs

    with report_errors():
        records = {str(run): read(run / "metrics.jsonl") for run in runs}
        for run, rows in records.items():
            if not losses(rows):
                raise ValueError(f"{run} holds no run with a step; give folders of quaver train")
        print_line(f"picture: {plot_runs(records, picture)}")


@app.command(name="inspect")
def inspect_gemms(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="folder of a run of quaver train --inspect-every N", metavar="RUN_DIR", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(help="a Hugging Face model instead of a run: hf:PATH, one step in float32", metavar="hf:PATH")
    ] = "",
    text: Annotated[list[Path] | None, typer.Option(help="text to run --model on", metavar="FILE...")] = None,
    recipe: Annotated[
        str, typer.Option(help="recipes to compare --model under, separated by commas; the first is inspected")
    ] = ",".join(inspecting.RECIPES),
    tokens: Annotated[int, typer.Option(help="tokens of the text at most")] = 2048,
    gpu: Annotated[str, typer.Option(help="GPU whose time is predicted for --model, as of plan")] = "h100",
    widen: Annotated[int, typer.Option(help="multiply all features by this, for the predicted time")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")] = "auto",
    to: Annotated[
        Path | None, typer.Option("--out", help="the folder to write (default RUN_DIR, or inspect)", show_default=False)
    ] = None,
    statistic: Annotated[str, typer.Option(help=f"of the picture: {', '.join(STATISTICS)}")] = "error",
) -> None:
    """Write a report of where a run or a model loses precision: report.html and inspect.png."""
    with report_errors():
        if model:
            lines = inspecting.report_model(
                model,
                # The files after the first belong to no option.
                [*(text or ()), *(paths or ())],
                recipe_name.split_recipes(recipe),
                to or Path("inspect"),
                statistic,
                tokens=tokens,
                gpu=gpu,
                widen=widen,
                device=device,
            )
        elif paths and len(paths) == 1 and not text:
            lines = inspecting.report_run(paths[0], to, statistic)
        else:
            raise ValueError("give RUN_DIR, the folder of one run, or --model hf:PATH --text FILE...")
        for line in lines:
            print_line(line)


@app.command(name="generate")
def generate_text(
    run: Annotated[Path, typer.Argument(help="folder of a run of quaver train", metavar="RUN_DIR")],
    prompt: Annotated[str, typer.Option(help="text to go on from")],
    tokens: Annotated[int, typer.Option(help="tokens at most; the mark between files ends the text before")] = 200,
    temperature: Annotated[float, typer.Option(help="logits are divided by it; 0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(help="choose among so many of the likeliest tokens; 0: all")] = 50,
    top_p: Annotated[float, typer.Option(help="choose among the likeliest that together have this probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="of the choice")] = 0,
    recipe: Annotated[str, typer.Option(help="as of train; none: the run's own", show_default=False)] = "",
    cache: Annotated[
        str,
        typer.Option(
            help="keys and values of earlier tokens: plain, paged, or none (computed again). Where a recipe's scale "
            "covers a whole tensor it sees other tokens with a cache than without, and the text may differ"
        ),
    ] = "plain",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")] = "auto",
) -> None:
    """Continue a prompt with the newest checkpoint of a run."""
    with report_errors():
        how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        first = iter([prompt])

        def emit(text: str) -> None:
            out.print(next(first, "") + text, end="", markup=False, highlight=False, soft_wrap=True)

        result = generate(
            run, prompt, tokens=tokens, how=how, seed=seed, recipe=recipe, cache=cache, device=device, emit=emit
        )
        print_line("")
        for line in (*result.notes, str(result)):
            err.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(name="export")
def export_weights(
    run: Annotated[Path, typer.Argument(help="folder of a run of quaver train", metavar="RUN_DIR")],
    to: Annotated[Path, typer.Option("--out", help="the folder to write, a new one")],
    format: Annotated[str, typer.Option(help="compressed-tensors, deepseek or modelopt")] = "compressed-tensors",
    check: Annotated[
        bool, typer.Option("--check", help="compare the next token's distribution with the trainer's, held-out text")
    ] = False,
) -> None:
    """Export the weight codes of a run to files that vLLM, SGLang, TensorRT-LLM and transformers read."""
    with report_errors():
        for line in export_run(run, to, format, check):
            print_line(line)


@app.command()
def kernels(
    arch: Annotated[str, typer.Option(help="GPUs: sm_80, sm_89, sm_90, sm_100, ..., separated by commas")],
    to: Annotated[Path, typer.Option("--out", help="the folder to write")],
    dtypes: Annotated[str, typer.Option(help="dtypes of values: bf16, f16, f32")] = "bf16",
    widths: Annotated[str, typer.Option(help="row lengths that norms and row scales are compiled for")] = "",
    families: Annotated[str, typer.Option(help="of kernels: tensor, row, block, mx, nv, norm, ...; or all")] = "all",
    compress: Annotated[bool, typer.Option("--compress", help="compress machine code by fatbinary of CUDA")] = False,
) -> None:
    """Compile kernels for GPUs and write a C library that launches them without Python."""
    with report_errors():
        for line in compiling.export_kernels(arch, to, dtypes, widths, families, compress, print_line):
            print_line(line)


@app.command()
def doctor() -> None:
    """Show which recipes run natively on this machine and which by emulation, and why."""
    with report_errors():
        for name, version in machine.versions().items():
            print_line(f"{name:8} {version}")
        print_line(f"{'cpu':8} {machine.cpu()}")
        devices = machine.gpus()
        for device in devices:
            print_line(f"{'gpu':8} {device.name}, sm_{device.capability[0]}{device.capability[1]}")
        for line in machine.frameworks():
            print_line(line)
        shown = Table("recipe", "runs", "because")
        for row in machine.recipes_table(devices):
            shown.add_row(*row)
        out.print(shown)
        print_line(machine.SEEN if machine.has("torch") else machine.UNSEEN)
        print_line(machine.advice(devices))
        if memory := machine.memory(devices):
            print_line(memory)


@app.command()
@with_options(scaling.Cluster, panel="On many GPUs")
def plan(
    typed: dict[str, Any],
    *,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, l40s, b200, ...; it need not be here")],
    model: Annotated[str, typer.Option(help="as of train, or mixtral-8x7b, deepseek-v3, nemotron-h-8b, mamba2-2.7b")],
    recipe: Annotated[str, typer.Option(help="a recipe, with options if wanted")],
    tokens: Annotated[int, typer.Option(help="tokens in a micro-batch")] = 8192,
    micro_batches: Annotated[int, typer.Option(help="micro-batches that share one quantization of the weights")] = 1,
    fused: Annotated[
        bool, typer.Option("--fused", help="norms and activations quantize what they make, forward and backward")
    ] = False,
    optimizer: Annotated[
        str, typer.Option(help="as of train, whose bytes count: adamw, lean, balanced, ...")
    ] = "adamw",
    offload: Annotated[
        bool, typer.Option("--offload", help="which saved activations to move to the host, recompute or keep")
    ] = False,
    optimizer_offload: Annotated[
        bool, typer.Option("--optimizer-offload", help="memory and time of a step with optimizer states on the host")
    ] = False,
    host_cores: Annotated[int, typer.Option(help="CPU cores of a node, for --optimizer-offload")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, with the rates and where they come from")] = False,
) -> None:
    """Predict how much faster a model's layers run under a recipe on a GPU, or with --gpus the time of a step
    on many.
    """
    cluster = scaling.Cluster(**typed)
    if optimizer_offload:
        if offload:
            raise ValueError("--offload and --optimizer-offload are two plans; leave out one of them")
        states = optimizer_offloading.price(model, recipe, gpu, cluster, optimizer=optimizer, cores=host_cores)
        print_plan(optimizer_offloading, states, as_json)
        return
    if offload:
        if cluster.gpus:
            raise ValueError("--offload plans the layers of one GPU; leave out --gpus")
        placed = offloading.price(
            model, recipe, gpu, tokens=tokens, sequence=cluster.sequence, micro_batches=micro_batches
        )
        print_plan(offloading, placed, as_json)
        return
    if cluster.gpus:
        stepped = scaling.price(
            model, recipe, gpu, cluster, tokens=tokens, micro_batches=micro_batches, optimizer=optimizer
        )
        print_plan(scaling, stepped, as_json)
        return
    planned = planning.plan(
        model, recipe, gpu, tokens=tokens, micro_batches=micro_batches, fused=fused, optimizer=optimizer
    )
    print_plan(planning, planned, as_json)


def print_plan(module: Any, planned: Any, as_json: bool) -> None:
    """Print a plan, as JSON or as a title, a table and notes, by the functions of its module."""
    if as_json:
        print_line(json.dumps(module.as_json(planned), indent=2))
        return
    print_line(module.title(planned))
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    first, *others = module.columns(planned)
    table.add_column(first, min_width=len("gate_proj,"))
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for row in module.cells(planned):
        table.add_row(*row)
    out.print(table)
    for line in module.notes(planned):
        print_line(line)


def print_line(line: str) -> None:
    """Print a line without formatting, for readers and scripts."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Progress]:
    """Progress bars on a terminal; they start with the first report, so that bad input shows none."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())
    progress = Progress(TextColumn("{task.description}"), *columns, console=err, disable=quiet or not err.is_terminal)
    try:
        yield progress
    finally:
        if progress.live.is_started:
            with suppress(OSError):  # the terminal may be gone
                progress.stop()


def progress_lines(
    label: str, config: TrainConfig, quiet: bool, left: Callable[[], str] = lambda: ""
) -> Callable[[Record], None]:
    """Return a function that prints some of a run's records as lines if there is no terminal."""
    if quiet or err.is_terminal:
        return lambda record: None
    return ProgressLines(label, config.steps, lambda line: print_on_stderr(line, ""), phase_texts(config), left)


def phase_texts(config: TrainConfig) -> list[str]:
    """Return the recipes of a run in order."""
    return [part.text for part in recipe_name.parse_phases(config.recipe)]


def update_bar(progress: Progress, task: TaskID, run: SeedRun) -> None:
    """Update a run's bar from its records; its clock starts with its first step."""
    latest = next((record for record in reversed(run.records) if "loss" in record), None)
    if run.failure:
        progress.update(task, numbers="failed")
        progress.stop_task(task)
    elif latest:
        if not progress.tasks[task].started:
            progress.start_task(task)
        progress.update(task, completed=latest["step"], numbers=format_step(latest, phase_texts(run.config)))
