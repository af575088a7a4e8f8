"""matmul by cuBLASLt, by way of `torch.nn.functional.scaled_mm`: which of its kinds takes two specs, and what it wants.

What a GEMM is for is asked of it once: for each device, pair of specs, output and class of shapes a small product is
computed and compared with the decoded one. A GEMM that refuses or differs is not used, and `explain` says why.

Source: the checks of torch's aten/src/ATen/native/cuda/ScaledBlas.cpp (2.13); cuBLAS's documentation of cublasLtMatmul.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from quaver.core.numbers.formats import E4M3, E5M2
from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.gemms import decoded
from quaver.torch.backends.gpu.gemms.operands import any_matrix, matrix, scales
from quaver.torch.backends.gpu.launching import capture
from quaver.torch.backends.gpu.launching.device import architecture, recorded_arch, refusal
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import FLOAT8, Quantized, spread


class Kind(NamedTuple):
    """A kind of scaled GEMM."""

    #: Names what of an operand a scale is for; also of `gpu.gemms.operands.scales`.
    a: str
    b: str
    #: Capabilities that have it, the first and the last.
    first: int
    last: int = 999
    #: True if it leaves out all scales: they go on its float32 output.
    bare: bool = False
    #: True if it reads transposes where they lie.
    loose: bool = False


#: What is tried for two operands, by what their scales are for, in order of preference.
KINDS: dict[tuple[str, ...], tuple[Kind, ...]] = {
    ("tensor", "tensor"): (Kind("tensor", "tensor", 100, loose=True), Kind("tensor", "tensor", 89)),
    ("row", "row"): (Kind("row", "row", 89), Kind("one", "one", 89, bare=True)),
    ("1x128", "128x128"): (Kind("1x128", "128x128", 90, 90),),
    ("128x128", "1x128"): (Kind("128x128", "1x128", 90, 90),),
    ("1x128", "1x128"): (Kind("1x128", "1x128", 90, 90),),
    ("mx", "mx"): (Kind("mx", "mx", 100),),
    ("nv", "nv"): (Kind("nv", "nv", 100),),
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
#: Kinds that can accumulate faster and coarser.
FAST = ("tensor", "row", "one")
#: What a probe may be off by: it looks for scales that are read wrongly, not for roundings.
TOLERANCE = 2.0**-5


class Way(NamedTuple):
    """How all calls of a class are computed."""

    #: The kind of GEMM; None if no native one computes them.
    kind: Kind | None
    #: Why no native GEMM computes them, or "".
    why: str
    #: The dtype that the GEMM writes.
    out: torch.dtype
    #: True if the GEMM adds the bias.
    adds: bool
    #: Held, so that no other spec gets an identity of theirs.
    specs: tuple[QuantSpec, QuantSpec]


#: Where a layer has transposes: the left operand of dgrad and of wgrad, and whether it is one; the right one always is.
WHOLE = QuantSpec(E4M3)
TRANSPOSED = ((QuantSpec(E5M2), False), (QuantSpec(E5M2), True), (WHOLE, True))

_ways: dict[tuple[object, ...], Way] = {}
_transposes: dict[tuple[torch.device, int], bool] = {}


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Why no native GEMM takes these operands, or ""; the device has been asked before."""
    return way(a, b, dtype, bias).why


def matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias, natively where that can be, else decoded.

    Bounded: fast accumulation on Ada and Hopper keeps 13 bits of a sum, and cuBLASLt's usual one float32's, added up in
    an order of its own. Not measured on a GPU yet.
    """
    chosen = way(a, b, dtype, bias)
    if chosen.kind is None:
        return decoded.matmul(a, b, dtype, bias)
    return _run(chosen, a, b, dtype, bias, fast_accum)


def way(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Way:
    """How a call like this one is computed, decided once."""
    (m, k), n = a.shape, b.shape[0]
    shapes = _evenness(m), n & 15 > 0, _evenness(k, 128), m == 0 or n == 0 or k == 0, a.turned, b.turned
    device = a.data.device
    key = (id(a.spec), id(b.spec), dtype, None if bias is None else bias.dtype, device, shapes, architecture(device))
    chosen = _ways.get(key)
    if chosen is None:
        chosen = _decide(a, b, dtype, None if bias is None else bias.dtype)
        if not capture.capturing(device):
            _ways[key] = chosen
    return chosen


def _evenness(size: int, most: int = 16) -> int:
    """The largest power of two up to `most` that divides a size: rules of cuBLASLt ask for nothing else."""
    return min(size & -size, most)


def reads_transposes(device: torch.device) -> bool:
    """True if GEMMs of two scales read a transpose where it lies, in each place where a layer has one; tried once.

    From Blackwell on they may: which card and which version of cuBLASLt does is not known beforehand.
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


def _reads(device: torch.device, left: QuantSpec, turned: bool) -> bool:
    """Whether the kind that reads transposes takes these: the left operand, turned or not, and a turned right one."""
    codes = torch.empty((128, 128), dtype=torch.uint8, device=device)
    scale = torch.ones((1, 1), dtype=torch.float32, device=device)
    a, b = (
        Quantized(codes.view(FLOAT8[spec.format.name]), scale, spec, (128, 128), lies)
        for spec, lies in ((left, turned), (WHOLE, True))
    )
    kind = way(a, b, torch.bfloat16, None).kind
    return kind is not None and kind.loose


def role(spec: QuantSpec) -> str:
    """What an operand's scales are for, as the table names it; "" where no GEMM knows them."""
    if spec.two_level:
        return "nv" if spec.block[1] == 16 and spec.block[0] in (1, 16) else ""
    if spec.format.name not in FLOAT8:
        return ""
    if spec.scale != "e8m0" and spec.block[1] is None:
        return {None: "tensor", 1: "row"}.get(spec.block[0], "")
    if spec.format != E4M3:
        # torch takes E5M2 with one scale for a tensor or a row alone.
        return ""
    if spec.scale == "e8m0":
        return "mx" if spec.block[1] == 32 and spec.block[0] in (1, 32) else ""
    return "1x128" if spec.block == (1, 128) else "128x128" if spec.block == (128, 128) else ""


def unavailable(a: QuantSpec, b: QuantSpec, device: torch.device) -> str:
    """Why a device multiplies no operands of two specs natively, or ""; without trying."""
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
    """Why a device multiplies no operands of two specs natively, or ""; the device is asked, with even sizes."""
    why = unavailable(a, b, device)
    if why or recorded_arch() is not None or device.type == "meta":
        return why
    scale = torch.ones((1, 1), dtype=torch.float32, device=device)
    codes = torch.empty((128, 128), dtype=torch.uint8, device=device)
    left, right = (Quantized(codes, scale, spec, (128, 128)) for spec in (a, b))
    return way(left, right, dtype, None).why


def _roles(a: QuantSpec, b: QuantSpec, device: torch.device) -> tuple[str, ...]:
    roles = role(a), role(b)
    if set(roles) == {"tensor", "row"}:
        return "row", "row"
    if set(roles) <= {"1x128", "128x128"} and a.power_of_two and b.power_of_two and architecture(device) >= 100:
        # Blackwell has narrower blocks alone, whose scales are powers of two: one of them four times does.
        return "mx", "mx"
    return roles


def _decide(a: Quantized, b: Quantized, dtype: torch.dtype, bias: torch.dtype | None) -> Way:
    device, specs = a.data.device, (a.spec, b.spec)
    why = "there is nothing to add up" if 0 in (*a.shape, b.shape[0]) else unavailable(a.spec, b.spec, device)
    if not why and b.shape[0] % 16:
        why = f"the output has {b.shape[0]} columns; cuBLASLt takes multiples of 16"
    arch, refusal = architecture(device), ""
    for kind in () if why else KINDS[_roles(a.spec, b.spec, device)]:
        if not kind.first <= arch <= kind.last or _leaves_the_stream(kind, arch):
            continue
        for adds in _additions(kind, dtype, bias):
            out = dtype if (bias is None or adds) and not kind.bare else torch.float32
            chosen = Way(kind, "", out, adds, specs)
            why = "" if capture.capturing(device) else _probe(chosen, a, b, dtype, bias)
            if not why:
                return chosen
            refusal = refusal or why
    return Way(None, why or refusal, dtype, False, specs)


