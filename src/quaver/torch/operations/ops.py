"""Operations of linear layers (quantize, matmul, column sums), their implementations, and the choice between them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe, interned
from quaver.torch.backends.cpu import few_bits, gemm
from quaver.torch.backends.cpu import quantize as fp8
from quaver.torch.backends.gpu import device, fused_quantize
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, ScalarOverride
from quaver.torch.numerics.rounding import NO_NOISE, Noise, is_tracing
from quaver.torch.operations.autograd import empty_parts, flat, joined, parts, restored
from quaver.torch.operations.operation import Implementation, Operation, narrowed
from quaver.torch.state import selective_checkpoint
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax as amax_state

_C: Any = torch._C


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: Returns True while torch.autocast is enabled for any device.
any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _any_autocast)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Package of the GPU implementations, imported only when a GPU tensor arrives, because it imports Triton.
GPU = "quaver.torch.backends.gpu"


def no_kernels(x: Tensor, *_: Any) -> str:
    """Return why no kernel supports a tensor on this device, or ""."""
    if x.is_cpu and not device.forced_implementations:
        return "the tensor is not on a GPU"
    return device.why_no_kernels(x.device)


def on_host(x: Tensor) -> bool:
    """Return True if only plain torch runs on x: on a CPU in eager mode, unless a kernel was requested by name."""
    return x.is_cpu and not device.forced_implementations and not is_tracing()


def chosen(operation: Operation, x: Tensor, implementation: int | None = None) -> Callable[..., Any]:
    """Return the function that runs an operation on x: the plain torch function itself where only that runs.

    Args:
        implementation: index of the implementation to run, if it is known.
    """
    if implementation is not None:
        return operation.implementations[implementation].run
    return operation.implementations[-1].run if on_host(x) else operation


#: Noise argument that marks a second quantization, in backward, of a tensor that forward has quantized. Otherwise a
#: compiler would merge the two and save the codes, a byte per element of a weight. Rounding to nearest ignores it.
NO_NOISE_ID: Noise = 1, 0, 0

# ---- quantize: hints to kernels, such as where to record the amax, do not change the result ----


def _quantize_traced(
    x: Tensor,
    spec: QuantSpec,
    amax: ScalarOverride = None,
    factor: ScalarOverride = None,
    noise: Noise = NO_NOISE,
    number: Tensor | None = None,
    transposed: bool | None = None,
) -> Quantized:
    """Quantize x while tracing; with a layer's `number`, record the amax as that of its grad_output.

    Args:
        transposed: True if x is a transposed view of a row-major matrix; None checks the strides. Checking strides in a
            compiled backward would trace it again and copy gradients that are not contiguous.
    """
    if transposed is None:
        transposed = x.stride(1) != 1 and x.stride(0) == 1
    tensor_id: Tensor | None
    count: Tensor | None
    # Without separate tensors a compiler merges equal calls, such as those of layers with the same input.
    tensor_id = count = None
    if spec.rounding != "nearest":
        # As a tensor, the id is not a constant of the graph, so layers with the same code share one.
        tensor_id, count = (
            torch.tensor(v, dtype=torch.int64, device="cpu") if isinstance(v, int) else v for v in noise[1:]
        )
    schema_arguments = (spec.text, _float(amax), _float(factor), noise[0], tensor_id, count, number)
    return joined(x, spec, transposed, *QUANTIZE.operator(x.t() if transposed else x, transposed, *schema_arguments))


def _float(v: ScalarOverride) -> Tensor | None:
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


# ---- matmul ----


def _no_gemms(a: Quantized, *_: Any) -> str:
    return device.why_no_fp8(a.device, "native")


def _reason_not_on_gpu(a: Quantized, *_: Any) -> str:
    if a.data.is_cuda or (a.data.is_cpu and device.forced_implementations & {"native", "decoded"}):
        return ""
    return "the operands are not on a GPU"


# ---- dequantize ----


def _dequantized(q: Quantized, dtype: torch.dtype) -> Tensor:
    return q.dequantize().to(dtype)


#: Data of an operand times its scales, rounded once: (operand, dtype) -> [rows, k]. Where a product overflows, the
#: kernel may return the largest number, and the reference returns infinity.
DEQUANTIZE: Operation[Tensor] = Operation(
    "dequantize",
    [
        Implementation(
            "triton", f"{GPU}.decode:dequantize", f"{GPU}.decode:reason_dequantize", lambda q, _: no_kernels(q.data)
        ),
        Implementation("reference", _dequantized),
    ],
    traced=_dequantized,
)


class WeightReference(NamedTuple):
    """Operand of a compiled GEMM: a layer's weight, which the operator quantizes or finds in the weight cache.

    A graph that had the codes as tensors would compute them, or be compiled again when they change.
    """

    weight: Tensor
    #: Number of the layer, int64: see `quaver.torch.state.history.amax`.
    number: Tensor
    recipe: Recipe
    #: True for dgrad, which reads the transpose.
    transposed: bool = False

    def flat(self) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
        """Flatten to the arguments of the `matmul` operator, which tells references by the dtype of the number."""
        number = self.number
        return self.weight, number, number, self.recipe.text, self.transposed, self.weight.shape[1], False


#: Text in place of a spec for operands that are `ValuesOperand`.
VALUES = "values"


class ValuesOperand(NamedTuple):
    """Operand of a compiled GEMM that a GPU does not have: bf16 values of codes, stored transposed or not."""

    values: Tensor
    transposed: bool = False

    def flat(self) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
        """Flatten to the arguments of the `matmul` operator.

        The values stand for scales too: an empty tensor made from those of backward would be made in forward, with
        them.
        """
        x = self.values
        return x, x, x, VALUES, self.transposed, x.shape[1], False


def _matmul_traced(
    a: Quantized | ValuesOperand,
    b: Quantized | ValuesOperand | WeightReference,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    left, right = (flat(x) if isinstance(x, Quantized) else x.flat() for x in (a, b))
    y: Tensor = MATMUL.operator(*left, *right, dtype, bias, fast_accum)
    return y


def _right_operand(data: Tensor, scale: Tensor, factor: Tensor, text: str, transposed: bool, *rest: Any) -> Quantized:
    """Rebuild the right operand of a compiled GEMM, which may be a `WeightReference`."""
    if scale.dtype is not torch.int64:
        return restored(data, scale, factor, text, transposed, *rest)
    recipe, layer = interned(text), amax_state.layer_of(scale)
    assert recipe is not None
    q: Quantized | None = None if layer is None else layer.cached_operand(data, recipe, transposed)  # type: ignore[operator]
    if q is not None:
        return q
    if transposed and not recipe.reuse.weight:
        return QUANTIZE.eager(data.t(), recipe.dgrad.b)
    q = QUANTIZE.eager(data, recipe.fprop.b)
    return q.T if transposed else q


def _matmul_kernel(*args: Any) -> Tensor:
    active_context.compiled = True
    with without_autocast(args[0].device.type), selective_checkpoint.inside():
        if args[3] == VALUES:
            from quaver.torch.backends.gpu.scaled_mm import product

            x, y = args[0], args[7]
            return product(x.t() if args[4] else x, y if args[11] else y.t(), *args[14:16])
        return MATMUL.eager(restored(*args[:7]), _right_operand(*args[7:14]), *args[14:])


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
        Implementation("decoded", f"{GPU}.scaled_mm:matmul", _reason_not_on_gpu),
        Implementation("reference", reference.matmul),
    ],
    fake=_matmul_fake,
    flops=_matmul_flops,
    kernel=_matmul_kernel,
    traced=_matmul_traced,
)


def shown_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """Run MATMUL as torch.ops.quaver.matmul, which a selective checkpoint sees, as in compiled code."""
    operands, compiled = (*flat(a), *flat(b)), active_context.compiled
    y: Tensor = selective_checkpoint.shown(MATMUL.operator, *operands, dtype, bias, fast_accum)
    active_context.compiled = compiled
    # The checkpoint's cached result must not change, but an output may be written to.
    return y.clone()


# ---- quantize both: an operand and its transpose ----


def _two_calls(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: ScalarOverride = None,
    factor: ScalarOverride = None,
    noise: Noise = NO_NOISE,
    other_noise: Noise = NO_NOISE,
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
    factor: ScalarOverride = None,
    noise: Noise = NO_NOISE,
    other_noise: Noise = NO_NOISE,
    number: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantize x and its transpose while tracing, rounding to nearest; `number` as in `QUANTIZE.traced`."""
    # Does not compare with NO_NOISE, because Dynamo sees a default and the global that it names as two tuples.
    assert spec.rounding == other.rounding == "nearest"
    *q, data, scale, tensor_factor = QUANTIZE_BOTH.operator(x, spec.text, other.text, amax, _float(factor), number)
    return joined(x, spec, False, *q), joined(x.t(), other, False, data, scale, tensor_factor, q[3])


