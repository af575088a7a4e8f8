"""Options that have no effect in a run as it is configured: each is said in a sentence, since nothing else shows it."""

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
from quaver.recipes.text import shown
from quaver.train import checkpoint, data, files, frameworks, memory
from quaver.train import config as recipe_name
from quaver.train import metrics as trackers
from quaver.train.checkpoint import CheckpointError
from quaver.train.config import TORCH, TrainConfig, find, lr_at, reason, to_toml
from quaver.train.data import TokenizedText, load, training_batch, validation_batches
from quaver.train.learner import DistributedLearner, Learner, NonFiniteError
from quaver.train.mesh import ProcessGroup, rank, same, world
from quaver.train.metrics import Metrics, Record, Tracker, losses, read, validation_losses
from quaver.train.resume import FORM, STATES, keeps_codes, take_up

# ---- idle ------------------------------------------------------------------------------------------------

#: By option, what says why it has no effect on so many ranks, or "".
IDLE: Mapping[str, Callable[[TrainConfig, int], str]] = {
    # A comparison has read its text and learnt its tokens before.
    "vocab": lambda config, ranks: (
        f"tokens is {shown(config.tokens)}, which learns none"
        if config.tokens != "bpe" and not data.is_one(config.text)
        else ""
    ),
    "final_lr": lambda config, ranks: (
        f"warmup is {config.warmup} of {config.steps} steps, and no cosine follows"
        if config.warmup >= config.steps
        else ""
    ),
    "beta2": lambda config, ranks: "sgd has one moment" * (find(config.optimizer).rule == "sgd"),
    "capture": lambda config, ranks: "framework is jax, which compiles whole steps" * (config.framework == "jax"),
    "cp_how": lambda config, ranks: "cp is 1, and no sequence is divided" * (config.cp == 1),
    "async_save": lambda config, ranks: "a single process writes before it goes on" * (ranks == 1),
    "timeout": lambda config, ranks: "a single process waits for no other" * (ranks == 1),
}


def sentences(config: TrainConfig, ranks: int) -> Iterator[str]:
    """One for each option that was given another value than its own and has no effect."""
    for field in fields(config):
        value = getattr(config, field.name)
        why = IDLE[field.name](config, ranks) if field.name in IDLE and value != field.default else ""
        if why:
            yield f"{field.name} is {shown(value)}, which has no effect here: {why}"


def say(config: TrainConfig, ranks: int) -> None:
    """Warn of each."""
    for sentence in sentences(config, ranks):
        warnings.warn(sentence, stacklevel=3)


# ---- interrupt -------------------------------------------------------------------------------------------
# Ctrl-C, a scheduler's SIGTERM or a closed terminal's SIGHUP lets a run finish its step and save.
#
# A second Ctrl-C stops at once, but not with several ranks, to which torchrun sends each signal once more. Under nohup,
# which has SIGHUP ignored, it stays ignored.


class Interrupted(Exception):
    """A run was asked to stop and did; `exit_code` is the shell's for that signal (130 for Ctrl-C)."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupt:
    """While entered, notes the first signal in `number`; a thread that is not the main one is left alone.

    Args:
        patient: note a second signal, too, where otherwise it does what it would without this.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

    def __init__(self, patient: bool = False) -> None:
        self.patient = patient
        self.number: int | None = None

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            recorded_amax = [number for number in self.SIGNALS if not ignored_on_purpose(number)]
            self._before = {number: signal.signal(number, self._note) for number in recorded_amax}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if not self.patient:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignored_on_purpose(number: int) -> bool:
    """Whether a signal is ignored as nohup has it; a shell's background jobs ignore SIGINT, which is to be noted."""
    return number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


# ---- precision -------------------------------------------------------------------------------------------
# Which recipe a run's steps are under: the schedule of its parts, through its steps, records and checkpoints.

#: The entry of a checkpoint's state.
STATE = "schedule"


