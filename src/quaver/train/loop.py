"""The training loop and what it needs: warnings for options without effect, signals, recipe schedule, and saving."""

import copy
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import numpy as np

from quaver.recipes.schedule import Schedule, SchedulePhase
from quaver.recipes.spec import Recipe
from quaver.recipes.text import folder_name, shown
from quaver.train import checkpoint, data, files, frameworks, memory
from quaver.train import config as recipe_name
from quaver.train import metrics as trackers
from quaver.train.checkpoint import CheckpointError
from quaver.train.config import TORCH_ADAMW, TrainConfig, error_text, find_optimizer, is_schedule_free, lr_at, to_toml
from quaver.train.data import TokenizedText, load, training_batch, validation_batches
from quaver.train.learner import DistributedLearner, InspectedLearner, Learner, NonFiniteError
from quaver.train.mesh import ProcessGroup, check_same, rank, world
from quaver.train.metrics import Metrics, Record, Tracker, losses, read, validation_losses
from quaver.train.resume import STATES, STATES_LAYOUT, resume_from, stores_codes

# ---- options without effect ----

#: By option, a function of config and number of ranks that returns why it has no effect, or "".
WHY_IDLE: Mapping[str, Callable[[TrainConfig, int], str]] = {
    # A comparison has tokenized its text before.
    "vocab": lambda config, ranks: (
        f"tokens is {shown(config.tokens)}, which learns none"
        if config.tokens != "bpe" and not data.is_token_file(config.text)
        else ""
    ),
    "final_lr": lambda config, ranks: (
        f"optimizer {config.optimizer} keeps the learning rate after warm-up"
        if is_schedule_free(config.optimizer)
        else f"warmup is {config.warmup} of {config.steps} steps, and no cosine follows"
        if config.warmup >= config.steps
        else ""
    ),
    "beta2": lambda config, ranks: "sgd has one moment" * (find_optimizer(config.optimizer).rule == "sgd"),
    "optimizer_offload": lambda config, ranks: (
        "the run is on a CPU, whose memory has the states anyway" * frameworks.runs_on_cpu(config)
    ),
    "capture": lambda config, ranks: "framework is jax, which compiles whole steps" * (config.framework == "jax"),
    "cp_how": lambda config, ranks: "cp is 1, and no sequence is divided" * (config.cp == 1),
    "async_save": lambda config, ranks: "a single process writes before it goes on" * (ranks == 1),
    "timeout": lambda config, ranks: "a single process waits for no other" * (ranks == 1),
}


def idle_options(config: TrainConfig, ranks: int) -> Iterator[str]:
    """Yield a sentence for each option that has no effect although it differs from its default."""
    for field in fields(config):
        value = getattr(config, field.name)
        why = WHY_IDLE[field.name](config, ranks) if field.name in WHY_IDLE and value != field.default else ""
        if why:
            yield f"{field.name} is {shown(value)}, which has no effect here: {why}"


def warn_of_idle_options(config: TrainConfig, ranks: int) -> None:
    """Warn of each option without effect."""
    for sentence in idle_options(config, ranks):
        warnings.warn(sentence, stacklevel=3)


# ---- signals ----
# Ctrl-C, a scheduler's SIGTERM or a closed terminal's SIGHUP lets a run finish its step and save.
#
# A second Ctrl-C stops immediately, except with several ranks, to which torchrun sends each signal again. Under nohup,
# SIGHUP stays ignored.


class Interrupted(Exception):
    """A run was stopped by a signal; `exit_code` is the shell's code for that signal (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupt:
    """Context manager that records the first signal in `number`; does nothing outside the main thread.

    Args:
        patient: also ignore a second signal, which otherwise has its default effect.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

    def __init__(self, patient: bool = False) -> None:
        self.patient = patient
        self.number: int | None = None

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in self.SIGNALS if not is_ignored(number)]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if not self.patient:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def is_ignored(number: int) -> bool:
    """True if a signal is ignored as under nohup. SIGINT does not count: shells ignore it in background jobs."""
    return number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


# ---- recipe schedule ----
# The recipe of each step, in records and checkpoints.

#: Entry in a checkpoint's state.
STATE = "schedule"


