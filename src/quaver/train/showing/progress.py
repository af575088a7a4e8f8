"""Progress where there is no terminal: a line every so many steps, for a log that is read while the run goes on."""

from collections.abc import Callable, Sequence

from quaver.train.records.metrics import Record

#: Lines of a run, about.
PARTS = 20


def numbers(record: Record, parts: Sequence[str] = ()) -> str:
    """What a step says: its loss and speed, and of a run whose recipe changes the one in force.

    Args:
        parts: the recipes of such a run.
    """
    said = f"loss {record['loss']:.3f}  {record['tokens_per_second']:>8,.0f} tokens/s"
    if 0 < record.get("part", 0) <= len(parts):
        said += f"  {parts[record['part'] - 1]}"
    return said + among_ranks(record) if "communication" in record else said


def among_ranks(record: Record) -> str:
    """What a step of several ranks says beside its loss: what a rank sends, how long it waits, which one is slowest."""
    sent = sum(size for name, size in record.items() if name.startswith("bytes_"))
    share, slowest = record["communication"], record["slowest_rank"]
    return f"  {share:.0%} communication, {sent / 1e6:,.1f} MB a rank, rank {slowest} slowest"


def time_left(seconds: float, done: int, total: int) -> str:
    """How long the rest takes, as text; "" before anything is done.

    Args:
        seconds: that the steps done so far took.
    """
    if not done or done >= total:
        return ""
    left = seconds * (total - done) / done
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {max(left, 1):.0f} s left"


class Lines:
    """Says a run's first step that it sees, its last, one in so many between them, and the first under another recipe.

    Args:
        label: of the run, before each line; "" for none.
        steps: of the run in all.
        say: takes a line.
        parts: the recipes of a run that changes its own.
        left: gives the time that all runs still take, as text.
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
        self.every = max(1, steps // PARTS)
        self.shown = 0
        self.due = 1

    def __call__(self, record: Record) -> None:
        """A record of a training step; one that was seen before says nothing."""
        step, part = record["step"], record.get("part")
        changed = self.part is not None and part != self.part
        if step <= self.shown or (step < self.due and step != self.steps and not changed):
            return
        self.shown, self.due, self.part = step, (step // self.every + 1) * self.every, part
        label, left = f"{self.label}: " if self.label else "", self.left()
        shown = f"{label}step {step} of {self.steps}  {numbers(record, self.parts)}"
        self.say(f"{shown}  {left}" if left else shown)
