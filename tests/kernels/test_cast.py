"""One scale for the tensor: amax, cast, and cast with its transpose equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch import reference
from quaver.torch.gpu import quantize as gpu
from tests.kernels.compare import DEVICE, assert_same
from tests.operands import nasty

SPECS = [QuantSpec(E4M3), QuantSpec(E5M2), QuantSpec(E4M3, scale="fp32"), QuantSpec(E5M2, scale="fp32")]
SHAPES = [(128, 64), (256, 128), (5, 7), (130, 65), (1, 16), (33, 200)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x).to(DEVICE).to(dtype) for name, x in nasty(shape).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax_is_the_largest_magnitude_by_its_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name, x in operands(shape, dtype).items():
        expected = reference.quantize(x, QuantSpec(E4M3)).amax
        torch.testing.assert_close(gpu.measure(x), expected, rtol=0, atol=0, equal_nan=True, msg=name)
        assert not gpu.workspace(DEVICE).any(), "the programs' meeting place is left as it was found"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("mode", ["current", "given", "delayed", "unset"])
def test_codes_scales_and_amax_equal_the_reference(mode: str, spec: QuantSpec, shape: tuple[int, int]) -> None:
    for name, x in operands(shape, torch.bfloat16).items():
        amax = torch.full((1, 1), 3.0, device=DEVICE) if mode == "given" else None
        factor = {"delayed": torch.tensor([4.0]), "unset": torch.tensor([0.0])}.get(mode)
        factor = None if factor is None else factor.to(DEVICE)
        expected = reference.quantize(x, spec, amax, factor)
        q = gpu.per_tensor(x, spec, amax, factor, mode == "delayed", True)
        assert_same(q, expected)
        assert q.twin is not None
        assert torch.equal(q.twin.codes(), expected.codes().t())
        # What ends a row is zero, for GEMMs whose k must be a multiple of 16.
        for part in (q, q.twin):
            base = part.data.as_strided((part.shape[0], part.data.stride(0)), (part.data.stride(0), 1))
            assert not base[:, part.shape[1] :].view(torch.uint8).any(), name
        if mode != "given":
            torch.testing.assert_close(q.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_every_bf16_value_rounds_as_the_reference(spec: QuantSpec) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)
    one = torch.ones(1, device=DEVICE)
    expected = reference.quantize(x, spec, None, one)
    assert torch.equal(gpu.per_tensor(x, spec, None, one, True, False).codes(), expected.codes())


def test_rows_far_apart_are_found() -> None:
    """64-bit offsets: the second row begins beyond 2**31 elements; memory that nobody touches costs nothing."""
    stride = 2**31 + 64
    storage = torch.UntypedStorage((stride + 16) * 2, device=DEVICE)
    x = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(storage, 0, (2, 16), (stride, 1))
    x.copy_(torch.arange(32.0).view(2, 16))
    spec = QuantSpec(E4M3)
    assert_same(gpu.per_tensor(x, spec, None, None, False, True), reference.quantize(x, spec))
