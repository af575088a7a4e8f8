"""NVFP4 kernels, along rows and down columns, have the reference's codes and scales, also rotated and random."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from quaver import E2M1, QuantSpec
from quaver.torch.backends.gpu import block_scaled, launch
from quaver.torch.backends.gpu.block_scaled import by_two_levels, rotated
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import rotate
from tests.kernels.compare import DEVICE, assert_same
from tests.operands import nasty
from tests.pairs import pairs

SPECS = [
    QuantSpec(E2M1, block, "two_level", rounding, hadamard)  # type: ignore[arg-type]
    for block, rounding, hadamard in itertools.product([(1, 16), (16, 16)], ["nearest", "stochastic"], [False, True])
    if not (hadamard and block == (16, 16))
]
RATIO = QuantSpec(E2M1, (1, 16), "two_level_fp32", "stochastic", True)
#: Whole blocks; ends within a block and within a byte; rows for which four words are drawn at once.
OPERANDS = {(128, 128): ["wide"], (5, 7): ["-infinity"], (36, 72): ["wide", "negative zeros", "NaN"]}
#: Seed, tensor id, count: each has a value beyond 31 bits.
NOISE = (0x1234_5678_9ABC_DEF0, 3_456_789_012, 2**33 + 7)


def operands(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    names = OPERANDS.get(shape, ["normal", "a subnormal"])
    return [torch.from_numpy(nasty(shape)[name]).to(DEVICE).to(dtype) for name in names]


def assert_as_stored(q: Quantized, expected: Quantized) -> None:
    """The same operand and the same factor, its rows filled with zeros."""
    assert_same(q, expected)
    assert q.tensor_factor is not None
    assert expected.tensor_factor is not None
    torch.testing.assert_close(q.tensor_factor, expected.tensor_factor, rtol=0, atol=0, equal_nan=True)
    if q.swizzled:
        rows, blocks = q.shape[0], -(-q.shape[1] // 16)
        assert isinstance(q.scale, Tensor)
        assert q.scale.numel() == -(-rows // 128) * -(-blocks // 4) * 512
        used = q.scale.view(-1, -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, -(-blocks // 4) * 4)
        assert not used[rows:].any()
        assert not used[:, blocks:].any()
    stride, width = q.data.stride(0), q.data.shape[1]
    if stride % 16 == 0 and q.swizzled:
        assert not q.data.as_strided((q.shape[0], stride), (stride, 1))[:, width:].any()
        if q.shape[1] % 2:
            assert not (q.data[:, -1] >> 4).any(), "half a byte that nobody owns is zero"


@pytest.mark.parametrize(("down", "spec", "shape"), pairs([False, True], [*SPECS, RATIO], OPERANDS), ids=str)
def test_codes_and_scales_equal_the_reference(down: bool, spec: QuantSpec, shape: tuple[int, int]) -> None:
    for x in operands(shape):
        expected = reference.quantize(x.t() if down else x, spec, None, None, NOISE)
        q = by_two_levels(x, spec, None, NOISE, down)
        assert_as_stored(q, expected)
        torch.testing.assert_close(q.amax, expected.amax, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_and_kinds_of_tensor_factors(dtype: torch.dtype) -> None:
    for scale in ("two_level", "two_level_fp32"):
        spec = QuantSpec(E2M1, (1, 16), scale)  # type: ignore[arg-type]
        for x in operands((20, 40), dtype):
            assert_as_stored(by_two_levels(x, spec), reference.quantize(x, spec))


@pytest.mark.parametrize("amax", [5.0, 0.0, 1e-3, float("inf"), float("nan")], ids=str)
def test_a_given_amax_is_used(amax: float) -> None:
    given = torch.full((1, 1), amax, device=DEVICE)
    x = operands((20, 40))[0]
    q = by_two_levels(x, SPECS[0], given)
    assert_as_stored(q, reference.quantize(x, SPECS[0], given))
    assert q.amax is None


def test_the_count_may_be_on_the_device_and_changes_the_noise() -> None:
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    x = operands((32, 64))[0]
    count = torch.tensor([3], dtype=torch.int64, device=DEVICE)
    first = by_two_levels(x, spec, None, (1, 2, count))
    assert_as_stored(first, reference.quantize(x, spec, None, None, (1, 2, 3)))
    count += 1
    again = by_two_levels(x, spec, None, (1, 2, count))
    assert_as_stored(again, reference.quantize(x, spec, None, None, (1, 2, 4)))
    assert not torch.equal(first.data, again.data)


def test_layers_and_seeds_share_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[launch.KernelLaunch] = []
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "_load", lambda one: loaded.append(one) or one)
    monkeypatch.setattr(launch, "_start_of", lambda one: (lambda *_: None, None, ()))
    monkeypatch.setattr(block_scaled._nv, "plans", {})

    def compiled(fn: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, warps: int, *_: Any) -> launch.Run:
        launch._loaded(launch.describe(fn, (*grid, 1), tensors, numbers, constants, warps), 0)
        return lambda *_: None

    monkeypatch.setattr(launch, "launcher", compiled)
    spec = QuantSpec(E2M1, (1, 16), "two_level", "stochastic")
    amax, count = torch.ones((1, 1), device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for seed, tensor_id in itertools.product((0, 2**31 + 1, 2**63 - 1), (0, 3, 2**32 - 1)):
        by_two_levels(operands((36, 72))[0], spec, amax, (seed, tensor_id, count))
    assert len(block_scaled._nv.plans) == 9
    assert len(loaded) == 1


def test_every_code_and_tie_rounds_as_the_reference() -> None:
    """Magnitudes around every multiple of a quarter step, under a block scale of 1."""
    steps = torch.arange(0, 8, 0.125)
    near = torch.cat([steps, steps.nextafter(torch.tensor(9.0)), steps.nextafter(torch.tensor(-9.0))])
    x = torch.cat([near, -near]).view(-1, 8).to(DEVICE)
    x = torch.cat([torch.full((len(x), 1), 6.0, device=DEVICE), x, torch.zeros(len(x), 7, device=DEVICE)], 1)
    for rounding in ("nearest", "stochastic"):
        spec = QuantSpec(E2M1, (1, 16), "two_level", rounding)  # type: ignore[arg-type]
        assert_as_stored(by_two_levels(x, spec, None, NOISE), reference.quantize(x, spec, None, None, NOISE))


@pytest.mark.parametrize("down", [False, True], ids=["along", "down"])
def test_amax_after_the_rotation(down: bool) -> None:
    for x in operands((40, 24)):
        expected: Any = rotate((x.t() if down else x).float())
        expected = reference.block_bits(expected.view(torch.int32) & 0x7FFFFFFF, QuantSpec(E2M1)).view(torch.float32)
        torch.testing.assert_close(rotated(x, down), expected, rtol=0, atol=0, equal_nan=True)
