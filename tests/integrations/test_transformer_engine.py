"""A checkpoint of Transformer Engine's own JAX modules goes on in ours: equal losses and gradients on the next step."""

import sys
from importlib.metadata import PathDistribution

import pytest

from tests import forked
from tests.integrations import beside_transformer_engine as beside

PACKAGE = beside.FOLDER / f"transformer_engine-{beside.VERSION}.dist-info"


@pytest.mark.slow
def test_its_checkpoints_go_on_as_there() -> None:
    if not PACKAGE.is_dir():
        pytest.skip(f"transformer-engine {beside.VERSION} is not in {beside.FOLDER}: make test-integrations")
    assert PathDistribution(PACKAGE).version == beside.VERSION
    done = forked.bare("jax").run(
        [sys.executable, "-m", beside.__name__], capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("|") == 3 * len(beside.CASES)
