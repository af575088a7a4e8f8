"""What a chunk adds to its state, and states from chunk to chunk: there, and back as gradients.

The specification is `quaver.torch.blocks.state_space.scan.chunked`.
"""

import triton
import triton.language as tl

from quaver.kernels.state_space.steps import chunk_of, tile


@triton.jit
def chunk_states(
    values, rows, step, high, low, out, table,
    heads, shared, dim, size, value_stride, row_stride, per, tokens,
    BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, INTO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Σ_l w_l values_l ⊗ rows_l of one chunk (axis 0) and head (axis 1), BN features of rows (axis 2).

    Args:
        values: [tokens, heads, dim], tokens `value_stride` apart. rows: [tokens, groups, size], `row_stride` apart;
            `shared` heads have a group.
        out: float32 [chunks, heads, dim, size].
        INTO: False: w is the step times what is left of a token at the end of the chunk; True: what is left at a token
            of what enters the chunk, for gradients.
    Bounded: sums are float32; values are rounded to their dtype once they are weighed.
    """
    c, h = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2) * BN
    start, length = chunk_of(table, c, per, tokens, BL)
    lane = (c.to(tl.int64) * heads + h) * BL
    i = tl.arange(0, BL)
    large, small = tl.load(high + lane + i), tl.load(low + lane + i)
    if INTO:
        weight = tl.exp(large + small)
    else:
        last = lane + BL - 1
        weight = tl.exp((tl.load(high + last) - large) + (tl.load(low + last) - small)) * tl.load(step + lane + i)
    x = tile(values + h.to(tl.int64) * dim, start, length, dim, value_stride, BL, BP, EVEN)
    b = tile(rows + (h // shared).to(tl.int64) * size + n, start, length, size - n, row_stride, BL, BN, EVEN)
    weighed = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
    if not EVEN:
        # An infinite weight of a row that is not there.
        weighed = tl.where(i[:, None] < length, weighed, 0.0)
    added = tl.dot(tl.trans(weighed), b, input_precision="ieee")
    p, m = tl.arange(0, BP)[:, None], tl.arange(0, BN)[None, :]
    at = out + ((c.to(tl.int64) * heads + h) * dim + p) * size + n + m
    if EVEN:
        tl.store(at, added)
    else:
        tl.store(at, added, mask=(p < dim) & (n + m < size))


@triton.jit
def pass_states(
    added, high, low, first, states, last, ranges,
    heads, numbers, per,
    BL: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The states that enter the chunks of one sequence and head (axis 0), BLOCK of their `numbers` (axis 1).

    Args:
        added: float32 [chunks, heads, numbers], by each chunk. first: float32 [sequences, heads, numbers], or None.
        states: as added, in the dtype that products read. last: float32, of the sequence.
        ranges: int32 [sequences + 1], the chunks of each sequence; None where each has `per`.
        BACK: from the last chunk to the first: of what each chunk adds to the gradient of the state that enters it, the
            gradients of the states that leave; first is that of the last state, last that of the first.
    """
    sequence = tl.program_id(0) // heads
    h = tl.program_id(0) - sequence * heads
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ranges is None:
        begin, count = sequence * per, per
    else:
        begin = tl.load(ranges + sequence)
        count = tl.load(ranges + sequence + 1) - begin
    state = tl.zeros([BLOCK], tl.float32)
    own = tl.program_id(0).to(tl.int64) * numbers + i
    if first is not None:
        state = tl.load(first + own) if EVEN else tl.load(first + own, mask=i < numbers, other=0.0)
    for k in range(0, count):
        c = begin + count - 1 - k if BACK else begin + k
        lane = c.to(tl.int64) * heads + h
        at = lane * numbers + i
        more = tl.load(added + at) if EVEN else tl.load(added + at, mask=i < numbers, other=0.0)
        decay = tl.exp(tl.load(high + lane * BL + BL - 1) + tl.load(low + lane * BL + BL - 1))
        rounded = state.to(states.dtype.element_ty)
        if EVEN:
            tl.store(states + at, rounded)
        else:
            tl.store(states + at, rounded, mask=i < numbers)
        state = state * decay + more
    if EVEN:
        tl.store(last + own, state)
    else:
        tl.store(last + own, state, mask=i < numbers)
