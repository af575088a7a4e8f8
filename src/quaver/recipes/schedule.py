"""Schedules: the recipe of each step of a run, with phases ending by step, share of steps, loss or learning rate.

    schedule = {recipe " until " end ","} recipe
    end      = STEP | SHARE "%" | "loss<" NATS | "lr<" SHARE "%"
    recipe   = NAME | NAME "(" option "=" value {"," option "=" value} ")"

`nvfp4 until 85%, bf16` trains 85 % of the steps in NVFP4 and the rest in bf16. A phase ends in one of these ways:

    until 1000      step 1000 is its last; steps count from 1, over the whole run
    until 85%       this share of the run's steps, rounded down, is its last step
    until loss<1.9  the mean of the training losses of the last `SMOOTHED` steps is below 1.9
    until lr<10%    the learning rate has fallen below 10 % of its peak; the warm-up does not count

Source: following the learning rate is the idea of github.com/Azure/MS-AMP, issue 99; switching to bf16 for the last
part of an NVFP4 training is that of arXiv:2509.25149.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from quaver.recipes.spec import Recipe
from quaver.recipes.text import end_of, pieces, shown

#: Number of steps over which `loss<` averages; no phase ends by its loss before that many steps.
SMOOTHED = 20
#: Maximum number of phases.
MOST = 100
#: Syntax of each kind of end.
FORMS = {
    "step": re.compile(r"([0-9]{1,18})"),
    "share": re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?%"),
    "loss": re.compile(r"loss ?< ?([0-9]{1,9}(?:\.[0-9]{1,18})?)"),
    "lr": re.compile(r"lr ?< ?([0-9]{1,9}(?:\.[0-9]{1,9})?) ?%"),
}
ENDS = "until STEP, until SHARE%, until loss<NATS or until lr<SHARE%"


@dataclass(frozen=True)
class ScheduleEnd:
    """End of a phase of a schedule."""

    #: Key of `FORMS`.
    kind: str
    #: A step, nats, or a share of the run's steps or of the peak learning rate.
    value: Fraction
    #: Text as written, without `until`.
    text: str

    def last(self, steps: int | None) -> int | None:
        """Return the phase's last step if it is known before the run; None if loss or learning rate decide."""
        if self.kind == "step":
            return int(self.value)
        return math.floor(self.value * steps) if self.kind == "share" and steps is not None else None


@dataclass(frozen=True)
class SchedulePhase:
    """One recipe of a schedule and its end; the last phase has no end."""

    recipe: Recipe
    #: Text as written.
    text: str
    end: ScheduleEnd | None = None


def read(text: str, find: Callable[[str], Recipe]) -> tuple[SchedulePhase, ...]:
    """Parse the phases of a schedule; a single recipe is a schedule of one phase.

    Args:
        find: returns the recipe of a text.

    Raises:
        ValueError: the text cannot be read; the message says what to write.
    """
    every = pieces(text)
    if len(every) > MOST:
        raise ValueError(f"recipe {shown(text)} has {len(every)} parts; give at most {MOST}")
    parts = []
    for number, piece in enumerate(every, 1):
        name, end = end_of(piece)
        if not name:
            raise ValueError(f"recipe {shown(text)} has a part without a recipe; write one as 'nvfp4 until 85%, bf16'")
        if number < len(every) and end is None:
            raise ValueError(
                f"recipe {shown(text)} has {len(every)} parts and does not say where {shown(piece)} ends: each but the "
                f"last has {ENDS}, as in 'nvfp4 until 85%, bf16'"
            )
        if number == len(every) and end is not None:
            raise ValueError(
                f"recipe {shown(text)} does not say what follows {shown(piece)}; write the recipe of the steps after "
                "it, as in 'nvfp4 until 85%, bf16'"
            )
        parts.append(SchedulePhase(find(name), name, None if end is None else end_from(end, text)))
    return tuple(parts)


def end_from(ending: str, text: str) -> ScheduleEnd:
    """Parse `ending`, the text after `until`. Raises ValueError if it is not an end."""
    for kind, form in FORMS.items():
        if written := form.fullmatch(ending):
            value = Fraction(written[1])
            if kind in ("share", "lr"):
                value /= 100
                if not 0 < value < 1:
                    raise ValueError(f"recipe {shown(text)}: 'until {ending}' is a share; give one between 0% and 100%")
            if not value:
                raise ValueError(f"recipe {shown(text)}: 'until {ending}' ends before the first step; give more")
            return ScheduleEnd(kind, value, ending)
    raise ValueError(f"recipe {shown(text)}: {shown('until ' + ending)} is no end of a part; write {ENDS}")


