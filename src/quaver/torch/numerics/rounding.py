"""The 16-point rotation in torch tensors: the twin of `quaver.reference.numerics`."""

from collections.abc import Callable
from functools import cache
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
from quaver.torch.numerics.quantized import FLOAT8

# ---- hadamard --------------------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:
    """float32 [rows, k] to [rows, ceil16(k)], groups of 16 along k rotated, the tail padded with zeros. Exact."""
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
    """`rotate` of the transpose, transposed: float32 [k, rows] to [ceil16(k), rows], where whole lines are added."""
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


# ---- philox ----------------------------------------------------------------------------------------------
# Philox4x32-10 and Philox2x32-10 in torch tensors: the twins of `quaver.reference.numerics`, on any device.

#: (seed, tensor id, count) of stochastic rounding; count may be an int64 tensor of one element.
Noise = tuple[int, Tensor | int, Tensor | int]
#: The same outside of compiled code.
EagerNoise = tuple[int, int, Tensor | int]


QUIET: EagerNoise = (0, 0, 0)


_LOW = 0xFFFFFFFF
#: Counters worked on at once: their arrays stay in a CPU's second-level cache.
_CHUNK = 1 << 15


def uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, device: torch.device, first_row: int = 0
) -> Tensor:
    """The number in [0, 1) that each element of an operand is rounded with, float32 [rows, k]; see
    `quaver.reference.numerics`.

    Args:
        rows, k: shape of the operand, or of the piece of it that starts at `first_row`, a multiple of four.
        seed, tensor_id: of the stream.
        count: an int, or an int64 tensor of one element, which then stays on its device.
    Exact.
    """
    assert first_row % 4 == 0
    start, groups = first_row * k // 4, -(-rows * k // 4)
    out = torch.empty((groups, 4), dtype=torch.float32, device=device)
    chunk = _CHUNK if device.type == "cpu" else max(groups, 1)
    for at in range(0, groups, chunk):
        g = torch.arange(start + at, start + min(at + chunk, groups), dtype=torch.int64, device=device)
        piece = out[at : at + chunk]
        for column, word in enumerate(words(g, seed, tensor_id, count)):
            piece[:, column] = word
    return out.mul_(2.0**-24).view(-1)[: rows * k].view(rows, k)


