"""The table of planted faults fits the sources."""

import ast

import pytest

from tests.faults.plant import ROOT, Fault, faults, planted_text

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert ast.dump(ast.parse(planted_text(fault))) != ast.dump(ast.parse((ROOT / fault.file).read_text()))
    assert all((ROOT / test).exists() for test in fault.tests if not test.startswith("-") and "/" in test)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