class Precision:
    """The recipes of a run; every rank calls every method.

    Args:
        recipe: a Recipe in place of the schedule that `config.recipe` spells.
    Raises: ValueError if that cannot be read, or a part of it would have no step.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe | None = None) -> None:
        self.config = config
        whole = None if recipe is None else Schedule([SchedulePhase(recipe, recipe.name)])
        self.schedule = whole or recipe_name.schedule_of(config)

    @property
    def recipes(self) -> list[Recipe]:
        """Of all parts."""
        return list(dict.fromkeys(part.recipe for part in self.schedule.parts))

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self.schedule.recipe

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state: in the part that it was saved in, or where the run has other parts since, in
        the one of its next step.

        Raises: CheckpointError if the state is none.
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
        """Give the model the recipe of a step, where that is another part's."""
        before = self.schedule.part
        recipe = self.schedule.at(step, lr=lr_at(step, self.config))
        if self.schedule.part != before:
            trained.take(recipe)

    def saw(self, record: Record, ranks: ProcessGroup) -> Record:
        """A step's record with the part that was in force, counted from 1, if there are several.

        Ranks sum in other orders, and decide by the first one's loss.
        """
        self.schedule.saw(ranks.given(record["loss"]) if self.schedule.by_loss else record["loss"])
        return record if len(self.schedule.parts) == 1 else {**record, "part": self.schedule.part + 1}

    def state(self) -> dict[str, Any]:
        """An entry of a checkpoint's state."""
        return {STATE: self.schedule.state_dict()}


# ---- saving ----------------------------------------------------------------------------------------------
# Saving a run: by its one process, or by every rank its own part of one folder that the first rank seals.
#
# Several ranks may go on meanwhile, with `async_save`: what they write is a copy, and a save begins when the one before
# has ended.


class Saver:
    """Writes the checkpoints of a run; every rank calls every method."""

    def __init__(self, trained: Learner, ranks: ProcessGroup, folder: Path, config: TrainConfig) -> None:
        self.trained, self.ranks, self.folder, self.config = trained, ranks, folder, config
        #: Waits for the save that has begun, and raises its error.
        self.pending: Callable[[], object] = nothing
        self.threads = ThreadPoolExecutor(1, "saving")

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, or begin to, and return its folder; see `checkpoint.save`.

        Raises: CheckpointError if it cannot be written, or the one before could not; those before them stay.
        """
        self.finish()
        if self.ranks.number == 1:
            return checkpoint.save(self.folder, step, *self.trained.tensors(), state, self.config.keep)
        with ExitStack() as stack:
            partial = ""
            if self.ranks.first:
                partial = str(stack.enter_context(checkpoint.writing(self.folder, step, state, self.config.keep)))
            written = cast(DistributedLearner, self.trained).write(
                Path(self.ranks.given(partial)), self.config.async_save
            )
            sealing = stack.pop_all()
        self.pending = self.threads.submit(sealed, sealing, written).result if self.config.async_save else nothing
        if not self.config.async_save:
            sealed(sealing, written)
            self.ranks.wait()
        return self.folder / checkpoint.name_of(step)

    def finish(self) -> None:
        """Wait for the save that has begun, if any. Raises: CheckpointError if it could not be written."""
        pending, self.pending = self.pending, nothing
        if pending is not nothing:
            pending()
            self.ranks.wait()


def nothing() -> None:
    """Of a run that saves nothing just now."""


def sealed(sealing: ExitStack, written: Callable[[], None]) -> None:
    """Wait until all ranks' parts are written; the first rank then gives the checkpoint its place."""
    with sealing:
        written()


# ---- loop ------------------------------------------------------------------------------------------------
# The training loop, to be read from top to bottom: set up, step, validate, save, stop.

#: What a run's folder holds besides checkpoints; the last is the command line's.
FILES = ("config.toml", "metrics.jsonl", "tokenizer.json", trackers.ID, "loss.png")

#: Seconds after which a shared disk shows every rank a new file; NFS takes up to 30 by itself.
LATE = 45.0


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run leaves behind."""

    # The run's folder: config.toml, metrics.jsonl, step-* and, with bpe, tokenizer.json.
    folder: Path
    # Training loss by step, and validation loss by the step that it was taken after.
    losses: dict[int, float]
    validation_losses: dict[int, float]
    # The trained model: PyTorch's `Decoder`, converted and on its device, or JAX's `Model`.
    model: Any
    # What the recipe was applied to; its str is a report.
    conversion: Any

    @property
    def validation_loss(self) -> float:
        """The one after the last step."""
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
        config: every option of the run.
        recipe: a Recipe to use in place of the one that `config.recipe` names.
        resume: go on from the run's newest checkpoint; the losses are those of a run never stopped. "auto" does so
            where the folder holds a run, and begins one elsewhere: what a restarted process of torchrun needs.
        watch: called with each record as it is written to metrics.jsonl, by the first of several ranks alone.
    Warns: of each option that has no effect in the run as it is configured.
    Raises:
        Told: with several ranks, where another one has said why the run ends.
        ValueError: an option, the text or a checkpoint is bad, the folder is in use or cannot be written, or something
            became NaN (NonFiniteError).
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, once the step was finished and saved.
    """
    precision = Precision(config, recipe)
    for each in precision.recipes:
        frameworks.check(config, each)  # before the text is read
    trackers.check(config)
    if rank() == 0:
        say(config, world())
    with (
        frameworks.joined(config, precision.recipe) as ranks,
        memory.told("--batch, --accumulate, --sequence or --model"),
    ):
        return as_rank(ranks, config, precision, resume, watch)


