"""Operators of grouped products for torch.compile: an opaque forward and backward that run the eager code.

Exported programs contain `quaver::grouped_forward`, so its schema does not change. Sizes of the results depend only on
the numbers of rows and groups: see `saved`.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.backends.gpu import device as gpu
from quaver.torch.linear.grouped import products
from quaver.torch.linear.grouped.call import GroupedCall, NoiseSource
from quaver.torch.linear.grouped.saved import SavedLayout, form_of
from quaver.torch.numerics.grouped import GroupedNoise, GroupOffsets
from quaver.torch.numerics.quantized import FLOAT8, Quantized, storage
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import flat, restored
from quaver.torch.operations.operation import Operation
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state import selective_checkpoint
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax

#: Names of an operand and its transpose, for forward and backward.
OPERANDS = ("input", "input.T"), ("grad_output", "grad_output.T")


def text_of(recipe: Recipe) -> str:
    """Encode the operand specs of a recipe's GEMMs as one line of text, such as "A|B|fast;A|B|;||;dequantized"."""
    lines = []
    for gemm in recipe.gemms.values():
        sides = ("", "") if gemm.a is None or gemm.b is None else (gemm.a.text, gemm.b.text)
        lines.append("|".join((*sides, "fast" * gemm.fast_accum)))
    return ";".join((*lines, "dequantized" * recipe.dequantized_backward))


@cache
def parsed(text: str) -> Recipe:
    """Return a recipe with the GEMMs encoded in this text."""
    *lines, dequantized = text.split(";")
    gemms = []
    for a, b, fast in (line.split("|") for line in lines):
        gemms.append(GemmSpec(QuantSpec.parse(a) if a else None, QuantSpec.parse(b) if b else None, bool(fast)))
    fprop, dgrad, wgrad = gemms
    return Recipe("compiled", fprop, dgrad, wgrad, dequantized_backward=bool(dequantized))


class CustomOpArguments(NamedTuple):
    """Arguments that both operators take after their own tensors, in the order of their schemas."""

    #: In the layer's layout, [groups, N, K] or [groups, K, N].
    weight: Tensor
    weight_scale: Tensor | None
    weight_factor: Tensor | None
    offsets: Tensor
    #: Encode factors, float32 [groups, 3].
    factors: Tensor | None
    #: Noise streams of an operand and of its transpose, int64 [2, groups].
    streams: Tensor | None
    counts: Tensor | None
    seed: int
    #: Name from which `grouped_matmul` derives the noise streams of its groups; "" for layers.
    name: str
    recipe: str
    #: Spec of a weight that is stored as codes, and its K; "" for other weights.
    weight_spec: str
    columns: int
    #: True if the weight is stored as [groups, K, N].
    transposed: bool
    dtype: torch.dtype

    def features(self) -> tuple[Any, Any]:
        """Return N and K."""
        if self.weight_spec and self.weight.dtype not in FLOAT8.values():
            return self.weight.shape[1], self.columns
        n, k = self.weight.shape[1:]
        return (k, n) if self.transposed else (n, k)


_SCHEMA = (
    "Tensor weight, Tensor? weight_scale, Tensor? weight_factor, Tensor offsets, Tensor? factors, Tensor? streams,"
    " Tensor? counts, int seed, str name, str recipe, str weight_spec, SymInt columns, bool turned, ScalarType dtype"
)


