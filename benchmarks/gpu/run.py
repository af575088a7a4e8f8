"""The sections one after another, in a process beside this one, as far as time allows; then the report.

A kernel that never returns is killed with that process, one that breaks the GPU's context ends it; either is named, and
a new process goes on with the next case.
"""

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from benchmarks.gpu import child, report
from benchmarks.gpu.child import Done
from benchmarks.gpu.measuring import card
from benchmarks.gpu.measuring.setting import GpuLost, Section
from benchmarks.gpu.options import Options
from benchmarks.gpu.sections.registry import SECTIONS
from benchmarks.measuring.figure import Case as Table
from benchmarks.measuring.figure import Result
from quaver.recipes.text import suggest

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds that a process may go on after its deadline before it is killed.
GRACE = 15.0
#: Begins the lines of a process that are meant for this one; libraries print too.
MARK = "benchmarks.gpu: "
#: After MARK: the section has ended.
END = "end"


def chosen(names: Iterable[str]) -> list[Section]:
    """Return the sections with these names, in this order, or all. Raises: ValueError for an unknown one."""
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"no section {name!r}; {suggest(name, SECTIONS)}")
    return [SECTIONS[name] for name in dict.fromkeys(names) or SECTIONS]


def run(options: Options, say: Callable[[str], None] = print) -> list[Result]:
    """Measure and print all sections, and write the results so far after each one."""
    sections = chosen(options.only)
    setting = card.describe(options.commit)
    for line in report.facts(setting):
        say(line)
    if not options.setting.cuda and not options.dry:
        raise ValueError("there is no CUDA device here; --dry-run walks through everything on a CPU")
    begun = time.monotonic()
    # A budget is a share of the remaining time, so that sections share what earlier ones did not use.
    done: list[Result] = []
    processes = options.processes if options.dry else 1
    with closing(Worker(options)) as worker, child.walked(sections, options.setting, processes) as ahead:
        for number, section in enumerate(sections):
            left = options.seconds - (time.monotonic() - begun)
            share = section.seconds / sum(other.seconds for other in sections[number:])
            say(f"\n{section.title} ({section.name}{'' if options.dry else f', at most {left * share:.0f} s'})")
            # A dry run leaves nothing out, because it checks that everything runs.
            seconds = math.inf if options.dry else left * share
            done.append(
                measure(
                    section,
                    options,
                    seconds,
                    say,
                    worker,
                    lambda part: report.write([*done, part], setting, options),
                    ahead.get(section.name),
                )
            )
            report.write(done, setting, options)
    for line in report.summary(done, setting, options.worthless):
        say(line)
    say(f"\n{covered(sections, options, done)}")
    for path in report.write(done, setting, options):
        say(f"written: {path}")
    return done


def missing(sections: Sequence[Section], options: Options, done: Sequence[Result]) -> list[str]:
    """Return the cases without a figure."""
    reached = {(result.case.name, case) for result in done for case in result.cases}
    names = [(section.name, case.name) for section in sections for case in section.cases(options.setting)]
    return [f"{section}: {case}" for section, case in names if (section, case) not in reached]


def covered(sections: Sequence[Section], options: Options, done: Sequence[Result]) -> str:
    """Describe how many of all cases gave a figure, and which did not."""
    lost = missing(sections, options, done)
    cases = sum(len(section.cases(options.setting)) for section in sections)
    of = f"{cases - len(lost)} of {cases} cases gave figures"
    return f"{of}; none: {', '.join(lost)}" if lost else of


def measure(
    section: Section,
    options: Options,
    seconds: float,
    say: Callable[[str], None],
    worker: "Worker",
    keep: Callable[[Result], object] = lambda part: None,
    ahead: Iterable[Done] | None = None,
) -> Result:
    """Return the table of one section.

    Args:
        worker: measures, unless this is a dry run.
        keep: called with the table so far after each case, before the case is printed.
        ahead: finished cases, if other processes measure them.
    """
    begun = time.monotonic()
    finished: list[Done] = []

    def tell(case: Done) -> None:
        if case.begins:
            return
        finished.append(case)
        keep(table(section, finished, begun))
        for line in report.case_lines(case):
            say(line)

    if ahead is not None:
        for case in ahead:
            tell(case)
    elif options.dry:
        here(section, options, begun + seconds, tell)
    else:
        elsewhere(section, worker, seconds, tell)
    return table(section, finished, begun)


