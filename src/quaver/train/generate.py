"""Text generation: continue a prompt with the newest checkpoint of a run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers

from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown
from quaver.train import checkpoint, frameworks, memory
from quaver.train import config as recipe_name
from quaver.train.checkpoint import SavedCheckpoint
from quaver.train.config import TORCH_ADAMW, TrainConfig, check_choice, is_plain, read_run
from quaver.train.data import open_tokenizer
from quaver.train.loop import RecipePhases
from quaver.train.memory import parameters
from quaver.train.model_config import MODELS
from quaver.train.resume import shape_errors

# ---- sampling ----


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Raises: ValueError for numbers out of range."""

    # Divisor of the logits; 0 takes the most likely token.
    temperature: float = 0.8
    # Number of most likely tokens to choose from; 0 for all.
    top_k: int = 50
    # Choose among the most likely tokens that together have this probability.
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; give 0 for the likeliest token, or a number above it")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give the number of tokens to choose from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a probability above 0 and up to 1")


def sample(logits: np.ndarray, how: Sampling, random: np.random.Generator) -> int:
    """Choose the next token.

    Args:
        logits: one row, [vocab].
        how: applied in the order temperature, top_k, top_p.
        random: used once, unless the temperature is 0.
    Raises: ValueError if a logit is NaN or none is finite.
    Exact: of equal logits the earlier token counts as more likely.
    Source: top_p is nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751.
    """
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        raise ValueError("the model's logits are not finite; its weights or its recipe's scales have overflowed")
    if how.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: how.top_k or None]
    with np.errstate(over="ignore"):  # for tiny temperatures
        weights = np.exp((logits[order] - logits[order[0]]) / how.temperature)
    below = np.cumsum(weights)
    top_count = int(np.searchsorted(below, how.top_p * below[-1])) + 1
    top_count = min(top_count, len(order))
    return int(order[np.searchsorted(below[:top_count], random.random() * below[top_count - 1], side="right")])


# ---- generation ----

