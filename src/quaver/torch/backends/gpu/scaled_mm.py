"""GEMMs by cuBLASLt through `torch.nn.functional.scaled_mm`: which kind supports two specs, and its operand layouts.

Each kind of GEMM is probed once per device, pair of specs, output dtype and class of shapes: a small product is
compared with the decoded one. A GEMM that raises or differs is not used, and `explain` says why.

Source: the checks of torch's aten/src/ATen/native/cuda/ScaledBlas.cpp (2.13); cuBLAS's documentation of cublasLtMatmul.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.device import architecture, recorded_arch, refusal, why_no_kernels
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized, filled, pack, spread, swizzle

# ---- operand layouts: row-major codes, scales in the order of each kind ----
# Operands written by the kernels are used as they are; others, such as those quantized by plain torch operations, are
# converted first.
#
# Source: torch's aten/src/ATen/native/cuda/ScaledBlas.cpp for the shapes and strides.

#: The bytes of a row must be a multiple of this.
LINE = 16


def matrix(q: Quantized) -> Tensor:
    """Return the codes [rows, k] row-major, with rows zero-padded to a multiple of 16 bytes.

    An operand stored transposed is transposed in place first (see `transpose_in_place`).
    """
    if q.transposed:
        transpose_in_place(q)
    codes = q.data
    rows, width = codes.shape
    length, whole = codes.stride(0), -(-width // LINE) * LINE
    if codes.stride(1) != 1 or length % LINE or codes.data_ptr() % LINE:
        codes = filled(codes, whole)
    elif whole != width:
        codes = codes.as_strided((rows, whole), (length, 1)) if _ends_in_zeros(codes, whole) else filled(codes, whole)
    return codes.view(torch.float4_e2m1fn_x2) if q.spec.format.packed else codes


def any_matrix(q: Quantized) -> Tensor:
    """Return the codes [rows, k] in either storage order, for GEMMs that read both."""
    codes = q.data
    fits = q.transposed and not (codes.shape[0] % LINE or codes.stride(0) % LINE or codes.data_ptr() % LINE)
    return codes.t() if fits and codes.stride(1) == 1 and codes.shape[1] % LINE == 0 else matrix(q)


def transpose_in_place(q: Quantized) -> None:
    """Convert an operand that is stored transposed to row-major storage, in place."""
    scale = q.plain_scale().t() if isinstance(q.scale, Tensor) else q.scale
    q.data = pack(q.codes()) if q.spec.format.packed else transpose(q.data)
    q.scale = scale
    q.transposed = q.swizzled = False
    q.decoded = None


def transpose(codes: Tensor) -> Tensor:
    """Transpose eight-bit codes [rows, k] to [k, rows], with zero-padded rows."""
    if not why_no_kernels(codes.device):
        from quaver.torch.backends.gpu import tensorwise as kernel

        return kernel.transpose(codes)
    rows = codes.shape[0]
    return filled(codes.t(), -(-rows // LINE) * LINE)[:, :rows]


def _ends_in_zeros(codes: Tensor, whole: int) -> bool:
    """Return True if rows are zero-padded in memory, as `Quantized` describes."""
    buffer = codes.untyped_storage().nbytes() - codes.storage_offset()
    return codes.stride(0) == whole and buffer >= codes.shape[0] * whole


def scales(q: Quantized, kind: str, right: bool) -> list[Tensor]:
    """Return an operand's scales in the layout of a GEMM kind (`ScaledGemmKind`), without changing the operand."""
    if kind == "one":
        return [_one(q.device)]
    if kind == "nv":
        assert q.tensor_factor is not None
        return [_swizzled(q).view(torch.float8_e4m3fn), 1.0 / q.tensor_factor]
    if kind == "mx":
        return [_swizzled(q).view(torch.float8_e8m0fnu)]
    scale = q.scale
    if not isinstance(scale, Tensor):
        scale = torch.full((1, 1), scale, dtype=torch.float32, device=q.device)
    if kind == "row":
        rows = scale if scale.shape[0] == q.shape[0] else scale.expand(q.shape[0], 1)
        rows = rows if rows.is_contiguous() else rows.contiguous()
        if right:
            return [rows.view(1, -1)]
        # The stride of a single column is meaningless but checked.
        return [rows if rows.stride(1) == 1 else rows.view(-1).unsqueeze(1)]
    if kind == "1x128":
        return [by_columns(scale)]
    return [scale if kind == "tensor" else _squares(scale)]


