"""The static gate: what is launched on a GPU is compiled for every architecture, and its machine code read.

In a process of its own for each architecture, since Triton interprets in this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = 89, 90, 100, 120
ROOT = Path(__file__).parents[2]
#: What would change the machine code, or keep Triton from making any.
FOREIGN = "TRITON_INTERPRET", "TRITON_PTXAS_PATH", "TRITON_DEFAULT_FP_FUSION", "DISABLE_PTXAS_OPT", "TRITON_KERNEL_DUMP"


def compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module or a script in a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiled_kernels_keep_the_rules_and_their_ceilings(arch: int) -> None:
    done = compiling("-m", "tests.kernels.gate", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr
