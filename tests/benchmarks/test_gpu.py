"""The GPU benchmark without a GPU: everything runs at toy sizes, failures are named, targets are judged."""

import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import child, report, run, targets
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.child import Done
from benchmarks.gpu.measuring import card
from benchmarks.gpu.measuring.setting import Case as GpuCase
from benchmarks.gpu.measuring.setting import Findings, GpuLost, Section, Setting
from benchmarks.gpu.options import Options
from benchmarks.gpu.sections.kernels.quantizing import differing
from benchmarks.gpu.sections.layers.experts import SHAPE
from benchmarks.gpu.sections.registry import SECTIONS
from benchmarks.measuring.figure import DECIMALS, Case, Figure, Result
from quaver import E4M3, QuantSpec, recipes
from quaver.costs import experts, hardware, ledger
from quaver.torch.numerics import reference

ROOT = Path(__file__).parents[2]
TOY = Setting(device=torch.device("cpu"), toy=True, quick=True)
#: Reasons for which a dry run may leave cases out.
EXPECTED = tuple(f"{name} is not installed" for name in ("torchao", "mamba_ssm", "fla", "causal_conv1d"))


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_every_section_runs_and_gives_finite_figures(name: str) -> None:
    results: list[Done] = []
    child.run(SECTIONS[name], TOY, time.monotonic() + 600, (), results.append)
    failures = [failure for case in results for failure in case.failures]
    assert not [failure for failure in failures if not any(known in failure for known in EXPECTED)]
    figures = [figure for case in results for figure in case.figures]
    assert figures and all(figure.value == figure.value and figure.unit in DECIMALS for figure in figures)
    cells = [(figure.subject, figure.column) for figure in figures]
    assert len(set(cells)) == len(cells), "two figures in one cell"
    assert all(case == child.read(case.line()) for case in results)


def section(*cases: GpuCase) -> Section:
    return Section(name="toys", title="Toys", notes="Of a test.", seconds=10, cases=lambda setting: list(cases))


def good(setting: Setting, findings: Findings) -> None:
    findings.add("good", "time", 1.0, "ms")


def broken(setting: Setting, findings: Findings) -> None:
    findings.add("broken", "time", 2.0, "ms")
    raise ValueError("it broke\nin two lines")


def test_a_case_that_breaks_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    options = Options(dry=True, folder=None)
    toys = section(GpuCase("broken", broken), GpuCase("good", good))
    done = run.measure(toys, options, 60, lines.append, run.Worker(options))
    assert [figure.subject for figure in done.figures] == ["broken", "good"], "figures before the failure remain"
    assert done.reason == "broken: failed: ValueError: it broke"
    assert "  ! broken: failed: ValueError: it broke" in lines and "Traceback" in capsys.readouterr().err


def test_cases_that_exceed_the_time_are_named() -> None:
    results: list[Done] = []
    child.run(section(GpuCase("good", good)), TOY, time.monotonic() - 1, (), results.append)
    assert results[0].failures == ["good: not measured: the section's time was up"]


def test_a_broken_context_ends_the_process_after_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(setting: Setting) -> None:
        raise GpuLost("an illegal memory access")

    monkeypatch.setattr(child, "check_gpu", lost)
    results: list[Done] = []
    with pytest.raises(GpuLost):
        child.run(section(GpuCase("good", good), GpuCase("next", good)), TOY, time.monotonic() + 9, (), results.append)
    assert results[-1].case == "good" and "broke the GPU's context: an illegal memory access" in results[-1].failures[0]


#: A worker's process: cases "one", "two" and "three" of a section; the second crashes or hangs unless it is skipped.
SCRIPT = """
import json, sys, time
for line in sys.stdin:
    for name in ("one", "two", "three"):
        if name not in json.loads(line)["skip"]:
            print("a library's words")
            print({begins!r}.replace("NAME", name), flush=True)
            if name == "two":
                {what}
            print({done!r}.replace("NAME", name), flush=True)
    print({ends!r}, flush=True)
"""


