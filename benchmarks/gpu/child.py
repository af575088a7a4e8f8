"""One section in this process: its cases one after another, each as a line of JSON the moment it is done."""

import gc
import json
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.measuring.setting import Case, Findings, GpuLost, Section, Setting, check_gpu, first_line
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
