"""Hadamard rotation, Philox noise, rounding and scale factors in torch tensors, and detection of tracing.

The numbers equal those of `quaver.reference.numerics`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._guards
from torch import Tensor, compiler
from torch.compiler import is_compiling, is_dynamo_compiling

from quaver.recipes.formats import Format
from quaver.recipes.spec import QuantSpec
from quaver.reference.numerics import (
    FACTOR_EXPONENTS,
    GROUP,
    MULTIPLIER,
    MULTIPLIERS,
    NAN_CODE,
    ROUNDS,
    SIGNS,
    TENSOR_EXPONENTS,
    WEYL,
)
from quaver.reference.numerics import noise_stream as reference_stream
from quaver.torch.numerics.quantized import FLOAT8

# ---- Hadamard rotation ----


def rotate(x: Tensor) -> Tensor:
    """Rotate float32 [rows, k] in groups of 16 along k; returns [rows, ceil16(k)], padded with zeros."""
    rows, k = x.shape
    groups = -(-k // GROUP)
    if k != groups * GROUP:
        x = torch.nn.functional.pad(x, (0, groups * GROUP - k))
    y = x.reshape(rows, groups, GROUP) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    for stride in (1, 2, 4, 8):
        pairs = y.view(rows, groups, GROUP // (2 * stride), 2, stride)
        a, b = pairs.unbind(3)
        y = torch.stack([a + b, a - b], 3)
    return y.view(rows, groups * GROUP).mul_(0.25)


def transposed_rotate(x: Tensor) -> Tensor:
    """Rotate the transpose: float32 [k, rows] to [ceil16(k), rows], by adding whole rows."""
    k, rows = x.shape
    groups = -(-k // GROUP)
    if k != groups * GROUP:
        x = torch.nn.functional.pad(x, (0, 0, 0, groups * GROUP - k))
    y = x.view(groups, GROUP, rows) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)[:, None]
    for stride in (1, 2, 4, 8):
        a, b = y.view(groups, GROUP // (2 * stride), 2, stride, rows).unbind(2)
        difference = a - b
        a.add_(b)
        b.copy_(difference)
    return y.view(groups * GROUP, rows).mul_(0.25)


# ---- noise of stochastic rounding, on any device ----

#: (seed, tensor id, count) of stochastic rounding; id and count may be int64 tensors.
Noise = tuple[int, Tensor | int, Tensor | int]
#: The same outside of compiled code.
EagerNoise = tuple[int, int, Tensor | int]


NO_NOISE: EagerNoise = (0, 0, 0)


_LOW = 0xFFFFFFFF
#: Counters processed at once, so that temporaries stay in a CPU's L2 cache.
_CHUNK = 1 << 15


def uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, device: torch.device, first_row: int = 0
) -> Tensor:
    """Return the uniform number in (0, 1) for each element's stochastic rounding, float32 [rows, k].

    Equals `quaver.reference.numerics`.

    Args:
        rows, k: shape of the operand, or of the piece of it that starts at `first_row`, a multiple of four.
        seed, tensor_id: stream.
        count: an int, or an int64 tensor of one element, which stays on its device.
    """
    assert first_row % 4 == 0
    stream = noise_stream(seed, tensor_id, count, device)
    start, groups = first_row * k // 4, -(-rows * k // 4)
    out = torch.empty((groups, 4), dtype=torch.float32, device=device)
    chunk = _CHUNK if device.type == "cpu" else max(groups, 1)
    for at in range(0, groups, chunk):
        g = torch.arange(start + at, start + min(at + chunk, groups), dtype=torch.int64, device=device)
        piece = out[at : at + chunk]
        for column, half in enumerate(halves(g, *stream)):
            piece[:, column] = half
    return unit_interval(out).view(-1)[: rows * k].view(rows, k)


def part_of_uniform(rows: Tensor, packed4: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """Return `uniform` of an operand with k columns (a multiple of four) at selected rows and columns.

    Args:
        rows: row indices, int64.
        packed4: column indices divided by four; each selects four consecutive columns.

    Returns:
        float32 [rows, 4 × len(packed4)].
    """
    assert k % 4 == 0
    out = torch.empty((len(rows), len(packed4), 4), dtype=torch.float32, device=rows.device)
    g = rows[:, None] * (k // 4) + packed4
    for column, half in enumerate(halves(g, *noise_stream(seed, tensor_id, count, g.device))):
        out[..., column] = half
    return unit_interval(out).view(len(rows), 4 * len(packed4))


def rows_of_uniform(rows: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """Return selected rows of `uniform` of an operand with any number k of columns: float32 [rows, k].

    Args:
        rows: row indices, int64.
    """
    if k % 4 == 0:
        packed4 = torch.arange(k // 4, dtype=torch.int64, device=rows.device)
        return part_of_uniform(rows, packed4, k, seed, tensor_id, count)
    # Enough groups of four to cover a row that begins anywhere in its first group.
    first = rows[:, None] * k
    g = first // 4 + torch.arange((k + 6) // 4, dtype=torch.int64, device=rows.device)
    inside = first % 4 + torch.arange(k, dtype=torch.int64, device=rows.device)
    drawn = torch.stack(halves(g, *noise_stream(seed, tensor_id, count, g.device)), -1).flatten(1).gather(1, inside)
    return unit_interval(drawn.to(torch.float32))


def transposed_uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, first: int, number: int
) -> Tensor:
    """Return columns first … first + number of `uniform(rows, k, ...)`, transposed: float32 [number, rows].

    k, first and number must be multiples of four, so that the four halves of a counter belong to four rows of the
    result.
    """
    out = torch.empty((number // 4, 4, rows), dtype=torch.float32, device="cpu")
    g = torch.arange(first // 4, (first + number) // 4, dtype=torch.int64, device="cpu")[:, None]
    g = g + torch.arange(rows, dtype=torch.int64, device="cpu") * (k // 4)
    for line, half in enumerate(halves(g, *noise_stream(seed, tensor_id, count, g.device))):
        out[:, line] = half
    return unit_interval(out).view(number, rows)


def halves(g: Tensor, key: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 16-bit halves of the two Philox words at counters g, int64 of any shape.

    key, upper: from `noise_stream`, of a shape that broadcasts to g's.
    """
    first, second = philox2x32(g & _LOW, (g >> 32).bitwise_xor_(upper), key)
    half, low = _word(16, g.device), _word(0xFFFF, g.device)
    upper_halves = first >> half, second >> half
    return upper_halves[0], first.bitwise_and_(low), upper_halves[1], second.bitwise_and_(low)