class RecipePhases:
    """Recipe schedule of a run; every rank must call every method.

    Args:
        config: options of the run.
        recipe: a Recipe to use instead of `config.recipe`.
    Raises: ValueError if that cannot be parsed, or a phase would have no step.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe | None = None) -> None:
        self.config = config
        whole = None if recipe is None else Schedule([SchedulePhase(recipe, recipe.name)])
        self.schedule = whole or recipe_name.schedule_of(config)

    @property
    def recipes(self) -> list[Recipe]:
        """Recipes of all phases."""
        return list(dict.fromkeys(part.recipe for part in self.schedule.parts))

    @property
    def recipe(self) -> Recipe:
        """The recipe of the current phase."""
        return self.schedule.recipe

    def resume_from(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: in its phase, or in the phase of the next step if the recipe option has changed.

        Raises: CheckpointError if the saved state is invalid.
        """
        config, step, state = saved.get("config"), saved["step"], saved.get(STATE)
        if state is not None and isinstance(config, Mapping) and config.get("recipe") == self.config.recipe:
            try:
                self.schedule.load_state_dict(state if isinstance(state, Mapping) else {})
            except ValueError as error:
                raise CheckpointError(f"the checkpoint of step {step} does not fit: {error}") from error
            return
        risen = {min(step, self.config.warmup), min(step, self.config.warmup + 1)}  # where the learning rate is highest
        reached = [lr_at(each, self.config) for each in risen]
        fresh = {"part": 0, "step": step, "highest_lr": max(reached), "losses": []}
        self.schedule.load_state_dict(fresh)
        ahead = copy.deepcopy(self.schedule)
        ahead.at(step + 1, lr=lr_at(step + 1, self.config))
        self.schedule.part = ahead.part

    def begin(self, step: int, trained: Learner) -> None:
        """Switch the model to the recipe of a step if a new phase begins."""
        before = self.schedule.part
        recipe = self.schedule.at(step, lr=lr_at(step, self.config))
        if self.schedule.part != before:
            trained.change_recipe(recipe)

    def report_loss(self, record: Record, ranks: ProcessGroup) -> Record:
        """Report a step's loss to the schedule, and return the record with the number of the phase if there are
        several.

        Losses differ between ranks in rounding, so all use that of the first rank.
        """
        self.schedule.record_loss(ranks.broadcast(record["loss"]) if self.schedule.by_loss else record["loss"])
        return record if len(self.schedule.parts) == 1 else {**record, "part": self.schedule.part + 1}

    def state(self) -> dict[str, Any]:
        """Return the schedule's entry for a checkpoint's state."""
        return {STATE: self.schedule.state_dict()}


# ---- saving ----
# A single process saves the whole state; several ranks write their shards into one folder that the first rank
# completes.
#
# With `async_save`, training continues while a copy is written; the next save waits for the previous one.


