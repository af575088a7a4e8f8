"""A cache of compiled kernels is packed into one archive, and works in another folder."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.ahead import cache

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "benchmarks.gpu.ahead.cache", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=ROOT).stdout


def test_a_packed_cache_is_unpacked_where_it_is_wanted(tmp_path: Path) -> None:
    kernel = tmp_path / "here" / "KEY"
    kernel.mkdir(parents=True)
    files = {"kernel.cubin": b"machine code" * 1000, "kernel.json": b"{}", "kernel.ttir": b"for people"}
    for name, content in files.items():
        (kernel / name).write_bytes(content)
    listed = {"child_paths": {name: str(kernel / name) for name in files}}
    (kernel / "__grp__kernel.json").write_text(json.dumps(listed))
    assert "here.tar.xz" in run("--pack", tmp_path / "here")
    (tmp_path / "here.tar.xz").rename(tmp_path / "there.tar.xz")
    assert "1 kernels" in run(tmp_path / "there")
    there = tmp_path / "there" / "KEY"
    paths = json.loads((there / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {name: str(there / name) for name in ("kernel.cubin", "kernel.json")}
    assert (there / "kernel.cubin").read_bytes() == files["kernel.cubin"]


def test_an_archive_that_is_too_large_or_empty_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = tmp_path / "here" / "KEY"
    kernel.mkdir(parents=True)
    arguments = ["--pack", str(tmp_path / "here"), str(tmp_path / "packed.tar.xz")]
    assert cache.main(arguments) == 2
    assert "has no compiled kernels" in capsys.readouterr().err
    (kernel / "__grp__kernel.json").write_text('{"child_paths": {}}')
    (kernel / "kernel.cubin").write_bytes(random.Random(0).randbytes(2**18))
    monkeypatch.setattr(cache, "LARGEST", 2**17)
    assert cache.main(arguments) == 2
    assert "0.3 MiB packed, more than" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    monkeypatch.undo()
    assert cache.main(arguments) == 0 and cache.LARGEST == 15 * 2**20
