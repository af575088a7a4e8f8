"""Test that launches are planned once per tensor layout, and write new memory at each call."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver.kernels.cross_entropy import column_sums
from quaver.torch.backends.gpu import activation, launch, norm
from quaver.torch.backends.gpu.buffers import whole
from quaver.torch.backends.gpu.launch import LaunchPlan, LaunchPlanCache, LaunchSpec

X = torch.arange(8 * 16, dtype=torch.float32).view(8, 16)


class Counted:
    """Sums of rows, and how often a pass of them was decided."""

    def __init__(self) -> None:
        self.decided = 0
        self.passes = LaunchPlanCache(self.decide)

    def decide(self, given: Sequence[Any], *_: int) -> LaunchPlan:
        self.decided += 1
        x, *_others = given
        out = whole((16,), torch.float32)
        constants = {"BM": 8, "BN": 16, "EVEN": True}
        numbers = (8, 16, x.stride(0), 8, 0)
        return LaunchPlan(given, (None, out), [LaunchSpec(column_sums, (1, 1), (x, out, None), numbers, constants, 1)])


def test_a_launch_is_planned_once_and_writes_new_memory_each_time() -> None:
    counted = Counted()
    (none, first), (_, second) = counted.passes((X,)), counted.passes((X + 1,))
    assert counted.decided == 1 and none is None
    assert torch.equal(first, X.sum(0)) and torch.equal(second, (X + 1).sum(0))


@pytest.mark.parametrize(
    "other",
    [
        X.view(2, 4, 16),
        X.repeat(1, 2)[:, :16],
        X.bfloat16(),
        torch.zeros(8 * 16 + 1)[1:].view(8, 16).copy_(X),
    ],
    ids=["shape", "strides", "dtype", "beyond a multiple of sixteen bytes"],
)
def test_another_layout_gets_another_launch_plan(other: Tensor) -> None:
    counted = Counted()
    for x in (X, other, X):
        if x.dim() == 2:
            assert torch.equal(counted.passes((x,))[1], X.sum(0))
        else:
            counted.passes((x,))
    assert counted.decided == 2


def test_another_device_gets_another_launch_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "card", lambda _: (0, lambda: 0, lambda _: 0, None))
    decided: list[str] = []

    def decide(given: Sequence[Any]) -> LaunchPlan:
        decided.append(given[0].device.type)
        return LaunchPlan(given, (), [])

    passes = LaunchPlanCache(decide)
    for x in (X, X.to("meta"), X):
        passes((x,))
    assert decided == ["cpu", "meta"]


def test_missing_or_other_arguments_get_another_launch_plan() -> None:
    counted = Counted()
    counted.passes((X, X))
    counted.passes((X, None))
    counted.passes((X, None), 1)
    assert counted.decided == 3
    with launch.recording(90):
        counted.passes((X, None), 1)
    counted.passes((X, None), 1)
    assert counted.decided == 5


def test_too_many_launch_plans_clear_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(launch, "MAX_CACHED", 4)
    for number in range(9):
        counted.passes((X,), number)
    assert len(counted.passes.plans) <= 4


def test_a_pass_that_was_decided_by_one_tensor_twice_takes_two() -> None:
    x, g, gamma = (torch.randn(4, 64) for _ in range(3))
    _, mean, inverse = norm.forward(x, gamma[0], None, "RMSNorm", 1e-5)
    norm.backward(x, x, gamma[0], None, mean, inverse, "RMSNorm")
    of_x, of_gamma, _ = norm.backward(g, x, gamma[0], None, mean, inverse, "RMSNorm")
    wide = (x * inverse).double()
    torch.testing.assert_close(of_gamma.double(), (g * wide).sum(0), rtol=1e-5, atol=1e-5)
    along = g.double() * gamma[0].double()
    expected = (along - wide * (along * wide).mean(-1, keepdim=True)) * inverse.double()
    torch.testing.assert_close(of_x.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart_first", [False, True])
def test_gradients_of_gate_and_value_have_the_layout_of_their_inputs(
    apart_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of one tensor, given as one or as two, have the same layout; the outputs do not."""
    monkeypatch.setattr(activation._backwards, "plans", {})
    h, g = torch.randn(6, 128), torch.randn(6, 64)
    read = [(h,), h.chunk(2, -1)]
    results = [activation.backward("swiglu", (), g, x) for x in (read[::-1] if apart_first else read)]
    (whole_one,), halves = results[::-1] if apart_first else results
    assert torch.equal(whole_one, torch.cat(halves, -1))
    x = h.clone().requires_grad_()
    gate, value = x.chunk(2, -1)
    (torch.nn.functional.silu(gate) * value).backward(g)
    torch.testing.assert_close(whole_one, x.grad)
