"""Progress without a terminal: a line every few steps, for a log that is read during the run."""

from collections.abc import Callable, Sequence

from quaver.train.metrics import Record

#: Approximate number of lines per run.
PROGRESS_LINES = 20


def format_step(record: Record, parts: Sequence[str] = ()) -> str:
    """Format a step's loss and speed, and the current recipe if the run changes its recipe.

    Args:
        record: record of a training step.
        parts: recipes of a run that changes its recipe.
    """
    text = f"loss {record['loss']:.3f}  {record['tokens_per_second']:>8,.0f} tokens/s"
    if 0 < record.get("part", 0) <= len(parts):
        text += f"  {parts[record['part'] - 1]}"
    return text


def time_left(seconds: float, done: int, total: int) -> str:
    """Return the estimated remaining time as text; "" before the first step and after the last.

    Args:
        seconds: time that the completed steps took.
        done: completed steps.
        total: all steps.
    """
    if not done or done >= total:
        return ""
    left = seconds * (total - done) / done
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {max(left, 1):.0f} s left"


class ProgressLines:
    """Print lines for a run's first and last step, for about PARTS steps in between, and when the recipe changes.

    Args:
        label: name of the run before each line; "" for none.
        steps: number of steps of the run.
        say: prints a line.
        parts: recipes of a run that changes its recipe.
        left: returns the remaining time of all runs as text.
    """

    def __init__(
        self,
        label: str,
        steps: int,
        say: Callable[[str], None],
        parts: Sequence[str] = (),
        left: Callable[[], str] = lambda: "",
    ) -> None:
        self.label = label
        self.steps = steps
        self.say = say
        self.parts = parts
        self.left = left
        self.part: int | None = None
        self.every = max(1, steps // PROGRESS_LINES)
        self.shown = 0
        self.due = 1

    def __call__(self, record: Record) -> None:
        """Print the record of a training step if it is due; records seen before are ignored."""
        step, part = record["step"], record.get("part")
        changed = self.part is not None and part != self.part
        if step <= self.shown or (step < self.due and step != self.steps and not changed):
            return
        self.shown, self.due, self.part = step, (step // self.every + 1) * self.every, part
        label, left = f"{self.label}: " if self.label else "", self.left()
        shown = f"{label}step {step} of {self.steps}  {format_step(record, self.parts)}"
        self.say(f"{shown}  {left}" if left else shown)
