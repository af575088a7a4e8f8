"""Memory does not grow with each new length of sequence: in float32 hardly, in bf16 no more than nn.Linear's."""

import os
import sys
from pathlib import Path

import pytest

from quaver.recipes import RECIPES
from tests import forked

ROOT = Path(__file__).parents[2]
#: Megabytes. Compiling a GEMM for each of 500 lengths would take hundreds; a layer with its buffers takes a dozen.
LARGEST = 40

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")


def growth(recipe: str, dtype: str) -> float:
    command = [sys.executable, "-m", "tests.torch.lengths", recipe, dtype]
    pipes = {"stdout": forked.quick.PIPE, "stderr": forked.quick.PIPE}
    walk = forked.quick.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    output, errors = walk.communicate()
    assert walk.returncode == 0, errors.decode()
    return float(output)


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