def arguments(call: GroupedCall, weight: Tensor, direction: int) -> CustomOpArguments:
    """Return the arguments of an operator for a call, with the layer's state as tensors of the graph.

    Args:
        weight: in the layer's layout.
        direction: 0 for forward, 1 for backward.
    """
    owner: Any = call.owner
    recipe, stored = call.recipe, call.stored
    spec, columns, scale, factor = "", 0, None, None
    if stored is not None:
        spec, columns, scale, factor = stored.spec.text, stored.columns, stored.scale, stored.factor
        weight = stored.codes
    streams = counts = None
    seed, name = 0, ""
    if recipe.stochastic and isinstance(owner, NoiseSource):
        seed, name = owner.seed, owner.name
        counts = torch.as_tensor(owner.count, dtype=torch.int64, device="cpu").reshape(1)
    elif recipe.stochastic:
        drawn: list[Any] = [owner.draw(operand, call.offsets.groups) for operand in OPERANDS[direction]]
        seed, streams, counts = drawn[0].seed, *(torch.stack(each) for each in list(zip(*drawn, strict=True))[1:])
    return CustomOpArguments(
        weight, scale, factor, call.offsets.ends, call.factors, streams, counts, seed, name, text_of(recipe), spec,
        columns, call.transposed, call.dtype,
    )  # fmt: skip


def _call(
    args: CustomOpArguments, like: Tensor, direction: int, bias_dtype: torch.dtype = torch.float32
) -> tuple[GroupedCall, Tensor]:
    """Build the call that eager mode would use, and view the weight as [groups, N, K]."""
    offsets, on_host, weight = GroupOffsets(args.offsets, like.shape[0]), ops.on_host(args.offsets), args.weight
    if args.weight_spec:
        assert args.weight_scale is not None
        spec = QuantSpec.parse(args.weight_spec)
        weight = QuantizedTensor(
            weight.view(storage(spec.format)),
            args.weight_scale,
            spec,
            factor=args.weight_factor if spec.two_level else None,
            columns=args.columns,
            transposed=args.transposed,
        )
    call = GroupedCall(None, parsed(args.recipe), offsets, like, args.dtype, True, weight, bias_dtype, args.transposed)
    if args.factors is not None:
        call.factors = args.factors.tolist() if on_host else args.factors
    if args.name and args.counts is not None:
        source = NoiseSource(args.seed, args.name, args.counts)
        call.draw = lambda operand: source.draw(operand, offsets.groups)
    elif args.streams is not None and args.counts is not None:
        numbers = [(t.tolist() if on_host else t) for t in (args.streams, args.counts)]
        call.draw = lambda operand: GroupedNoise(args.seed, *(t[OPERANDS[direction].index(operand)] for t in numbers))
    return call, call.view(weight)


