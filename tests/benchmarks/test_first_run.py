"""The script of the first run on a GPU: order, limits, and what a run that is killed leaves behind."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import report, run
from benchmarks.gpu.__main__ import parser
from benchmarks.gpu.ahead import cache
from benchmarks.gpu.child import Done
from benchmarks.gpu.measuring.setting import Case, Section, Setting
from benchmarks.gpu.options import Options
from benchmarks.gpu.sections.registry import SECTIONS
from benchmarks.measuring import stub_driver
from benchmarks.measuring.figure import Figure

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "first_run.sh"
#: Seconds of a whole command by its options, and its steps: name, seconds and sections.
WHOLE = {(): 580, ("--second",): 180}
STEPS = {
    (): [
        ("1-ceilings", 110, ["ceilings", "gemms", "host"]),
        ("2-gemms", 40, []),
        ("3-kernels", 150, []),
        ("4-layers", 195, ["kernels", "linears", "layer", "producers", "attention"]),
    ],
    ("--second",): [
        ("5-cuda-graphs", 45, []),
        ("6-second", 115, ["graph", "experts", "optimizers", "state-space", "memory", "training"]),
    ],
}


def first_run(*arguments: object, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    own = {**os.environ, "OUT": str(out), "TMPDIR": str(out.parent), **environment}
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("which", STEPS, ids=str)
def test_steps_run_in_order_and_have_limits(which: tuple[str, ...], tmp_path: Path) -> None:
    log, archive = tmp_path / "log", tmp_path / "kernels.tar.xz"
    archive.write_bytes(b"packed")
    executable(tmp_path / "bin" / "timeout", f'(IFS="|"; echo "$OUT|$*") >> {log}')
    done = first_run(
        *which, archive, out=tmp_path / "out", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", PYTHON="python"
    )
    assert done.returncode == 0, done.stderr
    (_, *unpacking), *steps = [line.split("|") for line in log.read_text().splitlines()]
    assert unpacking[:2] == ["--signal", "KILL"] and unpacking[4:6] == ["-m", "benchmarks.gpu.ahead.cache"]
    limit = int(unpacking[2])
    for (out, *words), (name, seconds, sections) in zip(steps, STEPS[which], strict=True):
        assert Path(out).name == name and words[:3] == ["--signal", "KILL", str(seconds)]
        limit += seconds
        if sections:
            given = parser().parse_args(words[6:])
            assert words[5] == "benchmarks.gpu" and given.only == sections and set(sections) <= set(SECTIONS)
            assert given.seconds + run.GRACE < seconds and given.quick and given.no_write and given.cache
        else:
            paths = [word for word in words if word.startswith("tests/")]
            assert words[5] == "pytest" and paths and all((ROOT / path).exists() for path in paths)
            assert words[words.index("--timeout-method") + 1] == "thread" and "tests.gpu_context" in words
    assert limit <= WHOLE[which]
    assert [line.split(":")[0] for line in (tmp_path / "out" / "steps.txt").read_text().splitlines()] == [
        name for name, *_ in STEPS[which]
    ]


def test_every_section_runs_in_one_of_the_commands() -> None:
    assert sorted(name for steps in STEPS.values() for *_, sections in steps for name in sections) == sorted(SECTIONS)


def test_a_step_that_hangs_is_killed_with_its_processes(tmp_path: Path) -> None:
    archive, pids = tmp_path / "kernels.tar.xz", tmp_path / "pids"
    archive.write_bytes(b"packed")
    real = shutil.which("timeout")
    executable(tmp_path / "bin" / "timeout", f'exec {real} --signal KILL 0.3 "${{@:4}}"')
    hangs = f"[ $2 = benchmarks.gpu.ahead.cache ] && exit; sleep 60 & echo $! >> {pids}; echo began; sleep 60"
    python = executable(tmp_path / "python", hangs)
    begun = time.monotonic()
    done = first_run(archive, out=tmp_path / "out", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", PYTHON=str(python))
    assert done.returncode == 0 and time.monotonic() - begun < 30
    steps = (tmp_path / "out" / "steps.txt").read_text().splitlines()
    assert len(steps) == 4 and all("exit code 137" in line for line in steps)
    for name, *_ in STEPS[()]:
        assert (tmp_path / "out" / name / "log.txt").read_text() == "began\n"
    for pid in map(int, pids.read_text().split()):
        assert not running(pid)


def running(pid: int) -> bool:
    """True unless a process has ended; one that nobody waits for may remain as a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    done = first_run(tmp_path / "none.tar.xz", out=tmp_path / "out")
    assert done.returncode == 2 and "none.tar.xz is no such file" in done.stderr
    (tmp_path / "bad.tar.xz").write_bytes(b"no archive")
    done = first_run(tmp_path / "bad.tar.xz", out=tmp_path / "out", PYTHON=sys.executable)
    assert done.returncode == 2 and "bad.tar.xz cannot be unpacked" in done.stderr