@pytest.mark.parametrize(
    ("what", "message", "continues"),
    [("sys.exit(3)", "two: its process ended with code 3", True), ("time.sleep(60)", "two: was killed", False)],
    ids=["crashes", "hangs"],
)
def test_a_process_that_dies_or_hangs_costs_one_case(
    what: str, message: str, continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(options: Options) -> list[str]:
        return [sys.executable, "-c", SCRIPT.format(what=what, begins=begins, done=done, ends=run.MARK + run.END)]

    begins = run.MARK + Done("NAME").line()
    done = run.MARK + Done("NAME", 1.0, [Figure("NAME", "time", 1.0, "ms")]).line()

    monkeypatch.setattr(run, "command_of", command)
    monkeypatch.setattr(run, "GRACE", 0.0)
    results: list[Done] = []
    with closing(run.Worker(Options())) as worker:
        run.elsewhere(section(), worker, 60 if continues else 1.5, results.append)
    assert [figure.subject for case in results for figure in case.figures] == ["one", *(["three"] if continues else [])]
    (failure,) = [failure for case in results for failure in case.failures]
    assert failure.startswith(message)


@pytest.mark.parametrize(("alone", "processes"), [(False, 1), (True, 3)])
def test_sections_share_a_process_unless_they_run_alone(
    alone: bool, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(options: Options) -> list[str]:
        starts.append(SCRIPT.format(what="pass", begins=begins, done=done, ends=run.MARK + run.END))
        return [sys.executable, "-c", starts[-1]]

    starts: list[str] = []
    begins, done = run.MARK + Done("NAME").line(), run.MARK + Done("NAME", 1.0).line()
    monkeypatch.setattr(run, "command_of", command)
    results: list[Done] = []
    with closing(run.Worker(Options())) as worker:
        for each in (section(), replace(section(), alone=alone), section()):
            run.elsewhere(each, worker, 60, results.append)
    assert [case.case for case in results] == 3 * ["one", "two", "three"] and len(starts) == processes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_line_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "gemms", "--quick"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


def result(name: str, *figures: Figure, reason: str = "") -> Result:
    case = Case(name=name, title=name, notes="A toy.", measure=lambda quick: [])
    return Result(case=case, figures=figures, seconds=1.0, reason=reason)


JUDGED = "8192, 4096 → 4096: quaver tensorwise"


@pytest.mark.parametrize(
    ("speedup", "on", "verdict"),
    [
        (1.5, "NVIDIA H200", "pass"),
        (1.49, "NVIDIA H200", "missed"),
        (float("nan"), "NVIDIA H200", "missed"),
        (1.41, "NVIDIA H100 80GB HBM3", "pass"),
        (1.39, "NVIDIA H100 80GB HBM3", "missed"),
        (1.6, "NVIDIA H200 NVL", "not judged on this card"),
        (1.6, "NVIDIA L4", "not judged on this card"),
        (None, "NVIDIA H200", "not measured"),
    ],
)
def test_targets_are_judged_on_an_h200_and_an_h100_alone(speedup: float | None, on: str, verdict: str) -> None:
    figures = () if speedup is None else (Figure(JUDGED, "changing, speed-up", speedup, "x"),)
    row = targets.judge([result("linears", *figures)], on)[0]
    assert row.what == "Linear 8192, 4096 → 4096, tensorwise, over bf16" and row.verdict == verdict


def test_the_worst_figure_counts() -> None:
    figures = [
        Figure(f"{name} input, 16384 x 8192", "of the floor", value, "%")
        for name, value in (("rowwise", 95), ("delayed", 89))
    ]
    figures += [Figure("nvfp4 input, 16384 x 8192", "of the floor", 10.0, "%")]
    figures += [
        Figure("rowwise input, 8192 x 4096", "of the floor", 10.0, "%"),
        Figure("a", "differing", 0, "elements"),
    ]
    rows = {row.what: row for row in targets.judge([result("kernels", *figures)], targets.H200)}
    slowest = rows["Quantization kernels, of the copy rate, the slowest"]
    assert (slowest.reached, slowest.verdict) == ("89.0 %", "missed")
    assert rows["Kernels that differ from the reference"].verdict == "pass"


def test_results_are_written_with_card_and_verdicts_but_not_of_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    setting = {**card.describe("abc123"), "card": "NVIDIA H200"}
    done = [result("linears", Figure(JUDGED, "changing, speed-up", 1.7, "x"), reason="torchao: it broke")]
    assert report.write(done, setting, Options(dry=True, folder=None)) == []
    assert not out.exists()
    dry = report.write(done, setting, Options(dry=True, folder=tmp_path / "dry"))
    assert len(dry) == 2 and all(path.name.startswith("gpu-h200-dry-") for path in dry) and not out.exists()
    assert all(report.WORTHLESS in path.read_text(encoding="utf-8") for path in dry if path.suffix == ".md")
    paths = report.write(done, setting, Options(folder=tmp_path / "saved"))
    assert sorted(path.name for path in paths) == sorted(
        2 * [f"gpu-h200-{setting['date']}{s}" for s in (".json", ".md")]
    )
    data = json.loads((out / f"gpu-h200-{setting['date']}.json").read_text(encoding="utf-8"))
    assert data["machine"]["commit"] == "abc123" and data["targets"][0]["verdict"] == "pass"
    text = (out / f"gpu-h200-{setting['date']}.md").read_text(encoding="utf-8")
    assert "**torchao: it broke**" in text and "not measured" in text
    assert report.WORTHLESS in report.summary(done, setting, True)


def test_one_wrong_code_or_scale_is_found() -> None:
    x = torch.randn(32, 64)
    x[0, 0] = float("nan")
    spec = QuantSpec(E4M3)
    q, r = reference.quantize(x, spec), reference.quantize(x, spec)
    assert differing(q, r) == 0
    r.data.view(torch.uint8)[3, 5] ^= 1
    assert differing(q, r) == 1
    q, r = (reference.quantize(x[1:], spec) for _ in range(2))
    assert isinstance(r.scale, torch.Tensor)
    r.scale *= 2
    assert differing(q, r) == 1


def test_h100_targets_are_scaled_from_h200_targets_by_predictions() -> None:
    for name, (h200, h100) in targets.LINEAR.items():
        predicted = [
            ledger.layer(recipes.get(name), 8192, 4096, 4096, hardware.get(gpu)).speedup for gpu in ("h100", "h200")
        ]
        assert h100 == pytest.approx(h200 * predicted[0] / predicted[1], abs=0.005), name
    target, others = targets.EXPERTS
    predicted = [experts.layer(recipes.get("rowwise"), *SHAPE, gpu).speedup for gpu in ("h100", "h200")]
    assert others[targets.H100].low == pytest.approx(target.low * predicted[0] / predicted[1], abs=0.005)


def test_a_dry_run_leaves_nothing_out_and_counts_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(setting: Setting, findings: Findings) -> None:
        time.sleep(0.01)
        good(setting, findings)

    toys = section(GpuCase("good", slow), GpuCase("silent", lambda setting, findings: None))
    monkeypatch.setattr(run, "chosen", lambda names: [toys])
    lines: list[str] = []
    (done,) = run.run(Options(dry=True, folder=None, seconds=0.0), lines.append)
    assert done.cases == ("good",) and not done.reason
    assert "1 of 2 cases gave figures; none: toys: silent" in lines[-1]


@pytest.mark.slow
def test_a_killed_run_leaves_its_measurements(tmp_path: Path) -> None:
    """Killed in its second section, it leaves all figures of the first and no forked process."""
    command = [sys.executable, "-u", "-m", "benchmarks.gpu", "--dry-run", "--only", "ceilings", "--only", "graph"]
    command += ["--processes", "2", "--results", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        # A case is written to the file before its line is printed.
        lines = iter(process.stdout.readline, "")
        assert any("(graph)" in line for line in lines), "its second section did not begin"
        process.kill()
        # Its output ends with the last process that has it open.
        assert not process.stdout.read()
    assert process.returncode < 0, "it ended before it was killed"
    (path,) = tmp_path.glob("*.json")
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["dry"] and [section["name"] for section in saved["sections"]] == ["ceilings"]
    assert {figure["subject"] for figure in saved["sections"][0]["figures"]} == {"copy on the device", "bf16 32³"}


def test_a_dry_run_without_a_figure_of_a_case_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [GpuCase("good", good)]
    monkeypatch.setattr(run, "chosen", lambda names: [section(*cases)])
    assert main(["--dry-run"]) == 0
    cases.append(GpuCase("silent", lambda setting, findings: None))
    assert main(["--dry-run"]) == 1


def test_a_dry_run_has_every_case_of_a_cards_run() -> None:
    cpu = torch.device("cpu")
    for section in SECTIONS.values():
        dry, whole = (section.cases(Setting(device=cpu, toy=toy)) for toy in (True, False))
        assert len(dry) == len(whole) > 0, section.name