def flat_rows(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return rows as the operators take them: (data, scale or None, tensor factor or None)."""
    return (x, None, None) if isinstance(x, Tensor) else flat(x)[:3]


def _rows(data: Tensor, scale: Any, factor: Any, call: GroupedCall) -> Tensor | Quantized:
    """Return high-precision rows unchanged, or rebuild the operand of fprop from codes and scales."""
    if scale is None:
        return data
    assert call.recipe.fprop.a is not None
    return restored(data, scale, factor, call.recipe.fprop.a.text, False, call.weight_shape[2], False)


# ---- forward ----

#: Shapes and dtypes of the four tensors for backward if there is no backward.
NO_OPERAND: tuple[Any, Any] = ((0,),) * 4, (torch.uint8, torch.uint8, torch.float32, torch.uint8)


def _forward(
    x: Tensor, x_scale: Tensor | None, x_factor: Tensor | None, high: Tensor | None, bias: Tensor | None, keeps: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call, weight = _call(CustomOpArguments(*rest), x, 0)
    groups, rows = call.offsets.groups, _rows(x, x_scale, x_factor, call)
    active_context.compiled = True
    with ops.without_autocast(x.device.type), selective_checkpoint.inside():
        y, saved = products.forward(call, rows, high, weight, bias, keeps)
    saved_tensors = tuple(y.new_empty(0, dtype=dtype) for dtype in NO_OPERAND[1])
    if saved is not None and call.recipe.saved_input is not None:
        saved_tensors = SavedLayout.of(call).flat(saved, padded=True)  # type: ignore[arg-type]
    amaxes = torch.zeros((2, groups), dtype=torch.float32, device=y.device)
    for column, group_amaxes in call.amaxes.items():
        amaxes[column] = torch.as_tensor(group_amaxes, dtype=torch.float32, device=y.device)
    return y, *saved_tensors, amaxes


def _forward_fake(
    x: Tensor, x_scale: Tensor | None, x_factor: Tensor | None, high: Tensor | None, bias: Tensor | None, keeps: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    args = CustomOpArguments(*rest)
    (n, k), recipe, groups, rows = args.features(), parsed(args.recipe), args.weight.shape[0], x.shape[0]
    shapes, dtypes = NO_OPERAND
    if keeps and recipe.saved_input is not None:
        on_host = x.device.type == "cpu" and not gpu.forced_implementations
        of = (args.dtype,) if args.weight_spec else (args.dtype, args.weight.dtype)
        form = "" if on_host else form_of(recipe, x.device, (groups, n, k), *of)
        shapes, dtypes = SavedLayout.by(recipe, rows, groups, k, form).shapes(on_host)
    saved = [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return x.new_empty((rows, n), dtype=args.dtype), *saved, x.new_empty((2, groups), dtype=torch.float32)


def _forward_flops(x: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    n, k = CustomOpArguments(*rest[5:]).features()
    return int(2 * x.shape[0] * n * k)


FORWARD: Operation[tuple[Tensor, ...]] = Operation(
    "grouped_forward(Tensor x, Tensor? x_scale, Tensor? x_factor, Tensor? high, Tensor? bias, bool keeps, "
    + _SCHEMA
    + ") -> (Tensor y, Tensor kept, Tensor kept_scale, Tensor kept_factor, Tensor kept_turned, Tensor amaxes)",
    _forward,
    fake=_forward_fake,
    kernel=_forward,
    flops=_forward_flops,
)

# ---- backward: tensors saved by forward, or `flat_rows` of the rows if the recipe saves them unquantized ----


def _backward(
    g: Tensor, data: Tensor, scale: Tensor | None, factor: Tensor | None, flags: Tensor | None,
    needs: list[bool], bias_dtype: torch.dtype, number: Tensor | None, first: int, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call, weight = _call(CustomOpArguments(*rest), g, 1, bias_dtype)
    recipe = call.recipe
    saved: Any = None
    if needs[1] and recipe.saved_input is None:
        saved = _rows(data, scale, factor, call)
    elif needs[1]:
        tensors: Any = data, scale, factor, flags
        saved = SavedLayout.of(call).operand(tensors, call.offsets)
    with ops.without_autocast(g.device.type), selective_checkpoint.inside():
        grads = products.backward(call, g, weight, saved, needs)
    if number is not None and amax.GRAD_OUTPUT in call.amaxes:
        amaxes = torch.as_tensor(call.amaxes[amax.GRAD_OUTPUT], dtype=torch.float32, device=g.device)
        amax.record_gradient(number, amaxes, first)
    return tuple(g.new_empty(0, dtype=torch.float32) if grad is None else grad.contiguous() for grad in grads)


def _backward_fake(g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs, bias_dtype, args = rest[4], rest[5], CustomOpArguments(*rest[8:])
    (n, k), groups, dtype = args.features(), args.weight.shape[0], args.weight.dtype
    shapes = (g.shape[0], k), (groups, *((k, n) if args.transposed else (n, k))), (groups, n)
    dtypes = args.dtype, torch.float32 if args.weight_spec else dtype, bias_dtype
    results = zip(needs, shapes, dtypes, strict=True)
    return tuple(g.new_empty(s if need else (0,), dtype=d if need else torch.float32) for need, s, d in results)


def _backward_flops(g: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    n, k = CustomOpArguments(*rest[8:]).features()
    return int(2 * g.shape[0] * n * k * sum(rest[4][:2]))


BACKWARD: Operation[tuple[Tensor, ...]] = Operation(
    "grouped_backward(Tensor g, Tensor kept, Tensor? kept_scale, Tensor? kept_factor, Tensor? kept_turned,"
    " bool[] needs, ScalarType bias_dtype, Tensor? number, int first, "
    + _SCHEMA
    + ") -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _backward,
    fake=_backward_fake,
    kernel=_backward,
    flops=_backward_flops,
)
