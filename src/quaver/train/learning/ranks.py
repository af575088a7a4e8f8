"""The processes of one run, in no framework's terms: who this one is, and what they settle between them.

torchrun, or a scheduler in its place, says it in the environment: RANK, WORLD_SIZE and LOCAL_RANK.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol


class Told(Exception):
    """The run ends, and another rank has said why."""


class OnRank(ValueError):
    """What a rank that is not the first has met, and no other: its number stands before the sentence."""


class Ranks(Protocol):
    """The ranks of a run as the loop sees them."""

    @property
    def number(self) -> int:
        """How many there are."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and shows progress."""

    def wait(self) -> None:
        """Go on once every rank has come here."""

    def largest(self, value: int) -> int:
        """The largest of every rank's."""

    def given(self, value: Any) -> Any:
        """What the first rank gives; small, of Python's own types."""

    def at(self, step: int, phase: str) -> None:
        """Say where this rank is, for those that wait for it."""

    def done(self) -> Mapping[str, float]:
        """What ranks did since `at`, for a record: their seconds, which is the slowest, what they sent."""


class Alone:
    """A run of a single process."""

    number = 1
    first = True

    def wait(self) -> None:
        pass

    def largest(self, value: int) -> int:
        return value

    def given(self, value: Any) -> Any:
        return value

    def at(self, step: int, phase: str) -> None:
        pass

    def done(self) -> Mapping[str, float]:
        return {}


def same(ranks: Ranks, what: str, value: Any) -> None:
    """Raise a ValueError on the ranks whose value is not the first one's."""
    first = ranks.given(value)
    if value != first:
        raise ValueError(f"this rank has {what} {value!r}, and the first one {first!r}; give every rank the same")
    ranks.wait()  # so that no rank goes on before all have looked


def rank() -> int:
    """This process's number as the environment says it; 0 where it says nothing."""
    return _of_environment("RANK", 0) if "WORLD_SIZE" in os.environ else 0


def speaks() -> bool:
    """Whether this process says what it has met before the ranks have: the first of each machine, which has its own."""
    return rank() == 0 or _of_environment("LOCAL_RANK", 0) == 0


def world() -> int:
    """How many processes the environment speaks of: 1 where it says nothing."""
    return _of_environment("WORLD_SIZE", 1) if "RANK" in os.environ else 1


def _of_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"the variable {name} is {text!r}, which is no number; start the ranks by torchrun")
    return int(text)
