"""Test errors before onnx is needed; `tests/integrations` runs the exported files."""

from importlib import util
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.conversion import onnx

FLOAT8 = {"delayed", "tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8"}


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else util.find_spec("torch"))
    model = nn.Sequential(nn.Linear(32, 32))
    qt.convert(model, "mxfp8")
    with pytest.raises(ModuleNotFoundError, match=r"onnxscript, which is not installed: pip install 'quaver\[onnx\]'"):
        qt.onnx_export(model, torch.randn(2, 32), tmp_path / "model.onnx")


@pytest.mark.parametrize("recipe", [name for name in recipes.RECIPES if name != "bf16"])
def test_operands_of_four_and_six_bits_give_a_clear_error(recipe: str) -> None:
    for spec in (recipes.get(recipe).fprop.a, recipes.get(recipe).fprop.b):
        assert spec is not None
        if recipe in FLOAT8:
            onnx.check(spec)
        else:
            with pytest.raises(ValueError, match="cannot be expressed with ONNX's float8 operators"):
                onnx.check(spec)


def test_the_binary_search_finds_every_exponent_and_no_other() -> None:
    """The comparisons of ONNX in Python's float32: the largest power of two within the range, of every amax at it."""
    largest = torch.tensor(448.0)
    for p in range(-117, 127):
        for amax in (largest * 2.0**p, torch.nextafter(largest * 2.0**p, torch.tensor(0.0))):
            if not 2.0**-126 <= float(amax) < float("inf"):
                continue
            e = torch.tensor(2.0**onnx.LOWEST)
            for step in onnx.STEPS:
                more = e * torch.tensor(2.0 ** min(step, 127)) * (2.0 if step == 128 else 1.0)
                e = more if amax * more <= largest else e
            e = e.clamp(max=2.0**onnx.HIGHEST)
            assert amax * e <= largest and (amax * (2 * e) > largest or e == 2.0**onnx.HIGHEST)
