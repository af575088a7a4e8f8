"""An optimizer's step needs the memory of a chunk, and steps in backward that of few gradients."""

import pytest
import torch

from quaver.torch.optim.step import CHUNK_ELEMENTS
from tests.torch.optim.step_memory import above, above_in_backward, live


def test_live_bytes_count_only_live_tensors() -> None:
    outside = torch.ones(1000)
    with live() as seen:
        first = outside + 1
        assert seen.now == 4000
        first.add_(1)
        view = first[10:]
        assert seen.now == 4000
        second = view * 2
        assert seen.now == seen.peak == 4000 + 990 * 4
        del first, view, second
        assert seen.now == 0 and seen.peak == 7960


@pytest.mark.parametrize(("preset", "recipe"), [("exact", "tensorwise"), ("lean", "tensorwise"), ("lean", "blockwise")])
def test_a_step_needs_the_memory_of_a_chunk_for_any_matrix_size(preset: str, recipe: str) -> None:
    """A chunk is at most a few adjacent blocks, however large the matrix is."""
    few, many = (above(preset, recipe, (256, columns)) for columns in (512, 2048))
    assert few > 0 and many <= few * 1.01
    # Sixteen numbers: after a failed compilation, as in test_compiled.py, `lean` takes three more than twelve.
    assert many / (4 * CHUNK_ELEMENTS) <= 16


@pytest.mark.slow
def test_steps_in_backward_keep_gradients_from_waiting_together() -> None:
    last, first = (above_in_backward("balanced", threshold, 256, 8) for threshold in (None, 1))
    # Seven of eight bfloat16 gradients are freed early.
    assert last - first >= 5 * 256 * 256 * 2
