"""What `quaver kernels` takes, records and refuses; compiles nothing."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import quaver
from tests.conftest import ROOT

pytest.importorskip("triton")

from quaver.capi import export, variants
from quaver.capi.cases import Selection
from quaver.train.commands.cli import app
from quaver.train.commands.kernels import export_kernels
from tests.native.recorded import CHECKS

HEADER = (ROOT / "src/quaver/capi/csrc/quaver.h").read_text()


@cache
def checked() -> dict[str, str]:
    """The error of each check in `tests.native.recorded`; Triton interprets in this process."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.native.recorded"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors: dict[str, str] = json.loads(done.stdout)
    return errors


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_of_recorded_launches(check: str) -> None:
    assert not checked()[check], checked()[check]


@pytest.mark.parametrize(
    "metadata, reason",
    [
        ({}, ""),
        ({"global_scratch_size": 128}, "scratch memory"),
        ({"profile_scratch_size": 128}, "scratch memory"),
        ({"num_ctas": 2}, "clusters"),
        ({"launch_pdl": True}, "dependent launch"),
        ({"launch_cooperative_grid": True}, "cooperative"),
        ({"tensordesc_meta": [1]}, "tensor descriptors"),
    ],
)
def test_kernels_that_need_what_c_does_not_provide_are_refused(metadata: dict[str, Any], reason: str) -> None:
    assert reason in export.why_not(SimpleNamespace(**metadata))
    assert bool(export.why_not(SimpleNamespace(**metadata))) == bool(reason)


def test_the_header_has_the_version_of_the_package() -> None:
    major, minor, patch = map(int, quaver.__version__.split(".")[:3])
    assert f"#define QUAVER_VERSION {10000 * major + 100 * minor + patch} " in HEADER
    cmake = (ROOT / "src/quaver/capi/csrc/CMakeLists.txt").read_text()
    assert f"project(quaver VERSION {major}.{minor}.{patch} " in cmake


def test_dtypes_of_a_key_are_those_of_the_header() -> None:
    (listed,) = re.findall(r"typedef enum \{ (QUAVER_BF16.*?) \} quaver_dtype;", HEADER)
    names = [name.strip() for name in listed.split(",")]
    triton = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8e4nv": "E4M3", "fp8e5": "E5M2"}
    assert {name: names.index(f"QUAVER_{ours}") for name, ours in triton.items()} == variants.DTYPES
    assert names.index("QUAVER_E2M1") == variants.E2M1


def test_the_tables_name_every_architecture() -> None:
    text = export.tables_header([90, 100])
    assert "#define QV_TABLES { &qv_table_sm90, &qv_table_sm100 }" in text
    assert re.search(r'#define QV_BUILD "quaver \S+, commit \w+, triton \S+, ptxas \S+"', text)


@pytest.mark.parametrize(
    "option, text, message",
    [
        ("arch", "sm_91", "--arch has no 'sm_91'"),
        ("arch", "sm_75", "--arch has no 'sm_75'"),
        ("arch", "", "--arch names nothing; give one or more of sm_80"),
        ("dtypes", "bf17", "--dtypes has no 'bf17'; did you mean 'bf16'"),
        ("widths", "0", "--widths has '0'; give row lengths from 1 to 16384"),
        ("widths", "99999", "--widths has '99999'"),
        ("families", "mxx", "--families has no 'mxx'; did you mean 'mx'"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_written(
    option: str, text: str, message: str, tmp_path: Path
) -> None:
    given = {"arch": "sm_90", "dtypes": "bf16", "widths": "", "families": "all", option: text}
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match=re.escape(message)):
        export_kernels(folder=folder, compress=False, progress=print, **given)
    assert not folder.exists()


def test_the_command_reports_a_mistake_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["kernels", "--arch", "sm_99", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.strip() == "--arch has no 'sm_99'; did you mean 'sm_90'?"


def test_other_versions_of_triton_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.9.0")
    with pytest.raises(ValueError, match=r"this is 3\.9\.0; pip install 'triton==3\.6\.0'"):
        export.export([90], tmp_path / "out", Selection(families=("mx",)))


def test_kernels_that_are_interpreted_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        export.export([90], tmp_path / "out", Selection(families=("mx",)))
