"""State-space kernels on a GPU: launches of the causal convolution and of the chunked scan, forward and backward.

Results equal those of `quaver.torch.nn.ssm` within its bounds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.kernels.causal_conv import causal_conv1d, causal_conv1d_backward, causal_conv1d_backward_input
from quaver.kernels.ssm import (
    chunk_scan,
    chunk_scan_backward,
    chunk_scan_backward_pairs,
    chunk_scan_backward_rows,
    chunk_states,
    pass_states,
    steps,
    steps_backward,
)
from quaver.torch.backends.gpu.activation import KINDS
from quaver.torch.backends.gpu.buffers import BufferSpec, whole
from quaver.torch.backends.gpu.cross_entropy import sum_launch
from quaver.torch.backends.gpu.device import architecture
from quaver.torch.backends.gpu.fused_quantize import DTYPES
from quaver.torch.backends.gpu.launch import (
    LaunchPlan,
    LaunchPlanCache,
    LaunchSpec,
    aligned,
    multiprocessors,
    power_above,
)

# ---- chunks of sequences, computed without copying the lengths to the host ----

#: Most tokens of a chunk, and fewest tokens or columns, which matrix products need.
MOST, FEWEST = 64, 16


class ChunkTable(NamedTuple):
    """Chunks of all sequences, in order."""

    #: Tokens of a chunk, number of chunks, number of sequences.
    size: int
    total: int
    sequences: int
    #: Chunks and tokens of a sequence if all sequences have the same length.
    per: int
    tokens: int
    #: int32 [total, 4] as `quaver.kernels.ssm.place_of` reads it, and int32 [sequences + 1] with the first chunk of
    #: each sequence; both None if all have the same length.
    table: Tensor | None = None
    ranges: Tensor | None = None

    @property
    def even(self) -> bool:
        """True if every chunk is known to be full."""
        return self.table is None and self.tokens % self.size == 0


def chunks_of(x: Tensor, cu_seqlens: Tensor | None, chunk: int, most: int = MOST) -> ChunkTable:
    """Return the chunks of x [B, T, ...], or of the sequences packed in its single row.

    Args:
        chunk: requested tokens per chunk, 0 for the maximum.
        most: maximum tokens per chunk, a power of two.
    """
    batch, tokens = x.shape[:2]
    size = most if not chunk else min(most, max(FEWEST, 1 << (chunk.bit_length() - 1)))
    if cu_seqlens is None:
        per = -(-tokens // size)
        return ChunkTable(size, batch * per, batch, per, tokens)
    starts = cu_seqlens.to(x.device, torch.int64)
    sequences = starts.shape[0] - 1
    # Upper bound of the number of chunks; those after the last sequence have no tokens.
    count = tokens // size + sequences
    ranges = torch.zeros(sequences + 1, dtype=torch.int64, device=x.device)
    torch.cumsum((starts.diff() + size - 1) // size, 0, out=ranges[1:])
    every = torch.arange(count, dtype=torch.int64, device=x.device)
    own = torch.bucketize(every, ranges[1:], right=True).clamp_(max=sequences - 1)
    before = (every - ranges[own]) * size
    first = starts[own] + before
    rest = (starts[own + 1] - first).clamp_(min=0).masked_fill_(every >= ranges[-1], 0)
    table = torch.stack((first, rest, before, own), 1).to(torch.int32)
    return ChunkTable(size, count, sequences, 0, 0, table, ranges.to(torch.int32))


# ---- causal convolution ----

#: Maximum number of taps; each is unrolled into a tile read.
TAPS = 16
#: Tokens, channels and warps of a program.
TILE = 64, 64, 4


def reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, activation: str
) -> str:
    """Return why no kernel convolves x [B, T, channels], or ""; the caller has checked the device."""
    odd = {t.dtype for t in (x, weight, bias, initial) if t is not None} - set(DTYPES)
    if odd:
        return f"its kernels read float32, bfloat16 and float16, not {odd.pop()}"
    if weight.shape[1] > TAPS:
        return f"its kernels take {TAPS} taps at most, not {weight.shape[1]}"
    if activation not in KINDS or KINDS[activation].gated:
        return f"its kernels have no activation {activation!r} of a single tensor"
    if not x.numel():
        return "there is nothing to convolve"
    return "there are too many tokens for its kernels" if x.shape[0] * x.shape[1] >= 2**31 else ""


def reason_backward(g: Tensor, *tensors_in: Any) -> str:
    """Return why no kernel computes the backward, or ""; the caller has checked the device."""
    return reason(*tensors_in)


def forward(x: Tensor, *arguments: Any) -> Tensor:
    """Convolve x; same arguments and result as `quaver.torch.nn.ssm.causal_conv.FORWARD`.

    The relative RMS error is at most 1e-6 against float64, before rounding to x's dtype.
    """
    y: Tensor = _run(_forwards, (), x, *arguments)[0]
    return y.view(x.shape)


def backward(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, *arguments: Any
) -> list[Tensor]:
    """Return the gradients of x, weight, bias and initial state, as `quaver.torch.nn.ssm.causal_conv.BACKWARD`.

    Precision as in `forward`.
    """
    *_, sums, dx, d_initial = _run(_backwards, (_rows(g),), x, weight, bias, initial, *arguments)
    taps, nothing = weight.shape[1], x.new_empty(0)
    grad_taps, grad_bias = sums.view(taps + 1, weight.shape[0]).split(taps)
    if d_initial is None and initial is not None:
        d_initial = torch.empty_like(initial)
    return [
        dx.view(x.shape),
        grad_taps.t().to(weight.dtype).contiguous(),
        nothing if bias is None else (grad_bias[0] if aligned(grad_bias) else grad_bias[0].clone()).to(bias.dtype),
        nothing if d_initial is None else d_initial,
    ]


def _run(
    passes: LaunchPlanCache,
    first: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
) -> Any:
    chunks = chunks_of(x, cu_seqlens, TILE[0])
    # A single tap needs no earlier tokens.
    initial = None if initial is None or weight.shape[1] == 1 else initial.contiguous()
    own = (weight.contiguous(), None if bias is None else bias.contiguous(), initial, chunks.table)
    return passes((*first, _rows(x), *own), activation, *chunks[:5], chunks.even)


def _rows(x: Tensor) -> Tensor:
    """Return [B, T, channels] as [tokens, channels] with contiguous channels, copied if necessary."""
    rows = x.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _ConvolutionPlan:
    """Arguments that the launches of a convolution share.

    Args:
        tensors_in: x [tokens, channels], weight, bias, initial state and the table of chunks.
        chunks: first five fields of `ChunkTable`, and whether all chunks are full.
    """

    def __init__(self, tensors_in: Sequence[Any], activation: str, *chunks: int) -> None:
        self.x, self.weight, self.bias, self.initial, self.table = tensors_in
        size, self.count, self.sequences, *self.extent, even = chunks
        self.channels, self.taps = self.weight.shape
        columns = TILE[1]
        self.grid = self.count, -(-self.channels // columns)
        self.constants = {"BL": size, "BC": columns, "K": self.taps, "EVEN": bool(even) and not self.channels % columns}
        self.kind = KINDS[activation]
        self.read = self.x, self.weight, self.bias, self.initial

    def launch(self, kernel: Any, tensors: Sequence[Any], strides: Sequence[int], **constants: Any) -> LaunchSpec:
        numbers = (self.channels, *strides, *self.extent)
        return LaunchSpec(kernel, self.grid, (*tensors, self.table), numbers, self.constants | constants, TILE[2])


@LaunchPlanCache
def _forwards(tensors_in: Sequence[Any], activation: str, *chunks: int) -> LaunchPlan:
    plan = _ConvolutionPlan(tensors_in, activation, *chunks)
    y = whole(tuple(plan.x.shape), plan.x.dtype)
    strides = (plan.x.stride(0),)
    launch = plan.launch(causal_conv1d, (*plan.read, y), strides, F=plan.kind.forward)
    return LaunchPlan(tensors_in, (y, None), [launch])


@LaunchPlanCache
def _backwards(tensors_in: Sequence[Any], activation: str, *chunks: int) -> LaunchPlan:
    g, *rest = tensors_in
    plan = _ConvolutionPlan(rest, activation, *chunks)
    wide, shape, wanted = torch.float32, tuple(plan.x.shape), (plan.taps + 1) * plan.channels
    dz, dx = whole(shape, wide), whole(shape, plan.x.dtype)
    partial, sums = whole((plan.count, wanted), wide), whole((wanted,), wide)
    d_initial = None
    if plan.initial is not None:
        # No program writes the gradient of a sequence without tokens, so it starts at zero.
        early = (plan.sequences, plan.taps - 1, plan.channels)
        d_initial = whole(early, plan.initial.dtype)._replace(zeros=plan.table is not None)
    tensors = (g, *plan.read, dz, partial)
    strides = g.stride(0), plan.x.stride(0)
    launches = [
        plan.launch(causal_conv1d_backward, tensors, strides, F=plan.kind.forward, B=plan.kind.backward),
        plan.launch(
            causal_conv1d_backward_input,
            (dz, plan.weight, dx, d_initial),
            (),
            BK=power_above(plan.taps - 1),
        ),
        sum_launch(partial, sums, plan.count, wanted),
    ]
    return LaunchPlan(tensors_in, (dz, partial, sums, dx, d_initial), launches)


# ---- chunked scan: steps, states of chunks, states passed on, outputs; and backward ----
# Results equal those of `quaver.torch.nn.ssm.chunked_scan` within its bounds in float32. With bf16 and fp16 inputs the
# operands of products are rounded.

#: Widest head and widest state that fit in registers.
HEAD, STATE = 128, 256
#: The same limits for chunks of 64 tokens.
NARROW_HEAD, NARROW_STATE = 64, 128
#: Limit for float32, which tensor cores do not multiply exactly; wider float32 inputs use torch's products.
NARROW_FLOAT32 = 32
#: Heads of a program that computes steps, and elements of one that passes states on.
STEPS, PASSED = 16, 1024
#: Elements of a state that one program computes.
MADE = 64 * 128
#: Programs per multiprocessor that are wanted before more heads share the products of their group.
PROGRAMS = 4
#: Columns in backward, where two sums of products are in registers.
BACK_COLUMNS = 64
#: Warps of a program, of a program before Hopper, and Hopper's capability. From Hopper on products of 64 tokens use
#: four warps, and eight would compute half of them twice. Before Hopper operands are in registers, of which four warps
#: have too few where outputs are computed.
WARPS, MANY, HOPPER = 4, 8, 90
#: Pipeline stages of a loop over heads.
STAGES = 1


class ScanConfig(NamedTuple):
    """Arguments of a scan that are not tensors."""

    softplus: bool
    least: float
    most: float
    size: int
    total: int
    sequences: int
    per: int
    tokens: int
    even: bool


def reason_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *rest: Any) -> str:
    """Return why no kernel scans x [B, T, H, P], or ""; the caller has checked the device."""
    if x.dtype not in DTYPES or dt.dtype not in DTYPES:
        return f"its kernels read float32, bfloat16 and float16, not {x.dtype} and {dt.dtype}"
    if x.shape[-1] > HEAD or B.shape[-1] > STATE:
        return f"heads of {x.shape[-1]} features and states of {B.shape[-1]} do not fit into registers"
    if D is not None and D.dim() == 2:
        return "its kernels support only one D per head"
    if x.dtype is torch.float32 and max(x.shape[-1], B.shape[-1]) > NARROW_FLOAT32:
        return f"its float32 kernels support up to {NARROW_FLOAT32} features, not {max(x.shape[-1], B.shape[-1])}"
    if not x.numel() or not B.numel():
        return "there is nothing to scan"
    if x.shape[0] * x.shape[1] * max(x.shape[2] * x.shape[3], 1) >= 2**40 or x.shape[2] > 65535:
        return "there are too many tokens or heads for a grid"
    return ""


def reason_backward_scan(g: Tensor, g_final: Tensor, *tensors_in: Any) -> str:
    """Return why no kernel computes the backward, or ""; the caller has checked the device."""
    return reason_scan(*tensors_in)


def forward_scan(*tensors_in: Any) -> tuple[Tensor, Tensor]:
    """Scan x; same arguments and results as `quaver.torch.nn.ssm.scan.FORWARD`.

    The relative RMS error against the recurrence in float64 is at most 3e-6 in float32, and 1e-2 in bf16.
    """
    *_, y, final = _forwards_scan(*_read(tensors_in))
    return y.view(tensors_in[0].shape), final


def backward_scan(g: Tensor, g_final: Tensor, *tensors_in: Any) -> list[Tensor]:
    """Return the gradients of a scan, as `quaver.torch.nn.ssm.scan.BACKWARD`; the states are recomputed.

    Precision as in `forward_scan`.
    """
    x, dt, A, B, C, D, bias, initial = tensors_in[:8]
    tensors, how = _read(tensors_in)
    along = _side_by_side(g.flatten(0, 1))
    last = g_final.to(torch.float32).contiguous()
    buffers = _backwards_scan((along, last, *tensors), how)
    dx, ddt, db, dc, sums, d_first = buffers[-6:]
    grad_A, grad_bias, *grad_D = (part if aligned(part) else part.clone() for part in sums.split(x.shape[2]))
    nothing = x.new_empty(0)
    if db.dim() == 4:
        db, dc = db.sum(0), dc.sum(0)
    return [
        dx.view(x.shape),
        ddt.view(dt.shape),
        grad_A.to(A.dtype),
        db.to(B.dtype).view(B.shape),
        dc.to(C.dtype).view(C.shape),
        nothing if D is None else grad_D[0].to(D.dtype),
        nothing if bias is None else grad_bias.to(bias.dtype),
        nothing if initial is None else d_first.to(initial.dtype),
    ]


def _read(tensors_in: Sequence[Any]) -> tuple[tuple[Tensor | None, ...], ScanConfig]:
    """Return the tensors of a `_ScanPlan` in the layouts of the kernels, and the configuration."""
    x, dt, A, B, C, D, bias, initial, cu_seqlens, softplus, limit, chunk = tensors_in
    # With more features, registers do not suffice for 64 tokens.
    narrow = x.shape[3] <= NARROW_HEAD and B.shape[3] <= NARROW_STATE and x.dtype is not torch.float32
    chunks = chunks_of(x, cu_seqlens, chunk, MOST if narrow else MOST // 2)
    least, most = map(float, limit.split(","))
    flat = [_side_by_side(t.flatten(0, 1)) for t in (x, B, C)]
    rows = dt.flatten(0, 1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    own = [None if t is None else t.contiguous() for t in (D, bias)]
    first = None if initial is None else initial.to(torch.float32).contiguous()
    tensors = flat[0], rows, A.to(torch.float32).contiguous(), flat[1], flat[2], *own, first
    return (*tensors, chunks.table, chunks.ranges), ScanConfig(softplus, least, most, *chunks[:5], chunks.even)


def _side_by_side(x: Tensor) -> Tensor:
    """Return [T, heads, features] with contiguous heads and features, copied if necessary."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _ScanPlan:
    """Launches of a scan, and the buffers that they write.

    Args:
        tensors_in: x, dt, A, B, C, D, bias, initial states, table of chunks and ranges of chunks.
    """

    def __init__(self, tensors_in: Sequence[Any], how: ScanConfig) -> None:
        self.x, self.dt, self.A, self.B, self.C, self.D, self.bias, self.first, self.table, self.ranges = tensors_in
        self.how = how
        _, self.heads, self.dim = self.x.shape
        self.groups, self.width = self.B.shape[1:]
        self.shared = self.heads // self.groups
        bp, bn = (max(FEWEST, power_above(n)) for n in (self.dim, self.width))
        self.whole = {"BL": how.size, "BP": bp, "BN": bn}
        self.even = how.even and bp == self.dim and bn == self.width
        self.each = self._each()
        self.warps = WARPS if architecture(self.x.device) >= HOPPER else MANY
        self.lanes = how.total, self.heads
        self.step, self.high, self.low = self.decays = [self.lane() for _ in range(3)]
        self.states = self.x.shape[1], self.dim, self.width

    def lane(self) -> BufferSpec:
        """Return the buffer spec of one number per chunk, head and token of the chunk."""
        return whole((*self.lanes, self.how.size), torch.float32)

    def state(self, dtype: torch.dtype, leading: int | None = None) -> BufferSpec:
        return whole((self.how.total if leading is None else leading, *self.states), dtype)

    def _each(self) -> int:
        """Return the heads of a group per program; more heads share more of the group's products."""
        most, programs = 1, PROGRAMS * multiprocessors(self.x.device)
        for n in (2, 4, 8, 16):
            if self.shared % n == 0 and self.how.total * self.heads // n >= programs:
                most = n
        return most

    def steps(self) -> LaunchSpec:
        how = self.how
        numbers = (self.heads, self.dt.stride(0), how.per, how.tokens, how.least, how.most)
        constants = {"BL": how.size, "BH": STEPS, "SOFTPLUS": how.softplus}
        tensors = (self.dt, self.bias, self.A, self.step, self.high, self.low, self.table)
        return LaunchSpec(steps, (how.total, -(-self.heads // STEPS)), tensors, numbers, constants, WARPS)

    def added(self, values: Tensor, rows: Tensor, out: BufferSpec, into: bool) -> LaunchSpec:
        """Return the launch that computes the contribution of each chunk to a state, or to the gradient of a state."""
        how, bn = self.how, min(MADE // self.whole["BP"], self.whole["BN"])
        stride = values.stride(0), rows.stride(0)
        numbers = (self.heads, self.shared, self.dim, self.width, *stride, how.per, how.tokens)
        constants = {**self.whole, "BN": bn, "INTO": into, "EVEN": self.even and self.width % bn == 0}
        tensors = (values, rows, self.step, self.high, self.low, out, self.table)
        grid = how.total, self.heads, -(-self.width // bn)
        return LaunchSpec(chunk_states, grid, tensors, numbers, constants, WARPS)

    def passed(
        self, added: BufferSpec, first: Tensor | None, out: BufferSpec, last: BufferSpec, back: bool
    ) -> LaunchSpec:
        how, numbers = self.how, self.dim * self.width
        constants = {"BL": how.size, "BLOCK": PASSED, "BACK": back, "EVEN": numbers % PASSED == 0}
        tensors = (added, self.high, self.low, first, out, last, self.ranges)
        grid = how.sequences * self.heads, -(-numbers // PASSED)
        return LaunchSpec(pass_states, grid, tensors, (self.heads, numbers, how.per), constants, WARPS)

    def numbers(self, *first: Tensor) -> tuple[int, ...]:
        """Return the scalars of launches that process `each` heads of a chunk."""
        strides = [t.stride(0) for t in (*first, self.x, self.B, self.C)]
        return (self.heads, self.shared, self.each, self.dim, self.width, *strides, self.how.per, self.how.tokens)

    def constants(self) -> dict[str, Any]:
        return {**self.whole, "EVEN": self.even, "STAGES": STAGES}


@LaunchPlanCache
def _forwards_scan(tensors_in: Sequence[Any], how: ScanConfig) -> LaunchPlan:
    plan = _ScanPlan(tensors_in, how)
    added, states = plan.state(torch.float32), plan.state(plan.x.dtype)
    y, final = whole(plan.x.shape, plan.x.dtype), plan.state(torch.float32, how.sequences)
    tensors = (plan.x, plan.B, plan.C, plan.D, plan.step, plan.high, plan.low, states, y, plan.table)
    grid = how.total, plan.heads // plan.each
    launches = [
        plan.steps(),
        plan.added(plan.x, plan.B, added, False),
        plan.passed(added, plan.first, states, final, False),
        LaunchSpec(chunk_scan, grid, tensors, plan.numbers(), plan.constants(), plan.warps),
    ]
    return LaunchPlan(tensors_in, (plan.step, plan.high, plan.low, added, states, y, final), launches)


class _ScanBackward(_ScanPlan):
    """Launches of the backward of a scan.

    Args:
        tensors_in: gradients of outputs and final states, and the tensors of a `_ScanPlan`.
    """

    def __init__(self, tensors_in: Sequence[Any], how: ScanConfig) -> None:
        self.g, self.g_last, *rest = tensors_in
        super().__init__(rest, how)
        count, heads, wide = how.total, self.heads, torch.float32
        self.blocks = heads // self.each
        self.products = whole((count, self.blocks, how.size, how.size), wide)
        self.inside, self.left, self.direct = (self.lane() for _ in range(3))
        #: Columns of a state per program, and programs that share the columns.
        self.columns = min(BACK_COLUMNS, self.whole["BN"])
        self.parts = -(-self.width // self.columns)
        self.entered = whole((self.parts, *self.lanes, how.size), wide)
        self.through = whole((self.parts, *self.lanes), wide)
        self.skipped = None if self.D is None else whole(self.lanes, wide)
        self.dx, self.ddt = whole(self.x.shape, self.x.dtype), whole(self.dt.shape, self.dt.dtype)
        shares = self.shared // self.each
        shape = tuple(self.B.shape) if shares == 1 else (shares, *self.B.shape)
        self.db, self.dc = (whole(shape, self.x.dtype if shares == 1 else wide) for _ in range(2))
        self.sums_width = (2 if self.D is None else 3) * heads

    def pairs(self) -> LaunchSpec:
        tensors = (*self.read(), *self.decays, self.products, self.inside, self.table)
        numbers = self.numbers(self.g)
        return LaunchSpec(
            chunk_scan_backward_pairs, (self.how.total, self.blocks), tensors, numbers, self.constants(), WARPS
        )

    def of_x(self, leaving: BufferSpec) -> LaunchSpec:
        written = (leaving, self.dx, self.left, self.direct, self.skipped)
        tensors = (*self.read(), self.D, *self.decays, *written, self.table)
        numbers = self.numbers(self.g)
        grid = self.how.total, self.blocks
        return LaunchSpec(chunk_scan_backward, grid, tensors, numbers, self.constants(), self.warps)

    def of_rows(self, entering: BufferSpec, leaving: BufferSpec) -> LaunchSpec:
        written = (self.products, self.db, self.dc, self.entered, self.through)
        tensors = (*self.read(), *self.decays, entering, leaving, *written, self.table)
        numbers = (*self.numbers(self.g), self.how.total, self.x.shape[0])
        even = self.even and self.width % self.columns == 0
        constants = {**self.constants(), "BN": self.columns, "EVEN": even}
        grid = self.how.total, self.blocks, self.parts
        return LaunchSpec(chunk_scan_backward_rows, grid, tensors, numbers, constants, WARPS)

    def of_steps(self, partial: BufferSpec) -> LaunchSpec:
        how = self.how
        by_token = (self.inside, self.entered, self.left, self.through, self.direct, self.skipped)
        tensors = (self.dt, self.bias, self.A, self.step, *by_token, self.ddt, partial, self.table)
        extent = (self.heads, self.dt.stride(0), how.per, how.tokens, self.sums_width, self.parts, how.total)
        constants = {"BL": how.size, "BH": STEPS, "SOFTPLUS": how.softplus}
        grid = how.total, -(-self.heads // STEPS)
        return LaunchSpec(steps_backward, grid, tensors, (*extent, how.least, how.most), constants, WARPS)

    def read(self) -> tuple[Tensor, ...]:
        return self.g, self.x, self.B, self.C


@LaunchPlanCache
def _backwards_scan(tensors_in: Sequence[Any], how: ScanConfig) -> LaunchPlan:
    plan = _ScanBackward(tensors_in, how)
    wide, sequences = torch.float32, how.sequences
    entering, leaving = (plan.state(plan.x.dtype) for _ in range(2))
    # Backward recomputes the states. `added`: the chunks' contributions to states; `back`: to gradients of states.
    added, back = (plan.state(wide) for _ in range(2))
    final, d_first = (plan.state(wide, sequences) for _ in range(2))
    partial, sums = whole((how.total, plan.sums_width), wide), whole((plan.sums_width,), wide)
    launches = [
        plan.steps(),
        plan.added(plan.x, plan.B, added, False),
        plan.passed(added, plan.first, entering, final, False),
        plan.added(plan.g, plan.C, back, True),
        plan.passed(back, plan.g_last, leaving, d_first, True),
        plan.pairs(),
        plan.of_x(leaving),
        plan.of_rows(entering, leaving),
        plan.of_steps(partial),
        sum_launch(partial, sums, how.total, plan.sums_width),
    ]
    between = (*plan.decays, added, back, entering, leaving, final, plan.products, plan.inside, plan.left, plan.direct)
    partial_sums = (*between, plan.entered, plan.through, plan.skipped, partial)
    return LaunchPlan(tensors_in, (*partial_sums, plan.dx, plan.ddt, plan.db, plan.dc, sums, d_first), launches)
