"""Eight virtual devices give the codes, scales and states of one, bit for bit; each recipe in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quaver import recipes

ROOT = Path(__file__).parents[3]

QUANTIZED = [name for name, build in recipes.RECIPES.items() if build().quantizes]


def run(*case: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.eight_devices", *case]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_eight_devices_give_the_bits_of_one(name: str) -> None:
    """Data, column, row, fully sharded and sequence parallel; what is gathered are bytes."""
    run(name, "some")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_eight_devices_give_the_bits_of_one_by_shard_map_and_by_shardings(name: str) -> None:
    run(name)


def test_what_cannot_be_sharded_is_told() -> None:
    run("sentences")


def test_a_mesh_with_explicit_axes_keeps_its_types() -> None:
    run("explicit")
