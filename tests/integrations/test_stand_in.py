"""Libraries that look for Transformer Engine or torchao train over our names, unchanged, with our recipes' losses."""

import sys
from importlib.util import find_spec

import pytest

from tests import forked
from tests.integrations.standing_in import PROGRAMS


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "peft" else ()) for n in PROGRAMS])
def test_a_library_trains_over_our_names(name: str) -> None:
    library = name.partition("_")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-integrations")
    done = forked.bare("torch").run(
        [sys.executable, "-m", "tests.integrations.standing_in", name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
