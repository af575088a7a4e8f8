"""Eight virtual devices give the codes, scales and states of one, bit for bit, in a process that has eight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quaver import recipes

ROOT = Path(__file__).parents[3]

QUANTIZED = [name for name, build in recipes.RECIPES.items() if build().quantizes]
#: Quick cases, which share a process.
TOGETHER = ("delayed:some", "mxfp8:some", "nvfp4:some", "sentences", "explicit", "attention")


def run(*cases: str) -> dict[str, str]:
    """The failure of each case, "" if there is none."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.eight_devices", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert set(failures) == set(cases)
    return failures


@pytest.fixture(scope="module")
def quick() -> dict[str, str]:
    return run(*TOGETHER)


@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_eight_devices_give_the_bits_of_one(quick: dict[str, str], name: str) -> None:
    """Data, column, row, fully sharded and sequence parallel; gathers move bytes."""
    assert not quick[f"{name}:some"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_eight_devices_give_the_bits_of_one_by_shard_map_and_by_shardings(name: str) -> None:
    assert run(name) == {name: ""}


def test_operands_that_cannot_be_sharded_are_refused(quick: dict[str, str]) -> None:
    assert not quick["sentences"]


def test_a_mesh_with_explicit_axes_keeps_its_types(quick: dict[str, str]) -> None:
    assert not quick["explicit"]


def test_attention_of_shards_is_that_of_one_device(quick: dict[str, str]) -> None:
    """Batch and heads sharded, and tokens sharded with keys and values travelling around a ring."""
    assert not quick["attention"]
