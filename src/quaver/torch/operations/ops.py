"""Quantizing, multiplying and summing, each with its implementations in order of preference, and the choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.backends.cpu import gemm
from quaver.torch.backends.cpu import quantize as few_bits
from quaver.torch.backends.cpu import quantize as fp8
from quaver.torch.backends.gpu import device, fused_quantize
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Given, Quantized
from quaver.torch.numerics.rounding import QUIET, Noise, is_tracing
from quaver.torch.operations import selecting
from quaver.torch.operations.autograd import empty_parts, flat, joined, parts, restored
from quaver.torch.operations.operation import Implementation, Operation, narrowed
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax as amax_state

_C: Any = torch._C


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: () to True while torch.autocast is on for a kind of device.
any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _any_autocast)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Where the kernels are, and Triton: imported when a tensor on a GPU comes.
GPU = "quaver.torch.backends.gpu"


def no_kernels(x: Tensor, *_: Any) -> str:
    """Why no kernel takes a tensor, whatever is to be done with it, or ""."""
    if x.is_cpu and not device.asked:
        return "the tensor is not on a GPU"
    return device.why_no_kernels(x.device)


def on_host(x: Tensor) -> bool:
    """True where plain torch is all that runs on x: on a CPU, in eager mode, unless a kernel is asked for by name."""
    return x.is_cpu and not device.asked and not is_tracing()


def chosen(operation: Operation, x: Tensor) -> Callable[..., Any]:
    """What runs an operation on x: where that is plain torch, the function itself."""
    return operation.impls[-1].run if on_host(x) else operation


#: Given in place of noise, which rounding to nearest leaves alone, where backward quantizes again what forward has
#: quantized: a compiler that took the two for one would keep the codes, of a weight a byte an element.
AGAIN: Noise = 1, 0, 0

# Quantizing an operand. What a kernel is told besides, such as where to note the amax, changes no bit: the caller looks
# what was done.


def _quantize_traced(
    x: Tensor,
    spec: QuantSpec,
    amax: Given = None,
    factor: Given = None,
    noise: Noise = QUIET,
    number: Tensor | None = None,
    transposed: bool | None = None,
) -> Quantized:
    """With the number of a layer, the amax is recorded as its grad_output's.

    Args:
        transposed: whether x is the transpose of what lies row by row; None looks. A compiler that traces a backward
        knows
            no strides: asked for them, it traces that backward once more and copies gradients that are not contiguous.
    """
    if transposed is None:
        transposed = x.stride(1) != 1 and x.stride(0) == 1
    tensor_id: Tensor | None
    count: Tensor | None
    # Two calls of equal arguments are one to a compiler, as of layers of one input, but for what is made for each.
    tensor_id = count = None
    if spec.rounding != "nearest":
        # A tensor id that is a tensor is no constant of the graph: layers that share code share a graph.
        tensor_id, count = (
            torch.tensor(v, dtype=torch.int64, device="cpu") if isinstance(v, int) else v for v in noise[1:]
        )
    given = (spec.text, _float(amax), _float(factor), noise[0], tensor_id, count, number)
    return joined(x, spec, transposed, *QUANTIZE.operator(x.t() if transposed else x, transposed, *given))


def _float(v: Given) -> Tensor | None:
    return torch.tensor(v, dtype=torch.float32, device="cpu") if isinstance(v, int | float) else v


def _quantize_kernel(
    x: Tensor,
    transposed: bool,
    text: str,
    amax: Tensor | None,
    factor: Tensor | None,
    seed: int,
    tensor_id: Tensor | None,
    count: Tensor | None,
    number: Tensor | None = None,
) -> tuple[Tensor, ...]:
    noise = (seed, 0 if tensor_id is None else int(tensor_id), 0 if count is None else count)
    q = QUANTIZE.eager(x.t() if transposed else x, QuantSpec.parse(text), amax, factor, noise)
    results = parts(q, transposed)
    if number is not None:
        amax_state.record_gradient(number, results[3])
    return results


def _quantize_fake(x: Tensor, transposed: bool, text: str, *_: Any) -> tuple[Tensor, ...]:
    return empty_parts(x, QuantSpec.parse(text), transposed)


QUANTIZE: Operation[Quantized] = Operation(
    "quantize(Tensor x, bool turned, str spec, Tensor? amax, Tensor? factor, int seed, Tensor? tensor_id,"
    " Tensor? count, Tensor? number)"
    " -> (Tensor data, Tensor scale, Tensor tensor_factor, Tensor amax)",
    [
        Implementation("cpu", fp8.quantize, fp8.reason),
        Implementation("cpu_fp4", few_bits.two_level, few_bits.reason_two_level),
        Implementation("cpu_mx", few_bits.e8m0, few_bits.reason_e8m0),
        Implementation("triton", f"{GPU}.quantize:quantize", f"{GPU}.quantize:reason", no_kernels),
        Implementation("reference", reference.quantize),
    ],
    fake=_quantize_fake,
    kernel=_quantize_kernel,
    traced=_quantize_traced,
)


# Multiplying two.


def _no_gemms(a: Quantized, *_: Any) -> str:
    return device.why_no_fp8(a.device, "native")


def _off_a_gpu(a: Quantized, *_: Any) -> str:
    if a.data.is_cuda or (a.data.is_cpu and device.asked & {"native", "decoded"}):
        return ""
    return "the operands are not on a GPU"


def _matmul_traced(
    a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    y: Tensor = MATMUL.operator(*flat(a), *flat(b), dtype, bias, fast_accum)
    return y


def _matmul_kernel(*args: Any) -> Tensor:
    active_context.compiled = True
    with without_autocast(args[0].device.type), selecting.inside():
        return MATMUL.eager(restored(*args[:7]), restored(*args[7:14]), *args[14:])


def _matmul_fake(*args: Any) -> Tensor:
    (a, *_, a_transposed, a_columns, _), (b, *_, b_transposed, b_columns, _) = args[:7], args[7:14]
    m = a_columns if a_transposed else a.shape[0]
    n = b_columns if b_transposed else b.shape[0]
    return a.new_empty((m, n), dtype=args[14])


def _matmul_flops(*args: Any, out_val: Tensor, **_: Any) -> int:
    a, transposed, columns = args[0], args[4], args[5]
    return 2 * out_val.numel() * int(a.shape[0] if transposed else columns)


MATMUL: Operation[Tensor] = Operation(
    "matmul(Tensor a, Tensor a_scale, Tensor a_factor, str a_spec, bool a_turned, SymInt a_k,"
    " bool a_swizzled, Tensor b, Tensor b_scale, Tensor b_factor, str b_spec, bool b_turned, SymInt b_k,"
    " bool b_swizzled, ScalarType dtype, Tensor? bias, bool fast_accum=False) -> Tensor",
    [
        Implementation("cpu", gemm.matmul, gemm.reason),
        Implementation("native", f"{GPU}.scaled_mm:scaled_matmul", f"{GPU}.scaled_mm:reason", _no_gemms),
        Implementation("decoded", f"{GPU}.scaled_mm:matmul", _off_a_gpu),
        Implementation("reference", reference.matmul),
    ],
    fake=_matmul_fake,
    flops=_matmul_flops,
    kernel=_matmul_kernel,
    traced=_matmul_traced,
)


def shown_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """MATMUL where all else is unseen: a selective checkpoint sees torch.ops.quaver.matmul, as in compiled code."""
    operands, compiled = (*flat(a), *flat(b)), active_context.compiled
    y: Tensor = selecting.shown(MATMUL.operator, *operands, dtype, bias, fast_accum)
    active_context.compiled = compiled
    # What it keeps may not change, and an output may be written to.
    return y.clone()


# An operand and its transpose.


def _two_calls(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Given = None,
    factor: Given = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    *_hints: object,
) -> tuple[Quantized, Quantized]:
    q = QUANTIZE(x, spec, amax, factor, noise)
    if spec == other and spec.transposable and noise is other_noise:
        return q, q.T
    return q, QUANTIZE(x.t(), other, amax, factor, other_noise)


def _both_traced(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | None = None,
    factor: Given = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    number: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """Of roundings to nearest; the number as `QUANTIZE.traced` takes it."""
    # Not whether they are QUIET: to a compiler a default and the global that it names are two tuples.
    assert spec.rounding == other.rounding == "nearest"
    *q, data, scale, of_tensor = QUANTIZE_BOTH.operator(x, spec.text, other.text, amax, _float(factor), number)
    return joined(x, spec, False, *q), joined(x.t(), other, False, data, scale, of_tensor, q[3])


def _both_kernel(
    x: Tensor, text: str, other: str, amax: Tensor | None, factor: Tensor | None, number: Tensor | None
) -> tuple[Tensor, ...]:
    pair = QUANTIZE_BOTH.eager(x, QuantSpec.parse(text), QuantSpec.parse(other), amax, factor)
    q, transposed = (_unshared(operand) for operand in pair)
    if number is not None:
        amax_state.record_gradient(number, q[3])
    return *q, *transposed[:3]


def _unshared(q: Quantized) -> tuple[Tensor, ...]:
    """`parts` that share nothing with another operand."""
    data, *others = parts(q)
    # The transpose of a row is the row.
    data = data.clone() if q.transposed and data.data_ptr() == q.data.data_ptr() else data
    return data, *(one.clone() for one in others)


def _both_fake(x: Tensor, text: str, other: str, *_: Any) -> tuple[Tensor, ...]:
    return *empty_parts(x, QuantSpec.parse(text)), *empty_parts(x.t(), QuantSpec.parse(other))[:3]


#: x [rows, k] by one spec and its transpose by another, from one read of x where an implementation can do that:
#: (x, spec, spec of the transpose, amax, factor, noise, noise of the transpose, whether factor is known not to be 0,
#: where a kernel may note the amax, whether it may sum x over its rows).
QUANTIZE_BOTH: Operation[tuple[Quantized, Quantized]] = Operation(
    "quantize_both(Tensor x, str spec, str other, Tensor? amax, Tensor? factor, Tensor? number)"
    " -> (Tensor data, Tensor scale, Tensor tensor_factor, Tensor amax,"
    " Tensor turned_data, Tensor turned_scale, Tensor turned_factor)",
    [
        Implementation("triton", f"{GPU}.quantize:quantize_both", f"{GPU}.quantize:reason_both", no_kernels),
        Implementation("two calls", _two_calls),
    ],
    fake=_both_fake,
    kernel=_both_kernel,
    traced=_both_traced,
    parts=QUANTIZE,
)


def _code_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).clone()


def _code_bytes_fake(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.uint8)


#: Packed codes of four bits as bytes: Inductor knows no float4 on a CPU.
CODE_BYTES: Operation[Tensor] = Operation("code_bytes(Tensor codes) -> Tensor", _code_bytes, fake=_code_bytes_fake)


def _plain_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.sum(0, dtype=torch.float32).to(dtype)


#: The gradient [features] of a bias, of the gradient [tokens, features] of what it was added to.
BIAS_GRADIENT: Operation[Tensor] = Operation(
    "bias_gradient",
    [
        Implementation(
            "triton", f"{GPU}.cross_entropy:column_sum", f"{GPU}.cross_entropy:column_sum_reason", no_kernels
        ),
        Implementation("reference", _plain_sum),
    ],
    traced=_plain_sum,
)
_ADD_UP = Implementation("triton", f"{GPU}.cross_entropy:add_up")
#: The implementation that runs in place of one that `only` names and that refuses the call.
_FALL_BACK = {"triton": "reference", "native": "decoded"}


@contextmanager
def only(name: str) -> Iterator[None]:
    """Run one implementation of every operation, by name ("cpu", "reference", "triton"): `with only("reference"): ...`.

    An operation that has none of that name runs as ever. "triton" on a CPU interprets the kernels, and specs without
    one go to the reference; "native" and "decoded" run there too where torch can.

    It holds for the whole process, other threads included: on a GPU a backward runs in a thread of autograd's, which
    must see it. Enter it in one thread at a time.
    """
    with narrowed(name, _FALL_BACK.get(name)), device.asking(name):
        _resolved.clear()
        try:
            yield
        finally:
            _resolved.clear()


class ResolvedOperations(NamedTuple):
    """What quantizes and multiplies under a recipe."""

    #: Held, so that no other recipe gets its identity.
    recipe: Recipe
    quantize: Callable[..., Quantized]
    matmul: Callable[..., Tensor]
    #: `QUANTIZE_BOTH` where one read of an operand can serve two GEMMs, else None: two calls take their time.
    both: Callable[..., tuple[Quantized, Quantized]] | None = None


_resolved: dict[Any, ResolvedOperations] = {}


def resolve(recipe: Recipe, x: Tensor) -> ResolvedOperations:
    """The implementations that run a recipe's operations on operands like x.

    The choice does not depend on shapes, so it is made once for a recipe (and device, and dtype): asking takes as long
    as a small GEMM.
    """
    resolved = _resolved.get(id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype))
    if resolved is None:
        resolved = _resolve(recipe, x)
        _resolved[id(recipe) if x.is_cpu else (id(recipe), x.device, x.dtype)] = resolved
    return resolved


def _resolve(recipe: Recipe, x: Tensor) -> ResolvedOperations:
    if x.is_cuda:
        fused_quantize.warn_once(recipe, x)
    specs = {spec for spec in recipe.operands().values() if spec is not None}
    if not specs:
        return ResolvedOperations(recipe, QUANTIZE.eager, MATMUL.eager, None)
    picks = {QUANTIZE.pick(x, spec) for spec in specs}
    run = picks.pop() if len(picks) == 1 else QUANTIZE.eager
    if x.is_cpu and not device.asked:
        operand = Quantized(x, 1.0, next(iter(specs)), (0, 0))
        return ResolvedOperations(recipe, run, MATMUL.pick(operand, operand, x.dtype, None))
    triton = QUANTIZE.named("triton")
    kernels = QUANTIZE.allows("triton") and any(not triton.reason(x, spec) for spec in specs)
    # Asking again at each call which implementation it is takes as long as a launch.
    multiply, both = MATMUL.eager, QUANTIZE_BOTH.eager
    if x.is_cuda and MATMUL.active is MATMUL.impls:
        multiply = MATMUL.named("decoded" if device.why_no_fp8(x.device, "native") else "native").run
    if x.is_cuda and QUANTIZE.active is QUANTIZE.impls:
        both = QUANTIZE_BOTH.named("triton").run
    return ResolvedOperations(recipe, run, multiply, both if kernels else None)


def bias_gradient(g: Tensor, dtype: torch.dtype, partial: Tensor | None = None) -> Tensor:
    """g [tokens, features] summed over its tokens in float32, in a fixed order, and rounded once: [features].

    Args:
        partial: `Quantized.partial_sums` of g, where whatever quantized it summed it on the way: g is not read again.
    """
    if partial is not None:
        total: Tensor = _ADD_UP.run(partial, dtype)
        return total
    return BIAS_GRADIENT(g, dtype)


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
