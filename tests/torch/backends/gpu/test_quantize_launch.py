"""Two matrices that share their launches become what each becomes alone, and what the reference makes of it."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E2M1, E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import quantize
from quaver.torch.backends.gpu.quantize_launch import (
    QuantizeLaunch,
    RequestedOperands,
    RowColQuantizer,
    combine_launches,
    delayed_inputs,
    noise_inputs,
)
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from tests.kernels.test_nvfp4 import assert_as_stored
from tests.operands import nasty
from tests.torch.backends.gpu.pretend import as_on_a_gpu

TENSOR, TENSOR_E5M2 = QuantSpec(E4M3), QuantSpec(E5M2)
ROWS = QuantSpec(E4M3, (1, None))
#: Two specs of each kind of scale; shapes of whole blocks, and of sides that are only multiples of 16.
PAIRS = [(TENSOR, TENSOR), (TENSOR_E5M2, TENSOR), (ROWS, ROWS)]
SHAPES = [((128, 64), (64, 64)), ((48, 80), (144, 80)), ((16, 16), (272, 48))]


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


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("specs", PAIRS, ids=str)
def test_two_matrices_in_shared_launches_equal_the_reference(
    specs: tuple[QuantSpec, QuantSpec], shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    wanted = RequestedOperands(), RequestedOperands(transpose=True)
    both = None
    values = [[torch.from_numpy(x).bfloat16() for x in nasty(shape).values()] for shape in shapes]
    # Combine different kinds of values; each case runs every other pair.
    at = (PAIRS.index(specs) + SHAPES.index(shapes)) % 2
    for x, w in list(zip(values[0], values[1][3:] + values[1][:3], strict=True))[at::2]:
        if both is None:
            plan_launch = [launch_plan(one, spec, each) for one, spec, each in zip((x, w), specs, wanted, strict=True)]
            shared = combine_launches(*plan_launch)
            assert shared is not None
            both = RowColQuantizer(x.device, shared)
        written = both(x, None, w, None)
        assert_is_reference(written[:5], x, specs[0], False)
        assert_is_reference(written[5:], w, specs[1], True)
        if specs[1].per_tensor:
            assert torch.equal(written[9].view(torch.int32), reference.quantize(w, specs[1]).amax.view(torch.int32))
    assert both is not None
    assert not any(t.any() for t in column_amax_buffers(both)), "what launches meet in is left as it was found"


def column_amax_buffers(both: RowColQuantizer) -> list[Tensor]:
    zeros = [i for i, buffer in enumerate(both.planned.reused) if buffer.zeros]
    assert zeros
    return [tensors[len(both.planned.inputs) + i] for tensors, _ in both.places.values() for i in zeros]


@pytest.mark.parametrize(
    ("scale", "rounding", "hadamard", "wanted", "shape"),
    [
        ("two_level", "nearest", True, (True, True), (128, 128)),
        ("two_level", "nearest", False, (True, True), (48, 80)),
        ("two_level_fp32", "stochastic", False, (True, True), (80, 16)),
        ("two_level", "stochastic", True, (True, True), (144, 80)),
        ("two_level", "stochastic", True, (True, False), (48, 80)),
        ("two_level", "stochastic", True, (False, True), (48, 80)),
        ("two_level_fp32", "nearest", False, (False, True), (16, 272)),
    ],
)
def test_four_bits_in_both_directions_by_one_launch_equal_the_reference(
    scale: Any, rounding: Any, hadamard: bool, wanted: tuple[bool, bool], shape: tuple[int, int]
) -> None:
    """Only the wanted directions, with advancing noise counts."""
    specs = [QuantSpec(E2M1, (1, 16), scale, rounding, rotated) for rotated in (False, hadamard)]
    family = quantize.family_of(specs[0], None)
    assert family is not None and family.plan_launch is not None
    plan_launch = family.plan_launch(torch.empty(shape, dtype=torch.bfloat16), *specs, RequestedOperands())
    assert plan_launch is not None
    both, counts, seed = (
        RowColQuantizer(torch.device("cpu"), plan_launch),
        torch.tensor([2**33 + 7, 5, 3]),
        0x1234_5678_9ABC_DEF0,
    )
    ids, random = (3_456_789_012, 11), rounding == "stochastic"
    for x in (torch.from_numpy(x).bfloat16() for x in nasty(shape).values()):
        before = counts.tolist()
        written = both(x, noise_inputs((seed, *ids), wanted, counts) if random or not all(wanted) else None)
        for i, (matrix, spec) in enumerate(zip((x, x.t()), specs, strict=True)):
            assert counts[i] == before[i] + (wanted[i] and random)
            if wanted[i]:
                expected = reference.quantize(matrix, spec, None, None, (seed, ids[i], before[i]))
                codes, of_codes, inverse = written[2 * i].view(torch.uint8), written[2 * i + 1], written[5 + i]
                assert expected.tensor_factor is not None
                torch.testing.assert_close(inverse, 1.0 / expected.tensor_factor, rtol=0, atol=0, equal_nan=True)
                got = Quantized(codes[:, : matrix.shape[1] // 2], of_codes.view(torch.uint8), spec, matrix.shape)  # type: ignore[arg-type]
                got.tensor_factor, got.swizzled = expected.tensor_factor, True
                assert_as_stored(got, expected)
        assert counts[2] == 3
    assert not any(t.any() for t in column_amax_buffers(both)), "what launches meet in is left as it was found"


@pytest.mark.parametrize("known", [True, False])
def test_factors_and_histories_are_per_matrix(known: bool) -> None:
    x, w = (
        torch.linspace(-3, 2, 32 * 48).view(32, 48).bfloat16(),
        torch.linspace(5, -7, 64 * 48).view(64, 48).bfloat16(),
    )
    factors, history = torch.tensor([4.0, 0.5, 9.0]), torch.tensor([1.0, 1.0, 8.0])
    shared = combine_launches(
        launch_plan(x, TENSOR, RequestedOperands()), launch_plan(w, TENSOR, RequestedOperands(transpose=True))
    )
    assert shared is not None
    both = RowColQuantizer(x.device, shared)
    delayed_x, delayed_w = (delayed_inputs(factors, i, known, history[i + 1 : i + 2]) for i in (0, 1))
    written = both(x, delayed_x, w, delayed_w)
    for codes, scale, matrix, factor in ((*written[:2], x, 4.0), (*written[5:7], w, 0.5)):
        expected = reference.quantize(matrix, TENSOR, None, factor)
        assert torch.equal(codes.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(scale.flatten(), torch.as_tensor(expected.scale).flatten())
    assert history.tolist() == [1.0, 3.0, 8.0]


def test_matrices_share_a_launch_when_one_kernel_handles_both() -> None:
    x = torch.empty(64, 128)
    transposing = RequestedOperands(transpose=True)
    assert combine_launches(launch_plan(x, TENSOR, RequestedOperands()), launch_plan(x, TENSOR, transposing))
    assert not combine_launches(launch_plan(x, TENSOR, RequestedOperands()), launch_plan(x, ROWS, transposing))
    assert not combine_launches(
        launch_plan(x, TENSOR, RequestedOperands(views=True)), launch_plan(x, TENSOR, transposing)
    ), "one of them writes no transpose"
    assert not combine_launches(
        launch_plan(x, QuantSpec(E4M3, scale="fp32"), RequestedOperands()), launch_plan(x, TENSOR, transposing)
    )


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


@pytest.mark.parametrize("spec", [TENSOR, ROWS, QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3, (1, 32), "e8m0")], ids=str)
def test_launch_decisions_hold_no_memory(spec: QuantSpec) -> None:
    """Neither the matrix used for the decision nor memory allocated for it."""
    x = torch.empty(512, 512)
    plan_launch = launch_plan(x, spec, RequestedOperands())
    tensors = [t for one in plan_launch.launches(None) for t in one.tensors if isinstance(t, Tensor)]
    assert tensors
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
