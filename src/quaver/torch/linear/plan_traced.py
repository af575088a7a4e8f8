"""Plan that torch.compile traces for a GPU without native GEMMs: bf16 values of the codes, as in `plan_emulated`.

Each launch of that plan is an opaque operator, so a graph takes as few launches as eager mode and has its bits. A
compiled graph has no weight cache, so backward quantizes the weight again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec, Recipe, interned
from quaver.torch.backends.gpu import device as gpu
from quaver.torch.linear.plan import LinearCall, LinearPlan, Operands, WeightOperands, written_transpose
from quaver.torch.numerics.quantized import FLOAT8
from quaver.torch.numerics.rounding import called_while_traced
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Operation
from quaver.torch.operations.ops import ValuesOperand
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.noise import advance_count, streams

# ---- operators ----


def _readable(x: Tensor) -> Tensor:
    """Return a matrix as the kernels read it: row-major, at a multiple of 16 bytes."""
    return x if x.is_contiguous() and not x.data_ptr() & 15 else x.clone(memory_format=torch.contiguous_format)


def _values_kernel(
    x: Tensor,
    text: str,
    other: str,
    saves_codes: bool,
    straight: bool,
    transposed: bool,
    seed: int,
    stream: Tensor | None,
    transposed_stream: Tensor | None,
    count: Tensor | None,
) -> tuple[Tensor, ...]:
    from quaver.torch.backends.gpu.emulation import StochasticRounding
    from quaver.torch.linear.plan_emulated import kernels

    noise = None
    if count is not None and stream is not None and transposed_stream is not None:
        # The kernel advances a copy, since the graph advances the buffer: where forward has made it, a value that
        # depends on backward could not be one of forward's results.
        count = count.to(x.device, torch.int64, copy=True)
        noise = StochasticRounding(seed, int(stream), int(transposed_stream), count)
    chosen = kernels(QuantSpec.parse(text), QuantSpec.parse(other))
    assert chosen is not None
    along, down, saved = chosen.values(_readable(x), saves_codes, noise, straight, transposed)
    results = along, down, *(saved or (None, None))
    return tuple(e if t is None else t for t, e in zip(results, _nothing(x), strict=True))


def _nothing(x: Tensor) -> tuple[Tensor, ...]:
    """Return the empty tensors that stand for results which are not needed."""
    return tuple(x.new_empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.uint8, torch.uint8))


def _values_fake(
    x: Tensor, text: str, other: str, saves_codes: bool, straight: bool, transposed: bool, *_: Any
) -> tuple[Tensor, ...]:
    (rows, columns), spec = x.shape, QuantSpec.parse(text)
    along, down, codes, scales = _nothing(x)
    values = x.new_empty((rows, columns), dtype=torch.bfloat16)
    if straight:
        along = values
    if transposed and not saves_codes:
        down = torch.empty_like(values)
    elif transposed and spec.two_level:
        codes = x.new_empty((rows // 16, 2, columns), dtype=torch.int32)
        scales = x.new_empty((rows // 16 + 1, columns), dtype=torch.uint8)
    elif transposed:
        width = spec.block[1]
        assert width is not None
        codes = x.new_empty((rows, columns), dtype=FLOAT8[_saved_format(text)])
        scales = x.new_empty((-(-rows // width), columns), dtype=torch.uint8)
    return along, down, codes, scales


def _saved_format(text: str) -> str:
    from quaver.torch.backends.gpu.emulation import saved_format

    stored = saved_format(QuantSpec.parse(text).format)
    assert stored is not None
    return stored.name


#: Rounds x by one spec, and its transpose by another, to bf16 values in the layout of x. Results that are not needed
#: are empty: values, those of the transpose, its codes for `SAVED_VALUES`, and their scales.
VALUES: Operation[Any] = Operation(
    "emulated_values(Tensor x, str spec, str other, bool saves_codes, bool straight, bool transposed, int seed,"
    " Tensor? stream, Tensor? transposed_stream, Tensor? count)"
    " -> (Tensor values, Tensor transposed_values, Tensor codes, Tensor scales)",
    _values_kernel,
    fake=_values_fake,
)


def _saved_values_kernel(codes: Tensor, scales: Tensor, text: str, other: str) -> Tensor:
    from quaver.torch.linear.plan_emulated import kernels

    chosen = kernels(QuantSpec.parse(text), QuantSpec.parse(other))
    assert chosen is not None
    return chosen.saved_values(codes, scales)


def _saved_values_fake(codes: Tensor, scales: Tensor, text: str, other: str) -> Tensor:
    rows = codes.shape[0] * (16 if codes.dim() == 3 else 1)
    return codes.new_empty((rows, codes.shape[-1]), dtype=torch.bfloat16)


#: Decodes the codes that `VALUES` has saved.
SAVED_VALUES: Operation[Tensor] = Operation(
    "emulated_saved_values(Tensor codes, Tensor scales, str spec, str other) -> Tensor",
    _saved_values_kernel,
    fake=_saved_values_fake,
)

# ---- plan ----


@called_while_traced
def supports_recipe(text: str, device: torch.device) -> bool:
    """Return True if values of a recipe's operands take fewer launches than codes; `text` is the recipe's.

    Asks the table of GEMMs alone, since nothing can be probed while a compiler traces.
    """
    recipe = interned(text)
    if recipe is None:
        # The compiled code itself builds the recipe.
        return False
    if device.type == "cpu" and not gpu.forced_implementations:
        return False
    if ops.QUANTIZE.enabled is not ops.QUANTIZE.implementations:
        # Inside `quaver.torch.only`.
        return False
    if gpu.why_no_kernels(device):
        return False
    from quaver.torch.backends.gpu.scaled_mm import unavailable
    from quaver.torch.linear.plan_emulated import reason_unsupported

    return recipe.delayed is None and not reason_unsupported(recipe, device, unavailable)


def emulates_layers(recipe: Recipe, x: Tensor, weights: Sequence[Any]) -> bool:
    """Return True if the plan runs layers with an input x [..., K], asked while a compiler traces.

    A graph is compiled for numbers of tokens that are multiples of 16, and another for others.
    """
    if not recipe.quantizes or torch.compiler.is_exporting() or not supports_recipe(recipe.text, x.device):
        return False
    if any(isinstance(w, QuantizedTensor) or w.shape[0] % 16 or w.shape[1] % 16 for w in weights):
        return False
    tokens = x.numel() // weights[0].shape[1]
    return tokens > 0 and tokens % 16 == 0


def plan_of(recipe: Recipe) -> LinearPlan:
    """Return the plan of a recipe for layers that `emulates_layers` accepts."""
    return LinearPlan(
        recipe=recipe,
        quantize_input=quantize_input,
        transpose_input=written_transpose,
        quantize_weight=quantize_weight,
        transpose_weight=transpose_weight,
        quantize_grad=quantize_grad,
        transpose_grad=written_transpose,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        recomputed_input=recomputed_input,
        operations=ops.ResolvedOperations(recipe, ops.QUANTIZE, ops.MATMUL),
    )


#: Noise arguments of `VALUES` for rounding to nearest, in forward and in backward. They differ in the seed, which is
#: not used: otherwise a compiler's common subexpression elimination would replace backward's call by forward's, and
#: save its values.
NO_NOISE_ARGS, RECOMPUTE_ARGS = (0, None, None, None), (1, None, None, None)


def _values(
    x: Tensor,
    specs: tuple[Any, Any],
    saves_codes: bool,
    straight: bool,
    transposed: bool,
    noise: Sequence[Any] = NO_NOISE_ARGS,
) -> tuple[Any, Any, Any]:
    """Return the values of x, those of the transpose (or its saved codes), and the scales of codes; None if not
    needed.
    """
    spec, other = specs
    square = spec.block[0] == spec.block[1]
    needed = straight or square, transposed and not square
    along, down, codes, scales = VALUES.operator(x, spec.text, other.text, saves_codes, *needed, *noise)
    if square:
        return along, along, None
    straight_values = along if straight else None
    if saves_codes and transposed:
        return straight_values, codes, scales
    return straight_values, down if transposed else None, None


def quantize_input(call: LinearCall, x: Tensor, save: bool) -> Operands:
    """Round x [T, K] to values, and save codes of the transpose if backward reads them."""
    along, saved, scales = _values(x, (call.recipe.fprop.a, call.recipe.wgrad.b), True, True, save)
    return along, None, saved, scales, None


def recomputed_input(call: LinearCall, x: Tensor) -> tuple[Tensor, None]:
    """Return the values of the transpose of an input that backward has recomputed."""
    return _values(x, (call.recipe.fprop.a, call.recipe.wgrad.b), False, False, True, RECOMPUTE_ARGS)[1], None


def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
    """Round the weight [N, K] to values for fprop."""
    return WeightOperands(_values(weight, (call.recipe.fprop.b, call.recipe.dgrad.b), False, True, False)[0])


def transpose_weight(call: LinearCall, weight: Tensor) -> tuple[Tensor, None]:
    """Round the transpose of the weight to values for dgrad."""
    specs = call.recipe.fprop.b, call.recipe.dgrad.b
    return _values(weight, specs, False, False, True, RECOMPUTE_ARGS)[1], None


def quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], bias_dtype: Any) -> Operands:
    """Round grad_output [T, N] to values along rows and along columns, as far as gradients need them."""
    straight, transposed, _ = needs
    if not (straight or transposed):
        return (None,) * 5
    layer, recipe = call.layer, call.recipe
    noise: Sequence[Any] = NO_NOISE_ARGS
    count: Any = layer._buffers.get("count")
    if recipe.stochastic:
        numbers = streams(layer)
        noise = layer.__dict__.get("seed", 0), numbers["grad_output"], numbers["grad_output.T"], count
    specs: tuple[Any, Any] = recipe.dgrad.a, recipe.wgrad.a
    along, down, _ = _values(g, specs, False, straight, transposed, noise)
    drawn = [needed and spec.rounding != "nearest" for spec, needed in zip(specs, (straight, transposed), strict=True)]
    if all(drawn):
        # Both counts in one launch.
        count[:2] += 1
    elif any(drawn):
        advance_count(layer, "grad_output" if drawn[0] else "grad_output.T")
    return along, None, down, None, None


def fprop(call: LinearCall, x: Tensor, _: None, w: Tensor, __: None, bias: Tensor | None) -> Tensor:
    """Compute x [T, K] @ w [N, K].T + bias."""
    return ops.MATMUL.traced(ValuesOperand(x), ValuesOperand(w), call.dtype, bias)


def dgrad(call: LinearCall, g: Tensor, _: None, w: Tensor, __: None, bias: None) -> Tensor:
    """Compute g [T, N] @ w [N, K]."""
    return ops.MATMUL.traced(ValuesOperand(g), ValuesOperand(w, True), call.dtype)


def wgrad(call: LinearCall, g: Tensor, _: None, x: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute g [T, N].T @ x [T, K], x given as values or as saved codes."""
    if scales is not None:
        a, c = call.recipe.fprop.a, call.recipe.wgrad.b
        assert a is not None and c is not None
        x = SAVED_VALUES.operator(x, scales, a.text, c.text)
    return ops.MATMUL.traced(ValuesOperand(g, True), ValuesOperand(x, True), dtype)
