"""The operations of the PyTorch front end, each with its implementations in order of preference.

In eager mode an operation is a plain function call. Under `torch.compile` it is one opaque library operator: decoding
happens inside it, so that a compiled graph keeps eight bits for backward and not their decoded copies, and so that
the bits are those of eager mode (Inductor may skip the rounding to bf16 between two fused operations).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.registry import Impl, Op
from quaver.core.registry import only as _only
from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import amax as amax_state
from quaver.torch import cpu_fp4, cpu_matmul, cpu_quantize, reference
from quaver.torch.gpu import choice
from quaver.torch.operators import define
from quaver.torch.quantized import STORAGE, Quantized, pack

#: (seed, tensor id, count) of stochastic rounding; count may be an int64 tensor of one element.
Noise = tuple[int, Tensor | int, Tensor | int]
QUIET: Noise = (0, 0, 0)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def widened(x: Tensor) -> Tensor:
    """float32, or the float64 that it is."""
    return x if x.dtype is torch.float64 else x.float()


def _always(*_: object) -> str:
    return ""


def _by_reference(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Any = QUIET,
    *_hints: object,
) -> Quantized:
    """What a kernel is told besides, such as where to note the amax, changes no bit: the caller looks what was done."""
    return reference.quantize(x, spec, amax, factor, noise)


QUANTIZE = Op(
    "quantize",
    [
        Impl("cpu", cpu_quantize.quantize, cpu_quantize.reason),
        Impl("cpu_fp4", cpu_fp4.quantize, cpu_fp4.reason),
        Impl("triton", choice.quantize, choice.why_not_quantize),
        Impl("reference", _by_reference, _always),
    ],
)
MATMUL = Op(
    "matmul",
    [
        Impl("cpu", cpu_matmul.matmul, cpu_matmul.reason),
        Impl("native", choice.native, choice.why_not_native),
        Impl("decoded", choice.decoded, choice.why_not_decoded),
        Impl("reference", reference.matmul, _always),
    ],
)


def _two_calls(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    *_hints: object,
) -> tuple[Quantized, Quantized]:
    q = QUANTIZE(x, spec, amax, factor, noise)
    if spec == other and spec.transposable and noise is other_noise:
        return q, q.T
    return q, QUANTIZE(x.t(), other, amax, factor, other_noise)


def _why_two_calls(x: Tensor, *args: Any) -> str:
    allowed = any(impl.name == "triton" for impl in QUANTIZE.active)
    return choice.why_not_quantize_both(x, *args) if allowed else "switched off by only()"


#: x [rows, k] by one spec and its transpose by another, from one read of x where an implementation can do that:
#: (x, spec, spec of the transpose, amax, factor, noise, noise of the transpose, whether factor is known not to be 0,
#: where a kernel may note the amax, whether it may sum x over its rows).
QUANTIZE_BOTH = Op(
    "quantize_both",
    [Impl("triton", choice.quantize_both, _why_two_calls), Impl("two calls", _two_calls, _always)],
)


def _plain_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.sum(0, dtype=torch.float32).to(dtype)


#: The gradient [features] of a bias, of the gradient [tokens, features] of what it was added to.
BIAS_GRADIENT = Op(
    "bias_gradient",
    [Impl("triton", choice.column_sum, choice.why_not_sum), Impl("reference", _plain_sum, _always)],
)
#: All that `only` chooses from; attention adds itself.
OPS = [QUANTIZE, MATMUL, BIAS_GRADIENT]
#: What runs instead of an implementation that takes no more than some calls, where it is asked for by name.
_FALL_BACK = {"triton": "reference", "native": "decoded"}


@contextmanager
def only(name: str) -> Iterator[None]:
    """Run one implementation of every operation, by name ("cpu", "reference", "triton"): `with only("reference"): ...`.

    An operation that has none of that name runs as ever. "triton" on a CPU interprets the kernels, and specs without
    one go to the reference; "native" and "decoded" run there too where torch can.
    """
    having = [op for op in OPS if any(impl.name == name for impl in op.impls)]
    with _only(having or OPS, name), choice.asking(name):
        for op in having:
            op.active = [*op.active, *(i for i in op.impls if i.name == _FALL_BACK.get(name))]
        _resolved.clear()
        try:
            yield
        finally:
            _resolved.clear()


class Resolved(NamedTuple):
    """What quantizes and multiplies under a recipe."""

    #: Held, so that no other recipe gets its identity.
    recipe: Recipe
    quantize: Callable[..., Quantized]
    matmul: Callable[..., Tensor]
    #: `QUANTIZE_BOTH` where one read of an operand can serve two GEMMs, else None: two calls take their time.
    both: Callable[..., tuple[Quantized, Quantized]] | None = None


_resolved: dict[Any, Resolved] = {}


def resolve(recipe: Recipe, x: Tensor) -> Resolved:
    """What runs a recipe's operations on operands like x.

    The choice does not depend on shapes, so it is made once for a recipe (and device, and dtype): asking takes as long
    as a small GEMM.
    """
    found = _resolved.get(id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype))
    if found is None:
        found = _resolve(recipe, x)
        _resolved[id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype)] = found
    return found


def _resolve(recipe: Recipe, x: Tensor) -> Resolved:
    if x.is_cuda:
        choice.announce(recipe, x)
    specs = {spec for spec in recipe.operands().values() if spec is not None}
    picks = {QUANTIZE.pick(x, spec) for spec in specs}
    run = picks.pop() if len(picks) == 1 else QUANTIZE
    kernels = any(impl.name == "triton" and not impl.reason(x, spec) for impl in QUANTIZE.active for spec in specs)
    if x.is_cpu and not choice.asked():
        operand = Quantized(x, 1.0, next(iter(specs)), (0, 0))
        return Resolved(recipe, run, MATMUL.pick(operand, operand, x.dtype, None))
    multiply = choice.resolve_matmul(x) if x.is_cuda and MATMUL.active is MATMUL.impls else MATMUL
    # Asking again at each call which implementation it is takes as long as a launch.
    unasked = x.is_cuda and QUANTIZE.active is QUANTIZE.impls
    return Resolved(recipe, run, multiply, (choice.quantize_both if unasked else QUANTIZE_BOTH) if kernels else None)


def quantize(
    x: Tensor | Quantized,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    *,
    factor: Tensor | float | None = None,
    seed: int = 0,
    tensor_id: int = 0,
    count: Tensor | int = 0,
) -> Quantized:
    """Quantize one GEMM operand: data = round_to(x × e), scale = 1 / e, a factor e for each block.

    Args:
        x: [rows, k] in float32, bfloat16 or float16, the axis that the GEMM sums over last. A `Quantized` of this
            spec is returned as it is.
        spec: how.
        amax: [blocks of rows, blocks of k], or the tensor's [1, 1] for two-level scales; None measures it.
        factor: the encode factor of delayed scaling, in place of the one that amax implies; 0 is unset.
        seed, tensor_id, count: of stochastic rounding's Philox stream.
    Returns:
        A block whose amax (measured or given) is infinite or NaN has scale NaN. Not differentiable: see `Linear`.
    Raises:
        ValueError: x is no matrix, has another dtype, or is quantized by another spec.
    Exact: the bits of `quaver.core.reference.quantize`, eager and compiled.
    """
    if isinstance(x, Quantized):
        if x.spec != spec:
            raise ValueError(f"the operand is quantized as {x.spec} and {spec} was asked for; dequantize() it first")
        return x
    if x.dim() != 2:
        raise ValueError(f"an operand is a matrix [rows, k]; this one has shape {tuple(x.shape)}: reshape it first")
    if x.dtype not in DTYPES:
        raise ValueError(f"an operand is float32, bfloat16 or float16, not {x.dtype}; convert it first")
    return run_quantize(x.detach(), spec, amax, factor, (seed, tensor_id, count))


def dequantize(q: Quantized) -> Tensor:
    """float32 [rows, k]: data × scale; after a Hadamard the rotated values, as the GEMM sees them. Exact."""
    return q.dequantize()


def matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias [n], accumulated in float32, scaled, rounded once to dtype.

    Args:
        fast_accum: let the hardware accumulate faster and coarser where it offers that; see `GemmSpec.fast_accum`.
    Raises:
        ValueError: the operands do not share k, or dtype is none of float32, bfloat16, float16.
    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {a.shape} and b is {b.shape}: both are [rows, k] and k must agree")
    if dtype not in DTYPES:
        raise ValueError(f"the output is float32, bfloat16 or float16, not {dtype}")
    with without_autocast(a.device.type):
        return run_matmul(a, b, dtype, bias, fast_accum)


def run_quantize(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
) -> Quantized:
    """`quantize` without its checks."""
    if torch.compiler.is_compiling():
        return quantize_opaquely(x, spec, amax, factor, noise)
    q: Quantized = QUANTIZE(x, spec, amax, factor, noise)
    return q


def run_matmul(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """`matmul` without its checks. Call it where torch.autocast is off: see `without_autocast`."""
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.quaver.matmul(*_flat(a), *_flat(b), dtype, bias, fast_accum)
        return y
    y = MATMUL(a, b, dtype, bias, fast_accum)
    return y


def bias_gradient(g: Tensor, dtype: torch.dtype, partial: Tensor | None = None) -> Tensor:
    """g [tokens, features] summed over its tokens in float32, in a fixed order, and rounded once: [features].

    Args:
        partial: `Quantized.partial_sums` of g, where whatever quantized it summed it on the way: g is not read again.
    """
    if partial is not None:
        return choice.add_up(partial, dtype)
    if torch.compiler.is_compiling() or (g.is_cpu and not choice.asked()):
        return _plain_sum(g, dtype)
    found: Tensor = BIAS_GRADIENT(g, dtype)
    return found


def autocast_device(x: Tensor) -> str:
    """The kind of torch.autocast that reaches a tensor; meta has none of its own."""
    return "cpu" if x.is_cpu or x.is_meta else x.device.type


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Keep an ambient torch.autocast from casting what a GEMM decodes; costs nothing where there is none."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


# The opaque operators. Scales travel as tensors; what a spec does not use is an empty tensor.


def quantize_opaquely(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | float | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
    number: Tensor | None = None,
) -> Quantized:
    """`quantize` as an opaque operator. With the number of a layer, the amax is recorded as its grad_output's."""
    turned = x.stride(1) != 1 and x.stride(0) == 1
    # A tensor id that is a tensor is no constant of the graph: layers that share code share a graph.
    amax, factor, tensor_id, count = (
        torch.tensor(v) if isinstance(v, int | float) else v for v in (amax, factor, *noise[1:])
    )
    data, scale, tensor_factor, top = torch.ops.quaver.quantize(
        x.t() if turned else x, turned, spec.text, amax, factor, noise[0], tensor_id, count, number
    )
    shape = (x.shape[0], spec.padded(x.shape[1]))
    lies_turned = turned and spec.format.bits == 8
    return Quantized(data, scale, spec, shape, lies_turned, tensor_factor if spec.two_level else None, top)


