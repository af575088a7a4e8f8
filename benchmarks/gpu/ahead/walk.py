"""Child process of `building`, in an environment of `stub_driver`: `python -m benchmarks.gpu.ahead.walk`.

It launches all that the gate's rows, the benchmark or the tests marked `gpu` launch on a card of an architecture, and
prints as JSON what Triton compiled for that and what it found in its cache. `reach 90 PATH ...`, by hand, compiles
nothing and tells which tests do not come to their ends.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton import knobs
from triton.runtime import build

from benchmarks.gpu.ahead import standin
from benchmarks.gpu.ahead.hollow import CARD

#: Kernels compiled, kernels found, launchers compiled.
counts: Counter[str] = Counter()
#: Names of the kernels that were compiled.
compiled: list[str] = []


def count() -> None:
    """Count what Triton compiles and finds from now on."""
    knobs.compilation.listener = _kernel
    original = build._build

    def built(*args: Any, **options: Any) -> Any:
        counts["launchers compiled"] += 1
        return original(*args, **options)

    build._build = built


def _kernel(*, src: Any, cache_hit: bool, **_: Any) -> None:
    counts["kernels found" if cache_hit else "kernels compiled"] += 1
    if not cache_hit:
        compiled.append(f"{src.name} {src.signature} {src.constants} {src.attrs}")


def rows(arch: int, _: list[str]) -> list[str]:
    """Launch the gate's rows."""
    from quaver.torch.backends.gpu import launch
    from tests.kernels.cases import CASES
    from tests.kernels.gate.record import record

    standin.drive(arch)
    for recorded in record(CASES, arch):
        launch._loaded(recorded.launch, 0)
    return []


def benchmark(arch: int, _: list[str]) -> list[str]:
    """Run every case of every section at full size, each step once."""
    standin.become(arch)
    from benchmarks.gpu.measuring.setting import Findings, Setting
    from benchmarks.gpu.sections.registry import SECTIONS

    setting, failed = Setting(device=CARD, hollow=True), []
    for section in SECTIONS.values():
        for case in section.cases(setting):
            findings = Findings()
            begun = time.perf_counter()
            try:
                case.measure(setting, findings)
            except Exception as error:
                findings.failures.append(f"{type(error).__name__}: {error}")
            failed += [f"{section.name}, {case.name}: {failure}" for failure in findings.failures]
            seconds = time.perf_counter() - begun
            print(f"{section.name}, {case.name}: {seconds:.1f} s, {dict(counts)}", file=sys.stderr)
    return failed


def tests(arch: int, paths: list[str]) -> list[str]:
    """Run the tests marked `gpu` in these paths to their ends."""
    import pytest

    from benchmarks.gpu.ahead import lenient

    # The number of steps after which delayed scaling takes its usual path.
    os.environ["QUAVER_TEST_STEPS"] = "3"
    standin.become(arch)
    torch.use_deterministic_algorithms(True)
    lenient.assert_nothing()
    options = ["-m", "gpu", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # No timeouts: a test that is stopped on a busy machine would leave launches unseen.
    options += ["-o", "timeout=0"]
    pytest.main([*options, "--continue-on-collection-errors", *paths], plugins=[seen := TestOutcomes()])
    return seen.failed


def reach(arch: int, paths: list[str]) -> list[str]:
    """Run the tests like `tests`, but compile nothing: finds in minutes which tests would stop early on a GPU."""
    from quaver.torch.backends.gpu import launch

    launched: set[Any] = set()

    def loaded(one: launch.KernelLaunch, index: int) -> launch._LoadedKernel:
        counts["kernels launched"] += one.kernel not in launched
        launched.add(one.kernel)
        return launch._LoadedKernel(TestOutcomes(), lambda *_: None, None, ())

    launch._loaded = loaded
    return tests(arch, paths)


class TestOutcomes:
    """Counts tests by outcome, and records the failures."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            counts[f"tests {report.outcome}"] += 1
        self.note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self.note(report)

    def note(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:300]}")


def layer(arch: int, _: list[str]) -> list[str]:
    """Run a Llama layer under each recipe that Hopper supports: a short check for versions of Triton."""
    standin.become(arch)
    from benchmarks.gpu.measuring.setting import Findings, Setting
    from benchmarks.gpu.sections.layers.layer import eager

    findings = Findings()
    eager(Setting(device=CARD, hollow=True), findings)
    if findings.failures:
        raise RuntimeError("; ".join(findings.failures))
    return []


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers and assemblers that it started."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


#: Each returns what failed.
WALKS: dict[str, Callable[[int, list[str]], list[str]]] = {
    "rows": rows,
    "benchmark": benchmark,
    "tests": tests,
    "reach": reach,
    "layer": layer,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ahead.walk")
    parser.add_argument("walk", choices=WALKS)
    parser.add_argument("arch", type=int)
    parser.add_argument("paths", nargs="*", help="of tests")
    args = parser.parse_args()
    count()
    failed = WALKS[args.walk](args.arch, args.paths)
    print(
        "\n" + json.dumps({**counts, "names": compiled, "failed": failed, "seconds": processor_seconds()}), flush=True
    )