def _both_kernel(
    x: Tensor, text: str, other: str, amax: Tensor | None, factor: Tensor | None, number: Tensor | None
) -> tuple[Tensor, ...]:
    pair = QUANTIZE_BOTH.eager(x, QuantSpec.parse(text), QuantSpec.parse(other), amax, factor)
    q, transposed = (_unshared(operand) for operand in pair)
    if number is not None:
        amax_state.record_gradient(number, q[3])
    return *q, *transposed[:3]


def _unshared(q: Quantized) -> tuple[Tensor, ...]:
    """Return `parts` that share no memory with another operand."""
    data, *others = parts(q)
    # The transpose of a single row shares its memory.
    data = data.clone() if q.transposed and data.data_ptr() == q.data.data_ptr() else data
    return data, *(one.clone() for one in others)


def _both_fake(x: Tensor, text: str, other: str, *_: Any) -> tuple[Tensor, ...]:
    return *empty_parts(x, QuantSpec.parse(text)), *empty_parts(x.t(), QuantSpec.parse(other))[:3]


#: Quantizes x [rows, k] by one spec and its transpose by another, from one read of x if an implementation can.
#: Arguments: (x, spec, spec of the transpose, amax, factor, noise, noise of the transpose, factor is known to be
#: nonzero, where a kernel may record the amax, whether to sum x over its rows).
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