class Saver:
    """Writes the checkpoints of a run; every rank must call every method."""

    def __init__(self, trained: Learner, ranks: ProcessGroup, folder: Path, config: TrainConfig) -> None:
        self.trained, self.ranks, self.folder, self.config = trained, ranks, folder, config
        #: Function that waits for the save in progress and raises its error.
        self.pending: Callable[[], object] = no_pending_save
        self.threads = ThreadPoolExecutor(1, "saving")

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, or start to, and return its folder; see `checkpoint.save`.

        Raises: CheckpointError if this or the previous checkpoint cannot be written; earlier ones are kept.
        """
        self.finish()
        if self.ranks.number == 1:
            return checkpoint.save(self.folder, step, *self.trained.tensors(), state, self.config.keep)
        with ExitStack() as stack:
            partial = ""
            if self.ranks.first:
                partial = str(stack.enter_context(checkpoint.writing(self.folder, step, state, self.config.keep)))
            written = cast(DistributedLearner, self.trained).write(
                Path(self.ranks.broadcast(partial)), self.config.async_save
            )
            sealing = stack.pop_all()
        self.pending = (
            self.threads.submit(finish_checkpoint, sealing, written).result
            if self.config.async_save
            else no_pending_save
        )
        if not self.config.async_save:
            finish_checkpoint(sealing, written)
            self.ranks.wait()
        return self.folder / checkpoint.folder_name(step)

    def finish(self) -> None:
        """Wait for the save in progress, if any. Raises: CheckpointError if it could not be written."""
        pending, self.pending = self.pending, no_pending_save
        if pending is not no_pending_save:
            pending()
            self.ranks.wait()


def no_pending_save() -> None:
    """Placeholder if no save is in progress."""


def finish_checkpoint(sealing: ExitStack, written: Callable[[], None]) -> None:
    """Wait until all ranks have written their shards; the first rank then completes the checkpoint."""
    with sealing:
        written()


# ---- loop ----
# Set up, step, validate, save, stop.

#: Files in a run's folder besides checkpoints; the command line writes the last.
FILES = ("config.toml", "metrics.jsonl", "inspect.jsonl", "tokenizer.json", trackers.WANDB_ID, "loss.png")

#: Seconds to wait for a file to appear on a shared disk; NFS alone may take up to 30.
SHARED_FOLDER_SECONDS = 45.0


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Results of a finished run."""

    # The run's folder: config.toml, metrics.jsonl, step-* and, with bpe, tokenizer.json.
    folder: Path
    # Training loss by step, and validation loss by the step before it.
    losses: dict[int, float]
    validation_losses: dict[int, float]
    # The trained model: PyTorch's converted `Decoder` on its device, or JAX's `Model`.
    model: Any
    # Report of the conversion; its str lists the converted layers.
    conversion: Any

    @property
    def validation_loss(self) -> float:
        """Validation loss after the last step."""
        return self.validation_losses[max(self.validation_losses)]


def run_training(
    config: TrainConfig,
    recipe: Recipe | None = None,
    *,
    resume: bool | Literal["auto"] = False,
    watch: Callable[[Record], None] = lambda record: None,
) -> TrainResult:
    """Train one model.

    Args:
        config: all options of the run.
        recipe: a Recipe to use instead of the one named by `config.recipe`.
        resume: continue from the run's newest checkpoint, with the losses of an uninterrupted run. "auto" does so if
            the folder has a run and starts a new one otherwise, as a restarted process of torchrun needs.
        watch: called with each record written to metrics.jsonl, on the first rank only.
    Returns:
        Losses, the trained model and its folder.
    Warns: for each option that has no effect in this run.
    Raises:
        OtherRankFailed: with several ranks, if another rank has reported the error.
        ValueError: an option, the text or a checkpoint is bad, the folder is in use or cannot be written, or a number
            is not finite (NonFiniteError).
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the step was finished and saved.
    """
    precision = RecipePhases(config, recipe)
    for each in precision.recipes:
        frameworks.check_options(config, each)  # before the text is read
    trackers.check_trackers(config)
    if rank() == 0:
        warn_of_idle_options(config, world())
        if config.inspect_every and not any(each.quantizes for each in precision.recipes):
            warnings.warn(
                f"inspect_every is {config.inspect_every}, which has no effect here: no recipe of the run quantizes",
                stacklevel=2,
            )
    with (
        frameworks.join_ranks(config, precision.recipe) as ranks,
        memory.out_of_memory_hint("--batch, --accumulate, --sequence or --model"),
    ):
        return run_rank(ranks, config, precision, resume, watch)


