"""Test bit operations of kernels on float32 against the reference, for all distinguishable values."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quaver import E4M3, E5M2, Format
from quaver.kernels.numerics import decoded, encode, encode_factor, largest_of_runs, widened
from quaver.reference import numerics
from quaver.reference.numerics import magnitudes
from quaver.torch.backends.gpu import interpreter
from quaver.torch.backends.gpu.tensorwise import DTYPES
from quaver.torch.numerics.quantized import FLOAT8
from tests.kernels.compare import DEVICE


@triton.jit
def encoded(x, q, BLOCK: tl.constexpr, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q + at, encode(widened(tl.load(x + at)), dtype, INTEGERS))


@triton.jit
def values(q, x, BLOCK: tl.constexpr, dtype: tl.constexpr, INTEGERS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, decoded(tl.load(q + at), dtype, INTEGERS))


@triton.jit
def amax_values(x, top, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    runs = tl.program_id(0) * (BLOCK >> HALVINGS) + tl.arange(0, BLOCK >> HALVINGS)
    tl.store(top + runs, largest_of_runs(tl.load(x + at), HALVINGS))


@triton.jit
def factors(bits, e, BLOCK: tl.constexpr, EMAX: tl.constexpr, TOP_MANTISSA: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(e + at, encode_factor(tl.load(bits + at), True, EMAX, TOP_MANTISSA, 1.0))


def telling(fmt: Format) -> Tensor:
    """Every bf16; every value of the format, the middles between them, and neighbours in float32 and float16."""
    values = np.append(magnitudes(fmt), np.float32(2 * fmt.max)).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles, [1e-10, 2.0**-14, 65504, 65520, 1e30]]).astype(np.float32)
    bits = points.view(np.int32)[:, None] + np.array([-8192, -4096, -1, 0, 1, 4095, 4096, 8192], np.int32)
    near = torch.from_numpy(bits.astype(np.int32).reshape(-1)).view(torch.float32)
    bf16 = (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)
    noise = torch.randn(40000) * 2.0 ** torch.randint(-20, 18, (40000,))
    odd = torch.tensor([0x7F800001, 0x7FC00000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    every = torch.cat([near, -near, bf16, noise, odd, -odd])
    return torch.nn.functional.pad(every, (0, -len(every) % 4096))


#: Values of INTEGERS: Hopper casts, Ada casts after rounding on the bits, Ampere has no cast.
INTEGERS = {0: "by a cast", 1: "by a cast of odd halves", 2: "by bits"}


@pytest.mark.parametrize("integers", INTEGERS, ids=INTEGERS.get)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_telling_value_rounds_to_nearest_even_and_saturates(fmt: Format, integers: int) -> None:
    interpreter.install_fixes()
    x = telling(fmt).to(DEVICE)
    q = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    with np.errstate(all="ignore"):
        encoded[(len(x) // 4096,)](x, q, 4096, DTYPES[fmt.name], integers)
    clamped = torch.where(x.isnan(), x, x.clamp(-fmt.max, fmt.max))
    expected = clamped.to(FLOAT8[fmt.name])
    rounded = q.view(FLOAT8[fmt.name])
    assert torch.equal(rounded.isnan(), expected.isnan())
    differs = (q != expected.view(torch.uint8)) & ~expected.isnan()
    assert not differs.any(), (x[differs][0].item(), q[differs][0].item())


@pytest.mark.parametrize("integers", INTEGERS, ids=INTEGERS.get)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_every_code_has_its_value(fmt: Format, integers: int) -> None:
    interpreter.install_fixes()
    codes, x = torch.arange(256).to(torch.uint8).to(DEVICE), torch.empty(256, device=DEVICE)
    values[(1,)](codes, x, 256, DTYPES[fmt.name], integers)
    expected = codes.view(FLOAT8[fmt.name]).float()
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(x.signbit()[~x.isnan()], expected.signbit()[~x.isnan()])


@pytest.mark.parametrize("halvings", range(5))
def test_the_largest_value_of_a_run_is_exact(halvings: int) -> None:
    x = telling(E4M3)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))].to(DEVICE)
    largest = torch.empty(len(x) >> halvings, dtype=torch.int32, device=DEVICE)
    amax_values[(len(x) // 4096,)](x, largest, 4096, halvings)
    expected = (x.view(torch.int32) & 0x7FFFFFFF).view(-1, 1 << halvings).amax(1)
    # All NaN are equal.
    infinity = 0x7F800000
    differs = (largest != expected) & ~((largest > infinity) & (expected > infinity))
    assert not differs.any(), (hex(largest[differs][0]), hex(expected[differs][0]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_a_power_of_two_is_the_reference_s_for_every_exponent_of_an_amax(fmt: Format) -> None:
    mantissas = np.array([0, 1, fmt.max_mantissa - 1, fmt.max_mantissa, fmt.max_mantissa + 1, 0x7FFFFF], np.int32)
    bits = np.resize((np.arange(256, dtype=np.int32)[:, None] << 23) + mantissas, 2048)
    powers = torch.empty(2048, device=DEVICE)
    factors[(1,)](torch.from_numpy(bits).to(DEVICE), powers, 2048, fmt.emax, fmt.max_mantissa)
    amax = np.where(bits < 0x00800000, 0, bits).view(np.float32)
    expected = numerics.encode_factor(amax, fmt, True)
    differs = powers.cpu().numpy() != expected
    assert not differs.any(), (amax[differs][0], powers[torch.from_numpy(differs)][0].item(), expected[differs][0])
