"""Timing on a GPU: subjects interleaved, several calls between two events behind a spin, medians over rounds.

The spin keeps the GPU busy while the host queues the calls, so that what the events enclose is the GPU's time alone.
On a CPU, where only dry runs measure, it is the wall clock's.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.gpu.measuring.setting import Findings, Setting, check_gpu, first_line
from benchmarks.measuring.timing import Timing

#: A timed call, whose result is dropped.
Step = Callable[[], object]
#: Maximum cycles per second of a spinning GPU, and maximum seconds of spinning.
CYCLES, LONGEST = 2e9, 0.1
#: Seconds of GPU time that one stretch should take at least, and calls in it at most: a queue holds 1024 launches.
STRETCH, MOST_CALLS = 1e-3, 20


def interleave(subjects: Mapping[str, Step], setting: Setting, findings: Findings) -> dict[str, Timing]:
    """Time every subject in every round, alternately in forward and backward order.

    Args:
        subjects: by name, the baseline first.
        setting: the device and the number of rounds.
        findings: subjects that fail are named in its failures, and left out of the result.
    Returns:
        Seconds of one call, and the median over rounds of the ratio to the baseline, NaN where that failed.
    """
    stretches: dict[str, Callable[[], float]] = {}
    for name, step in subjects.items():
        with blamed(name, setting, findings):
            stretches[name] = prepare(step, setting)
    times: dict[str, list[float]] = {name: [] for name in stretches}
    gc.collect()
    for number in range(setting.rounds):
        order = list(stretches)
        for name in order if number % 2 else reversed(order):
            with blamed(name, setting, findings):
                times[name].append(stretches[name]())
            if len(times[name]) <= number:
                del stretches[name], times[name]
    first = times.get(next(iter(subjects)))
    return {name: Timing(statistics.median(own), ratio(own, first)) for name, own in times.items()}


@contextmanager
def blamed(name: str, setting: Setting, findings: Findings) -> Iterator[None]:
    """Note what fails inside as this subject's, and go on if the GPU still works."""
    try:
        yield
    except Exception as error:
        findings.failures.append(f"{name}: {first_line(error)}")
        check_gpu(setting)


def ratio(own: list[float], first: list[float] | None) -> float:
    """Median over rounds."""
    return float("nan") if first is None else statistics.median(a / b for a, b in zip(own, first, strict=True))


def prepare(step: Step, setting: Setting) -> Callable[[], float]:
    """Warm up, and return what takes the seconds of one call anew each time it is called."""
    if not setting.cuda or setting.hollow:
        return lambda: stretch_on_cpu(step)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    queued = time.perf_counter() - begun
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    calls = max(1, min(MOST_CALLS, round(STRETCH / whole)))
    spin = int(min(LONGEST, 50e-6 + 1.5 * queued * calls) * CYCLES)
    return lambda: stretch(step, calls, spin)


def stretch(step: Step, calls: int, spin: int) -> float:
    """Return the GPU time of one of these calls in seconds."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(spin)
    begun.record()
    for _ in range(calls):
        step()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) * 1e-3 / calls


def stretch_on_cpu(step: Step) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def host_seconds(step: Step, setting: Setting, calls: int) -> float:
    """Wall-clock seconds until a call has returned, its work perhaps only queued."""
    if setting.cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        step()
    seconds = (time.perf_counter() - begun) / calls
    if setting.cuda:
        torch.cuda.synchronize()
    return seconds
