"""Nothing is cached by an output of torch.compile(mode="reduce-overhead"), which is written to without a trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.conversion.replace.rope import HALVES, Rope
from quaver.torch.numerics import versions
from tests.close import assert_bitwise


@contextmanager
def replayed(*outputs: Tensor) -> Iterator[None]:
    """Outputs of torch's CUDA graphs, as those mark them."""
    torch._C._set_cached_tensors_enabled(True)
    for each in outputs:
        torch._C._add_cached_tensor(each)
    try:
        yield
    finally:
        for each in outputs:
            torch._C._remove_cached_tensor(each)
        torch._C._set_cached_tensors_enabled(False)


def rotary_tables() -> tuple[Callable[[Tensor], Any], Tensor]:
    q, k, sin = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 5, 8)
    rope = Rope(HALVES, False)
    return lambda cos: rope(q, k, cos, sin)[0], torch.randn(1, 5, 8)


def positions() -> tuple[Callable[[Tensor], Any], Tensor]:
    rope, q = qt.RotaryEmbedding(8), torch.randn(2, 5, 4, 8)
    return lambda given: rope(q, positions=given), torch.arange(5)


def lengths() -> tuple[Callable[[Tensor], Any], Tensor]:
    return lambda ends: torch.tensor(versions.host_values(ends)), torch.tensor([0, 5, 9])


@pytest.mark.parametrize("of", [rotary_tables, positions, lengths])
def test_a_replayed_output_is_read_at_each_call(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "waits", lambda t: True)
    torch.manual_seed(0)
    run, output = of()
    with replayed(output):
        before = run(output)
        output.numpy()[...] += 1
        after = run(output)
        assert_bitwise(after, run(output.clone()))
    assert not torch.equal(before, after)