def as_rank(
    ranks: ProcessGroup,
    config: TrainConfig,
    precision: Precision,
    resume: bool | Literal["auto"],
    watch: Callable[[Record], None],
) -> TrainResult:
    """A run as one of its ranks sees it; the first alone holds the folder and writes into it."""
    folder = folder_of(config)
    with files.held(folder, "training") if ranks.first else nullcontext():
        same(ranks, "--resume", resume)
        if resume == "auto":
            # The first rank's choice, before it writes anything there.
            resume = bool(ranks.given((folder / "config.toml").exists()))
        if ranks.first:
            check_folder(folder, resume)
        see(folder, ranks, config.timeout)
        saved_tokenizer = folder / "tokenizer.json"
        tokens = load(config, saved_tokenizer if resume and saved_tokenizer.exists() else None, folder)
        same(ranks, "a text of fingerprint", tokens.fingerprint)
        if frameworks.on_cpu(config):
            memory.check(config, tokens.vocab, ranks.number)
        facts = {"model": config.model, "seed": config.seed, "text": tokens.fingerprint}
        start = 0
        # The first rank's choice: a shared disk may show another one an older list.
        last, codes = ranks.given((path := checkpoint.latest(folder)) and path.name) if resume else None, True
        if last:
            precision.take_up(checkpoint.read_state(folder / last))
            codes = config.optimizer == TORCH or keeps_codes(folder / last, facts)
        trained = frameworks.make(config, precision.recipe, tokens.vocab, ranks, codes)
        if last:
            start = take_up(folder / last, trained, ranks, facts, config, tokens.vocab)
        if start < config.steps and ranks.first:
            prepare(folder, config, tokens)
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt(patient=ranks.number > 1))
            log: RunLog | Silent = Silent()
            if ranks.first:
                metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", start))
                log = RunLog(metrics, stack.enter_context(trackers.opened(folder, config, metrics.records)), watch)
            go_on(trained, precision, tokens, config, facts, start, ranks, log, interrupt)
    return TrainResult(
        folder=folder,
        losses=losses(log.records),
        validation_losses=validation_losses(log.records),
        model=trained.model,
        conversion=trained.conversion,
    )


def go_on(
    trained: Learner,
    precision: Precision,
    tokens: TokenizedText,
    config: TrainConfig,
    facts: dict[str, Any],
    start: int,
    ranks: ProcessGroup,
    log: "RunLog | Silent",
    interrupt: Interrupt,
) -> None:
    """The steps after `start`: train, validate, save, stop."""
    saver = Saver(trained, ranks, folder_of(config), config)
    held_out = validation_batches(tokens.validation, config)
    with kept(saver, config):
        for step in range(start + 1, config.steps + 1):
            batch = training_batch(tokens.train, config, step)
            ranks.at(step, "training")
            precision.begin(step, trained)
            record = precision.saw(train_step(trained, batch, step, config), ranks)
            log({**record, **ranks.done()})
            last_one = step == config.steps
            if last_one or due(step, config.validate_every):
                ranks.at(step, "validation")
                log(validation(trained, held_out, step))
            stop = ranks.largest(interrupt.number or 0)
            if last_one or due(step, config.checkpoint_every) or stop:
                ranks.at(step, "saving")
                state = {**facts, **precision.state(), STATES: FORM, "config": asdict(config)}
                path = saver.save(step, state)
            if stop and not last_one:
                saver.finish()
                message = f"stopped after step {step} of {config.steps}, saved as {path}; go on with --resume"
                raise Interrupted(message, stop)
        saver.finish()
        # The record may have been lost after the checkpoint was saved.
        if ranks.given(config.steps not in validation_losses(log.records)):
            log(validation(trained, held_out, config.steps))


