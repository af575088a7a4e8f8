"""Test chunked steps: peak memory for any matrix size, and chunks of columns."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver.recipes import Recipe, get, mxfp8
from quaver.recipes.spec import QuantSpec
from quaver.torch import optim
from quaver.torch.optim import step
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import AdamRule
from tests.kernels.optim.test_step import BLOCKWISE, MXFP8, SQUARES, TENSORWISE

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("preset", ["lean", "balanced"])
@pytest.mark.parametrize("recipe", [get("blockwise"), mxfp8(weight_2d=True)], ids=["128", "32"])
def test_columns_that_step_by_themselves_match_whole_rows(
    preset: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks have as many adjacent blocks as fit; 456 columns and 200 rows end within blocks."""

    def trained(size: int) -> tuple[Any, nn.Module]:
        monkeypatch.setattr(step, "CHUNK_ELEMENTS", size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(456, 200, bias=False))
        qt.quantize_weights(model, recipe)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, preset=preset)
        for _ in range(3):
            with qt.autocast(recipe):
                model(torch.randn(4, 456)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, model

    (ours, model), (whole, twin) = trained(1 << 12), trained(1 << 20)
    for (name, t), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(t.view(torch.uint8), other.view(torch.uint8)), name
    for name, state in ours.state[model[0].weight].items():
        assert torch.equal(state, whole.state[twin[0].weight][name]), name


@pytest.mark.parametrize("spec", [BLOCKWISE, SQUARES, MXFP8, TENSORWISE, None])
def test_compiled_and_other_chunks_cover_all_rows_once(spec: QuantSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for blocks higher than a chunk, the last of which has fewer rows."""
    monkeypatch.setattr(step, "COMPILED_CHUNK_ELEMENTS", (1 << 14, 1 << 12))
    monkeypatch.setattr(step, "CHUNK_ELEMENTS", 1 << 10)
    config = step.StepConfig(AdamRule(), WeightFormat("residual8", spec), (), predicts_scale=spec == TENSORWISE)
    for columns in (32, 64, 96, 128, 256, 512):
        for rows in range(16, 513, 16):
            parts = step.ParameterTensors((torch.empty(rows, columns, device="meta"),), (), ())
            every = [*step.split_into_chunks(config, parts, compiled=True)]
            assert all(
                (large.stop - large.start) * columns in step.COMPILED_CHUNK_ELEMENTS for large, _ in every if large
            )
            small = [row for _, each in every for some in each for row in range(some.start, some.stop)]
            assert small == [*range(rows)], (rows, columns)


#: Runs in a separate process: after a failed compilation, as in test_compiled.py, `lean` takes three more.
PEAKS = """
from tests.torch.optim.step_memory import above
for preset, recipe in (("exact", "tensorwise"), ("lean", "tensorwise"), ("lean", "blockwise")):
    print(preset, recipe, *(above(preset, recipe, shape) for shape in ((256, 512), (256, 2048))))
"""


def test_a_step_needs_at_most_twelve_numbers_per_chunk_element() -> None:
    """A chunk is at most a few adjacent blocks, however large the matrix is."""
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for preset, recipe, *peaks in lines:
        numbers = [int(peak) / (4 * step.CHUNK_ELEMENTS) for peak in peaks]
        assert max(numbers) <= 12, f"{preset} over {recipe}: {numbers}"
