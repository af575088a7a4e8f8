"""A cache of compiled kernels is packed into one archive, and works in another folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
