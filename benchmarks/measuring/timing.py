"""Timing things against each other: interleaved in one process, medians of the ratios of each round.

A ratio compares two times taken within the same fraction of a second, so that a machine that is slow for a while is
slow for both; the median over rounds drops what was interrupted. What is counted is the processor's time: with one
thread it is the clock's on an idle machine, and it does not run while others have the core. With several threads it is
the clock's, and nothing else may run.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Step = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Timing of one subject."""

    #: Median seconds of one step.
    seconds: float
    #: Median over rounds of its time over the first subject's in that round.
    ratio: float


def interleave(subjects: Mapping[str, Step], *, rounds: int, steps: int) -> dict[str, Timing]:
    """Time every subject in every round, alternately in forward and backward order.

    Args:
        subjects: by name, the baseline first; each call is one step.
        rounds: how often each is timed, after one round that is not counted.
        steps: timed in one go, after one step that is not: what another subject left in the caches costs it nothing.
    """
    times: dict[str, list[float]] = {name: [] for name in subjects}
    with no_collection():
        for number in range(rounds + 1):
            order = list(subjects.items())
            for name, step in order if number % 2 else reversed(order):
                seconds = stopwatch(step, steps)
                if number:
                    times[name].append(seconds)
            gc.collect()
    baseline = next(iter(times.values()))
    return {
        name: Timing(statistics.median(own), statistics.median(a / b for a, b in zip(own, baseline, strict=True)))
        for name, own in times.items()
    }


def interleave_with_first(subjects: Mapping[str, Step], *, rounds: int, steps: int) -> dict[str, Timing]:
    """Like `interleave`, but time the first subject right before and right after each of the others.

    A ratio is relative to the mean of these two times. This is for short steps, whose times may change by half within
    a tenth of a second because of caches and other processes. The first subject's own ratio is 1.
    """
    (first, baseline), *others = subjects.items()
    times: dict[str, list[float]] = {name: [] for name in subjects}
    ratios: dict[str, list[float]] = {name: [] for name in subjects}
    with no_collection():
        for number in range(rounds + 1):
            before = stopwatch(baseline, steps)
            for name, step in others if number % 2 else reversed(others):
                seconds, after = stopwatch(step, steps), stopwatch(baseline, steps)
                if number:
                    times[name].append(seconds)
                    times[first].append(after)
                    ratios[name].append(2 * seconds / (before + after))
                before = after
            gc.collect()
    ratios[first] = [1.0]
    return {name: Timing(statistics.median(own), statistics.median(ratios[name])) for name, own in times.items()}


def stopwatch(step: Step, steps: int) -> float:
    """Return the seconds of one step: CPU time with one thread, else wall-clock time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    step()
    begun = clock()
    for _ in range(steps):
        step()
    return (clock() - begun) / steps


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Context in which torch uses this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage between rounds only, and then only what has come since; what was frozen before stays so."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
