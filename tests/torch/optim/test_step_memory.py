"""An optimizer's step needs the memory of a chunk, and steps in backward that of few gradients."""

import pytest
import torch

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


@pytest.mark.parametrize("preset", ["lean", *(pytest.param(n, marks=pytest.mark.slow) for n in ("balanced", "exact"))])
def test_a_step_needs_memory_of_one_chunk_for_any_matrix_size(preset: str) -> None:
    few, many = (above(preset, "tensorwise", (rows, 1024)) for rows in (512, 1024))
    assert few > 0 and many <= few * 1.01


@pytest.mark.slow
def test_steps_in_backward_keep_gradients_from_waiting_together() -> None:
    last, first = (above_in_backward("balanced", threshold, 256, 8) for threshold in (None, 1))
    # Seven of eight bfloat16 gradients are freed early.
    assert last - first >= 5 * 256 * 256 * 2
