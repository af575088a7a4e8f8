"""Compile benchmarks ahead for an absent GPU, and check the portable kernel cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.ahead import building, cache, cards, hollow
from benchmarks.measuring import stub_driver
from tests.kernels.gate.record import ARCHITECTURES

ROOT = Path(__file__).parents[2]
#: Files that only speak of the marker.
SELF = ("test_ahead.py", "test_machines.py")
#: Steps of a layer of 8192 tokens, forward and backward, in a process that simulates an H200. Its torch queries the
#: driver as a build with CUDA does, which would fail there.
STEP = """
import gc, json, os, resource
import torch
from triton import JITFunction

torch._C._cuda_getCurrentRawStream = torch._C._cuda_getDevice = lambda *_: os._exit(139)
from benchmarks.gpu.ahead import standin, walk
walk.count()
standin.become(90)
import quaver.torch as qt

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

imported = peak()
x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
assert x.is_cuda and str(x.device) == "cuda:0" and torch.cuda.get_device_name() == "NVIDIA H200"
layer = qt.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16, recipe="delayed")
for _ in range(3):
    y = layer(layer(x))
    y.backward(torch.empty_like(y))
assert x.grad.shape == x.shape and layer.weight.grad.shape == (4096, 4096)
megabytes = peak() - imported
# Each hashed after all that it calls, whose constants the hash else lacks.
hashed = [fn for fn in gc.get_objects() if isinstance(fn, JITFunction) and fn.hash is not None]
assert len(hashed) > 10 and not [fn for fn in hashed if JITFunction(fn.fn).cache_key != fn.cache_key]
print(json.dumps({**walk.counts, "megabytes": megabytes}))
"""


@pytest.mark.slow
@pytest.mark.skipif(stub_driver.compiler() is None, reason="needs a C compiler")
def test_a_carried_cache_leaves_nothing_to_compile_and_needs_no_compiler(tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.mkdir()
    built, carried = tmp_path / "built", tmp_path / "carried"
    environment = {name: value for name, value in os.environ.items() if name not in building.FOREIGN}
    environment |= stub_driver.build(stub) | hollow.ENVIRONMENT | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def step(folder: Path, **others: str) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-c", STEP],
            env={**environment, "TRITON_CACHE_DIR": str(folder), **others},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return times

    first = step(built)
    # The cast of each tensor with a factor, for both operands, and without one, with its amax before it; and the roll.
    assert first["kernels compiled"] >= 4 and first["launchers compiled"] >= 3
    assert first["megabytes"] < 100, "pages of real sizes were written"
    shutil.copytree(built, carried, ignore=shutil.ignore_patterns(*cache.UNUSED))
    shutil.rmtree(built)
    assert cache.settle(carried) == first["kernels compiled"]
    with building.path_without_compilers() as bare:
        second = step(carried, PATH=bare)
    assert "kernels compiled" not in second and "launchers compiled" not in second
    assert second["kernels found"] == first["kernels compiled"]


@pytest.mark.slow
@pytest.mark.skipif(stub_driver.compiler() is None, reason="needs a C compiler")
def test_walks_that_compile_leave_nothing_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WALKS", "CHECKED"):
        monkeypatch.setattr(building, name, (("tests", ("tests/kernels/test_roll.py",)),))
    lines: list[str] = []
    built = building.build([90], tmp_path / "cache", lines.append)
    assert built["kernels compiled"] >= 10 and built["tests passed"] >= 10, lines
    again = building.check([90], tmp_path / "cache", lines.append)
    assert not again["kernels compiled"] and not again["launchers compiled"], lines
    assert again["kernels found"] >= 10 and again["tests passed"] == built["tests passed"], lines


def test_all_files_of_gpu_tests_are_walked_and_run_by_the_makefile() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    homes, makefile = building.TESTS, (ROOT / "Makefile").read_text()
    others = [path.relative_to(ROOT).as_posix() for path in marked if path.name not in SELF]
    others = [path for path in others if not path.startswith(homes)]
    # XLA compiles JAX's programs where they run.
    assert marked and all(path.startswith("tests/jax/") and path in makefile for path in others), others
    assert " ".join(homes) in makefile


def test_an_architecture_is_written_as_compilers_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert [cards.architecture(text) for text in ("sm_90", "90", "sm_100a")] == [90, 90, 100]
    assert main(["--compile", "hopper", "--cache", "folder"]) == 2
    assert "no architecture 'hopper'; write it as sm_90" in capsys.readouterr().err
    for older, newer in (("sm_75", "103"), ("sm_103", "75")):
        assert main(["--compile", "sm_90", older, newer, "--cache", "folder"]) == 2
        assert f"{older!r}; choose from sm_80, sm_86, sm_89, sm_90, sm_100, sm_120" in capsys.readouterr().err
    assert tuple(cards.CARDS) == ARCHITECTURES
    assert main(["--compile", "sm_90"]) == 2
    assert "--cache DIR" in capsys.readouterr().err


def test_an_unpacked_cache_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "cast.cubin").touch()
    assert main(["--compile", "sm_90", "--cache", str(tmp_path), "--check"]) == 2
    assert "give --cache an empty folder" in capsys.readouterr().err
