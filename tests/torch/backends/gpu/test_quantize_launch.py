"""Launches that quantize a matrix keep their workspace clean after an error, and apart between threads and streams."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E4M3, QuantSpec
from quaver.torch.backends.gpu import quantize
from quaver.torch.backends.gpu.quantize_launch import (
    QuantizeLaunch,
    RequestedOperands,
    RowColQuantizer,
)
from quaver.torch.numerics import reference
from tests.torch.backends.gpu.pretend import as_on_a_gpu

ROWS = QuantSpec(E4M3, (1, None))


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with as_on_a_gpu(monkeypatch):
        yield


def launch_plan(x: Tensor, spec: QuantSpec, wanted: RequestedOperands) -> QuantizeLaunch:
    family = quantize.family_of(spec, spec)
    assert family is not None and family.plan_launch is not None
    plan_launch = family.plan_launch(x, spec, spec, wanted)
    assert plan_launch is not None
    return plan_launch


def assert_is_reference(written: Any, x: Tensor, spec: QuantSpec, views: bool) -> None:
    """Check codes and scales of a matrix and of its transpose, contiguous or as a view."""
    codes, scale, transposed, scale_transposed, _ = written
    if views:
        transposed, scale_transposed = transposed.t(), scale_transposed if spec.per_tensor else scale_transposed.t()
    for got, scale_got, matrix in ((codes, scale, x), (transposed, scale_transposed, x.t())):
        expected = reference.quantize(matrix, spec)
        known = got.float().isnan()
        assert torch.equal(known, expected.data.float().isnan())
        assert torch.equal(got.view(torch.uint8)[~known], expected.data.view(torch.uint8)[~known])
        torch.testing.assert_close(scale_got, expected.scale, rtol=0, atol=0, equal_nan=True)


def column_amax_buffers(both: RowColQuantizer) -> list[Tensor]:
    zeros = [i for i, buffer in enumerate(both.planned.reused) if buffer.zeros]
    assert zeros
    return [tensors[len(both.planned.inputs) + i] for tensors, _ in both.places.values() for i in zeros]


def test_launches_that_fail_leave_nothing_behind_for_the_next() -> None:
    """Column amaxes pass from one launch to the next; those of a failed launch must not reach another matrix."""
    x = torch.full((32, 48), 3.0).bfloat16()
    rows = RowColQuantizer(x.device, launch_plan(x, ROWS, RequestedOperands()))
    rows(x)
    runs = rows.plans[None].runs
    second, select = runs[1]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    runs[1] = fail, select
    with pytest.raises(KeyboardInterrupt):
        rows(x * 100)
    runs[1] = second, select
    assert_is_reference(rows(x), x, ROWS, False)


def test_each_thread_and_stream_has_its_own_workspace() -> None:
    """Intermediate results must not be shared with launches on another stream or from another thread."""
    x = torch.ones(32, 48).bfloat16()
    both, stream = RowColQuantizer(x.device, launch_plan(x, ROWS, RequestedOperands())), [0]
    both.card = (*both.card[:2], lambda _: stream[0], both.card[3])
    for stream[0] in (0, 1):
        both(x)
    thread = threading.Thread(target=both, args=(x,))
    thread.start()
    thread.join()
    places = column_amax_buffers(both)
    assert len(places) == len({place.data_ptr() for place in places}) == 3