def _leaves_the_stream(kind: Kind, arch: int) -> bool:
    """Whether a GEMM is launched on the default stream, not the current one: pytorch/pytorch#177651, mended in 2.12."""
    return kind.a == "row" and arch == 89 and torch.__version__ < "2.12"


def _additions(kind: Kind, dtype: torch.dtype, bias: torch.dtype | None) -> tuple[bool, ...]:
    """Whether the GEMM adds the bias itself: tried first where it can, and then without, the bias added after it."""
    return (True, False) if bias is dtype and dtype is not torch.float32 and not kind.bare else (False,)


def _where(kind: Kind) -> str:
    return f"from sm_{kind.first} on" if kind.last == 999 else f"on sm_{kind.first} alone"


def _run(chosen: Way, a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    kind = chosen.kind
    assert kind is not None
    lay = any_matrix if kind.loose else matrix
    y = scaled_mm(
        lay(a),
        lay(b).t(),
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
        return decoded.finished(y, dtype, bias, a.scales(), b.scales())
    if bias is not None and not chosen.adds:
        y = y.add_(bias)
    return y if y.dtype is dtype else y.to(dtype)


def _probe(chosen: Way, a: Quantized, b: Quantized, dtype: torch.dtype, bias: torch.dtype | None) -> str:
    """Try a small product of the same class: "" or why the call is not computed in this way."""
    device = a.data.device
    m, k, n = 160 + _evenness(a.shape[0]) % 16, 640 + _evenness(a.shape[1], 128) % 128, 144
    generator = torch.Generator("cpu").manual_seed(0)
    left, right = (_made_like(_uneven(rows, k, generator), like, device) for rows, like in ((m, a), (n, b)))
    extra = None if bias is None else torch.randn(n, generator=generator, dtype=torch.float32, device="cpu")
    extra = None if extra is None else extra.to(device, bias)
    try:
        y = _run(chosen, left, right, dtype, extra, False)
        expected = decoded.matmul(left, right, torch.float32, extra)
        off = ((y.float() - expected).norm() / expected.norm()).item()
    except torch.OutOfMemoryError:
        # Says nothing of the GEMM.
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return refusal(error, device)
    return "" if off < TOLERANCE else f"a probe of it was off by {off:.2g} of the result"


def _uneven(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """Numbers whose blocks, of any size that has scales, differ in their scales from their neighbours."""
    x = torch.randn((rows, k), generator=generator, dtype=torch.float32, device="cpu").mul_(4.0)
    for height, width in ((1, k), (16, 16), (128, 128)):
        shape = -(-rows // height), -(-k // width)
        part = torch.randint(4, shape, generator=generator, dtype=torch.float32, device="cpu").neg_().exp2_()
        x *= spread(part, (height, width), (rows, k))
    return x


def _made_like(x: Tensor, like: Quantized, device: torch.device) -> Quantized:
    """x by a spec, nearest and without what goes before the rounding; on a device, lying as an operand lies."""
    spec = QuantSpec(like.spec.format, like.spec.block, like.spec.scale)
    turned = like.turned and spec.block[0] == spec.block[1]
    # A transpose lies row by row as every operand does, or it would be brought into order before the GEMM sees it.
    q = reference.quantize(x.t().contiguous() if turned else x, spec)
    return Quantized(
        q.data.to(device),
        q.scale.to(device) if isinstance(q.scale, Tensor) else q.scale,
        like.spec,
        (x.shape[0], x.shape[1]),
        turned,
        None if q.tensor_factor is None else q.tensor_factor.to(device),
    )
