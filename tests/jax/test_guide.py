"""docs/guides/jax.md trains its GPT on eight devices; tests/contracts/test_docs.py runs the page on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import jax
from tests.contracts.test_readme import python_blocks
from pathlib import Path

assert jax.device_count() == 8
_, gpt = python_blocks(Path("docs/guides/jax.md").read_text())[0]
names = {"__name__": "page"}
exec(gpt, names)
moments = [leaf for leaf in jax.tree.leaves(names["state"].opt_state) if leaf.ndim == 2]
assert any(len(leaf.sharding.device_set) == 8 and not leaf.is_fully_replicated for leaf in moments)
"""


@pytest.mark.slow
def test_the_gpt_of_the_guide_trains_on_eight_devices() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
