"""Run the cases of a section in this process, each reported as a line of JSON. A dry run, which times nothing and
interprets each kernel on one core, uses forked processes."""

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
    """Outcome of a case."""

    case: str
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def begins(self) -> bool:
        """True if this only reports that the case begins."""
        return not self.seconds and not self.failures

    def line(self) -> str:
        figures = [[f.subject, f.column, f.value, f.unit] for f in self.figures]
        return json.dumps({"case": self.case, "seconds": self.seconds, "figures": figures, "failures": self.failures})


def read(line: str) -> Done:
    """Parse the text of `Done.line`."""
    fields: dict[str, Any] = json.loads(line)
    fields["figures"] = [Figure(*figure) for figure in fields["figures"]]
    return Done(**fields)


def run(
    section: Section, setting: Setting, deadline: float, skip: Collection[str], tell: Callable[[Done], None]
) -> None:
    """Measure a section's cases.

    Args:
        deadline: in time.monotonic(); cases that have not begun by then are reported as not measured.
        skip: names of cases that are done.
        tell: called with each case when it begins (no seconds) and when it is done.
    Raises:
        GpuLost: a case broke the context; it has been reported.
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
    """Run one case and catch its errors; return also the error if it broke the GPU's context."""
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
        except GpuLost as gpu_error:
            lost = gpu_error
    if lost is None:
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()
    # 0 seconds would mean that the case begins.
    seconds = max(round(time.perf_counter() - begun, 3), 1e-3)
    return Done(case.name, seconds, findings.figures, findings.failures), lost


@contextmanager
def walked(sections: Sequence[Section], setting: Setting, processes: int) -> Iterator[Mapping[str, Iterable[Done]]]:
    """Yield an iterator of each section's finished cases, in order; {} if the caller has to measure them itself."""
    if processes < 2:
        yield {}
        return
    # A fork has the imported modules but no threads of libraries; none runs yet.
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
    """Run one case of a section."""
    section, reports = SECTIONS[name], list[Done]()
    others = [other.name for other in section.cases(setting) if other.name != case]
    # The lost GPU is among the reported failures.
    with suppress(GpuLost):
        run(section, setting, math.inf, others, reports.append)
    return reports[-1]


def end_with_parent() -> None:
    """Make this process exit when its parent does, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
