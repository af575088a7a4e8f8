"""The patched interpreter rounds as a GPU does."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as tritons

from quaver.torch.backends.gpu import interpreter, launch

FP8 = {"e4m3": (tl.float8e4nv, torch.float8_e4m3fn, 448.0), "e5m2": (tl.float8e5, torch.float8_e5m2, 57344.0)}
NARROW = {"bf16": (tl.bfloat16, torch.bfloat16), "fp16": (tl.float16, torch.float16)}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a dtype of 16 bits."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def midpoints(dtype: torch.dtype, largest: float) -> Tensor:
    """float32: all finite codes, the middles between neighbours, both ± 1 ulp, and NaN."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].unique()
    exact = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([largest * 1.0625, -largest * 1.0625])])
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3.4e38])
    return torch.cat([exact, up, down, special])


def saturated(x: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    wide = x.float()
    return torch.where(wide.isnan(), wide, wide.clamp(-largest, largest)).to(dtype)


def converted(x: Tensor, source: object, target: object, dtype: torch.dtype) -> Tensor:
    """Convert a tensor in the interpreter, with its current conversion."""
    size = x.element_size()
    data = x.view(BITS[size]).numpy().view(UNSIGNED[size])
    codes = np.ascontiguousarray(tritons._convert_float(data, source, target, None))
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(codes.view(np.dtype(f"i{size}") if size > 1 else np.uint8).copy()).view(dtype)


def wrong(result: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; all NaN are equal."""
    size = BITS[result.element_size()]
    both = result.float().isnan() & expected.float().isnan()
    return int(((result.view(size) != expected.view(size)) & ~both).sum())


@pytest.fixture
def patched() -> None:
    interpreter.install_fixes()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("target", FP8)
def test_all_narrow_values_become_fp8_as_torch_saturates_them(source: str, target: str) -> None:
    kind, dtype, largest = FP8[target]
    x = every(NARROW[source][1])
    assert wrong(converted(x, NARROW[source][0], kind, dtype), saturated(x, dtype, largest)) == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("target", FP8)
def test_float32_midpoints_and_their_neighbours_round_to_even(target: str) -> None:
    kind, dtype, largest = FP8[target]
    x = midpoints(dtype, largest)
    assert wrong(converted(x, tl.float32, kind, dtype), saturated(x, dtype, largest)) == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("target", NARROW)
def test_float32_becomes_sixteen_bits_as_torch_rounds_it(target: str) -> None:
    kind, dtype = NARROW[target]
    x = torch.cat([torch.randn(4096), midpoints(torch.float8_e5m2, 57344.0), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])])
    assert wrong(converted(x, tl.float32, kind, dtype), x.to(dtype)) == 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("target", [tl.float32, tl.bfloat16], ids=str)
@pytest.mark.parametrize("source", FP8)
def test_all_codes_round_trip(source: str, target: object) -> None:
    kind, dtype, _ = FP8[source]
    wide = torch.float32 if target == tl.float32 else torch.bfloat16
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    assert wrong(converted(codes, kind, target, wide), codes.to(wide)) == 0


@triton.jit
def mixed(small, wide, real, floats, wholes, N: tl.constexpr):
    at = tl.arange(0, N)
    byte, long, x, first = tl.load(small + at), tl.load(wide + at), tl.load(real + at), tl.load(real)
    tl.store(floats + at, x + byte)
    tl.store(floats + N + at, first - x)
    tl.store(floats + 2 * N + at, x * 0.0)
    tl.store(floats + 3 * N + at, x * -1.5)
    tl.store(floats + 4 * N + at, byte / 4)
    tl.store(floats + 5 * N + at, tl.where(x > first, x, first))
    tl.store(wholes + at, byte + long)
    tl.store(wholes + N + at, byte * 3)
    tl.store(wholes + 2 * N + at, x.to(tl.int32))
    tl.store(wholes + 3 * N + at, byte.to(tl.uint8))
    tl.store(wholes + 4 * N + at, byte.to(tl.uint8).to(tl.int16) + long.to(tl.int16))
    tl.store(wholes + 5 * N + at, tl.sum(byte[:, None].to(tl.int32) * at[None, :] + 1, 1))


def test_mixed_types_promote_as_in_torch() -> None:
    """See tests/interpreting.py: the result of two types is cached, that of a type and a number is not."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        byte = torch.randint(-128, 128, (32,), generator=generator).to(torch.int8)
        long = torch.randint(-(2**40), 2**40, (32,), generator=generator)
        x = 100 * torch.randn(32, generator=generator)
        floats, wholes = torch.empty(6, 32), torch.empty(6, 32, dtype=torch.int64)
        given = byte, long, x, floats, wholes
        launch.launcher(mixed, (1,), given, (), {"N": 32})(*given)
        real = [x + byte, x[0] - x, x * 0.0, x * -1.5, byte / 4, torch.where(x > x[0], x, x[0])]
        assert torch.equal(floats.view(torch.int32), torch.stack(real).view(torch.int32))
        unsigned = byte.view(torch.uint8)
        sums = (byte[:, None].int() * torch.arange(32) + 1).sum(1)
        whole = [byte + long, byte * 3, x.int(), unsigned, unsigned.short() + long.short(), sums]
        assert torch.equal(wholes, torch.stack([value.long() for value in whole]))


@triton.jit
def product(a, b, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_of_narrow_types_are_exact(dtype: torch.dtype) -> None:
    a, b = (torch.randn(16, 16).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    launch.launcher(product, (1,), (a, b, out))(a, b, out)
    exact = a.double() @ b.double()
    assert (out.double() - exact).norm() < 1e-6 * exact.norm()


@triton.jit
def fused(x, y, z, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


def test_a_product_and_a_sum_are_rounded_once() -> None:
    """Against fractions: sums that cancel, ties that only the product's last bits decide, NaN and infinities."""
    x, y = torch.randn(4096), torch.randn(4096)
    near = -(x.double() * y.double()).float()
    halves = torch.tensor([1 + 2**-23, 1 - 2**-24, 1 + 2**-12, 1 - 2**-12], dtype=torch.float32).repeat(256)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 3e38, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([x, x, halves, special.repeat(8), torch.randn(960)])
    y = torch.cat([y, y, halves.roll(1), special.repeat_interleave(8), torch.randn(960)])
    z = torch.cat([near, torch.randn(4096), torch.ones(512) * 2**-48, torch.ones(512) * -(2**-50), torch.randn(1024)])
    n = 16384
    x, y, z = (torch.cat([t, torch.randn(n - len(t))]) for t in (x, y, z))
    out = torch.empty(n)
    launch.launcher(fused, (1,), (x, y, z, out), (), {"N": n})(x, y, z, out)
    for a, b, c, ours in zip(x.tolist(), y.tolist(), z.tolist(), out.tolist(), strict=True):
        if all(map(math.isfinite, (a, b, c))):
            exact = Fraction(a) * Fraction(b) + Fraction(c)
            assert nearest_float32(exact, ours), (a, b, c, ours)
        else:
            assert repr(ours) == repr(a * b + c)


def nearest_float32(exact: Fraction, ours: float) -> bool:
    """Whether ours is the nearest float32, and the even one of a tie."""
    if math.isinf(ours):
        return abs(exact) >= Fraction(float(np.finfo(np.float32).max)) + Fraction(2) ** 103
    one = np.float32(ours)
    neighbours = [float(np.nextafter(one, np.float32(side))) for side in (-np.inf, np.inf)]
    far = abs(exact - Fraction(ours))
    nearer = min(abs(exact - Fraction(v)) for v in neighbours if math.isfinite(v))
    return far < nearer or (far == nearer and int(one.view(np.int32)) % 2 == 0)


@triton.jit
def extremes(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.maximum(a, b))
    tl.store(out + N + at, tl.minimum(a, b))
    tl.store(out + 2 * N + at, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 3 * N + at, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))


def test_extremes_drop_nan_unless_told_to_propagate_it() -> None:
    """As PTX's `max.f32` and `min.f32` do without and with `.NaN`."""
    values = torch.tensor([torch.nan, 1.0, -2.0, torch.inf])
    x, y, out = values.repeat_interleave(4), values.repeat(4), torch.empty(4, 16)
    launch.launcher(extremes, (1,), (x, y, out), (), {"N": 16})(x, y, out)
    for got, expected in zip(out, (x.fmax(y), x.fmin(y), x.maximum(y), x.minimum(y)), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
