"""Eight virtual devices give the codes, scales and states of one, bit for bit; each recipe in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quaver import recipes

ROOT = Path(__file__).parents[2]

#: Of every kind of scale one; the others take minutes together and have nothing of their own here.
FAST = ("delayed", "rowwise", "mxfp8")
CASES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name, build in recipes.RECIPES.items()
    if build().quantizes
]


def run(case: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.eight_devices", case]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", CASES)
def test_eight_devices_give_the_bits_of_one(name: str) -> None:
    """Data, column, row, fully sharded and sequence parallel, by shard_map and by shardings; gathers are of bytes."""
    run(name)


def test_what_cannot_be_sharded_is_told() -> None:
    run("sentences")