def part_of_uniform(rows: Tensor, packed4: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """`uniform` of an operand with k columns, a multiple of four, where some rows and columns of it meet.

    Args:
        rows: the numbers of the rows, int64.
        packed4: the numbers of the columns, each divided by four: of every four that begin at a multiple of four.
    Returns:
        float32 [rows, 4 × fours]. Exact.
    """
    assert k % 4 == 0
    out = torch.empty((len(rows), len(packed4), 4), dtype=torch.float32, device=rows.device)
    g = rows[:, None] * (k // 4) + packed4
    for column, word in enumerate(words(g, seed, tensor_id, count)):
        out[..., column] = word
    return out.mul_(2.0**-24).view(len(rows), 4 * len(packed4))


def rows_of_uniform(rows: Tensor, k: int, seed: int, tensor_id: int, count: Tensor | int) -> Tensor:
    """Some rows of `uniform` of an operand with k columns, however many: float32 [rows, k]. Exact.

    Args:
        rows: their numbers, int64.
    """
    if k % 4 == 0:
        packed4 = torch.arange(k // 4, dtype=torch.int64, device=rows.device)
        return part_of_uniform(rows, packed4, k, seed, tensor_id, count)
    # Groups of four that hold a row wherever it begins in its first one.
    first = rows[:, None] * k
    g = first // 4 + torch.arange((k + 6) // 4, dtype=torch.int64, device=rows.device)
    inside = first % 4 + torch.arange(k, dtype=torch.int64, device=rows.device)
    drawn = torch.stack(words(g, seed, tensor_id, count), -1).flatten(1).gather(1, inside)
    return drawn.to(torch.float32).mul_(2.0**-24)


def transposed_uniform(
    rows: int, k: int, seed: int, tensor_id: int, count: Tensor | int, first: int, number: int
) -> Tensor:
    """Columns first … first + number of `uniform(rows, k, ...)`, transposed: float32 [number, rows].

    k, first and number are multiples of four, so that the four words of a counter belong to four lines of the result.
    """
    out = torch.empty((number // 4, 4, rows), dtype=torch.float32, device="cpu")
    g = torch.arange(first // 4, (first + number) // 4, dtype=torch.int64, device="cpu")[:, None]
    g = g + torch.arange(rows, dtype=torch.int64, device="cpu") * (k // 4)
    for line, word in enumerate(words(g, seed, tensor_id, count)):
        out[:, line] = word
    return out.mul_(2.0**-24).view(number, rows)


def words(g: Tensor, seed: int, tensor_id: int, count: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The upper 24 bits of the four words for counters g, int64 of any shape."""
    if isinstance(count, Tensor):
        c3 = torch.empty_like(g).copy_(count.reshape(()).bitwise_and(_LOW).to(g.device))
    else:
        c3 = torch.full_like(g, count & _LOW)
    drawn = philox4x32(g & _LOW, g >> 32, torch.full_like(g, tensor_id), c3, seed)
    return tuple(word.bitwise_right_shift_(8) for word in drawn)  # type: ignore[return-value]


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on four int64 tensors of 32-bit words, which it overwrites.

    Products wrap in int64, whose bits are those of uint64. Constants are tensors: torch wraps a Python number anew
    each time.
    """
    device = c0.device
    low, half, m0, m1 = (_word(v, device) for v in (_LOW, 32, *MULTIPLIERS))
    high = torch.empty_like(c0)
    # Fake tensors have keys of their own, which are kept for nothing else.
    keys = _keys if type(c0) is Tensor else _keys.__wrapped__
    for k0, k1 in keys(seed, device):
        c0.mul_(m0)
        c2.mul_(m1)
        torch.bitwise_right_shift(c2, half, out=high)
        c1.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(k0)
        torch.bitwise_right_shift(c0, half, out=high)
        c3.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(k1)
        c2.bitwise_and_(low)
        c0.bitwise_and_(low)
        c0, c1, c2, c3 = c1, c2, c3, c0
    return c0, c1, c2, c3


@cache
def _keys(seed: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The round keys."""
    rounds = [((seed + i * WEYL[0]) & _LOW, ((seed >> 32) + i * WEYL[1]) & _LOW) for i in range(ROUNDS)]
    with torch.inference_mode(False):
        return [(_word(k0, device), _word(k1, device)) for k0, k1 in rounds]


def _word(v: int, device: torch.device) -> Tensor:
    return torch.tensor(v, dtype=torch.int64, device=device)


def philox2x32(c0: Tensor, c1: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds of Philox of two words on int64 tensors of 32-bit words, the first two of which it overwrites.

    Args:
        key: int64 [], below 2**32.
    """
    device = c0.device
    low, half, multiplier = (_word(v, device) for v in (_LOW, 32, MULTIPLIER))
    high = torch.empty_like(c0)
    for round_key in round_keys(key).unbind():
        c0.mul_(multiplier)
        torch.bitwise_right_shift(c0, half, out=high)
        c1.bitwise_xor_(high.bitwise_and_(low)).bitwise_xor_(round_key)
        c0.bitwise_and_(low)
        c0, c1 = c1, c0
    return c0, c1


def round_keys(key: Tensor) -> Tensor:
    """The keys of all rounds of Philox of two words, int64 [10] below 2**32, whose first is this one, int64 []."""
    return (key + torch.arange(0, ROUNDS * WEYL[0], WEYL[0], dtype=torch.int64, device=key.device)).bitwise_and_(_LOW)


def traced(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """`philox2x32` for a compiler, which fuses it: nothing is overwritten, and the keys are `round_keys`.

    Keys of int32 have words of int32, as their bits are: AVX2 has no product of vectors of int64.
    """
    if keys.dtype is torch.int32:
        return _traced_in_halves(c0, c1, keys)
    for i in range(ROUNDS):
        wide = c0 * MULTIPLIER
        c0, c1 = ((wide >> 32) & _LOW) ^ c1 ^ keys[i], wide & _LOW
    return c0, c1


def _traced_in_halves(c0: Tensor, c1: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Products by halves of words: the multiplier is 2**32 more than two signed numbers of 14 bits, by which halves are
    int32, and the two in the middle add up to one; they are the product of both sums less the outer two. Between rounds
    a word is float32 of its bits, which Inductor reads whole, int32 by halves of vectors."""
    upper, lower = (MULTIPLIER - (1 << 32)) + (1 << 15) >> 16, ((MULTIPLIER & 0xFFFF) ^ 0x8000) - 0x8000
    held = c0.view(torch.float32)
    for i in range(ROUNDS):
        word = held.view(torch.int32)
        a, b = (word >> 16) & 0xFFFF, word & 0xFFFF
        first, last = a * upper, b * lower
        middle = (a + b) * (upper + lower) - first - last + (last >> 16)
        high, low = first + (middle >> 16) + word, (middle << 16) + (last & 0xFFFF)
        held, c1 = (high ^ c1 ^ keys[i]).view(torch.float32), low
    return held.view(torch.int32), c1


# ---- rounding --------------------------------------------------------------------------------------------
# Rounding and scale factors in torch tensors, on any device: the twin of `rounding` and `scaling` of
# `quaver.reference`.
#
# Everything works on integers where a compiler or a GPU could round otherwise.

INFINITY_BITS = 0x7F800000
SMALLEST_NORMAL_BITS = 0x00800000


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |float32 x| as int32: they order as NaN > infinity > finite."""
    return x.view(torch.int32) & 0x7FFFFFFF


def exponent(bits: Tensor, fmt: Format) -> Tensor:
    """The largest p in bounds with amax × 2**p <= fmt.max, from amax's bits; 0 where amax is 0 or not finite. int32."""
    p = (fmt.emax + 127) - ((bits + (0x7FFFFF - fmt.max_mantissa)) >> 23)
    return torch.where(usable(bits), p.clamp(*FACTOR_EXPONENTS), 0)


def tensor_exponent(bits: Tensor) -> Tensor:
    """The same for a two-level tensor factor: amax × 2**p <= 2688 = 1.3125 × 2**11."""
    p = (11 + 127) - ((bits + (0x7FFFFF - 0x280000)) >> 23)
    return torch.where(usable(bits), p.clamp(*TENSOR_EXPONENTS), 0)


def usable(bits: Tensor) -> Tensor:
    """Where an amax defines a factor: finite, normal and so not zero."""
    return (bits >= SMALLEST_NORMAL_BITS) & (bits < INFINITY_BITS)


def power_of_two(p: Tensor) -> Tensor:
    """float32 2**p for int32 p in [-126, 127]."""
    return ((p + 127) << 23).view(torch.float32)


def ratio(largest: float, bits: Tensor) -> Tensor:
    """largest / amax, correctly rounded on a CPU and held to normal numbers; 1 where amax is 0 or not finite."""
    amax = torch.where(usable(bits), bits, 0x3F800000).view(torch.float32)
    e = torch.full_like(amax, largest) / amax
    info = torch.finfo(torch.float32)
    return torch.where(usable(bits), e.clamp(info.tiny, info.max), 1.0)


def encode(y: Tensor, spec: QuantSpec, u: Tensor | None) -> Tensor:
    """Scaled float32 values to codes: a tensor of y's shape in float8, or in uint8 where torch has no such dtype."""
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
    """float32 to uint8 codes of any format, NaN as 0x7F or the largest code."""
    whole, e = _steps(y, fmt, u)
    # A number of a binade counts 2**mantissa_bits steps from its start, where the field of its exponent begins.
    code = whole.to(torch.int32) + (e + (fmt.mantissa_bits - fmt.emin) << fmt.mantissa_bits)
    code |= torch.signbit(y).to(torch.int32) << (fmt.bits - 1)
    return torch.where(y.isnan(), NAN_CODE if fmt.has_nan else fmt.max_code, code).to(torch.uint8)


def _steps(y: Tensor, fmt: Format, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """|y|, held to the largest, in rounded steps of the format's grid: float32, and the exponent of a step, int32."""
    a = y.abs().clamp(max=fmt.max)
    e = ((a.view(torch.int32) >> 23) - 127).clamp(min=fmt.emin, max=fmt.emax) - fmt.mantissa_bits
    steps = a * power_of_two(-e)
    if u is None:
        return steps.round(), e
    whole = steps.floor()
    return whole + (u < steps - whole).to(torch.float32), e


def encode_e2m1(y: Tensor, u: Tensor | None) -> Tensor:
    """float32 to E2M1 codes, one a byte. The grid has step 1/2 below 2, 1 below 4 and 2 above; NaN becomes +6."""
    a = y.abs().clamp_(max=6.0)
    over2, over4 = (a >= 2.0).to(torch.float32), (a >= 4.0).to(torch.float32)
    # In units of its step a magnitude of the first stretch counts from 0, of the second from 2, of the third from 4.
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
    """float32 to the format's grid, away from zero where u is below the fraction of a step."""
    whole, e = _steps(y, fmt, u)
    rounded = whole * power_of_two(e)
    return torch.where(y.isnan(), y, torch.copysign(rounded, y))


def flush(x: Tensor) -> Tensor:
    """Subnormals to zeros of their sign."""
    return torch.where(magnitude_bits(x) < SMALLEST_NORMAL_BITS, x * 0.0, x)


# ---- tracing ---------------------------------------------------------------------------------------------
# Whether a compiler traces what this thread runs.
#
# `torch.compiler.is_compiling` reads a flag of the process, which torch.compile (since torch 2.13) and torch.export
# hold while any thread compiles; two whose compilations overlap may even leave it behind. `is_tracing` is the thread's
# own: torch keeps what belongs to a trace, Dynamo's, AOTAutograd's of a backward or torch.export's, in a context of the
# thread that traces. A dispatch mode says less: an eager thread may have one of its user's.


class _CompilingFlag:
    """The flag, by torch's public function."""

    def __getitem__(self, _: str) -> bool:
        return is_compiling()


def _no_context() -> bool:
    """What stands in for a context where torch keeps none: then the process's flag alone decides."""
    return True


_Context: Any = getattr(torch._guards, "TracingContext", None)
#: What has the process's flag: read without a call, which all of an eager layer's questions together would notice. No
#: module: Dynamo compiles a function by itself whose globals are torch's modules, and would make it always True.
flags: Any = vars(compiler) if hasattr(compiler, "_is_compiling_flag") else _CompilingFlag()
#: () to this thread's context, None where it traces nothing.
context: Callable[[], object] = getattr(_Context, "try_get", _no_context)


def is_tracing() -> bool:
    """True if a compiler traces what this thread runs: Dynamo, AOTAutograd for torch.compile, or torch.export.

    Dynamo takes it for True. False in every other thread, in `make_fx` alone, and when a compiled program runs.
    """
    return is_dynamo_compiling() or (flags["_is_compiling_flag"] and context() is not None)
