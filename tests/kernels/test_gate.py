"""The static gate: all launches on GPUs are compiled for every architecture, and their machine code is checked.

In processes of their own, since Triton interprets in this one.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from quaver.torch.backends.gpu.device import KERNELS, TRAITS
from tests.kernels.cases import CASES
from tests.kernels.gate import bad, ceilings, floors, measured
from tests.kernels.gate.best import BEHIND, BEST
from tests.kernels.gate.ceilings import Ceilings
from tests.kernels.gate.check import Checked, failures
from tests.kernels.gate.record import ARCHITECTURES, SIBLINGS
from tests.kernels.gate.selection import LONG, SHORT, SIDES, length, sampled, split_name

ROOT = Path(__file__).parents[2]
#: Variables that would change the machine code, or keep Triton from compiling.
FOREIGN = "TRITON_INTERPRET", "TRITON_PTXAS_PATH", "TRITON_DEFAULT_FP_FUSION", "DISABLE_PTXAS_OPT", "TRITON_KERNEL_DUMP"


def compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module or a script in a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


# Every launch on every architecture, by its figures in measured.json; some are compiled again.
def test_compiled_kernels_keep_the_rules_and_their_ceilings() -> None:
    done = compiling("-m", "tests.kernels.gate", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


# Seven tenths of a second for each of 159 launches on each of six architectures.
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_kernels_keep_them_on_every_architecture(arch: int) -> None:
    done = compiling("-m", "tests.kernels.gate", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_architecture_is_compiled_or_launches_the_kernels_of_a_compiled_one() -> None:
    # That they launch the same kernels is checked by the gate itself.
    assert {arch for arch in TRAITS if arch >= KERNELS} == {*ARCHITECTURES, *SIBLINGS}
    assert set(SIBLINGS.values()) <= set(ARCHITECTURES) and not set(SIBLINGS) & set(ARCHITECTURES)


def test_short_rows_and_every_kernel_are_compiled_before_and_after_hopper() -> None:
    # That the table lists exactly what is launched is checked by the gate itself.
    table = ceilings.load().rows
    selected = sampled(table, CASES)
    assert all(f"sm_{arch}" in table[name] for arch, names in selected.items() for name in names)
    regular = {name for name in table if split_name(name)[0] not in {case.name for case in CASES if case.rare}}
    kernels = {arch: {split_name(name)[1] for name in names} for arch, names in selected.items()}
    before, after = ({kernel for arch in side for kernel in kernels[arch]} for side in SIDES)
    assert before | after == {split_name(name)[1] for name in regular}
    # Kernels without a launch that compiles quickly are on one side, some on each.
    slow = {
        kernel
        for kernel in before | after
        if all(length(table[name]) > LONG for name in regular if split_name(name)[1] == kernel)
    }
    assert before ^ after <= slow and len(slow) < 25 and slow & before and slow & after
    compiled = {name for names in selected.values() for name in names}
    rows = {
        split_name(name)[0]: [other for other in regular if split_name(other)[0] == split_name(name)[0]]
        for name in regular
    }
    short = [launches for launches in rows.values() if all(length(table[name]) <= SHORT for name in launches)]
    assert len(short) > len(rows) / 4 and all(compiled.issuperset(launches) for launches in short)
    assert sum(map(len, selected.values())) < len(table)
    assert set(BEST) <= selected[90]


def broken_by_planted_kernels() -> dict[str, dict[str, list[str]]]:
    """Rules that each kernel breaks, by architecture: from measured.json, or compiled if a kernel changed."""
    known, names = bad.known(measured.load()), {one.name for one in bad.recorded()}
    if all(codes.keys() == names for codes in known.values()):
        return bad.broken(known)
    done = compiling("-m", "tests.kernels.gate.bad")
    assert done.returncode == 0, done.stderr
    rules: dict[str, dict[str, list[str]]] = json.loads(done.stdout)
    return rules


def test_each_rule_fires_on_a_kernel_that_breaks_it() -> None:
    broken = broken_by_planted_kernels()
    for arch in ("89", "90"):
        assert broken["turns bytes"][arch] == ["shared bytes"]
        assert "passing NaN" in broken["clamps"][arch]
        assert broken["holds too much"][arch] == ["local memory"]
        assert broken["strides of 1023"][arch] == ["wide loads", "wide stores"]
        assert broken["strides of 1024"][arch] == []
        assert "sectors loaded" in broken["half of a sector read"][arch]
        assert broken["half of a sector written"][arch] == ["sectors loaded", "sectors stored"]
        # Before Hopper codes are rounded on their bits, which takes many registers.
        assert ("overlap" in broken["one program"][arch]) == (arch == "90")
        assert broken["goes round"][arch] == ["trips"]
        # Instructions are compared with the copy rate of an H200 only.
        assert broken["grinds"][arch] == (["instructions"] if arch == "90" else [])
    # Later versions of Triton may cast directly.
    if triton.__version__.startswith("3.6."):
        assert broken["casts"] == {"89": ["rounding"], "90": []}


ROW = {"registers": 40, "shared": 0, "instructions": 100, "per_element": 4.0, "loads": "4x16 1x4", "stores": "2x16"}


def wrong(row: dict[str, Any] | None, table: dict[str, Any], arch: int = 100) -> list[str]:
    """The failures of one launch called "row" with these figures, or of no launch."""
    checked = [] if row is None else [Checked("row: kernel", row, ())]
    return failures(checked, arch, Ceilings(triton.__version__, table))


def table(**changes: Any) -> dict[str, Any]:
    return {"row: kernel": {"sm_100": ROW | changes}}


def test_figures_at_their_ceilings_or_below_pass() -> None:
    assert wrong(ROW, table()) == []
    assert wrong(ROW | {"instructions": 92, "loads": "5x16"}, table()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"registers": 41},
        {"shared": 16},
        {"instructions": 104},
        {"per_element": 4.1},
        {"loads": "3x16 2x8"},
        {"stores": "2x16 1x1"},
    ],
    ids=str,
)
def test_a_figure_above_its_ceiling_fails_and_names_the_command(change: dict[str, Any]) -> None:
    (message,) = wrong(ROW | change, table())
    assert next(iter(change)) in message
    assert "python -m tests.kernels.gate --update --only 'row'" in message


def test_a_launch_without_a_row_fails_and_a_row_without_a_launch() -> None:
    (message,) = wrong(ROW, {})
    assert "has no ceilings" in message and "--update --only 'row'" in message
    (message,) = wrong(None, table())
    assert "launched by no row" in message and "--update" in message


def test_other_versions_of_triton_keep_the_rules_without_the_ceilings() -> None:
    checked = [Checked("row: kernel", ROW, ("local memory: 8 bytes",))]
    assert failures(checked, 100, Ceilings("2.0.0", table(instructions=1))) == ["row: kernel: local memory: 8 bytes"]


def test_more_instructions_than_were_reached_before_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.gate.check.BEST", {"row: kernel": ("per_element", 3.5)})
    monkeypatch.setattr("tests.kernels.gate.check.BEHIND", {})
    rows = {"row: kernel": {"sm_90": ROW}}
    assert wrong(ROW, rows, 90) == ["row: kernel: per_element 4.0, 3.5 was reached before"]
    monkeypatch.setattr("tests.kernels.gate.check.BEHIND", {"row: kernel": ("per_element", 4.5)})
    monkeypatch.setattr("tests.kernels.gate.check.BEST", {})
    (message,) = wrong(ROW, rows, 90)
    assert "move its row" in message
    assert not set(BEST) & set(BEHIND)


def test_fewer_programs_side_by_side_than_the_table_has_fail() -> None:
    (message,) = wrong(ROW | {"programs": 2}, table(programs=3))
    assert "programs 2, the table has 3" in message
    assert wrong(ROW | {"programs": 4}, table(programs=3)) == []


def test_the_page_has_the_floors_of_every_kernel() -> None:
    page = floors.PAGE.read_text(encoding="utf-8")
    assert floors.filled(page) == page, "run python -m tests.kernels.gate.floors"


def test_kernels_that_no_h200_can_run_at_its_copy_rate_are_few_and_have_a_reason() -> None:
    slow = {
        name.partition(":")[0]
        for name, row in ceilings.load().rows.items()
        if floors.counted(row)
        and not floors.bound_by_products(row)
        and row["sm_90"]["bytes"] >= floors.SMALL
        and floors.share(row["sm_90"]["a_byte"], "H200") < 1
    }
    assert slow <= {case.name for case in CASES if "instructions" in case.exceptions}
    launched = slow & {case.name for case in CASES if case.since <= 90}
    steps = {name for name in launched if name.startswith("optimizer ")}
    experts = {name for name in launched if name.startswith("experts, ")}
    # Kernels with stochastic rounding, convolutions, a scan's steps, every optimizer step that writes moments in eight
    # bits, with any scales of its weight, and kernels that find their group.
    assert len(launched - steps - experts) <= 6
    assert len(steps) <= 15
    assert len(experts) <= 7


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    ceilings.save(table(), "3.6.0", tmp_path / "table.toml")
    loaded = ceilings.load(tmp_path / "table.toml")
    assert dataclasses.astuple(loaded) == ("3.6.0", table())
    assert ceilings.load(tmp_path / "none.toml").rows == {}
