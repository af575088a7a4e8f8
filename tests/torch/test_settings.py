"""What a process sets for torch reaches no result of a quantized layer: every setting by recipes and paths of a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.close import assert_bitwise, assert_close
from tests.operands import variants
from tests.torch.under_settings import BOUNDED, SETTINGS, SHAPES

ROOT = Path(__file__).parents[2]
RECIPES = list(variants())
#: One case per setting for each kind of path: C kernels, fast plans, noise, and a full layer.
QUICK = [("mxfp8", "blocks compiled by libtorch"), ("tensorwise", "decided"), ("nvfp4", "ragged"), ("delayed", "block")]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    run(QUICK, folder)
    return folder


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "none"])
def test_a_setting_of_the_process_changes_no_result(setting: str, quick: Path) -> None:
    same(setting, quick)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", [*SHAPES, "block"])
def test_no_setting_changes_a_result_of_any_recipe_on_any_path(shape: str, tmp_path: Path) -> None:
    run([(recipe, shape) for recipe in RECIPES], tmp_path)
    for setting in SETTINGS:
        same(setting, tmp_path)


def run(cases: list[tuple[str, str]], folder: Path) -> None:
    """Fill a folder with one file per setting; see `tests.torch.under_settings`."""
    arguments = json.dumps([list(SETTINGS), cases, str(folder)])
    command = [sys.executable, "-m", "tests.torch.under_settings", arguments]
    done = forked.bare("torch").run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "words").write_text(done.stdout + done.stderr, encoding="utf-8")


def same(setting: str, folder: Path) -> None:
    """A setting changes no bit, or only within the GEMM's bound if it changes the order of sums."""
    file = folder / f"{setting}.pt"
    assert file.exists(), f"{setting}: " + (folder / "words").read_text(encoding="utf-8")
    tensors, expected = torch.load(file), torch.load(folder / "none.pt")
    assert list(tensors) == list(expected) and expected
    for what, t in tensors.items():
        assert not expected[what].isnan().any(), what
        if setting in BOUNDED:
            assert t.dtype is expected[what].dtype
            assert_close(f"{setting}: {what}", t.double(), expected[what].double(), bound(setting, what, t.itemsize))
        else:
            assert_bitwise(t, expected[what], f"{setting}: {what}")


def bound(setting: str, what: str, itemsize: int) -> float:
    """The relative RMS by which a result may differ from that of a process without settings."""
    recipe = next(name for name in RECIPES if what.startswith(f"{name}, "))
    gemms = variants()[recipe].gemms.values()
    if setting == "rounded products" and what.startswith(f"{recipe}, block, "):
        # The setting rounds attention's high-precision products, which changes later codes by a step.
        return 0.3
    if setting == "rounded products" and any(gemm.a is None for gemm in gemms):
        return 4e-3
    # Two consecutive GEMMs, and a code that another order of sums changes by a step.
    return 1e-6 if itemsize == 4 else 4e-3
