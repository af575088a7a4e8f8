"""Causal convolution of each channel over its last few tokens, with activation: forward, and backward in two passes.

The activation is passed as functions of `quaver.kernels.activation`. Tokens are read from memory once, and from a cache
for each further tap. The specification is `quaver.torch.nn.ssm.causal_conv`.
"""

import triton
import triton.language as tl

from quaver.kernels.ssm import place_of, tile, write_tile


@triton.jit
def tokens_before(
    x, initial, start, before, sequence, length, c, channels, stride,
    BACK: tl.constexpr, K: tl.constexpr, BL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load the token BACK positions before each of a tile, float32 [BL, BC], from its sequence or its initial state.

    initial: [sequences, K - 1, channels], or None for zeros.
    """
    r = tl.arange(0, BL)
    at = before + r - BACK
    here = (at >= 0)[:, None]
    early = (at < 0)[:, None]
    if not EVEN:
        here = here & (r < length)[:, None] & (c < channels)[None, :]
        early = early & (r < length)[:, None] & (c < channels)[None, :]
    place = x + (start + r - BACK)[:, None] * stride + c[None, :]
    if EVEN and BACK == 0:
        return tl.load(place).to(tl.float32)
    value = tl.load(place, mask=here, other=0.0).to(tl.float32)
    if initial is not None and BACK > 0:
        row = sequence * (K - 1) + (K - 1) + at
        value += tl.load(initial + row[:, None] * channels + c[None, :], mask=early, other=0.0).to(tl.float32)
    return value


@triton.jit
def convolved(
    x, weight, bias, initial, start, before, sequence, length, c, channels, stride,
    K: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the input of the activation, float32 [BL, BC]."""
    z = tl.zeros([BL, BC], tl.float32)
    for k in tl.static_range(K):
        tap = tl.load(weight + c * K + k, mask=c < channels, other=0.0).to(tl.float32)
        value = tokens_before(
            x, initial, start, before, sequence, length, c, channels, stride, K - 1 - k, K, BL, EVEN
        )  # fmt: skip
        z = tl.fma(value, tl.broadcast_to(tap[None, :], (BL, BC)), z)
    if bias is not None:
        z += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def causal_conv1d(
    x, weight, bias, initial, y, table,
    channels, stride, per, tokens,
    BL: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, F: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Convolve BL tokens of one sequence (axis 0) and BC channels (axis 1) of x [tokens, channels] into contiguous y.

    Args:
        x: token stride `stride`. weight: [channels, K]. bias: [channels] or None.
        initial: [sequences, K - 1, channels], the tokens before the first of each sequence, or None.
        table, per, tokens: as in `quaver.kernels.ssm.place_of`.

    The relative RMS error is at most 1e-6 against float64, before y's rounding.
    """
    start, rest, before, sequence = place_of(table, tl.program_id(0), per, tokens, BL)
    length = tl.minimum(rest, BL)
    first = tl.program_id(1) * BC
    c = first + tl.arange(0, BC)
    z = convolved(x, weight, bias, initial, start, before, sequence, length, c, channels, stride, K, BL, BC, EVEN)
    write_tile(y + first, F(z, 0.0, 0.0), start, length, channels - first, channels, BL, BC, EVEN)


@triton.jit
def causal_conv1d_backward(
    g, x, weight, bias, initial, dz, sums, table,
    channels, g_stride, stride, per, tokens,
    BL: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, F: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the activation's input, and a tile's share of the gradients of taps and bias.

    Args:
        g: gradient of y, token stride `g_stride`. dz: float32 [tokens, channels].
        sums: float32 [tiles, K + 1, channels], the last row for the bias.
        B: backward of F.

    Precision as in `causal_conv1d`.
    """
    start, rest, before, sequence = place_of(table, tl.program_id(0), per, tokens, BL)
    length = tl.minimum(rest, BL)
    first = tl.program_id(1) * BC
    c = first + tl.arange(0, BC)
    z = convolved(x, weight, bias, initial, start, before, sequence, length, c, channels, stride, K, BL, BC, EVEN)
    grad = tile(g + first, start, length, channels - first, g_stride, BL, BC, EVEN).to(tl.float32)
    of_z = B(grad, z, 0.0, 0.0)
    if not EVEN:
        # Padding may be NaN with an infinite bias.
        of_z = tl.where((tl.arange(0, BL) < length)[:, None], of_z, 0.0)
    write_tile(dz + first, of_z, start, length, channels - first, channels, BL, BC, EVEN)
    row = sums + tl.program_id(0).to(tl.int64) * (K + 1) * channels + c
    for k in tl.static_range(K):
        value = tokens_before(
            x, initial, start, before, sequence, length, c, channels, stride, K - 1 - k, K, BL, EVEN
        )  # fmt: skip
        tl.store(row + k * channels, tl.sum(of_z * value, 0), mask=c < channels)
    tl.store(row + K * channels, tl.sum(of_z, 0), mask=c < channels)


@triton.jit
def later_gradients(
    dz, weight, start, first, rest, c, channels,
    K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return the input gradients of BR tokens, [BR, BC], from the gradients dz of the following K tokens.

    The token at `start` has index 0; the first computed token has index `first`: 0, or below for the initial state.
    rest: tokens of the sequence from `start` on.
    """
    at = first + tl.arange(0, BR)
    total = tl.zeros([BR, BC], tl.float32)
    for k in tl.static_range(K):
        ahead = at + (K - 1 - k)
        tap = tl.load(weight + c * K + k, mask=c < channels, other=0.0).to(tl.float32)
        here = ((ahead >= 0) & (ahead < rest))[:, None] & (c < channels)[None, :]
        value = tl.load(dz + (start + ahead)[:, None] * channels + c[None, :], mask=here, other=0.0)
        total = tl.fma(value, tl.broadcast_to(tap[None, :], (BR, BC)), total)
    return total


@triton.jit
def causal_conv1d_backward_input(
    dz, weight, dx, d_initial, table,
    channels, per, tokens,
    BL: tl.constexpr, BC: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x [tokens, channels], contiguous, and of `initial` or None, from dz.

    BK: at least K - 1. Gradients of the initial state of a sequence without tokens are not written. Precision as in
    `causal_conv1d`.
    """
    start, rest, before, sequence = place_of(table, tl.program_id(0), per, tokens, BL)
    first = tl.program_id(1) * BC
    c = first + tl.arange(0, BC)
    of_x = later_gradients(dz, weight, start, 0, rest, c, channels, K, BL, BC)
    write_tile(dx + first, of_x, start, tl.minimum(rest, BL), channels - first, channels, BL, BC, EVEN)
    if d_initial is not None:
        of_early = later_gradients(dz, weight, start, 1 - K, rest, c, channels, K, BK, BC)
        i = tl.arange(0, BK)
        there = ((i < K - 1) & (before == 0) & (rest > 0))[:, None] & (c < channels)[None, :]
        row = sequence * (K - 1) + i
        place = d_initial + row[:, None] * channels + c[None, :]
        tl.store(place, of_early.to(d_initial.dtype.element_ty), mask=there)
