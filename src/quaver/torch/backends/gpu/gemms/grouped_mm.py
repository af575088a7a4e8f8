"""Grouped GEMMs of codes by torch's own, without a word from the host of how many rows a group has.

    rows     y[t]    = a[t] @ b[e].T                    of tokens [T, k] and a matrix [n, k] of each group
    sums     y[e]    = a[:, slots of e] @ b[:, slots of e].T    of transposes [n, slots] and [k, slots]

`torch.nn.functional.scaled_grouped_mm` multiplies codes by CUTLASS; which operands it takes is tried once.

Source: the checks of torch's aten/src/ATen/native/cuda/GroupedBlas.cpp and GroupedMMUtils.h (2.13): compute capability
9 or 10, bf16 results, int32 offsets, features multiples of 16; E4M3 by E4M3 with a scale a row; MXFP8 and NVFP4 in
builds with FBGEMM_GENAI, whose scales are swizzled group by group, each group's rows filled up to 128 and its sums to
four blocks; no bias. In bf16 fewer than 1024 groups. Not measured on a GPU yet.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType, pad

from quaver.core.numbers.formats import E2M1, E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.gemms.grouped_values import finished_rows, group_by_group, sums_group_by_group
from quaver.torch.backends.gpu.gemms.operands import matrix
from quaver.torch.backends.gpu.gemms.scaled_mm import TOLERANCE, role
from quaver.torch.backends.gpu.launching import capture
from quaver.torch.backends.gpu.launching.device import architecture, refusal
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.groups import Laid, Offsets, of_groups
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.swizzling import BLOCKS, ROWS, swizzle


class Kind(NamedTuple):
    """A kind of scaled grouped GEMM."""

    #: Compute capabilities that torch asks it of, whole: 9.0, and 10.0 with its like.
    majors: tuple[int, ...]
    scaling: tuple[ScalingType, ...]
    swizzle: tuple[SwizzleType, ...] | None


SWIZZLED = SwizzleType.SWIZZLE_32_4_4
KINDS = {
    # On 10.0 torch's wheel has kernels for 9.0 alone, which trap there and take the CUDA context along.
    "row": Kind((9,), (ScalingType.RowWise,), None),
    "mx": Kind((10,), (ScalingType.BlockWise1x32,), (SWIZZLED,)),
    "nv": Kind((10,), (ScalingType.BlockWise1x16, ScalingType.TensorWise), (SWIZZLED, SwizzleType.NO_SWIZZLE)),
}

_probes: dict[tuple[torch.device, str, bool, bool], str] = {}


def kind_of(a: QuantSpec, b: QuantSpec) -> str:
    """By what name of `KINDS` operands are multiplied; "" if by none."""
    kinds = {_kind(a), _kind(b)}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind(spec: QuantSpec) -> str:
    # A scale of a group is one of each of its rows.
    name = {"tensor": "row", "row": "row", "mx": "mx", "nv": "nv"}.get(role(spec), "")
    return name if spec.format == (E2M1 if name == "nv" else E4M3) else ""


def reason(a: Laid, b: Any, offsets: Offsets, n: int, dtype: torch.dtype, *rest: Any) -> str:
    """Why these operands are not multiplied natively, row by row, or ""; the device has been asked before."""
    why = _why_not(a.spec, b.spec, a.data.device, n, dtype)
    if not why and kind_of(a.spec, b.spec) == "mx" and b.shape[1] % 32:
        # torch counts scales of whole blocks; a last, partial one has a scale here.
        why = f"k is {b.shape[1]}; it takes whole blocks of 32"
    if not why and 0 in (*a.shape, *b.shape):
        why = "there is nothing to add up"
    return why or _tried(a.data.device, kind_of(a.spec, b.spec), False, bool(rest[1]))


def reason_sums(a: Laid, b: Laid, dtype: torch.dtype, fast_accum: bool = False) -> str:
    """Why these operands are not multiplied natively, summed over the rows of groups, or ""."""
    why = _why_not(a.spec, b.spec, a.data.device, b.data.shape[0], dtype)
    if not why and a.data.shape[0] % 16:
        why = f"the output has {a.data.shape[0]} rows; it takes multiples of 16"
    if not why and 0 in (*a.shape, *b.shape):
        why = "there is nothing to add up"
    return why or _tried(a.data.device, kind_of(a.spec, b.spec), True, fast_accum)


def _why_not(a: QuantSpec, b: QuantSpec, device: torch.device, n: int, dtype: torch.dtype) -> str:
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    name, arch = kind_of(a, b), architecture(device)
    if not name:
        return f"torch has no grouped GEMM for {a} by {b}"
    if arch // 10 not in KINDS[name].majors:
        where = " and ".join(map(str, KINDS[name].majors))
        return f"torch multiplies groups of {a} by {b} on compute capability {where}, and this GPU is sm_{arch}"
    if dtype is not torch.bfloat16:
        return f"it writes bfloat16, and the result is to be {dtype}"
    return f"the output has {n} columns; it takes multiples of 16" if n % 16 else ""


def _tried(device: torch.device, name: str, summed: bool, fast_accum: bool) -> str:
    key = device, name, summed, fast_accum
    if key not in _probes and capture.capturing(device):
        return "a CUDA graph is being captured before any call has tried it: run a step first"
    return probe(*key)


def matmul(
    a: Laid,
    b: Quantized,
    offsets: Offsets,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """a [T, k] by each group's matrix of b [groups · n, k], transposed: bf16 [T, n]; zeros for tokens of no group.

    Bounded: fast accumulation on Hopper keeps 13 bits of a sum; a bias is a second rounding to bf16.
    """
    name, groups = kind_of(a.spec, b.spec), offsets.groups
    rows, factor = grouped.row_scales(a, offsets)
    left, right = _rows(a), matrix(b).view(groups, n, -1).transpose(1, 2)
    of_left = _of_rows(name, rows, None if factor is None else a.factor, offsets)
    y = _run(name, left, right, of_left, _of_matrices(name, b, groups, n), offsets.ends, fast_accum)
    return finished_rows(y, bias, offsets)


def sums(a: Laid, b: Laid, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """a [n, slots] by b [k, slots], transposed, summed over each group's slots: bf16 [groups, n, k].

    Bounded: as `matmul`.
    """
    name = kind_of(a.spec, b.spec)
    left, right = _packed(a), _packed(b).t()
    y = _run(name, left, right, _of_sums(name, a), _of_sums(name, b), a.slots.ends, fast_accum)
    # What is summed over nothing may be anything.
    return y.masked_fill_((a.slots.sizes == 0).view(-1, 1, 1), 0.0)


def _run(
    name: str, a: Tensor, b: Tensor, of_a: list[Tensor], of_b: list[Tensor], ends: Tensor, fast_accum: bool
) -> Tensor:
    kind, run = KINDS[name], vars(F)["scaled_grouped_mm"]
    swizzles = {} if kind.swizzle is None else {"swizzle_a": [*kind.swizzle], "swizzle_b": [*kind.swizzle]}
    y: Tensor = run(
        a,
        b,
        of_a,
        [*kind.scaling],
        of_b,
        [*kind.scaling],
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
        **swizzles,
    )
    return y


def _rows(a: Laid) -> Tensor:
    """Codes row by row, as a GEMM wants them."""
    return matrix(Quantized(a.data, 1.0, a.spec, a.shape))


def _packed(a: Laid) -> Tensor:
    return a.data.view(torch.float4_e2m1fn_x2) if a.spec.format.packed else a.data


def _of_rows(name: str, scale: Tensor, factor: Tensor | None, offsets: Offsets) -> list[Tensor]:
    """Scales of tokens: one each, or those of blocks in the order of each group's own GEMM."""
    if name == "row":
        return [scale.reshape(-1).contiguous()]
    filled = offsets.slots(ROWS)
    blocks = swizzle(filled.take(scale)).view(filled.count, -1)
    return _with_factor(name, blocks, factor)