#: Cases of a section, figures of a case, and seconds of a case.
CASES, FIGURES, SECONDS = 10, 10, 0.005
#: A worker's process that measures them.
WORKER = f"""
import json, sys, time
for line in sys.stdin:
    section = json.loads(line)["section"]
    for case in range({CASES}):
        name = f"{{section}}{{case}}"
        print({run.MARK + Done("NAME").line()!r}.replace("NAME", name), flush=True)
        time.sleep({SECONDS})
        line = {run.MARK + Done("NAME", 1.0, [Figure("NAME", f"c{i}", 1.0, "ms") for i in range(FIGURES)]).line()!r}
        print(line.replace("NAME", name), flush=True)
    print({run.MARK + run.END!r}, flush=True)
"""


def toy(name: str) -> Section:
    cases = [Case(f"{name}{number}", lambda setting, findings: None) for number in range(CASES)]
    return Section(name=name, title=name, notes="Of a test.", seconds=10, cases=lambda setting: cases)


def measure(folder: Path) -> None:
    """Run two toy sections in a process group of their own; printed lines go to a file."""
    os.setpgrp()
    with (folder / "printed").open("w", buffering=1) as printed:
        run.run(Options(folder=folder, only=("a", "b")), lambda line: print(line, file=printed))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_leaves_every_case_that_ended(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(device=torch.device("cuda"), hollow=True)
    monkeypatch.setattr(Options, "setting", setting)
    monkeypatch.setattr(run, "chosen", lambda names: [toy(name) for name in names])
    monkeypatch.setattr(run, "command_of", lambda options: [sys.executable, "-c", WORKER])
    monkeypatch.setattr(run.card, "describe", lambda commit: {"card": "NVIDIA H200", "date": "2026-01-01"})
    begun = time.monotonic()
    assert survivors(tmp_path / "whole", None) == 2 * CASES
    whole, moments = time.monotonic() - begun, random.Random(0)
    left = [survivors(tmp_path / str(number), moments.uniform(0, whole)) for number in range(kills)]
    assert any(0 < cases < 2 * CASES for cases in left), left


def survivors(folder: Path, moment: float | None) -> int:
    """Return the number of cases in the results of a run killed after so many seconds, all checked."""
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(target=measure, args=(folder,))
    with warnings.catch_warnings():
        # JAX, if another test has imported it, warns of its threads, which this process does not use.
        warnings.simplefilter("ignore", RuntimeWarning)
        process.start()
    process.join(moment)
    if moment is not None and process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    printed = [line.split()[0] for line in (folder / "printed").read_text().splitlines() if " c0 " in line]
    ended = [name for name in printed if name[1:].isdigit()]
    for path in folder.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert report.WORTHLESS in text and text.endswith("\n") and all(f"| {name} |" in text for name in ended)
    saved: list[str] = []
    for path in folder.glob("*.json"):
        assert path.name == "gpu-h200-dry-a-b-2026-01-01.json"
        sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
        figures = [figure for section in sections for figure in section["figures"]]
        saved = list(dict.fromkeys(figure["subject"] for figure in figures))
        assert len(figures) == FIGURES * len(saved), "a case is there in part"
    assert set(ended) <= set(saved) and len(saved) <= len(ended) + 1
    return len(saved)


@pytest.mark.slow
@pytest.mark.skipif(stub_driver.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("which", STEPS, ids=str)
def test_the_script_runs_on_the_stand_in(which: tuple[str, ...], tmp_path: Path) -> None:
    kernel = tmp_path / "cache" / "KEY"
    kernel.mkdir(parents=True)
    (kernel / f"{cache.GROUP}k.json").write_text(json.dumps({"child_paths": {}}))
    cache.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    command = [sys.executable, "-m", "benchmarks.gpu.ahead.rehearsal", "90", "bash", str(SCRIPT), *which]
    own = {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [*command, str(tmp_path / "kernels.tar.xz")],
        env={**os.environ, **own},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, _, sections in STEPS[which]:
        said = (tmp_path / "out" / name / "log.txt").read_text()
        assert f"{name}: exit code 0" in done.stdout, said
        if not sections:
            assert "tests collected" in said
            continue
        (path,) = (tmp_path / "out" / name).glob("*.json")
        assert "-".join(["gpu-h200-dry-quick", *sections]) in path.name
        results = json.loads(path.read_text(encoding="utf-8"))
        assert [section["name"] for section in results["sections"]] == sections
        assert all(section["figures"] for section in results["sections"])


def test_outcomes_of_tests_are_written_after_each(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-c", os.devnull, "-p", "tests.gpu_results"]
    own = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    own.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run([*command, str(tmp_path)], env=own, cwd=tmp_path, capture_output=True, text=True, check=False)
    outcomes = json.loads((tmp_path / "tests.json").read_text(encoding="utf-8"))
    assert done.returncode == 1 and list(outcomes["passed"]) == ["test_it.py::test_good"], done.stdout
    assert "assert 1 == 2" in outcomes["failed"]["test_it.py::test_bad"]
