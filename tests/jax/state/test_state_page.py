"""Run the code of the page on state."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "jax-state.md"


def test_every_example_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for block in blocks:
        if "import equinox" in block and importlib.util.find_spec("equinox") is None:
            continue
        exec(compile(block, str(PAGE), "exec"), names)
    recipe = names["recipe"]
    for state in (names["state"], names["after"], names["model"]):
        names["qj"].state.check(state, recipe)
    assert float(names["state"]["w1"]["history"][-1, 0]) == pytest.approx(float(abs(names["x"]).max()))