def by_columns(scale: Tensor) -> Tensor:
    """Return the scales [rows, blocks] with strides (1, rows)."""
    rows, blocks = scale.shape
    if scale.stride(0) != 1 or (scale.stride(1) != rows and blocks > 1):
        scale = scale.t().contiguous()
    return scale.as_strided((rows, blocks), (1, rows))


def _squares(scale: Tensor) -> Tensor:
    """Return scales [blocks of rows, blocks of k] as [blocks of k rounded up to 4, blocks of rows], first axis
    contiguous.
    """
    rows, blocks = scale.shape
    whole = -(-blocks // 4) * 4
    buffer = scale.untyped_storage().nbytes() // 4 - scale.storage_offset()
    if scale.stride(1) != 1 or scale.stride(0) != whole or buffer < rows * whole:
        scale = pad(scale, (0, whole - blocks)).contiguous()
    return scale.as_strided((whole, rows), (1, whole))


def _swizzled(q: Quantized) -> Tensor:
    assert isinstance(q.scale, Tensor)
    if q.swizzled:
        return q.scale
    scale = q.scale
    if scale.dtype is torch.float32:
        # Powers of two in wider blocks: the exponent field is the E8M0 code, also for NaN.
        codes = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        scale = codes.repeat_interleave(4, 1)[:, : -(-q.shape[1] // 32)]
    return swizzle(spread(scale, (q.spec.block[0], 1), (q.shape[0], scale.shape[1])))


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    one = _ones.get(device)
    if one is None:
        with torch.inference_mode(False):
            one = torch.ones((1, 1), dtype=torch.float32, device=device)
        if capture.capturing(device):
            # Memory of this graph, filled at each replay and useless to other work.
            return one
        if device.type == "cuda":
            # Other streams do not wait for this one.
            torch.cuda.current_stream(device).synchronize()
        # Another thread may have created one.
        one = _ones.setdefault(device, one)
    return one


# ---- bf16 GEMMs with float32 sums and one final rounding ----
# By default torch lets cuBLAS split a sum over idle multiprocessors and add the parts in the output's dtype
# (`allow_bf16_reduced_precision_reduction`), which rounds each part to bf16. That setting is process-wide, and Quaver
# does not change it. So a product whose output does not fill a GPU is written in float32, and rounded by another
# launch.
#
# Source: cuBLAS's documentation of CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; torch's notes on numerical
# accuracy.

#: Oldest compute capability (times ten) with bf16 tensor cores.
HALF = 80
#: Output elements that occupy all multiprocessors: four tiles of 256 × 128 for each of about 130.
FILLS = 1 << 24


def fills(m: int, n: int) -> bool:
    """Return True if the sums of an output [m, n] are not split, so that the GEMM may write bf16 itself."""
    return m * n >= FILLS


def wide(x: Tensor, y: Tensor) -> Tensor:
    """Compute x @ y in float32 for two bf16 matrices, or in true float32 whatever the process-wide settings."""
    if x.is_cuda:
        if x.dtype is y.dtype is torch.bfloat16 and torch.version.hip is None and architecture(x.device) >= HALF:
            return torch.mm(x, y, out_dtype=torch.float32)
        if torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee"):
            # TF32 would round the operands, and changing the process-wide setting would affect other threads.
            return (x.double() @ y.double()).float()
    return x.float() @ y.float()


def narrow(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ y + bias of bf16 matrices in bf16, for outputs that `fills` accepts."""
    if x.is_cuda:
        return torch.mm(x, y) if bias is None else torch.addmm(bias, x, y)
    z = x.float() @ y.float()
    return (z if bias is None else z.add_(bias)).to(torch.bfloat16)


# ---- decoded GEMMs: operands decoded to bf16, float32 sums ----
# Every FP8 and E2M1 value is a bf16 value, also times a power of two or an E4M3 scale, and products of two are exact in
# float32. So scales of blocks along k are multiplied into the values, and those of tensors and rows into the product.
# Operands stay within bf16's normal range, except values that round up to 2**128, which neither bf16 nor float32 can
# represent: they are clamped to bf16's largest number. Blocks along k with scales that are no powers of two have no
# exact bf16 values: they are decoded to float32 and multiplied in true float32.

#: dtypes of a bias that kernels read.
READ = torch.float32, torch.bfloat16, torch.float16


def matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias on decoded operands.

    The relative RMS error is below 1e-6 against float64 on the same operands for float32 output.
    """
    if 0 in (a.shape[0], *b.shape):
        return reference.matmul(a, b, dtype, bias)
    (x, row_scales), (y, column_scales) = decode(a), decode(b)
    if row_scales is None and column_scales is None:
        return product(x, y.t(), dtype, bias)
    return finished(wide(x, y.t()), dtype, bias, row_scales, column_scales)


def product(x: Tensor, y: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Compute x @ y + bias of decoded operands, with float32 sums, rounded once to `dtype`."""
    half = x.dtype is y.dtype is dtype is torch.bfloat16 and (bias is None or bias.dtype is dtype)
    if half and fills(x.shape[0], y.shape[1]):
        return narrow(x, y, bias)
    return finished(wide(x, y), dtype, bias)


def finished(
    z: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> Tensor:
    """Multiply a float32 product [m, n] by row and column scales, add the bias, and round to `dtype`; may overwrite z.

    Uses one launch if there are kernels.
    """
    if row_scales is None and column_scales is None and bias is None:
        return z.to(dtype)
    if not why_no_kernels(z.device) and (bias is None or bias.dtype in READ):
        from quaver.torch.backends.gpu.emulation import fold

        return fold(z, dtype, bias, row_scales, column_scales)
    z = rescale(z, *(s for s in (row_scales, None if column_scales is None else column_scales.t()) if s is not None))
    return (z if bias is None else z.add_(bias)).to(dtype)


def decode(q: Quantized) -> tuple[Tensor, Tensor | None]:
    """Decode an operand to bf16 values [rows, k] (float32 if bf16 cannot represent them), and the factor for the
    product.

    The factor is float32 [rows or 1, 1], or None.
    """
    outer = None
    if q.spec.two_level:
        assert q.tensor_factor is not None
        outer = 1.0 / q.tensor_factor
    elif q.spec.block[1] is None:
        outer = q.scales()
        outer = outer if outer.shape[0] == 1 else _scales_of_rows(outer, q)
    half = outer is not None or q.spec.power_of_two
    return _values(q, torch.bfloat16 if half else torch.float32), outer


def _scales_of_rows(scales: Tensor, q: Quantized) -> Tensor:
    """Expand scales of blocks of rows [blocks, 1] to one per row."""
    return spread(scales, (q.spec.block[0], 1), (q.shape[0], 1))


def _values(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the values [rows, k] times the scales of blocks along k, without row and tensor scales."""
    if not why_no_kernels(q.device):
        from quaver.torch.backends.gpu import decode as kernel

        if not kernel.reason(q, dtype, False):
            return kernel.decode(q, dtype, False)
    if q.spec.block[1] is None:
        values = (q.data if q.data.is_floating_point() else q.stored_values()).to(dtype)
        return values.t() if q.transposed else values
    if q.spec.two_level:
        scales = q.plain_scale().view(torch.float8_e4m3fn).to(torch.float32)
        scales = scales.t() if q.transposed else scales
    else:
        scales = q.scales()
    most = torch.finfo(dtype).max
    return q.values().mul_(spread(scales, q.spec.block, q.shape)).clamp_(-most, most).to(dtype)


def rescale(y: Tensor, *scales: Tensor) -> Tensor:
    """Multiply y by each scale in place, in halves, because one scale may overflow where the product does not."""
    halves = [_halves(s) for s in scales]
    for part in (0, 1):
        for pair in halves:
            y = y.mul_(pair[part])
    return y


def _halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split a scale into two factors of similar size, the first a power of two; NaN goes to the second."""
    first = ((((scale.view(torch.int32) >> 23) & 0xFF) + 127 >> 1) << 23).view(torch.float32)
    return first, scale / first


# ---- native scaled GEMMs ----


class ScaledGemmKind(NamedTuple):
    """Kind of scaled GEMM, named by the granularity of its scales."""

    #: Granularity of each operand's scales, as in `scales`.
    a: str
    b: str
    #: First and last compute capability (times ten) that supports it.
    first: int
    last: int = 999
    #: True if it gets unit scales, and the real scales are applied to its float32 output.
    bare: bool = False
    #: True if it reads transposed operands without a copy.
    loose: bool = False


#: Kinds to try for two operands by the granularity of their scales, in order of preference.
KINDS: dict[tuple[str, ...], tuple[ScaledGemmKind, ...]] = {
    ("tensor", "tensor"): (ScaledGemmKind("tensor", "tensor", 100, loose=True), ScaledGemmKind("tensor", "tensor", 89)),
    ("row", "row"): (ScaledGemmKind("row", "row", 89), ScaledGemmKind("one", "one", 89, bare=True)),
    ("1x128", "128x128"): (ScaledGemmKind("1x128", "128x128", 90, 90),),
    ("128x128", "1x128"): (ScaledGemmKind("128x128", "1x128", 90, 90),),
    ("1x128", "1x128"): (ScaledGemmKind("1x128", "1x128", 90, 90),),
    ("mx", "mx"): (ScaledGemmKind("mx", "mx", 100),),
    ("nv", "nv"): (ScaledGemmKind("nv", "nv", 100),),
}
SCALING = {
    "tensor": [ScalingType.TensorWise],
    "one": [ScalingType.TensorWise],
    "row": [ScalingType.RowWise],
    "1x128": [ScalingType.BlockWise1x128],
    "128x128": [ScalingType.BlockWise128x128],
    "mx": [ScalingType.BlockWise1x32],
    "nv": [ScalingType.BlockWise1x16, ScalingType.TensorWise],
}
SWIZZLE = {"mx": [SwizzleType.SWIZZLE_32_4_4], "nv": [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]}
#: Scale granularities whose GEMMs support fast accumulation.
FAST = ("tensor", "row", "one")
#: Relative error that a probe tolerates; it detects scales that are read wrongly, not rounding.
TOLERANCE = 2.0**-5


class GemmChoice(NamedTuple):
    """Implementation chosen for all calls of a class."""

    #: Kind of GEMM, or None if no native one supports the class.
    kind: ScaledGemmKind | None
    #: Why no native GEMM supports the class, or "".
    why: str
    #: dtype that the GEMM writes.
    out: torch.dtype
    #: True if the GEMM adds the bias.
    adds: bool
    #: Referenced so that their ids, part of the key, are not reused.
    specs: tuple[QuantSpec, QuantSpec]


#: Left operands of dgrad and wgrad, and whether each is transposed; the right operand always is.
WHOLE = QuantSpec(E4M3)
TRANSPOSED = ((QuantSpec(E5M2), False), (QuantSpec(E5M2), True), (WHOLE, True))

_choices: dict[tuple[object, ...], GemmChoice] = {}
_transposes: dict[tuple[torch.device, int], bool] = {}


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Return why no native GEMM supports these operands, or ""; the caller has checked the device."""
    return choose_gemm(a, b, dtype, bias).why


def scaled_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias by a native GEMM if possible, else decoded.

    Fast accumulation on Ada and Hopper keeps 13 bits of a sum; otherwise sums are float32 in cuBLASLt's order. Not
    measured on a GPU yet.
    """
    chosen = choose_gemm(a, b, dtype, bias)
    if chosen.kind is None:
        return matmul(a, b, dtype, bias)
    return _run(chosen, a, b, dtype, bias, fast_accum)


def choose_gemm(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None) -> GemmChoice:
    """Return the implementation for calls like this one, chosen at the first of them."""
    (m, k), n = a.shape, b.shape[0]
    shapes = _evenness(m), n & 15 > 0, _evenness(k, 128), m == 0 or n == 0 or k == 0, a.transposed, b.transposed
    device = a.data.device
    key = (id(a.spec), id(b.spec), dtype, None if bias is None else bias.dtype, device, shapes, architecture(device))
    chosen = _choices.get(key)
    if chosen is None:
        chosen = _decide(a, b, dtype, None if bias is None else bias.dtype)
        if not capture.capturing(device):
            _choices[key] = chosen
    return chosen


def _evenness(size: int, most: int = 16) -> int:
    """Return the largest power of two up to `most` that divides a size; cuBLASLt's rules depend only on that."""
    return min(size & -size, most)


def reads_transposes(device: torch.device) -> bool:
    """Return True if per-tensor-scaled GEMMs read transposed operands without a copy in all places of a layer; probed
    once.

    That is possible from Blackwell on, but depends on the GPU and the version of cuBLASLt.
    """
    arch = architecture(device)
    if arch < 100:
        return False
    if recorded_arch() is not None or device.type == "meta":
        return True
    known = _transposes.get((device, arch))
    if known is None:
        known = all(_reads(device, *one) for one in TRANSPOSED)
        if not capture.capturing(device):
            _transposes[device, arch] = known
    return known


def _reads(device: torch.device, left: QuantSpec, transposed: bool) -> bool:
    """Return True if the GEMM kind for transposes supports a left operand, transposed or not, and a transposed right
    one.
    """
    codes = torch.empty((128, 128), dtype=torch.uint8, device=device)
    scale = torch.ones((1, 1), dtype=torch.float32, device=device)
    a, b = (
        Quantized(codes.view(FLOAT8[spec.format.name]), scale, spec, (128, 128), stored)
        for spec, stored in ((left, transposed), (WHOLE, True))
    )
    kind = choose_gemm(a, b, torch.bfloat16, None).kind
    return kind is not None and kind.loose


def role(spec: QuantSpec) -> str:
    """Return the granularity of an operand's scales as a key of `KINDS`, or "" if no GEMM supports it."""
    if spec.two_level:
        return "nv" if spec.block[1] == 16 and spec.block[0] in (1, 16) else ""
    if spec.format.name not in FLOAT8:
        return ""
    if spec.scale != "e8m0" and spec.block[1] is None:
        return {None: "tensor", 1: "row"}.get(spec.block[0], "")
    if spec.format != E4M3:
        # torch supports E5M2 only with one scale per tensor or row.
        return ""
    if spec.scale == "e8m0":
        return "mx" if spec.block[1] == 32 and spec.block[0] in (1, 32) else ""
    return "1x128" if spec.block == (1, 128) else "128x128" if spec.block == (128, 128) else ""


def unavailable(a: QuantSpec, b: QuantSpec, device: torch.device) -> str:
    """Return why a device has no native GEMM for two specs, or "", without probing."""
    arch, roles = architecture(device), _roles(a, b, device)
    if roles not in KINDS:
        return f"cuBLASLt has no GEMM for {a} by {b}"
    kind = KINDS[roles][-1]
    if not kind.first <= arch <= kind.last:
        return f"cuBLASLt multiplies {a} by {b} {_where(kind)}, and this GPU is sm_{arch}"
    if a.format.name == b.format.name == "e5m2":
        return "CUDA does not multiply E5M2 by E5M2"
    return ""


def why_not_native(a: QuantSpec, b: QuantSpec, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why a device has no native GEMM for two specs, or ""; probes the device with even sizes."""
    why = unavailable(a, b, device)
    if why or recorded_arch() is not None or device.type == "meta":
        return why
    scale = torch.ones((1, 1), dtype=torch.float32, device=device)
    codes = torch.empty((128, 128), dtype=torch.uint8, device=device)
    left, right = (Quantized(codes, scale, spec, (128, 128)) for spec in (a, b))
    return choose_gemm(left, right, dtype, None).why


def _roles(a: QuantSpec, b: QuantSpec, device: torch.device) -> tuple[str, ...]:
    roles = role(a), role(b)
    if set(roles) == {"tensor", "row"}:
        return "row", "row"
    if set(roles) <= {"1x128", "128x128"} and a.power_of_two and b.power_of_two and architecture(device) >= 100:
        # Blackwell supports narrower blocks only, with power-of-two scales: each scale is repeated four times.
        return "mx", "mx"
    return roles


def _decide(a: Quantized, b: Quantized, dtype: torch.dtype, bias: torch.dtype | None) -> GemmChoice:
    device, specs = a.data.device, (a.spec, b.spec)
    why = "there is nothing to add up" if 0 in (*a.shape, b.shape[0]) else unavailable(a.spec, b.spec, device)
    if not why and b.shape[0] % 16:
        why = f"the output has {b.shape[0]} columns; cuBLASLt takes multiples of 16"
    arch, refusal = architecture(device), ""
    for kind in () if why else KINDS[_roles(a.spec, b.spec, device)]:
        if not kind.first <= arch <= kind.last or _uses_default_stream(kind, arch):
            continue
        for adds in _additions(kind, dtype, bias):
            out = dtype if (bias is None or adds) and not kind.bare else torch.float32
            chosen = GemmChoice(kind, "", out, adds, specs)
            why = "" if capture.capturing(device) else _probe(chosen, a, b, dtype, bias)
            if not why:
                return chosen
            refusal = refusal or why
    return GemmChoice(None, why or refusal, dtype, False, specs)


def _uses_default_stream(kind: ScaledGemmKind, arch: int) -> bool:
    """Return True if the GEMM would run on the default stream instead of the current one: pytorch/pytorch#177651, fixed
    in     2.12.
    """
    return kind.a == "row" and arch == 89 and torch.__version__ < "2.12"


def _additions(kind: ScaledGemmKind, dtype: torch.dtype, bias: torch.dtype | None) -> tuple[bool, ...]:
    """Return the ways to add the bias, in order: by the GEMM (True) if possible, then after it (False)."""
    return (True, False) if bias is dtype and dtype is not torch.float32 and not kind.bare else (False,)


def _where(kind: ScaledGemmKind) -> str:
    return f"from sm_{kind.first} on" if kind.last == 999 else f"on sm_{kind.first} alone"


def _run(
    chosen: GemmChoice, a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    kind = chosen.kind
    assert kind is not None
    to_layout = any_matrix if kind.loose else matrix
    y = scaled_mm(
        to_layout(a),
        to_layout(b).t(),
        scales(a, kind.a, False),
        SCALING[kind.a],
        scales(b, kind.b, True),
        SCALING[kind.b],
        SWIZZLE.get(kind.a),
        SWIZZLE.get(kind.b),
        bias if chosen.adds else None,
        chosen.out,
        (),
        fast_accum and kind.a in FAST,
    )
    if kind.bare:
        return finished(y, dtype, bias, a.scales(), b.scales())
    if bias is not None and not chosen.adds:
        y = y.add_(bias)
    return y if y.dtype is dtype else y.to(dtype)


def _probe(chosen: GemmChoice, a: Quantized, b: Quantized, dtype: torch.dtype, bias: torch.dtype | None) -> str:
    """Run a small product of the same class; return "" or why the implementation is not used."""
    device = a.data.device
    m, k, n = 160 + _evenness(a.shape[0]) % 16, 640 + _evenness(a.shape[1], 128) % 128, 144
    generator = torch.Generator("cpu").manual_seed(0)
    left, right = (_made_like(_uneven(rows, k, generator), like, device) for rows, like in ((m, a), (n, b)))
    extra = None if bias is None else torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")
    extra = None if extra is None else extra.to(device, bias)
    return compare_products(
        lambda: (_run(chosen, left, right, dtype, extra, False), matmul(left, right, torch.float32, extra)), device
    )


def compare_products(products: Callable[[], tuple[Tensor, Tensor]], device: torch.device) -> str:
    """Return "" if the first product is close to the second, which is expected, or why it is not used."""
    try:
        y, expected = products()
        off = ((y.float() - expected).norm() / expected.norm()).item()
    except torch.OutOfMemoryError:
        # Being out of memory says nothing about the GEMM.
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return refusal(error, device)
    return "" if off < TOLERANCE else f"a probe of it was off by {off:.2g} of the result"


def _uneven(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """Return random numbers whose blocks, of any supported size, have different scales than their neighbours."""
    x = torch.randn((rows, k), generator=generator, dtype=torch.float32, device="cpu").mul_(4.0)
    for height, width in ((1, k), (16, 16), (128, 128)):
        shape = -(-rows // height), -(-k // width)
        part = torch.randint(4, shape, generator=generator, dtype=torch.float32, device="cpu").neg_().exp2_()
        x *= spread(part, (height, width), (rows, k))
    return x


def _made_like(x: Tensor, like: Quantized, device: torch.device) -> Quantized:
    """Quantize x by a spec like that of `like`, nearest and without rotation, on a device and in the same storage
    order.
    """
    spec = QuantSpec(like.spec.format, like.spec.block, like.spec.scale)
    transposed = like.transposed and spec.block[0] == spec.block[1]
    # Operands that are stored transposed get row-major source data, or they would be copied before the GEMM.
    q = reference.quantize(x.t().contiguous() if transposed else x, spec)
    return Quantized(
        q.data.to(device),
        q.scale.to(device) if isinstance(q.scale, Tensor) else q.scale,
        like.spec,
        (x.shape[0], x.shape[1]),
        transposed,
        None if q.tensor_factor is None else q.tensor_factor.to(device),
    )