@contextmanager
def kept(saver: Saver, config: TrainConfig) -> Iterator[None]:
    """Where numbers stop a run, which all ranks see, end the save that has begun, and say what it can go on from."""
    try:
        yield
    except NonFiniteError as error:
        with suppress(CheckpointError, OSError):  # the one before is what is there then
            saver.finish()
        last = checkpoint.last_good(folder_of(config))
        raise NonFiniteError(f"{error}; {last}; try a smaller --lr, more --warmup or another --recipe") from error


class Silent:
    """Writes nothing, on ranks that are not the first."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self.records.append(record)


class RunLog:
    """Writes a run's records, with the time that the run has taken, and shows them to trackers and `watch`."""

    def __init__(self, metrics: Metrics, tracked: Sequence[Tracker], watch: Callable[[Record], None]) -> None:
        self.folder = metrics.path.parent
        self.metrics = metrics
        self.records = metrics.records
        self.shown_to: tuple[Callable[[Record], None], ...] = (*tracked, watch)
        self.begun = time.perf_counter() - metrics.seconds

    def __call__(self, record: Record) -> None:
        """Raises: ValueError if it cannot be written, or the run's folder is not where it was."""
        try:
            self.metrics.append({**record, "seconds": round(time.perf_counter() - self.begun, 3)})
        except FileNotFoundError as error:
            raise ValueError(
                f"stopped after step {record['step']}: the run's folder {self.folder} was removed or renamed while it "
                "ran; put it back under that name and go on with --resume, or begin again"
            ) from error
        except OSError as error:
            raise ValueError(
                f"stopped after step {record['step']}: could not write {self.metrics.path}: {reason(error)}; "
                f"{checkpoint.last_good(self.folder)}; mend that, such as by making room, then go on with --resume"
            ) from error
        for show in self.shown_to:
            show(self.metrics.records[-1])


def train_step(trained: Learner, batch: np.ndarray, step: int, config: TrainConfig) -> Record:
    """One update from batch int64 [accumulate, B, S + 1]; returns its record.

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
        **trained.said,
    }


def validate(trained: Learner, batches: np.ndarray, step: int) -> float:
    """Mean loss over batches int64 [n, B, S + 1], in nats a token.

    Raises: NonFiniteError if it is not finite.
    """
    mean = trained.loss(batches)
    if not math.isfinite(mean):
        where = trained.first_output(batches)
        raise NonFiniteError(f"stopped at step {step}: the validation loss is {mean}; {where}")
    return mean


def validation(trained: Learner, batches: np.ndarray, step: int) -> Record:
    """The record of `validate`."""
    return {"step": step, "validation_loss": validate(trained, batches, step), **trained.said}


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def folder_of(config: TrainConfig) -> Path:
    """The run's folder: `config.out`, or a name made of what distinguishes a run."""
    framework = "" if config.framework == "torch" else f"-{config.framework}"
    optimizer = "" if config.optimizer == TORCH else f"-{config.optimizer}"
    name = f"{config.model}-{recipe_name.folder(config.recipe)}{framework}{optimizer}-seed{config.seed}"
    return Path(config.out) if config.out else Path("runs") / name


def check_folder(folder: Path, resume: bool) -> None:
    """Raise a ValueError if a folder has the name of one of the run's files, or a run would be written over."""
    files.check_places(folder, FILES)
    has_run = bool(read(folder / "metrics.jsonl") or checkpoint.all_in(folder))
    if has_run and not resume:
        raise ValueError(f"{folder} already holds a run; go on with it by --resume, or give another --out")
    if resume and not (folder / "config.toml").exists():
        raise ValueError(f"{folder} holds no run to resume; give the run's folder with --out")


def see(folder: Path, ranks: ProcessGroup, timeout: int) -> None:
    """Raise a ValueError on ranks that do not see the folder of the first one, into which all will write."""
    end = time.monotonic() + min(LATE, timeout / 2 or LATE)
    while not files.marked(folder):
        if time.monotonic() > end:
            raise ValueError(
                f"this rank does not see the folder {folder.absolute()} that the first one has made; give --out on a "
                "disk that all ranks share, and start them in one folder"
            )
        time.sleep(0.1)
    ranks.wait()  # so that no rank goes on before all have looked


def prepare(folder: Path, config: TrainConfig, tokens: TokenizedText) -> None:
    """Make the run's folder, with what it takes to run it again."""
    files.write(folder / "config.toml", to_toml(replace(config, out=str(folder))))
    if tokens.tokenizer is not None:
        files.write(folder / "tokenizer.json", tokens.tokenizer.to_str(pretty=True))
