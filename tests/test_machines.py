"""Which tests run on a machine with a GPU and which without: see conftest.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, place_on_a_machine


@pytest.mark.parametrize(
    ("path", "marked", "gpu", "interpreting", "added"),
    [
        ("tests/kernels/test_cast.py", False, False, True, None),
        ("tests/kernels/test_cast.py", False, True, False, "gpu"),
        ("tests/kernels/test_gate.py", False, True, False, None),
        ("tests/kernels/gate/test_keys.py", False, True, False, None),
        ("tests/torch/backends/gpu/test_layers.py", False, False, True, None),
        ("tests/torch/backends/gpu/test_layers.py", False, True, False, "skip"),
        ("tests/torch/backends/gpu/test_layers.py", False, True, True, None),
        ("tests/torch/backends/gpu/test_grouped_mm.py", True, True, False, None),
        ("tests/gpu/test_layers.py", True, False, True, "skip"),
        ("tests/gpu/test_layers.py", True, True, False, None),
        ("tests/torch/linear/test_linear.py", False, True, False, None),
    ],
)
def test_a_machine_runs_the_tests_it_supports(
    path: str, marked: bool, gpu: bool, interpreting: bool, added: str | None
) -> None:
    markers: list[Any] = []
    item: Any = SimpleNamespace(
        path=ROOT / path, add_marker=markers.append, get_closest_marker=lambda name: True if marked else None
    )
    place_on_a_machine(item, gpu, interpreting)
    assert [getattr(marker, "name", marker) for marker in markers] == ([] if added is None else [added])
