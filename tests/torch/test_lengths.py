"""Memory does not grow with each new length of sequence: in float32 hardly, in bf16 no more than nn.Linear's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quaver.recipes import RECIPES

ROOT = Path(__file__).parents[2]
#: Megabytes. A compiled product of each of 500 lengths takes hundreds; a layer and what it holds takes a dozen.
LARGEST = 40

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def growth(recipe: str, dtype: str) -> float:
    command = [sys.executable, "-m", "tests.torch.lengths", recipe, dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@linux
@pytest.mark.parametrize(
    "recipe", [name if name == "mxfp8" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_500_lengths_in_float32_leave_the_process_as_large_as_it_was(recipe: str) -> None:
    assert growth(recipe, "float32") < LARGEST


@linux
@pytest.mark.slow
def test_500_lengths_in_bf16_add_no_more_than_nn_linear_does() -> None:
    limit = growth("nn.Linear", "bfloat16") + LARGEST
    for recipe in RECIPES:
        assert growth(recipe, "bfloat16") < limit, recipe
