"""The training loop, to be read from top to bottom: set up, step, validate, save, stop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quaver.core.spec import Recipe
from quaver.train.configuration import memory, recipe_name
from quaver.train.configuration.config import TrainConfig, reason, to_toml
from quaver.train.configuration.optimizer_name import TORCH
from quaver.train.configuration.schedule import lr_at
from quaver.train.data.batches import training_batch, validation_batches
from quaver.train.data.tokens import Tokens, load
from quaver.train.files import lock, whole_file
from quaver.train.learning import frameworks
from quaver.train.learning.learner import Learner
from quaver.train.learning.nonfinite import NonFiniteError
from quaver.train.learning.ranks import Ranks, rank, same, world
from quaver.train.records import checkpoint, trackers
from quaver.train.records.checkpoint import CheckpointError
from quaver.train.records.metrics import Metrics, Record, losses, read, validation_losses
from quaver.train.records.trackers import Tracker
from quaver.train.running import idle
from quaver.train.running.interrupt import Interrupt, Interrupted
from quaver.train.running.precision import Precision
from quaver.train.running.resuming import FORM, STATES, keeps_codes, take_up
from quaver.train.running.saving import Saver

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
        idle.say(config, world())
    with (
        frameworks.joined(config, precision.recipe) as ranks,
        memory.told("--batch, --accumulate, --sequence or --model"),
    ):
        return as_rank(ranks, config, precision, resume, watch)


def as_rank(
    ranks: Ranks,
    config: TrainConfig,
    precision: Precision,
    resume: bool | Literal["auto"],
    watch: Callable[[Record], None],
) -> TrainResult:
    """A run as one of its ranks sees it; the first alone holds the folder and writes into it."""
    folder = folder_of(config)
    with lock.held(folder, "training") if ranks.first else nullcontext():
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
            log: Log | Silent = Silent()
            if ranks.first:
                metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", start))
                log = Log(metrics, stack.enter_context(trackers.opened(folder, config, metrics.records)), watch)
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
    tokens: Tokens,
    config: TrainConfig,
    facts: dict[str, Any],
    start: int,
    ranks: Ranks,
    log: "Log | Silent",
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


class Log:
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
    whole_file.check_places(folder, FILES)
    has_run = bool(read(folder / "metrics.jsonl") or checkpoint.all_in(folder))
    if has_run and not resume:
        raise ValueError(f"{folder} already holds a run; go on with it by --resume, or give another --out")
    if resume and not (folder / "config.toml").exists():
        raise ValueError(f"{folder} holds no run to resume; give the run's folder with --out")


def see(folder: Path, ranks: Ranks, timeout: int) -> None:
    """Raise a ValueError on ranks that do not see the folder of the first one, into which all will write."""
    end = time.monotonic() + min(LATE, timeout / 2 or LATE)
    while not lock.marked(folder):
        if time.monotonic() > end:
            raise ValueError(
                f"this rank does not see the folder {folder.absolute()} that the first one has made; give --out on a "
                "disk that all ranks share, and start them in one folder"
            )
        time.sleep(0.1)
    ranks.wait()  # so that no rank goes on before all have looked


def prepare(folder: Path, config: TrainConfig, tokens: Tokens) -> None:
    """Make the run's folder, with what it takes to run it again."""
    whole_file.write(folder / "config.toml", to_toml(replace(config, out=str(folder))))
    if tokens.tokenizer is not None:
        whole_file.write(folder / "tokenizer.json", tokens.tokenizer.to_str(pretty=True))