#: Caches of keys and values: contiguous, paged, or none.
CACHES = ("plain", "paged", "none")
#: The token that separates files; it ends the text.
END = 0


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Generated text and its timing."""

    text: str
    tokens: tuple[int, ...]
    # True if the model ended the text itself.
    ended: bool
    # Seconds for the prompt, and seconds for all tokens after the first.
    prompt_seconds: float
    seconds: float
    # Notes for the user, one sentence each.
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        speed = f", {(len(self.tokens) - 1) / self.seconds:,.1f} tokens/s" if len(self.tokens) > 1 else ""
        ended = ", where the model ended the text" if self.ended else ""
        return f"{len(self.tokens)} tokens{speed}, the prompt in {self.prompt_seconds:.2f} s{ended}"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a run; without a tokenizer each is a byte of UTF-8."""

    tokenizer: tokenizers.Tokenizer | None

    @property
    def size(self) -> int:
        return 256 if self.tokenizer is None else int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(text.encode()) if self.tokenizer is None else list(self.tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace") if self.tokenizer is None else self.tokenizer.decode(list(ids))


def generate(
    run: Path,
    prompt: str,
    *,
    tokens: int = 200,
    how: Sampling | None = None,
    seed: int = 0,
    recipe: str = "",
    cache: str = "plain",
    device: str = "auto",
    emit: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Continue a prompt with the newest checkpoint of a run, whichever framework trained it.

    Args:
        run: folder of a run.
        prompt: text to continue.
        tokens: maximum number of new tokens; the separator of files ends the text earlier.
        how: rule that chooses tokens; None uses the defaults of `Sampling`.
        seed: seed of the choice.
        recipe: as on the command line; "" is the run's own, or that of the checkpoint if the run has several.
        cache: one of `CACHES`. If a recipe quantizes every row independently, a cache does not change the text; a
            per-tensor scale depends on the other tokens in the tensor.
        device: as `TrainConfig.device`.
        emit: called with each piece of text, in whole characters.
    Raises: ValueError for bad input, before the model is built.
    """
    config = replace(config_of(run), device=device)
    check_choice("cache", cache, CACHES)
    if not is_plain(prompt):
        raise ValueError(f"the prompt is {shown(prompt)}, which is not valid Unicode text")
    if tokens < 1:
        raise ValueError(f"tokens is {shown(tokens)}; it must be at least 1")
    if seed < 0:
        raise ValueError(f"seed is {shown(seed)}; it must be at least 0")
    how = how or Sampling()
    chosen = recipe_name.find_recipe(recipe) if recipe else saved_recipe(run, config)
    vocabulary = Vocabulary(None if config.tokens == "byte" else open_tokenizer(run / "tokenizer.json"))
    ids = vocabulary.encode(prompt)
    notes = check_length(config, len(ids), tokens)
    frameworks.check_installed("torch", "quaver generate")
    from quaver.train.torch.learner import NextTokenLogits

    saved = load_matching(newest_checkpoint(run), config, vocabulary.size)
    with memory.out_of_memory_hint("--tokens"):
        step = NextTokenLogits(config, chosen, vocabulary.size, saved, cache, len(ids) + tokens)
        with step.frozen_weights():
            return replace(_generate_tokens(step, vocabulary, ids, tokens, how, seed, emit), notes=notes)


def load_matching(path: Path, config: TrainConfig, vocab: int) -> SavedCheckpoint:
    """Load a checkpoint. Raises: CheckpointError if it is broken or its weights are those of another model."""
    saved = checkpoint.load(path, {})
    wrong: list[str] = []
    if config.optimizer == TORCH_ADAMW:  # other optimizers also save codes and bfloat16, which are checked on loading
        wrong = shape_errors("the model", saved.model, parameters(MODELS[config.model], vocab))
    if saved.state.get("model") != config.model:
        wrong = [f"it is one of {shown(saved.state.get('model'))}"]
    if wrong:
        message = f"the checkpoint of step {saved.step} does not fit {config.model}, as the run's config.toml has it"
        raise checkpoint.CheckpointError(f"{message}: {wrong[0]} ({path})")
    return saved


def _generate_tokens(
    step: Callable[[Sequence[int]], np.ndarray],
    vocabulary: Vocabulary,
    prompt: list[int],
    tokens: int,
    how: Sampling,
    seed: int,
    emit: Callable[[str], None],
) -> Generated:
    """Generate token by token: logits, choice, text."""
    random = np.random.default_rng(seed)
    begun = time.perf_counter()
    logits = step(prompt)
    prompt_seconds, begun = time.perf_counter() - begun, time.perf_counter()
    new: list[int] = []
    shown, ended = "", False
    while True:
        token = sample(logits, how, random)
        if ended := token == END:
            break
        new.append(token)
        text = vocabulary.decode(new)
        if not text.endswith("\ufffd"):  # else a character is incomplete
            emit(text[len(shown) :])
            shown = text
        if len(new) == tokens:
            break
        logits = step([token])
    seconds = time.perf_counter() - begun
    text = vocabulary.decode(new)
    emit(text[len(shown) :])
    return Generated(text=text, tokens=tuple(new), ended=ended, prompt_seconds=prompt_seconds, seconds=seconds)


def config_of(run: Path) -> TrainConfig:
    """Return the options of a run. Raises: ValueError if the folder has no run, or no checkpoint yet."""
    path = run / "config.toml"
    if not path.exists():
        raise ValueError(f"{run} holds no run; give the folder that quaver train wrote, such as runs/tiny-bf16-seed0")
    config = TrainConfig(**read_run(path))
    newest_checkpoint(run)
    return config


def saved_recipe(run: Path, config: TrainConfig) -> Recipe:
    """Return the recipe under which a run's newest checkpoint was saved."""
    precision = RecipePhases(config)
    precision.resume_from(checkpoint.read_state(newest_checkpoint(run)))
    return precision.recipe


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run. Raises: ValueError if there is none."""
    path = checkpoint.latest(run)
    if path is None:
        raise ValueError(f"the run {run} has no checkpoint yet; train it on with: quaver train --out {run} --resume")
    return path


def check_length(config: TrainConfig, prompt: int, tokens: int) -> tuple[str, ...]:
    """Check the lengths of prompt and text; returns notes for the user. Raises: ValueError if they do not fit
    the model.
    """
    positions = max(MODELS[config.model].positions, config.sequence)
    if prompt == 0:
        raise ValueError("the prompt is empty; give some text to go on from with --prompt")
    if prompt >= positions:
        raise ValueError(f"the prompt has {prompt} tokens, and {config.model} takes {positions} in all; shorten it")
    if prompt + tokens > positions:
        buffer = positions - prompt
        raise ValueError(
            f"after {prompt} of {positions} tokens {shown(tokens)} more do not fit; give --tokens {buffer} or fewer"
        )
    if prompt + tokens <= config.sequence:
        return ()
    return (f"the model was trained on {config.sequence} tokens at a time, and has not seen longer sequences",)