def quantize_both_opaquely(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    number: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """`QUANTIZE_BOTH` as an opaque operator, of roundings to nearest; the number as `quantize_opaquely` takes it."""
    # Not whether they are QUIET: to a compiler a default and the global that it names are two tuples.
    assert spec.rounding == other.rounding == "nearest"
    if isinstance(factor, float):
        factor = torch.tensor(factor)
    data, scale, of_tensor, top, turned_data, turned_scale, turned_of_tensor = torch.ops.quaver.quantize_both(
        x, spec.text, other.text, amax, factor, number
    )
    (rows, k), two = x.shape, (spec.two_level, other.two_level)
    q = Quantized(data, scale, spec, (rows, spec.padded(k)), False, of_tensor if two[0] else None, top)
    of_turned = turned_of_tensor if two[1] else None
    return q, Quantized(turned_data, turned_scale, other, (k, other.padded(rows)), False, of_turned, top)


def _both_impl(
    x: Tensor, text: str, other: str, amax: Tensor | None, factor: Tensor | None, number: Tensor | None
) -> tuple[Tensor, ...]:
    pair = QUANTIZE_BOTH(x, QuantSpec.parse(text), QuantSpec.parse(other), amax, factor)
    q, turned = (_plain(operand) for operand in pair)
    if number is not None:
        amax_state.record_gradient(number, q[3])
    return *q, *turned[:3]


def _plain(q: Quantized) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(data, scales, tensor factor, amax) as `_both_fake` describes them, sharing nothing with anything."""
    none = q.data.new_empty(0, dtype=torch.float32)
    scale = q.plain_scale() if isinstance(q.scale, Tensor) else none.new_full((1, 1), q.scale)
    top = none
    if q.spec.per_tensor:
        top = q.amax if isinstance(q.amax, Tensor) else none.new_full((1, 1), q.amax or 0.0)
    if not q.turned:
        data = q.data.contiguous()
    else:
        data = pack(q.codes()) if q.spec.format.bits == 4 else q.data.t().clone(memory_format=torch.contiguous_format)
    scale = (scale.t() if q.turned else scale).clone(memory_format=torch.contiguous_format)
    return data, scale, none if q.tensor_factor is None else q.tensor_factor.clone(), top.clone()


def _both_fake(
    x: Tensor, text: str, other: str, amax: Tensor | None, factor: Tensor | None, number: Tensor | None
) -> tuple[Tensor, ...]:
    straight = _quantize_fake(x, False, text, amax, factor, 0, None, None)
    return *straight, *_quantize_fake(x.t(), False, other, amax, factor, 0, None, None)[:3]


def _quantize_impl(
    x: Tensor,
    turned: bool,
    text: str,
    amax: Tensor | None,
    factor: Tensor | None,
    seed: int,
    tensor_id: Tensor | None,
    count: Tensor | None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = QuantSpec.parse(text)
    noise = (seed, 0 if tensor_id is None else int(tensor_id), 0 if count is None else count)
    q: Quantized = QUANTIZE(x.t() if turned else x, spec, amax, factor, noise)
    data, scale = q.data, q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if (turned and spec.format.bits == 8 and not q.turned) or (q.turned and not turned):
        data, scale = data.t(), scale.t() if isinstance(scale, Tensor) else scale
    scale = scale if isinstance(scale, Tensor) else x.new_full((1, 1), scale, dtype=torch.float32)
    factor = x.new_empty(0, dtype=torch.float32) if q.tensor_factor is None else q.tensor_factor
    top = x.new_empty(0, dtype=torch.float32)
    if spec.per_tensor:
        top = q.amax if isinstance(q.amax, Tensor) else x.new_full((1, 1), q.amax or 0.0, dtype=torch.float32)
    if number is not None:
        amax_state.record_gradient(number, top)
    return data.contiguous(), scale.contiguous(), factor, top


def _quantize_fake(
    x: Tensor,
    turned: bool,
    text: str,
    amax: Tensor | None,
    factor: Tensor | None,
    seed: int,
    tensor_id: Tensor | None,
    count: Tensor | None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = QuantSpec.parse(text)
    rows, k = (x.shape[1], x.shape[0]) if turned else (x.shape[0], x.shape[1])
    k = spec.padded(k)
    blocks = spec.blocks(rows, k)
    if spec.format.bits == 4:
        shape = (rows, (k + 1) // 2)
    elif turned:
        shape, blocks = (k, rows), blocks[::-1]
    else:
        shape = (rows, k)
    narrow = spec.scale == "e8m0" or spec.two_level
    return (
        x.new_empty(shape, dtype=STORAGE[spec.format.name]),
        x.new_empty(blocks, dtype=torch.uint8 if narrow else torch.float32),
        x.new_empty((1, 1) if spec.two_level else (0,), dtype=torch.float32),
        x.new_empty((1, 1) if spec.per_tensor else (0,), dtype=torch.float32),
    )


def _flat(q: Quantized) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
    assert isinstance(q.scale, Tensor)
    factor = q.scale.new_empty(0) if q.tensor_factor is None else q.tensor_factor
    return q.data, q.scale, factor, q.spec.text, q.turned, q.lying_shape[1], q.swizzled


def _restore(
    data: Tensor, scale: Tensor, factor: Tensor, text: str, turned: bool, columns: int, swizzled: bool
) -> Quantized:
    spec = QuantSpec.parse(text)
    data = data.view(STORAGE[spec.format.name])
    lying = (data.shape[0], columns)
    shape = lying[::-1] if turned else lying
    host = spec.per_tensor and data.is_cpu
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale.item() if host else scale, spec, shape, turned, tensor_factor, swizzled=swizzled)


def _matmul_impl(*args: Any) -> Tensor:
    a, b, rest = args[:7], args[7:14], args[14:]
    with without_autocast(args[0].device.type):
        y: Tensor = MATMUL(_restore(*a), _restore(*b), *rest)
        return y


def _bytes_impl(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).clone()


def _bytes_fake(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.uint8)


def _matmul_fake(*args: Any) -> Tensor:
    (a, *_, a_turned, a_columns, _), (b, *_, b_turned, b_columns, _) = args[:7], args[7:14]
    m = a_columns if a_turned else a.shape[0]
    n = b_columns if b_turned else b.shape[0]
    return a.new_empty((m, n), dtype=args[14])


define(
    "quantize(Tensor x, bool turned, str spec, Tensor? amax, Tensor? factor, int seed, Tensor? tensor_id,"
    " Tensor? count, Tensor? number)"
    " -> (Tensor data, Tensor scale, Tensor tensor_factor, Tensor amax)",
    _quantize_impl,
    _quantize_fake,
)
define(
    "matmul(Tensor a, Tensor a_scale, Tensor a_factor, str a_spec, bool a_turned, SymInt a_k,"
    " bool a_swizzled, Tensor b, Tensor b_scale, Tensor b_factor, str b_spec, bool b_turned, SymInt b_k,"
    " bool b_swizzled, ScalarType dtype, Tensor? bias, bool fast_accum=False) -> Tensor",
    _matmul_impl,
    _matmul_fake,
)
define(
    "quantize_both(Tensor x, str spec, str other, Tensor? amax, Tensor? factor, Tensor? number)"
    " -> (Tensor data, Tensor scale, Tensor tensor_factor, Tensor amax,"
    " Tensor turned_data, Tensor turned_scale, Tensor turned_factor)",
    _both_impl,
    _both_fake,
)
# Packed codes of four bits as bytes: Inductor knows no float4 on a CPU.
define("code_bytes(Tensor codes) -> Tensor", _bytes_impl, _bytes_fake)
