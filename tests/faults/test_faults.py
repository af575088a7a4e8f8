"""The table of planted faults fits the sources."""

import ast

import pytest

from tests.faults.plant import ROOT, Fault, faults, planted_text

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    planted, text = planted_text(fault), (ROOT / fault.file).read_text()
    assert planted != text if fault.file.endswith(".h") else ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests)
    assert fault.file.startswith("src/")


def test_fault_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
