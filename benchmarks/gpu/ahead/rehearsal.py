"""Run a script as on the machine of a GPU that is not there.

    python -m benchmarks.gpu.ahead.rehearsal 90 benchmarks/gpu/first_run.sh kernels.tar.xz

The script finds in $PYTHON an interpreter whose processes stand in for the GPU: the benchmark launches everything once
at real sizes and compiles nothing; tests are collected and not run, because `walk` runs them.
"""

import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def rehearse(arch: int, command: list[str]) -> int:
    """Run a command with such a $PYTHON; returns its exit code."""
    from benchmarks.gpu.ahead import building

    with tempfile.TemporaryDirectory() as folder, building.environment(Path(folder), compilers=True) as environment:
        python = Path(folder, "python")
        within = [sys.executable, "-m", "benchmarks.gpu.ahead.rehearsal", "--within", str(python), str(arch)]
        python.write_text(f'#!/bin/sh\nexec {shlex.join(within)} "$@"\n')
        python.chmod(0o755)
        return subprocess.run(command, env={**environment, "PYTHON": str(python)}, check=False).returncode


def within(python: str, arch: int, arguments: list[str]) -> None:
    """Be the interpreter: run `-m MODULE ARGUMENT...` on the stand-in."""
    _, module, *sys.argv[1:] = arguments
    if module == "benchmarks.gpu.ahead.cache":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from benchmarks.gpu.ahead import standin
    from benchmarks.gpu.ahead.hollow import CARD
    from benchmarks.gpu.measuring.setting import Setting
    from benchmarks.gpu.options import Options
    from quaver.torch.backends.gpu import launch

    def loaded(one: launch.KernelLaunch, index: int) -> launch._LoadedKernel:
        return launch._LoadedKernel(None, lambda *_: None, None, ())

    launch._loaded = loaded
    standin.become(arch)
    # Processes that this one starts stand in too.
    sys.executable = python
    hollow: Any = property(lambda options: Setting(device=CARD, quick=options.quick, hollow=True))
    Options.setting = hollow
    if module == "pytest":
        sys.argv += ["--collect-only", "-n", "0"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1] == "--within":
        within(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(rehearse(int(sys.argv[1]), sys.argv[2:]))