def _plain_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.sum(0, dtype=torch.float32).to(dtype)


#: Gradient of a bias [features] from grad_output [tokens, features].
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
#: Implementation that runs if the one named by `only` does not support the call.
_FALL_BACK = {"triton": "reference", "native": "decoded"}


@contextmanager
def only(name: str) -> Iterator[None]:
    """Run one implementation of every operation, by name ("cpu", "reference", "triton"): `with only("reference"): ...`.

    Operations without an implementation of that name are not affected. "triton" on a CPU interprets the kernels, and
    specs without a kernel use the reference. "native" and "decoded" run on a CPU too if torch can.

    Applies to the whole process, because on a GPU backward runs in an autograd thread. Enter it in one thread at a
    time.
    """
    with narrowed(name, _FALL_BACK.get(name)), device.asking(name):
        clear_resolved()
        try:
            yield
        finally:
            clear_resolved()


def clear_resolved() -> None:
    """Drop cached choices among implementations, when the implementations have changed."""
    for cache in resolved_caches:
        cache.clear()


class ResolvedOperations(NamedTuple):
    """Functions that quantize and multiply under a recipe."""

    #: Referenced so that its id, the cache key, is not reused.
    recipe: Recipe
    quantize: Callable[..., Quantized]
    matmul: Callable[..., Tensor]
    #: `QUANTIZE_BOTH` if one read of an operand can serve two GEMMs, else None.
    both: Callable[..., tuple[Quantized, Quantized]] | None = None


_resolved: dict[Any, ResolvedOperations] = {}
#: Caches of choices among implementations, which `only` clears.
resolved_caches: list[dict[Any, Any]] = [_resolved]


def resolve(recipe: Recipe, x: Tensor) -> ResolvedOperations:
    """Return the implementations that run a recipe's operations on operands like x.

    The choice does not depend on shapes, so it is cached per recipe (and device and dtype); choosing takes as long as a
    small GEMM.
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
    if x.is_cpu and not device.forced_implementations:
        operand = Quantized(x, 1.0, next(iter(specs)), (0, 0))
        return ResolvedOperations(recipe, run, MATMUL.pick(operand, operand, x.dtype, None))
    triton = QUANTIZE.named("triton")
    kernels = QUANTIZE.allows("triton") and any(not triton.reason(x, spec) for spec in specs)
    # Choosing again at each call takes as long as a launch.
    multiply, both = MATMUL.eager, QUANTIZE_BOTH.eager
    if x.is_cuda and MATMUL.enabled is MATMUL.implementations:
        multiply = MATMUL.named("decoded" if device.why_no_fp8(x.device, "native") else "native").run
    if x.is_cuda and QUANTIZE.enabled is QUANTIZE.implementations:
        both = QUANTIZE_BOTH.named("triton").run
    return ResolvedOperations(recipe, run, multiply, both if kernels else None)


def bias_gradient(g: Tensor, dtype: torch.dtype, partial: Tensor | None = None) -> Tensor:
    """Sum g [tokens, features] over its tokens in float32, in a fixed order, rounded once; returns [features].

    Args:
        partial: `Quantized.partial_sums` of g, if its quantization has computed them; g is then not read.
    """
    if partial is not None:
        total: Tensor = _ADD_UP.run(partial, dtype)
        return total
    return BIAS_GRADIENT(g, dtype)


def autocast_device(x: Tensor) -> str:
    """Return the device type whose torch.autocast applies to a tensor; meta counts as CPU."""
    return "cpu" if x.is_cpu or x.is_meta else x.device.type


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Disable torch.autocast, so that it does not cast decoded operands; free if it is not enabled."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)
