"""A launch is made once for all tensors that are alike in what it may depend on, and anew for others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import launch
from quaver.torch.backends.gpu.launching.launch import Launches

X = torch.zeros(8, 16)


class Counted:
    """What was made, and what ran."""

    def __init__(self) -> None:
        self.built: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []
        self.launches = Launches(self.make)

    def make(self, tensors: tuple[Tensor | None, ...], *decided: Any) -> launch.Run:
        self.built.append((tensors, *decided))
        return lambda *given: self.ran.append((len(self.built), given))


def test_a_launch_is_made_once_and_runs_on_what_each_call_gives() -> None:
    counted = Counted()
    for _ in range(3):
        counted.launches((X, torch.empty(4)), (X.clone(),), "max", 2)
    assert len(counted.built) == 1 and counted.built[0][1:] == ("max", 2)
    assert [number for number, _ in counted.ran] == [1, 1, 1]
    assert len({id(given[1]) for _, given in counted.ran}) == 3


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 16), torch.zeros(16, 8).t(), X.bfloat16(), torch.zeros(8, 32)[:, :16], X.to("meta")],
    ids=["shape", "strides", "dtype", "strides of rows", "device"],
)
def test_another_launch_is_made_where_what_it_reads_lies_otherwise(other: Tensor) -> None:
    counted = Counted()
    for x in (X, other, X):
        counted.launches((x,), (x,))
    assert [number for number, _ in counted.ran] == [1, 2, 2]
    assert len(counted.built) == 2


def test_another_launch_is_made_beyond_a_multiple_of_sixteen_bytes() -> None:
    counted, room = Counted(), torch.zeros(8 * 16 + 4)
    for first in (0, 4, 1):
        x = room[first : first + 8 * 16].view(8, 16)
        counted.launches((x,), (x,))
    assert [number for number, _ in counted.ran] == [1, 1, 2]


def test_another_launch_is_made_where_a_tensor_is_missing_or_something_else_is_decided() -> None:
    counted = Counted()
    counted.launches((X, X), (X,), 1)
    counted.launches((X, None), (X,), 1)
    counted.launches((X, X), (X,), 2)
    assert len(counted.built) == 3


def test_launches_are_forgotten_where_kernels_are_recorded_and_where_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted()
    counted.launches((X,), (X,))
    with launch.recording(90):
        counted.launches((X,), (X,))
    counted.launches((X,), (X,))
    assert len(counted.built) == 3
    monkeypatch.setattr(launch, "MOST_KEPT", 4)
    for size in range(9):
        counted.launches((X,), (X,), size)
    assert len(counted.launches.kept) <= 4