def table(section: Section, finished: Sequence[Done], begun: float) -> Result:
    """Return the table of the finished cases."""
    figures = tuple(figure for case in finished for figure in case.figures)
    reason = "; ".join(dict.fromkeys(failure for case in finished for failure in case.failures))
    case = Table(name=section.name, title=section.title, notes=section.notes, measure=lambda quick: [])
    names = tuple(case.case for case in finished if case.figures)
    return Result(case=case, figures=figures, seconds=time.monotonic() - begun, reason=reason, cases=names)


def here(section: Section, options: Options, deadline: float, tell: Callable[[Done], None]) -> None:
    """Measure in this process, as dry runs do."""
    try:
        child.run(section, options.setting, deadline, (), tell)
    except GpuLost as error:
        tell(Done(section.name, 0.0, [], [f"{section.name}: the rest is not measured: {error}"]))


def elsewhere(section: Section, worker: "Worker", seconds: float, tell: Callable[[Done], None]) -> None:
    """Measure in the worker's process; start another one whenever one breaks, while there is time."""
    deadline = time.monotonic() + seconds
    finished: list[str] = []
    if section.alone:
        worker.close()
    while True:
        current, why = worker.measure(section, deadline, finished, tell)
        if why or section.alone:
            worker.close()
        if not why:
            return
        stuck = current or section.name
        if stuck not in finished:
            finished.append(stuck)
            tell(Done(stuck, 0.0, [], [f"{stuck}: {why}"]))
        if current is None or time.monotonic() > deadline:
            return


class Worker:
    """A process that measures sections, started when it is needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None]
        self._reader: threading.Thread

    def measure(
        self, section: Section, deadline: float, finished: list[str], tell: Callable[[Done], None]
    ) -> tuple[str | None, str]:
        """Measure a section's cases that are not finished.

        Returns:
            The case that was running when the process broke, if any, and why it broke, or "" if the section ended.
        """
        process = self._process if self._process and self._process.poll() is None else self._start()
        assert process.stdin is not None
        order = {"section": section.name, "seconds": deadline - time.monotonic(), "skip": finished}
        current: str | None = None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            while (line := self._lines.get(timeout=max(0.1, deadline + GRACE - time.monotonic()))) is not None:
                if not line.startswith(MARK):
                    continue
                text = line.removeprefix(MARK).strip()
                if text == END:
                    return None, ""
                case = child.read(text)
                current = case.case if case.begins else None
                if not case.begins:
                    finished.append(case.case)
                    tell(case)
        except queue.Empty:
            return current, "was killed: it did not end in time"
        except BrokenPipeError:
            pass
        return current, f"its process ended with code {process.wait()}"

    def _start(self) -> "subprocess.Popen[str]":
        self.close()
        pipe = subprocess.PIPE
        command = command_of(self.options)
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environment())
        assert process.stdout is not None
        self._process, self._lines = process, queue.Queue()
        self._reader = threading.Thread(target=pump, args=(process.stdout, self._lines))
        self._reader.start()
        return process

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is None:
            return
        self._process.kill()
        self._reader.join()
        with suppress(BrokenPipeError), self._process:
            self._process = None


def command_of(options: Options) -> list[str]:
    """Return the command of a worker's process."""
    return [sys.executable, "-m", "benchmarks.gpu", "--serve", *(["--quick"] if options.quick else [])]


def pump(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    """Put each line of a process's output into a queue, and None at its end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def environment() -> Mapping[str, str]:
    """Return a child's environment: this process's PYTHONPATH, and no Triton interpreter."""
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}


def serve(options: Options) -> int:
    """Main function of a worker's process: measure each section that a line of stdin names; returns the exit code."""

    def tell(case: Done) -> None:
        print(MARK + case.line(), flush=True)

    for line in sys.stdin:
        order = json.loads(line)
        deadline = time.monotonic() + order["seconds"]
        try:
            child.run(SECTIONS[order["section"]], options.setting, deadline, order["skip"], tell)
        except GpuLost:
            return child.LOST
        print(MARK + END, flush=True)
    return 0


__all__ = ["chosen", "missing", "run", "serve"]