def run_rank(
    ranks: ProcessGroup,
    config: TrainConfig,
    precision: RecipePhases,
    resume: bool | Literal["auto"],
    watch: Callable[[Record], None],
) -> TrainResult:
    """Run training as one rank; only the first rank locks the folder and writes into it."""
    folder = folder_of(config)
    with files.locked(folder, "training") if ranks.first else nullcontext():
        check_same(ranks, "--resume", resume)
        if resume == "auto":
            # Decided by the first rank before it writes there.
            resume = bool(ranks.broadcast((folder / "config.toml").exists()))
        if ranks.first:
            check_folder(folder, resume)
        check_shared_folder(folder, ranks, config.timeout)
        saved_tokenizer = folder / "tokenizer.json"
        tokens = load(config, saved_tokenizer if resume and saved_tokenizer.exists() else None, folder)
        check_same(ranks, "a text of fingerprint", tokens.fingerprint)
        if frameworks.runs_on_cpu(config):
            memory.check_memory(config, tokens.vocab, ranks.number)
        facts = {"model": config.model, "seed": config.seed, "text": tokens.fingerprint}
        start = 0
        # Decided by the first rank, since a shared disk may show other ranks an outdated list.
        last, codes = ranks.broadcast((path := checkpoint.latest(folder)) and path.name) if resume else None, True
        if last:
            precision.resume_from(checkpoint.read_state(folder / last))
            codes = config.optimizer == TORCH_ADAMW or stores_codes(folder / last, facts)
        trained = frameworks.make_learner(config, precision.recipe, tokens.vocab, ranks, codes)
        if last:
            start = resume_from(folder / last, trained, ranks, facts, config, tokens.vocab)
        if start < config.steps and ranks.first:
            write_run_files(folder, config, tokens)
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt(patient=ranks.number > 1))
            log: RunLog | RecordList = RecordList()
            if ranks.first:
                metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", start))
                log = RunLog(
                    metrics, stack.enter_context(trackers.open_trackers(folder, config, metrics.records)), watch
                )
            if config.inspect_every and any(recipe.quantizes for recipe in precision.recipes):
                stack.enter_context(cast(InspectedLearner, trained).inspect(folder, start + 1))
            run_steps(trained, precision, tokens, config, facts, start, ranks, log, interrupt)
    return TrainResult(
        folder=folder,
        losses=losses(log.records),
        validation_losses=validation_losses(log.records),
        model=trained.model,
        conversion=trained.conversion,
    )


def run_steps(
    trained: Learner,
    precision: RecipePhases,
    tokens: TokenizedText,
    config: TrainConfig,
    facts: dict[str, Any],
    start: int,
    ranks: ProcessGroup,
    log: "RunLog | RecordList",
    interrupt: Interrupt,
) -> None:
    """Run the steps after `start`: train, validate, save, stop."""
    saver = Saver(trained, ranks, folder_of(config), config)
    validation_set = validation_batches(tokens.validation, config)
    with save_on_error(saver, config):
        for step in range(start + 1, config.steps + 1):
            batch = training_batch(tokens.train, config, step)
            precision.begin(step, trained)
            record = precision.report_loss(train_step(trained, batch, step, config), ranks)
            log(record)
            last_one = step == config.steps
            if last_one or is_due(step, config.validate_every):
                log(validation(trained, validation_set, step))
            stop = ranks.largest(interrupt.number or 0)
            if last_one or is_due(step, config.checkpoint_every) or stop:
                state = {**facts, **precision.state(), STATES: STATES_LAYOUT, "config": asdict(config)}
                path = saver.save(step, state)
            if stop and not last_one:
                saver.finish()
                message = f"stopped after step {step} of {config.steps}, saved as {path}; continue with --resume"
                raise Interrupted(message, stop)
        saver.finish()
        # The record may be missing if the run was interrupted after the checkpoint was saved.
        if ranks.broadcast(config.steps not in validation_losses(log.records)):
            log(validation(trained, validation_set, config.steps))


@contextmanager
def save_on_error(saver: Saver, config: TrainConfig) -> Iterator[None]:
    """On a NonFiniteError, which all ranks raise, finish the save in progress and name the checkpoint to
    resume from.
    """
    try:
        yield
    except NonFiniteError as error:
        with suppress(CheckpointError, OSError):  # then the previous checkpoint is the newest
            saver.finish()
        last = checkpoint.last_checkpoint_text(folder_of(config))
        raise NonFiniteError(f"{error}; {last}; try a smaller --lr, more --warmup or another --recipe") from error


class RecordList:
    """Collects records without writing them, on ranks other than the first."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)


class RunLog:
    """Writes a run's records with the elapsed time, and passes them to trackers and `watch`."""

    def __init__(self, metrics: Metrics, tracked: Sequence[Tracker], watch: Callable[[Record], None]) -> None:
        self.folder = metrics.path.parent
        self.metrics = metrics
        self.records = metrics.records
        self.shown_to: tuple[Callable[[Record], None], ...] = (*tracked, watch)
        self.begun = time.perf_counter() - metrics.seconds

    def __call__(self, record: Record) -> None:
        """Write a record. Raises: ValueError if it cannot be written, or the run's folder was moved."""
        try:
            self.metrics.append({**record, "seconds": round(time.perf_counter() - self.begun, 3)})
        except FileNotFoundError as error:
            raise ValueError(
                f"stopped after step {record['step']}: the run's folder {self.folder} was removed or renamed while it "
                "ran; put it back under that name and continue with --resume, or begin again"
            ) from error
        except OSError as error:
            raise ValueError(
                f"stopped after step {record['step']}: could not write {self.metrics.path}: {error_text(error)}; "
                f"{checkpoint.last_checkpoint_text(self.folder)}; fix this, for example by freeing disk "
                "space, then continue with --resume"
            ) from error
        for show in self.shown_to:
            show(self.metrics.records[-1])


