"""`python -m benchmarks cpu` and `parallel`: run the cases of a suite, print their tables and keep them."""

import dataclasses
import fnmatch
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.cases.ranks import PARALLEL
from benchmarks.measuring import machine, results
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, Result
from benchmarks.measuring.timing import torch_threads
from quaver.recipes.text import suggest

COLOURS = {None: "", True: "green", False: "bold red"}


class Suite(NamedTuple):
    """Cases that are run together."""

    #: Name of the result files.
    name: str
    #: Heading of the results.
    heading: str
    cases: Sequence[Case]


CPU = Suite("cpu", "# Benchmarks on a CPU", CASES)
RANKS = Suite("parallel", "# Benchmarks of two ranks on a CPU", PARALLEL)


def chosen(pattern: str | None, suite: Suite = CPU) -> list[Case]:
    """Return the cases whose name matches the pattern, or all without one. Raises: ValueError if none matches."""
    if pattern is None:
        return list(suite.cases)
    cases = [case for case in suite.cases if fnmatch.fnmatch(case.name, pattern)]
    if not cases:
        raise ValueError(f"no case matches {pattern!r}; {suggest(pattern, [case.name for case in suite.cases])}")
    return cases


#: Called with the rows so far of a case in progress.
Tell = Callable[[Result], None]


def run_case(case: Case, quick: bool, threads: int = 1, tell: Tell = lambda result: None) -> Result:
    """Run a case and return its result; a failing case is reported, and the others still run.

    With several threads no figure is judged but those of cases that say so.

    Args:
        tell: called whenever a row has ended, of a case that gives them one by one.
    """
    begun = time.perf_counter()
    figures: list[Figure] = []

    def result(reason: str) -> Result:
        shown = figures
        if threads > 1 and not case.of_threads:
            shown = [dataclasses.replace(figure, target=None) for figure in figures]
        return Result(case=case, figures=tuple(shown), seconds=time.perf_counter() - begun, reason=reason)

    try:
        with torch_threads(threads):
            given = case.measure(quick)
            for figure in given:
                if figures and figures[-1].subject != figure.subject and not isinstance(given, list):
                    tell(result("not at its end"))
                figures.append(figure)
    except NotMeasurable as why:
        figures += why.figures
        return result(str(why))
    except Exception as error:
        traceback.print_exc()
        return result(f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return result("")


def run(
    quick: bool,
    pattern: str | None,
    write: bool,
    console: Console,
    folder: Path = results.FOLDER,
    threads: int = 1,
    suite: Suite = CPU,
) -> list[Result]:
    """Run, print and optionally write the chosen cases, after each case and after each row of a long one."""
    cases = chosen(pattern, suite)
    setting = {**machine.describe(), "threads": str(threads) + (", the clock's time" if threads > 1 else "")}
    for key, value in setting.items():
        console.print(f"{key:8} {value}", highlight=False)
    done: list[Result] = []
    paths: list[Path] = []

    def keep(results_so_far: Sequence[Result]) -> None:
        if write:
            paths[:] = written(results_so_far, quick, pattern, setting, folder, threads, suite)

    def tell(so_far: Result) -> None:
        subject, row = so_far.rows()[-1]
        console.print(f"{subject}: {', '.join(str(figure) for figure in row if figure is not None)}", highlight=False)
        keep([*done, so_far])

    for case in cases:
        with console.status(case.title):
            done.append(run_case(case, quick, threads, tell))
        show(done[-1], console)
        keep(done)
    console.print(summary(done), highlight=False)
    if quick:
        console.print("quick: small sizes or few rounds; only what does not depend on them is judged", highlight=False)
    for path in paths:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return done


def written(
    done: Sequence[Result],
    quick: bool,
    pattern: str | None,
    setting: Mapping[str, str],
    folder: Path,
    threads: int,
    suite: Suite,
) -> list[Path]:
    """Write these results and return the files."""
    heading = suite.heading + (", quick" if quick else "")
    # Results of a part of the cases do not replace those of whole runs.
    part = "" if pattern is None else "-" + re.sub(r"[^\w]+", "-", pattern).strip("-")
    name = f"{suite.name}{part}" + (f"-{threads}-threads" if threads > 1 else "")
    lines = [heading, "", summary(done), *(line for result in done for line in results.case_markdown(result))]
    data = {"quick": quick, "cases": [results.case_data(result) for result in done]}
    return results.write(folder, name, setting, lines, data)


def show(result: Result, console: Console) -> None:
    console.print(f"\n[bold]{result.case.title}[/bold] ({result.case.name}, {result.seconds:.0f} s)", highlight=False)
    if result.reason:
        console.print(result.reason, highlight=False)
    if not result.figures:
        return
    shown = Table()
    shown.add_column("")
    for column in result.columns:
        shown.add_column(column, justify="right")
    for subject, row in result.rows():
        shown.add_row(subject, *("" if figure is None else coloured(figure) for figure in row))
    console.print(shown)


def coloured(figure: Figure) -> str:
    style = COLOURS[figure.passed]
    return f"[{style}]{figure}[/{style}]" if style else str(figure)


def summary(done: Sequence[Result]) -> str:
    """Describe how many targets are met, and which are not."""
    judged = [(result.case.name, figure) for result in done for figure in result.figures if figure.target is not None]
    missed = [f"{name}: {f.subject}, {f.column} {f}" for name, f in judged if not f.passed]
    without = [f"{result.case.name}: {result.reason}" for result in done if result.reason]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets met.", *missed, *without]
    return "\n\n".join(lines)