def unit_interval(half: Tensor) -> Tensor:
    """Convert 16-bit halves, float32, to numbers in (0, 1) in place: (half + 1/2) × 2**-16."""
    return half.add_(0.5).mul_(2.0**-16)


def noise_stream(
    seed: int, tensor_id: Tensor | int, count: Tensor | int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the key and the upper counter word of one quantization's noise, int64 below 2**32.

    Equals `quaver.reference.numerics.noise_stream`.

    Args:
        seed: 64 bits.
        tensor_id, count: ints, or int64 tensors of one element, or of many streams.
        device: device of the results; a tensor on a GPU is not read by the host.

    Returns:
        Two tensors, [] or of the shape of tensor_id and count.
    """
    if _readable(tensor_id) and _readable(count):
        # For a single stream, Python integers are faster than tensors.
        words = reference_stream(seed, int(tensor_id) & _LOW, int(count))
        return _word(words[0], device), _word(words[1], device)
    c2, c3 = (torch.as_tensor(n, dtype=torch.int64, device=device).bitwise_and(_LOW) for n in (tensor_id, count))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return philox4x32(zero, zero, c2, c3, seed)[:2]


def _readable(number: Tensor | int) -> bool:
    """Return True if a number is an int, or one element on a CPU that no compiler traces."""
    if not isinstance(number, Tensor):
        return True
    return type(number) is Tensor and number.is_cpu and number.numel() == 1 and not is_tracing()


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ten rounds of four-word Philox on int64 tensors of 32-bit words.

    Products wrap in int64 with the bits of uint64.
    """
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        wide0, wide1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (wide1 >> 32) & _LOW ^ c1 ^ k0, wide1 & _LOW
        c2, c3 = (wide0 >> 32) & _LOW ^ c3 ^ k1, wide0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _word(v: int, device: torch.device) -> Tensor:
    return torch.tensor(v, dtype=torch.int64, device=device)


def philox2x32(c0: Tensor, c1: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Run ten rounds of two-word Philox on int64 tensors of 32-bit words; overwrites c0 and c1.

    Constants are tensors, because torch converts a Python number in each call.

    Args:
        key: int64 below 2**32, of a shape that broadcasts to c0's.
    """
    device = c0.device
    low, half, multiplier = (_word(v, device) for v in (_LOW, 32, MULTIPLIER))
    high = torch.empty_like(c0)
    for round_key in round_keys(key).unbind(-1):
        c0.mul_(multiplier)
        torch.bitwise_right_shift(c0, half, out=high)
        c1.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(round_key)
        c0.bitwise_and_(low)
        c0, c1 = c1, c0
    return c0, c1


def round_keys(key: Tensor) -> Tensor:
    """Return the round keys of two-word Philox, int64 [..., 10] below 2**32, from the first keys, int64 [...]."""
    steps = torch.arange(0, ROUNDS * WEYL[0], WEYL[0], dtype=torch.int64, device=key.device)
    return (key.unsqueeze(-1) + steps).bitwise_and_(_LOW)


def traced(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Run `philox2x32` without in-place operations, so that a compiler can fuse it; keys are those of `round_keys`.

    int32 keys give int32 words with the same bits: AVX2 cannot multiply vectors of int64.
    """
    if keys.dtype is torch.int32:
        return _traced_in_halves(c0, c1, keys)
    for i in range(ROUNDS):
        wide = c0 * MULTIPLIER
        c0, c1 = ((wide >> 32) & _LOW) ^ c1 ^ keys[i], wide & _LOW
    return c0, c1


def _traced_in_halves(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Run Philox rounds with products of 16-bit halves in int32.

    The multiplier is 2**32 plus two signed 14-bit halves, so that products of halves fit int32. The two middle products
    are computed as one: the product of both sums minus the outer products. Between rounds a word is viewed as float32,
    because Inductor loads full vectors of float32 but half vectors of int32.
    """
    upper, lower = (MULTIPLIER - (1 << 32)) + (1 << 15) >> 16, ((MULTIPLIER & 0xFFFF) ^ 0x8000) - 0x8000
    word0 = c0.view(torch.float32)
    for i in range(ROUNDS):
        word = word0.view(torch.int32)
        a, b = (word >> 16) & 0xFFFF, word & 0xFFFF
        first, last = a * upper, b * lower
        middle = (a + b) * (upper + lower) - first - last + (last >> 16)
        high, low = first + (middle >> 16) + word, (middle << 16) + (last & 0xFFFF)
        word0, c1 = (high ^ c1 ^ keys[i]).view(torch.float32), low
    return word0.view(torch.int32), c1


# ---- rounding and scale factors ----
# All steps use integers where a compiler or a GPU could round differently.

INFINITY_BITS = 0x7F800000
SMALLEST_NORMAL_BITS = 0x00800000


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of |x| for float32 x as int32; they are ordered NaN > infinity > finite."""
    return x.view(torch.int32) & 0x7FFFFFFF


def exponent(bits: Tensor, fmt: Format) -> Tensor:
    """Return the largest p in bounds with amax × 2**p <= fmt.max, int32, from amax's bits; 0 if amax is 0 or not
    finite.
    """
    p = (fmt.emax + 127) - ((bits + (0x7FFFFF - fmt.max_mantissa)) >> 23)
    return torch.where(usable(bits), p.clamp(*FACTOR_EXPONENTS), 0)


def tensor_exponent(bits: Tensor) -> Tensor:
    """Return the same for a two-level tensor factor: amax × 2**p <= 2688 = 1.3125 × 2**11."""
    p = (11 + 127) - ((bits + (0x7FFFFF - 0x280000)) >> 23)
    return torch.where(usable(bits), p.clamp(*TENSOR_EXPONENTS), 0)


def usable(bits: Tensor) -> Tensor:
    """Return a mask of amaxes that define a factor: normal and finite."""
    return (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)


def power_of_two(p: Tensor) -> Tensor:
    """Return float32 2**p for int32 p in [-126, 127]."""
    return ((p + 127) << 23).view(torch.float32)


def ratio(largest: float, bits: Tensor) -> Tensor:
    """Return largest / amax, correctly rounded on a CPU and clamped to normal numbers; 1 if amax is 0 or not finite."""
    amax = torch.where(usable(bits), bits, 0x3F800000).view(torch.float32)
    e = torch.full_like(amax, largest) / amax
    info = torch.finfo(torch.float32)
    return torch.where(usable(bits), e.clamp(info.tiny, info.max), 1.0)


def encode(y: Tensor, spec: QuantSpec, u: Tensor | None) -> Tensor:
    """Encode scaled float32 values as codes, in float8 or in uint8 if torch has no such dtype."""
    fmt = spec.format
    if fmt.packed:
        return encode_e2m1(y, u)
    dtype = FLOAT8.get(fmt.name)
    if dtype is None:
        return _encode_in_bytes(y, fmt, u)
    if u is not None:
        y = _round_stochastically(y, fmt, u)
    return y.clamp(-fmt.max, fmt.max).to(dtype)


def _encode_in_bytes(y: Tensor, fmt: Format, u: Tensor | None) -> Tensor:
    """Encode float32 as uint8 codes of any format, NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # A binade has 2**mantissa_bits steps, which continue in the exponent field.
    code = whole.to(torch.int32) + (e + (fmt.mantissa_bits - fmt.emin) << fmt.mantissa_bits)
    code |= torch.signbit(y).to(torch.int32) << (fmt.bits - 1)
    return torch.where(y.isnan(), NAN_CODE if fmt.has_nan else fmt.max_code, code).to(torch.uint8)


def _steps(y: Tensor, fmt: Format, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return |y|, clamped and rounded to steps of the format's grid, float32, and the exponent of a step, int32."""
    a = y.abs().clamp(max=fmt.max)
    e = ((a.view(torch.int32) >> 23) - 127).clamp(min=fmt.emin, max=fmt.emax) - fmt.mantissa_bits
    steps = a * power_of_two(-e)
    if u is None:
        return steps.round(), e
    whole = steps.floor()
    return whole + (u < steps - whole).to(torch.float32), e


def encode_e2m1(y: Tensor, u: Tensor | None) -> Tensor:
    """Encode float32 as E2M1 codes, one per byte. Steps are 1/2 below 2, 1 below 4 and 2 above; NaN becomes +6."""
    a = y.abs().clamp_(max=6.0)
    over2, over4 = (a >= 2.0).to(torch.float32), (a >= 4.0).to(torch.float32)
    # In steps, the first range counts from 0, the second from 2, the third from 4.
    first = (over2 + over4).mul_(2.0)
    a.mul_(over4.mul_(0.5).add_(over2).neg_().add_(2.0))
    if u is None:
        code = a.round_().add_(first)
    else:
        whole = a.floor()
        code = whole.add_(u < a.sub_(whole)).add_(first)
    code = code.nan_to_num_(nan=7.0).to(torch.uint8)
    negative = torch.signbit(y) & ~y.isnan()
    return code | negative.to(torch.uint8) << 3


def _round_stochastically(y: Tensor, fmt: Format, u: Tensor) -> Tensor:
    """Round float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    rounded = whole * power_of_two(e)
    return torch.where(y.isnan(), y, torch.copysign(rounded, y))


def flush(x: Tensor) -> Tensor:
    """Flush subnormals to zeros of their sign."""
    return torch.where(magnitude_bits(x) < SMALLEST_NORMAL_BITS, x * 0.0, x)


# ---- tracing: detect whether a compiler traces this thread ----
# `torch.compiler.is_compiling` reads a process-wide flag, which torch.compile (since torch 2.13) and torch.export set
# while any thread compiles, and which overlapping compilations may even leave set. `is_tracing` is per thread: torch
# stores the state of a trace (Dynamo, AOTAutograd of a backward, torch.export) in a thread-local context. A dispatch
# mode is no evidence, because a user may enter one in eager mode.


class _CompilingFlag:
    """The process-wide flag, read by torch's public function."""

    def __getitem__(self, _: str) -> bool:
        return is_compiling()


def _no_context() -> bool:
    """Return True: used if torch has no `TracingContext.try_get`, so that the process-wide flag decides alone."""
    return True


_Context: Any = getattr(torch._guards, "TracingContext", None)
#: Mapping with the process-wide flag, read without a call, because eager layers ask often. Not a module: Dynamo
#: compiles functions whose globals are torch modules separately, and would treat it as always True.
flags: Any = vars(compiler) if hasattr(compiler, "_is_compiling_flag") else _CompilingFlag()
#: Returns this thread's tracing context, or None.
context: Callable[[], object] = getattr(_Context, "try_get", _no_context)


def is_tracing() -> bool:
    """Return True if a compiler traces this thread: Dynamo, AOTAutograd for torch.compile, or torch.export.

    Constant True for Dynamo. False in all other threads, under `make_fx` alone, and while a compiled program runs.
    """
    return is_dynamo_compiling() or (flags["_is_compiling_flag"] and context() is not None)
