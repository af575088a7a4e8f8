"""The Python of `first_run.sh` in a test: toy sections on a GPU that is not there, and tests that pass.

    python tests/benchmarks/first_run_stand_in.py -m MODULE ARGUMENT...

Options, results and reports are the real ones. Sections are replaced before they are imported, which takes seconds.
"""

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
#: Cases of a section, figures of a case, tests of a step.
CASES, FIGURES, TESTS = 4, 10, 12
#: A worker's process, which reports the cases of each section that it is asked for.
WORKER = """
import json, sys, time
for line in sys.stdin:
    section = json.loads(line)["section"]
    for number in range({cases}):
        case = {{"case": f"{{section}}:{{number}}", "seconds": 0.0, "figures": [], "failures": []}}
        print("{mark}" + json.dumps(case), flush=True)
        time.sleep(0.005)
        figures = [[case["case"], f"c{{figure}}", 1.0, "ms"] for figure in range({figures})]
        print("{mark}" + json.dumps({{**case, "seconds": 1.0, "figures": figures}}), flush=True)
    print("{mark}{end}", flush=True)
"""
#: A file of tests.
TESTED = """
import time
import pytest
@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    time.sleep(0.005)
"""


def replace_sections() -> None:
    """Replace the sections, the worker that measures them, and the description of the GPU."""
    registry: Any = ModuleType("benchmarks.gpu.sections.registry")
    registry.SECTIONS = sections = {}
    sys.modules[registry.__name__] = registry
    import torch

    from benchmarks.gpu import run
    from benchmarks.gpu.measuring.setting import Case, Section, Setting
    from benchmarks.gpu.options import Options

    for name in sys.argv:
        cases = [Case(f"{name}:{number}", lambda setting, findings: None) for number in range(CASES)]
        sections[name] = Section(name=name, title=name, notes="Of a test.", seconds=10, cases=lambda _, c=cases: c)
    hollow: Any = property(lambda options: Setting(device=torch.device("cuda"), quick=options.quick, hollow=True))
    Options.setting = hollow
    worker = WORKER.format(cases=CASES, figures=FIGURES, mark=run.MARK, end=run.END)
    run.command_of = lambda options: [sys.executable, "-c", worker]
    run.card.describe = lambda commit: {"card": "NVIDIA H200", "date": "2026-01-01"}


def replace_tests() -> None:
    """Replace the tests of a step by a file beside its results; at most two processes run them."""
    path = Path(os.environ["OUT"], "test_it.py")
    path.write_text(TESTED.format(tests=TESTS))
    options = [word for word in sys.argv if not word.startswith("tests/")]
    processes = str(min(2, int(options[options.index("-n") + 1])))
    sys.argv = [*options, "-c", os.devnull, "-m", "", "-k", "", "-n", processes, str(path)]


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]
    _, module, *sys.argv[1:] = sys.argv[1:]
    if module == "benchmarks.gpu":
        replace_sections()
    elif module == "pytest":
        replace_tests()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
