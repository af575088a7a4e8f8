"""Test measured.json: when it is valid, when changes are detected, and which launches are compiled then."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.kernels.cases import CASES
from tests.kernels.gate import bad, ceilings, check, measured, selection
from tests.kernels.gate.ceilings import Ceilings
from tests.kernels.gate.flow import Block
from tests.kernels.gate.keys import key
from tests.kernels.gate.machine_code import Code
from tests.kernels.gate.measured import Measured
from tests.kernels.gate.record import ARCHITECTURES, Recorded

#: Some figures are zero, since nothing is spilled.
CODE = Code(
    arch=90,
    registers=40,
    stack=0,
    shared=2048,
    instructions=104,
    loads={16: 8, 4: 1},
    stores={16: 4},
    shared_loads={},
    local=0,
    truncating=0,
    passing_nan=3,
    exchanged_bytes=0,
    load_runs={128: 8192},
    store_runs={64: 4096},
    way=(Block(10, 4, (), (1,)), Block(60, 16, (0,), (2,)), Block(20, 8, (), ())),
)
KEYS = {"row: one": "1" * 64, "row: two": "2" * 64}


def planted(name: str = "goes round", **changes: Any) -> Recorded:
    recorded = next(one for one in bad.recorded() if one.kernel == name)
    return replace(recorded, case=replace(recorded.case, **changes))


def written(path: Path, entries: dict[measured.Place, measured.Entry]) -> Measured:
    measured.save(entries, path)
    return measured.load(path)


def entries(figures: measured.Figures) -> dict[measured.Place, measured.Entry]:
    return {(name, arch): measured.entry(KEYS[name], figures) for name in KEYS for arch in (89, 90)}


def test_code_figures_round_trip_and_use_the_longest_path_with_the_loop_counts_of_the_row() -> None:
    recorded = planted(trips=(5,))
    figures = measured.figures(CODE, recorded)
    again = measured.code(figures, 90)
    assert replace(again, way=CODE.way) == CODE
    assert again.way == (Block(10 + 5 * 60 + 20, 4 + 5 * 16 + 8, (), ()),)
    assert check.judge(recorded, again) == check.judge(recorded, CODE)
    assert json.loads(json.dumps(figures)) == figures


def test_the_file_round_trips_and_architectures_share_lines(tmp_path: Path) -> None:
    figures = measured.figures(CODE, planted())
    expected = entries(figures) | {("row: two", 100): measured.entry("3" * 64, figures | {"registers": 41})}
    stored = written(tmp_path / "one.json", expected)
    assert stored == Measured(triton.__version__, expected)
    lines = (tmp_path / "one.json").read_text().splitlines()
    assert sum('"registers"' in line for line in lines) == 3
    written(tmp_path / "other.json", dict(reversed(expected.items())))
    assert (tmp_path / "one.json").read_text() == (tmp_path / "other.json").read_text()
    assert measured.load(tmp_path / "none.json") == Measured("", {})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"registers":40', '"registers":39'),
        ('"instructions":104', '"instructions":96'),
        ('"executed":[90,28]', '"executed":[80,28]'),
        ('"loads":{"4":1,"16":8}', '"loads":{"16":8}'),
        ('"load_runs":{"128":8192}', '"load_runs":{"256":8192}'),
        (',"passing_nan":3', ""),
        ('"passing_nan":3', '"passing_nan":3,"stack":8'),
    ],
)
def test_a_manually_changed_figure_is_rejected_on_every_architecture(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    stored = written(path, entries(measured.figures(CODE, planted())))
    assert stored.current(KEYS, 89).keys() == KEYS.keys() and check.changed_launches({}, KEYS, 89, stored) == []
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    edited = measured.load(path)
    for arch in (89, 90):
        assert edited.current(KEYS, arch).keys() == {"row: two"}
        assert check.changed_launches({}, KEYS, arch, edited) == ["row: one"]


def test_changed_and_new_launches_are_remeasured_and_missing_ones_reported(tmp_path: Path) -> None:
    stored = written(tmp_path / "measured.json", entries(measured.figures(CODE, planted())))
    keys = {"row: one": "4" * 64, "row: three": "3" * 64}
    assert stored.current(keys, 90) == {} and check.changed_launches({}, keys, 90, stored) == ["row: one", "row: three"]
    assert stored.stale({90: keys}) == ["sm_90 row: two is launched no more"]
    message = measured.sentence([f"sm_90 row {i}" for i in range(25)])
    assert "`python -m tests.kernels.gate --measure`" in message and "sm_90 row 19; and 5 more" in message


def test_recorded_figures_are_judged_by_the_rules_and_the_ceilings(tmp_path: Path) -> None:
    """Nothing is compiled."""
    recorded = planted()
    keys = {recorded.name: key(recorded, 90)}
    spilling = measured.figures(replace(CODE, stack=8), recorded)
    stored = written(tmp_path / "measured.json", {(recorded.name, 90): measured.entry(keys[recorded.name], spilling)})
    (checked,), other = check.check_launches([recorded], [], keys, 90, stored)
    assert other == [] and [message.partition(":")[0] for message in checked.broken] == ["local memory", "trips"]
    low = Ceilings(triton.__version__, {recorded.name: {"sm_90": checked.row | {"registers": 39}}})
    assert any("registers 40, the table has 39" in message for message in check.failures([checked], 90, low))
    assert check.check_launches([recorded], [], {recorded.name: "0" * 64}, 90, stored) == ([], [recorded.name])


def launches(names: list[str]) -> dict[int, list[Recorded]]:
    cases = {case.name: case for case in CASES}
    launch = bad.recorded()[0].launch
    recorded = [Recorded(cases[selection.split_name(name)[0]], name, launch) for name in names]
    return dict.fromkeys(ARCHITECTURES, recorded)


def everywhere(names: set[str]) -> dict[int, set[str]]:
    return dict.fromkeys(ARCHITECTURES, names)


def test_changed_kernels_are_compiled_on_every_architecture_or_sampled_when_many() -> None:
    table = ceilings.load().rows
    recorded = launches(list(table))
    chosen = selection.select(recorded, everywhere(set()), table, True)
    samples = {arch: [r.name for r in chosen[arch]] for arch in ARCHITECTURES}
    assert samples == {arch: [n for n in names if n in table] for arch, names in by_arch(selection.SAMPLES).items()}
    few = {"attention by heads: attention", "attention 1x128: attention", "cast bf16: cast"}
    chosen = selection.select(recorded, everywhere(few), table, True)
    for arch in ARCHITECTURES:
        # The row of "attention 1x128" is rare: only `make slow` compiles its launches.
        assert {r.name for r in chosen[arch]} == few - {"attention 1x128: attention"} | set(samples[arch])
    sampled = selection.sampled(table, CASES)
    for changed, measured_before in ((set(table), True), (set(table), False)):
        chosen = selection.select(recorded, everywhere(changed), table, measured_before)
        for arch in ARCHITECTURES:
            assert {r.name for r in chosen[arch]} == sampled[arch] | set(samples[arch] if measured_before else [])


def by_arch(samples: dict[int, str]) -> dict[int, list[str]]:
    return {arch: [samples[arch]] if arch in samples else [] for arch in ARCHITECTURES}


def test_samples_are_in_the_file_and_cover_different_kernels_before_and_after_hopper() -> None:
    stored = measured.load()
    assert {(name, arch) for arch, name in selection.SAMPLES.items()} <= stored.entries.keys()
    assert len(set(selection.SAMPLES.values())) == len(selection.SAMPLES) >= 3
    assert all(set(side) & selection.SAMPLES.keys() for side in selection.SIDES)