def train_step(trained: Learner, batch: np.ndarray, step: int, config: TrainConfig) -> Record:
    """Run one update on a batch int64 [accumulate, B, S + 1]; returns its record.

    Raises: NonFiniteError if the loss or the gradient is not finite; nothing was updated then.
    """
    begun = time.perf_counter()
    lr = lr_at(step, config)
    loss, grad_norm = trained.step(batch, lr)
    if not math.isfinite(loss):
        raise NonFiniteError(f"stopped at step {step}: the loss is {loss}; {trained.first_output(batch)}")
    if not math.isfinite(grad_norm):
        where = trained.first_gradient(batch)
        raise NonFiniteError(f"stopped at step {step}: the gradient's norm is {grad_norm}; {where}")
    speed = batch[..., 1:].size / (time.perf_counter() - begun)
    return {
        "step": step,
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens_per_second": round(speed, 1),
        **trained.extra_metrics,
    }


def validate(trained: Learner, batches: np.ndarray, step: int) -> float:
    """Return the mean loss over batches int64 [n, B, S + 1], in nats per token.

    Raises: NonFiniteError if it is not finite.
    """
    mean = trained.loss(batches)
    if not math.isfinite(mean):
        where = trained.first_output(batches)
        raise NonFiniteError(f"stopped at step {step}: the validation loss is {mean}; {where}")
    return mean


def validation(trained: Learner, batches: np.ndarray, step: int) -> Record:
    """Run `validate` and return its record."""
    return {"step": step, "validation_loss": validate(trained, batches, step), **trained.extra_metrics}


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def folder_of(config: TrainConfig) -> Path:
    """Return the run's folder: `config.out`, or a name made of the options that distinguish a run."""
    framework = "" if config.framework == "torch" else f"-{config.framework}"
    optimizer = "" if config.optimizer == TORCH_ADAMW else f"-{config.optimizer}"
    name = f"{config.model}-{folder_name(config.recipe)}{framework}{optimizer}-seed{config.seed}"
    return Path(config.out) if config.out else Path("runs") / name


def check_folder(folder: Path, resume: bool) -> None:
    """Raise a ValueError if the folder has a run that would be overwritten, lacks one to resume, or a file
    name is taken.
    """
    files.check_places(folder, FILES)
    has_run = bool(read(folder / "metrics.jsonl") or checkpoint.list_checkpoints(folder))
    if has_run and not resume:
        raise ValueError(f"{folder} already holds a run; continue it with --resume, or give another --out")
    if resume and not (folder / "config.toml").exists():
        raise ValueError(f"{folder} holds no run to resume; give the run's folder with --out")


def check_shared_folder(folder: Path, ranks: ProcessGroup, timeout: int) -> None:
    """Raise a ValueError on ranks that do not see the first rank's folder, into which all will write."""
    end = time.monotonic() + min(SHARED_FOLDER_SECONDS, timeout / 2 or SHARED_FOLDER_SECONDS)
    while not files.has_lock_file(folder):
        if time.monotonic() > end:
            raise ValueError(
                f"this rank does not see the folder {folder.absolute()} that the first one has made; give --out on a "
                "disk that all ranks share, and start them in one folder"
            )
        time.sleep(0.1)
    ranks.wait()  # all ranks must have checked before one continues


def write_run_files(folder: Path, config: TrainConfig, tokens: TokenizedText) -> None:
    """Create the run's folder with its configuration and tokenizer."""
    files.write(folder / "config.toml", to_toml(replace(config, out=str(folder))))
    if tokens.tokenizer is not None:
        files.write(folder / "tokenizer.json", tokens.tokenizer.to_str(pretty=True))
