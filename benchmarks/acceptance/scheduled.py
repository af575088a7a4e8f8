"""`python -m benchmarks accept-schedule`: does a run that ends in bf16 end nearer bf16 than its recipe alone?

A schedule's run is its first recipe's, bit for bit, until it changes, and goes on from that one's checkpoint here
(tests/train/test_switching.py compares). Two null models show chance: bf16 nudged at the beginning, and the recipe
nudged where the schedule changes. The schedule is judged against the second: both have the same first part.

The rule is about means, since single seeds scatter: the mean by which the schedule ends nearer must be 2 of its
standard errors or more, and above the magnitude of that null model's mean shift and 2 of its standard errors together.
"""

from typing import Any

from benchmarks.acceptance.command import Plan
from benchmarks.acceptance.report import BASELINE, Acceptance, by_seed, mean_of
from benchmarks.acceptance.training import NUDGE, NULL
from quaver.comparison.results import paired
from quaver.train import config

ALONE, SCHEDULE, LATE = "nvfp4", "nvfp4 until 85%, bf16", "null at the change"


def plan(steps: int = 300, seeds: int = 3, first: int = 0, model: str = "tiny", **options: Any) -> Plan:
    """Return the plan of the schedule. Raises: ValueError for seeds that have no standard error, or too few steps."""
    if seeds < 2:
        raise ValueError(f"seeds is {seeds}, of which there is no standard error; give 2 or more")
    end = config.parse_phases(SCHEDULE)[0].end
    last = None if end is None else end.last(steps)
    if not last:
        raise ValueError(f"{SCHEDULE!r} does not say after which of {steps} steps it changes; give more")
    variants: dict[str, dict[str, Any]] = {
        ALONE: {"keep": last},
        SCHEDULE: {"after": ALONE},
        NULL: {"recipe": BASELINE, "nudge": NUDGE},
        LATE: {"recipe": ALONE, "nudge": NUDGE, "after": ALONE},
    }
    # Results of later seeds do not replace those of the first ones.
    name = f"accept-schedule-from-seed-{first}" if first else "accept-schedule"
    own = {"recipes": (BASELINE, *variants), "variants": variants, "rules": {}, "verdict": verdict, "name": name}
    return Plan(steps=steps, seeds=seeds, first=first, model=model, **own | options)


def verdict(done: Acceptance) -> tuple[bool, str]:
    """Return whether the schedule ends nearer bf16 than its recipe alone, beyond chance."""
    alone, scheduled = (done.differences(row, BASELINE) for row in (ALONE, SCHEDULE))
    nearer = tuple(abs(a) - abs(s) for a, s in zip(alone, scheduled, strict=True))
    mean, error = paired(nearer)
    shift, scatter = paired(done.differences(LATE, ALONE))
    if mean is None or error is None or shift is None or scatter is None:
        return False, "Too few runs have ended."
    chance = abs(shift) + 2 * scatter
    return mean >= 2 * error and mean > chance, (
        f"`{SCHEDULE}` ends nearer bf16 than `{ALONE}` by {mean_of(nearer)} nats (by seed {by_seed(nearer)}). Rule: in "
        f"the mean by 2 standard errors, and by more than `{LATE}` is off in the mean and 2 of its standard errors, "
        f"{chance:.4f}. It has {ALONE}'s weights of that step, moved by {NUDGE:g} at most."
    )
