"""Grouped GEMMs by CUTLASS, by way of `torch.nn.functional.scaled_grouped_mm`: which operands it takes, tried once.

Source: the checks of torch's aten/src/ATen/native/cuda/GroupedBlas.cpp (2.13): compute capability 9 or 10, E4M3 by
E4M3 with a scale a row, bf16 results, int32 offsets, k and n multiples of 16. MXFP8 and NVFP4 it takes in builds with
FBGEMM_GENAI, their scales swizzled group by group, which no kernel here does yet. Not measured on a GPU yet.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from quaver.core.numbers.formats import E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.gemms.operands import matrix, scales
from quaver.torch.backends.gpu.gemms.scaled_mm import TOLERANCE, role
from quaver.torch.backends.gpu.launching import capture
from quaver.torch.backends.gpu.launching.device import architecture
from quaver.torch.numerics import reference
from quaver.torch.numerics.groups import Groups, Offsets

#: Compute capabilities that torch asks it of, whole: 9.0, and 10.0 with its like.
MAJORS = (9, 10)

_probes: dict[tuple[torch.device, bool], str] = {}


def reason(a: Groups, b: Groups, offsets: Offsets, n: int, dtype: torch.dtype, fast_accum: bool = False) -> str:
    """Why these operands of all groups are not multiplied natively, or ""; the device has been asked before."""
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    left, right = a.whole, b.whole
    if left is None or right is None:
        return "its operands have a scale for each row, and these have one for rows of a group together"
    why = _why_not(left.spec, right.spec)
    if why:
        return why
    arch = architecture(left.device)
    if arch // 10 not in MAJORS:
        return f"torch multiplies groups on compute capabilities 9 and 10, and this GPU is sm_{arch}"
    if dtype is not torch.bfloat16:
        return f"it writes bfloat16, and the result is to be {dtype}"
    if n % 16:
        return f"the output has {n} columns; it takes multiples of 16"
    if 0 in (*left.shape, *right.shape):
        return "there is nothing to add up"
    if (left.device, fast_accum) not in _probes and capture.capturing(left.device):
        return "a CUDA graph is being captured before any call has tried it: run a step first"
    return probe(left.device, fast_accum)


def _why_not(a: QuantSpec, b: QuantSpec) -> str:
    if a.format.name == b.format.name == "e4m3" and role(a) == role(b) == "row":
        return ""
    if role(a) == role(b) and role(a) in ("mx", "nv"):
        return f"the scales of {a} would have to be swizzled group by group, which no kernel does yet"
    return f"torch has no grouped GEMM for {a} by {b}"


def matmul(a: Groups, b: Groups, offsets: Offsets, n: int, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    """a [T, k] by each group's matrix of b [groups · n, k], transposed: bf16 [T, n]; zeros for tokens of no group.

    Bounded: fast accumulation on Hopper keeps 13 bits of a sum.
    """
    assert a.whole is not None and b.whole is not None
    left, right = matrix(a.whole), matrix(b.whole)
    ends, groups = offsets.ends, offsets.groups
    run: Any = vars(F)["scaled_grouped_mm"]
    y: Tensor = run(
        left,
        right.view(groups, n, -1).transpose(1, 2),
        scales(a.whole, "row", False)[0].view(-1),
        ScalingType.RowWise,
        scales(b.whole, "row", False)[0].view(groups, n),
        ScalingType.RowWise,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    of_none = torch.arange(left.shape[0], dtype=torch.int64, device=ends.device) >= ends[-1]
    # What was not written may be anything, NaN too.
    return y.masked_fill_(of_none[:, None], 0.0)


def probe(device: torch.device, fast_accum: bool) -> str:
    """Try a small product with an empty group and tokens of none, once: "" or why it is not used."""
    key = device, fast_accum
    if key not in _probes:
        _probes[key] = _probe(device, fast_accum)
    return _probes[key]


def _probe(device: torch.device, fast_accum: bool) -> str:
    generator, spec = torch.Generator("cpu").manual_seed(0), QuantSpec(E4M3, (1, None))
    x, w = (
        torch.randn(rows, 272, generator=generator, dtype=torch.float32, device="cpu").mul_(
            torch.rand(rows, 1, generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
        )
        for rows in (48, 3 * 32)
    )
    a, b = reference.quantize(x.to(device), spec), reference.quantize(w.to(device), spec)
    ends = torch.tensor([21, 21, 40], dtype=torch.int32, device=device)
    expected = torch.zeros(48, 32, dtype=torch.float32, device=device)
    left, right = a.dequantize(), b.dequantize().view(3, 32, 272)
    expected[:21], expected[21:40] = left[:21] @ right[0].t(), left[21:40] @ right[2].t()
    try:
        y = matmul(Groups(a, ()), Groups(b, (), 32), Offsets(ends, 48), 32, torch.bfloat16, fast_accum).float()
        off = ((y - expected).norm() / expected.norm()).item()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return "" if off < TOLERANCE else f"a probe of it was off by {off:.2g} of the result"
