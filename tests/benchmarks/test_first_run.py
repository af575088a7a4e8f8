"""The script of the first run on a GPU: order, limits, and what a run that is killed leaves behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.gpu import report, run
from benchmarks.gpu.__main__ import parser
from benchmarks.gpu.ahead import cache
from benchmarks.gpu.sections.registry import SECTIONS
from benchmarks.measuring import stub_driver
from tests.benchmarks import first_run_stand_in as stand_in

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


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A packed cache of one kernel."""
    kernel = tmp_path / "cache" / "KEY"
    kernel.mkdir(parents=True)
    (kernel / f"{cache.GROUP}k.json").write_text(json.dumps({"child_paths": {}}))
    cache.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    return tmp_path / "kernels.tar.xz"


#: Results of each step on the stand-in, in order.
RESULTS = {
    which: {name: len(sections) * stand_in.CASES or stand_in.TESTS for name, _, sections in steps}
    for which, steps in STEPS.items()
}


@pytest.mark.parametrize(("which", "kills"), [(("--second",), 3), pytest.param((), 20, marks=pytest.mark.slow)])
def test_a_script_that_is_killed_leaves_every_result_that_ended(
    which: tuple[str, ...], kills: int, tmp_path: Path, archive: Path
) -> None:
    python = executable(tmp_path / "bin" / "python", f'exec {sys.executable} {stand_in.__file__} "$@"')
    moments = random.Random(0)
    for number in range(kills):
        results = moments.randrange(sum(RESULTS[which].values()))
        run_and_kill(which, archive, tmp_path / str(number), python, results, moments.uniform(0, 0.03))


def run_and_kill(which: tuple[str, ...], archive: Path, out: Path, python: Path, results: int, seconds: float) -> None:
    """Kill a script so many seconds after it has so many results, with all its processes, and check what is left.

    Results are also read while the script writes them.
    """
    out.mkdir()
    # A worker of pytest-xdist runs this test. With its variables, tests of the script would write no results.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"OUT": str(out), "TMPDIR": str(out), "PYTHON": str(python)}
    command = ["bash", str(SCRIPT), *which, str(archive)]
    with (out / "printed").open("w") as printed:
        # A session, because `timeout` makes a process group of its own.
        script = subprocess.Popen(command, env=own, stdout=printed, stderr=printed, start_new_session=True)
    try:
        while sum(map(len, saved(which, out).values())) < results:
            assert script.poll() is None, (out / "printed").read_text()
            time.sleep(0.01)
        time.sleep(seconds)
    finally:
        kill_session(script.pid)
        script.wait()
    left = saved(which, out)
    assert sum(map(len, left.values())) >= results
    for name, cases in printed_results(which, out).items():
        assert set(cases) <= set(left[name]), "a result that was printed is missing"
    # A step that ended by itself is complete; a busy machine may reach the limit of one.
    log = out / "steps.txt"
    ended = (
        [line.split(":")[0] for line in log.read_text().splitlines() if "exit code 0," in line] if log.exists() else []
    )
    assert all(len(left[name]) == RESULTS[which][name] for name in ended)
    for path in out.glob("quaver-kernels-*"):
        assert (path / "KEY" / f"{cache.GROUP}k.json").exists(), "half a cache"


def kill_session(leader: int) -> None:
    """Kill all processes of a session, the leader first, so that it begins nothing else."""
    members = [leader]
    while members:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        members = [pid for pid in pids if running(pid) and session(pid) == leader]


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def saved(which: tuple[str, ...], out: Path) -> dict[str, list[str]]:
    """Return the cases and tests of each step in its files, all of which must be complete."""
    left: dict[str, list[str]] = {name: [] for name in RESULTS[which]}
    for name, names in left.items():
        for path in (out / name).glob("*.json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            if path.name == "tests.json":
                assert list(data) == ["passed"]
                names += data["passed"]
                continue
            figures = [figure["subject"] for section in data["sections"] for figure in section["figures"]]
            names += dict.fromkeys(figures)
            assert len(figures) == stand_in.FIGURES * len(names), "a case is there in part"
        for path in (out / name).glob("*.md"):
            text = path.read_text(encoding="utf-8")
            assert report.WORTHLESS in text and text.endswith("\n")
    return left


def printed_results(which: tuple[str, ...], out: Path) -> dict[str, list[str]]:
    """Return the cases of each step that its log reports; a case is saved before it is reported."""
    logs = {name: out / name / "log.txt" for name in RESULTS[which]}
    lines = {name: path.read_text().splitlines() for name, path in logs.items() if path.exists()}
    return {name: [line.split()[0] for line in log if " c0 " in line] for name, log in lines.items()}


@pytest.mark.slow
@pytest.mark.skipif(stub_driver.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("which", STEPS, ids=str)
def test_the_script_runs_on_the_stand_in(which: tuple[str, ...], tmp_path: Path, archive: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.ahead.rehearsal", "90", "bash", str(SCRIPT), *which]
    own = {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [*command, str(archive)],
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
