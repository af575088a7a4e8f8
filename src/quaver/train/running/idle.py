"""Options that have no effect in a run as it is configured: each is said in a sentence, since nothing else shows it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from quaver.core.text.given import shown
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.optimizer_name import find
from quaver.train.data import frozen

#: By option, what says why it has no effect on so many ranks, or "".
IDLE: Mapping[str, Callable[[TrainConfig, int], str]] = {
    # A comparison has read its text and learnt its tokens before.
    "vocab": lambda config, ranks: (
        f"tokens is {shown(config.tokens)}, which learns none"
        if config.tokens != "bpe" and not frozen.is_one(config.text)
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