class Schedule:
    """Recipe of each step of a run; `quaver.recipes.schedule` creates one from text.

        schedule = quaver.recipes.schedule("nvfp4 until loss<1.9, bf16")
        for step in range(1, steps + 1):
            with qt.autocast(schedule.at(step)):
                loss = ...
            schedule.record_loss(loss.item())

    A finished phase does not come back; one whose end has already passed is skipped. The result depends only on the
    arguments of `at` and `record_loss`, so ranks that pass the same values get the same recipes.

    Args:
        parts: phases in order.
        steps: total number of steps; needed for shares of it.
        peak: highest learning rate; needed for ends by learning rate.

    Raises:
        ValueError: a phase needs a missing argument, or would have no step.

    Attributes:
        part: index of the current phase.
    """

    def __init__(self, parts: Sequence[SchedulePhase], *, steps: int | None = None, peak: float | None = None) -> None:
        self.parts, self.steps, self.peak = tuple(parts), steps, peak
        _check(self.parts, steps, peak)
        self.part = 0
        #: Last step passed to `at`, and whether its loss was passed to `record_loss`.
        self._step, self._loss_seen = 0, True
        #: Highest learning rate so far, and the losses of the last steps.
        self._highest = 0.0
        self._losses: tuple[float, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """Current recipe."""
        return self.parts[self.part].recipe

    @property
    def by_loss(self) -> bool:
        """True if a phase ends by loss; then call `record_loss` once per step, on all ranks with the same number."""
        return any(part.end is not None and part.end.kind == "loss" for part in self.parts)

    @property
    def text(self) -> str:
        """The schedule as text."""
        return ", ".join(p.text if p.end is None else f"{p.text} until {p.end.text}" for p in self.parts)

    def at(self, step: int, *, lr: float | None = None) -> Recipe:
        """Return the recipe of a step; call it once per step, in order, before the forward.

        Args:
            step: counted from 1.
            lr: learning rate of this step; needed if a phase ends by it.

        Raises:
            ValueError: the step was passed before, or the learning rate or loss that a phase ends by is missing.
        """
        if step <= self._step:
            raise ValueError(
                f"at() was called for step {self._step}, and now for {step}; call it once per step, in order"
            )
        if self.by_loss and not self._loss_seen:
            raise ValueError(f"the loss of step {self._step} is missing: call record_loss(loss) after each step")
        self._step, self._loss_seen = step, False
        if lr is not None:
            self._highest = max(self._highest, float(lr))
        while (end := self.parts[self.part].end) is not None and self._is_over(end, step, lr):
            self.part += 1
        return self.recipe

    def record_loss(self, loss: float) -> None:
        """Pass the training loss, in nats, of the last step passed to `at`."""
        self._loss_seen = True
        if self.by_loss:
            self._losses = (*self._losses, float(loss))[-SMOOTHED:]

    def _is_over(self, end: ScheduleEnd, step: int, lr: float | None) -> bool:
        last = end.last(self.steps)
        if last is not None:
            return step > last
        if end.kind == "loss":
            return len(self._losses) == SMOOTHED and math.fsum(self._losses) / SMOOTHED < end.value
        if lr is None:
            raise ValueError(f"'until {end.text}' needs each step's learning rate: give at(step, lr=...)")
        assert self.peak is not None
        bound = float(end.value) * self.peak
        return lr < bound <= self._highest

    def state_dict(self) -> dict[str, Any]:
        """Return the state after a step for `load_state_dict`, as numbers that JSON preserves."""
        return {"part": self.part, "step": self._step, "highest_lr": self._highest, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`. Raises ValueError if it is not a state of this schedule."""
        part, losses = state.get("part"), state.get("losses")
        numbers = [state.get("step"), state.get("highest_lr"), *(losses if isinstance(losses, Sequence) else [None])]
        if type(part) is not int or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"the state of a schedule is {shown(dict(state))}, which is not from state_dict()")
        if not 0 <= part < len(self.parts):
            raise ValueError(f"the state is of part {part + 1}, and {self.text!r} has {len(self.parts)}")
        self.part, self._step, self._loss_seen = part, state["step"], True
        self._highest, self._losses = state["highest_lr"], tuple(state["losses"])


def _check(parts: Sequence[SchedulePhase], steps: int | None, peak: float | None) -> None:
    """Raise ValueError if a phase would have no step, or needs a missing argument."""
    before, before_text = 0, ""
    for part, after in pairwise(parts):
        end = part.end
        assert end is not None
        if end.kind == "share" and steps is None:
            raise ValueError(f"'until {end.text}' is a share of a run's steps; give steps=")
        if end.kind == "lr" and not (peak and 0 < peak < math.inf):
            raise ValueError(f"'until {end.text}' is a share of the highest learning rate; give peak=, above 0")
        last = end.last(steps)
        if last is None:
            continue
        if last <= before:
            why = f"which is not after {before_text}" if before_text else f"and there are {steps} steps"
            raise ValueError(
                f"'{part.text} until {end.text}' has no step: it ends with step {last}, {why}; give a later end"
            )
        if steps is not None and last >= steps:
            raise ValueError(
                f"'{part.text} until {end.text}' leaves no step for {after.text!r}: it ends with step {last}, and "
                f"there are {steps}; give an earlier end, or more steps"
            )
        before, before_text = last, f"step {last}, where '{part.text} until {end.text}' ends"
