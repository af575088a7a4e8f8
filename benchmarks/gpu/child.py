"""A section in this process, its cases one after another, each as a line of JSON the moment it is done; or those of a
dry run in forked processes, since nothing is timed there and kernels are interpreted on one core each."""

import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.measuring.setting import Case, Findings, GpuLost, Section, Setting, check_gpu, first_line
from benchmarks.gpu.sections.registry import SECTIONS
from benchmarks.measuring.figure import Figure

#: Exit code of a process whose GPU context broke.
LOST = 3


@dataclass
class Done:
    """What became of a case."""

    case: str
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def begins(self) -> bool:
        """Whether this only says that the case is next."""
        return not self.seconds and not self.failures

    def line(self) -> str:
        figures = [[f.subject, f.column, f.value, f.unit] for f in self.figures]
        return json.dumps({"case": self.case, "seconds": self.seconds, "figures": figures, "failures": self.failures})


def read(line: str) -> Done:
    """What `Done.line` wrote."""
    fields: dict[str, Any] = json.loads(line)
    fields["figures"] = [Figure(*figure) for figure in fields["figures"]]
    return Done(**fields)


def run(
    section: Section, setting: Setting, deadline: float, skip: Collection[str], tell: Callable[[Done], None]
) -> None:
    """Measure a section's cases.

    Args:
        deadline: of time.monotonic; cases that have not begun by then are told as not measured.
        skip: names of cases that are done.
        tell: called with each case when it begins (no seconds) and when it is done.
    Raises:
        GpuLost: after the case that broke the context has been told.
    """
    for case in section.cases(setting):
        if case.name in skip:
            continue
        if time.monotonic() > deadline:
            tell(Done(case.name, 0.0, [], [f"{case.name}: not measured: the section's time was up"]))
            continue
        tell(Done(case.name))
        done, lost = measure(case, setting)
        tell(done)
        if lost is not None:
            raise lost


def measure(case: Case, setting: Setting) -> tuple[Done, GpuLost | None]:
    """One case, whatever it does, and whether the GPU survived it."""
    begun = time.perf_counter()
    findings = Findings()
    lost: GpuLost | None = None
    try:
        case.measure(setting, findings)
        check_gpu(setting)
    except GpuLost as error:
        lost = error
        findings.failures.append(f"{case.name}: broke the GPU's context: {error}")
    except Exception as error:
        traceback.print_exc()
        findings.failures.append(f"{case.name}: failed: {first_line(error)}")
        try:
            check_gpu(setting)
        except GpuLost as gone:
            lost = gone
    if lost is None:
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()
    # No seconds would say that it begins.
    seconds = max(round(time.perf_counter() - begun, 3), 1e-3)
    return Done(case.name, seconds, findings.figures, findings.failures), lost


@contextmanager
def walked(sections: Sequence[Section], setting: Setting, processes: int) -> Iterator[Mapping[str, Iterable[Done]]]:
    """By section, its cases in their order, each when it is done; {} where the caller is to measure them."""
    if processes < 2:
        yield {}
        return
    # What is imported is there; a thread of a library would not be, and none runs yet.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, end_with_parent) as pool:
        begun = {
            section.name: [pool.submit(dry, section.name, case.name, setting) for case in section.cases(setting)]
            for section in sections
        }
        try:
            yield {name: (case.result() for case in cases) for name, cases in begun.items()}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def dry(name: str, case: str, setting: Setting) -> Done:
    """One case of a section."""
    section, kernel_args = SECTIONS[name], list[Done]()
    others = [other.name for other in section.cases(setting) if other.name != case]
    # What is lost is among what was told.
    with suppress(GpuLost):
        run(section, setting, math.inf, others, kernel_args.append)
    return kernel_args[-1]


def end_with_parent() -> None:
    """Have this process end when the one that forked it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