def _of_matrices(name: str, b: Quantized, groups: int, n: int) -> list[Tensor]:
    """Scales of the groups' matrices, [groups, ...]."""
    scale = b.plain_scale()
    if name == "row":
        return [scale.reshape(groups, n).contiguous()]
    tall = pad(scale.view(groups, n, -1), (0, 0, 0, -n % ROWS))
    blocks = swizzle(tall.reshape(-1, tall.shape[2])).view(groups, -1)
    factor = None if b.tensor_factor is None else b.tensor_factor.view(groups, n)[:, :1]
    return _with_factor(name, blocks, factor)


def _of_sums(name: str, a: Laid) -> list[Tensor]:
    """Scales of transposes that are summed over slots: one a group's row, or those of blocks, group after group."""
    rows, groups = a.data.shape[0], a.slots.groups
    if name == "row":
        return [a.scale.expand(groups, rows).reshape(-1).contiguous()]
    return _with_factor(name, _swizzled(a), a.factor)


def _swizzled(a: Laid) -> Tensor:
    """Stored scales [blocks of slots, blocks of rows] in tiles of 128 rows and four blocks of slots: all tiles of a
    group before those of the next, in which those of its first rows come first."""
    rows = a.data.shape[0]
    scale = a.scale.t()
    height = a.spec.block[0]
    assert height is not None
    scale = scale if height == 1 else scale.repeat_interleave(height, 0)[:rows]
    tall, across = -(-rows // ROWS), -(-scale.shape[1] // BLOCKS)
    tiles = swizzle(scale).view(tall, across, ROWS * BLOCKS)
    width = a.spec.block[1]
    assert width is not None
    # Of each column of tiles its group, and how many that and those before it have.
    group = a.slots.group[:: width * BLOCKS]
    of_group = a.slots.filled // (width * BLOCKS)
    first = of_group.cumsum(0) - of_group
    before, own = of_groups(first, group), of_groups(of_group, group)
    column = torch.arange(across, dtype=torch.int64, device=scale.device)
    row = torch.arange(tall, dtype=torch.int64, device=scale.device).unsqueeze(1)
    none = group == a.slots.groups
    # What is of no group lies behind all others.
    behind = of_group.sum() * tall + row * none.sum() + none.cumsum(0) - 1
    place = torch.where(none, behind, before * tall + row * own + column - before)
    out = torch.empty_like(tiles).view(tall * across, -1)
    out[place.reshape(-1)] = tiles.reshape(tall * across, -1)
    return out.view(tall * ROWS, -1)


def _with_factor(name: str, blocks: Tensor, factor: Tensor | None) -> list[Tensor]:
    if name == "mx":
        return [blocks.view(torch.float8_e8m0fnu)]
    assert factor is not None
    return [blocks.view(torch.float8_e4m3fn), (1.0 / factor).reshape(-1).contiguous()]


def probe(device: torch.device, name: str, summed: bool, fast_accum: bool) -> str:
    """Try a small product with an empty group and tokens of none, once: "" or why it is not used."""
    key = device, name, summed, fast_accum
    if key not in _probes:
        _probes[key] = _probe(*key)
    return _probes[key]


#: What stands for a kind in its probe.
SPECS = {
    "row": QuantSpec(E4M3, (1, None)),
    "mx": QuantSpec(E4M3, (1, 32), "e8m0"),
    "nv": QuantSpec(E2M1, (1, 16), "two_level"),
}


def _probe(device: torch.device, name: str, summed: bool, fast_accum: bool) -> str:
    generator, spec = torch.Generator("cpu").manual_seed(0), SPECS[name]
    x, w = (
        torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu").mul_(
            torch.rand(rows, columns, generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
        )
        for rows, columns in ((48, 288), (48, 32) if summed else (3 * 32, 288))
    )
    offsets = Offsets(torch.tensor([21, 21, 40], dtype=torch.int32, device=device), 48)
    a = grouped.quantize(x.to(device), spec, offsets, summed)
    try:
        if summed:
            b = grouped.quantize(w.to(device), spec, offsets, True)
            y, expected = sums(a, b, torch.bfloat16, fast_accum), sums_group_by_group(a, b, torch.float32)
        else:
            c = reference.quantize(w.to(device), spec)
            if c.tensor_factor is not None:
                c.tensor_factor = c.tensor_factor.expand(c.shape[0], 1)
            y = matmul(a, c, offsets, 32, torch.bfloat16, None, fast_accum)
            expected = group_by_group(a, c, offsets, 32, torch.float32)
        off = ((y.float() - expected).norm() / expected.norm()).item()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return refusal(error, device)
    return "" if off < TOLERANCE else f"a probe of it was off by {off:.2g} of the result"
