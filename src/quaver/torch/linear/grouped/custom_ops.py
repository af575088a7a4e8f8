"""Custom operators of grouped products for torch.compile: an opaque forward and backward that run the eager code.

Output sizes depend only on the numbers of rows and groups. On a CPU every group has an operand of its own; they are
saved one after the other in a byte tensor that is large enough for any distribution of rows.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.backends.gpu import device as gpu
from quaver.torch.linear.grouped import cpu
from quaver.torch.linear.grouped import gpu as device
from quaver.torch.linear.grouped.cpu import WgradOperands
from quaver.torch.linear.grouped.operands import GradientLike, GroupedContext, NoiseSource
from quaver.torch.linear.stored_weight import CODES, StackCodes
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets, dtype_of_scales, multiple, slots
from quaver.torch.numerics.quantized import Quantized, storage
from quaver.torch.operations import ops, selective_checkpoint
from quaver.torch.operations.operation import Operation
from quaver.torch.state.context import active_context
from quaver.torch.state.history import amax

#: Names of an operand and its transpose, for forward and backward.
OPERANDS = ("input", "input.T"), ("grad_output", "grad_output.T")


def text_of(recipe: Recipe) -> str:
    """Encode the operand specs of a recipe's GEMMs as one line of text."""
    lines = []
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        pair = "|" if gemm.a is None or gemm.b is None else f"{gemm.a.text}|{gemm.b.text}"
        lines.append(f"{pair}|{'fast' if gemm.fast_accum else ''}")
    return ";".join([*lines, "dequantized" if recipe.dequantized_backward else ""])


@cache
def parsed(text: str) -> Recipe:
    """Return a recipe with the GEMMs encoded in this text."""
    *lines, dequantized = text.split(";")
    fprop, dgrad, wgrad = (_gemm(*line.split("|")) for line in lines)
    return Recipe("compiled", fprop, dgrad, wgrad, dequantized_backward=bool(dequantized))


def _gemm(a: str, b: str, fast: str) -> GemmSpec:
    left, right = (QuantSpec.parse(side) if side else None for side in (a, b))
    return GemmSpec(left, right, bool(fast))


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


_SCHEMA = (
    "Tensor weight, Tensor? weight_scale, Tensor? weight_factor, Tensor offsets, Tensor? factors, Tensor? streams,"
    " Tensor? counts, int seed, str name, str recipe, str weight_spec, SymInt columns, bool turned, ScalarType dtype"
)


def _call(kernel_args: CustomOpArguments, rows: int, direction: int) -> GroupedContext:
    """Build the context that eager mode would use."""
    offsets = GroupOffsets(kernel_args.offsets, rows)
    call = GroupedContext(parsed(kernel_args.recipe), offsets, kernel_args.dtype, True, None)
    on_host = ops.on_host(kernel_args.offsets)
    if kernel_args.factors is not None:
        call.factors = kernel_args.factors.tolist() if on_host else kernel_args.factors
    if kernel_args.weight_spec:
        assert kernel_args.weight_scale is not None
        spec = QuantSpec.parse(kernel_args.weight_spec)
        factor = kernel_args.weight_factor if spec.two_level else None
        call.codes = StackCodes(spec, kernel_args.weight_scale, factor, kernel_args.transposed, kernel_args.columns)
    if kernel_args.name and kernel_args.counts is not None:
        source = NoiseSource(kernel_args.seed, kernel_args.name, kernel_args.counts)
        call.draw = lambda operand: source.draw(operand, offsets.groups)
    elif kernel_args.streams is not None and kernel_args.counts is not None:
        streams, counts = ((t.tolist() if on_host else t) for t in (kernel_args.streams, kernel_args.counts))
        call.draw = lambda operand: GroupedNoise(
            kernel_args.seed, *(t[OPERANDS[direction].index(operand)] for t in (streams, counts))
        )
    return call


def _view(kernel_args: CustomOpArguments) -> Tensor:
    """View the weight as [groups, N, K]."""
    packed = kernel_args.weight.dtype is torch.float4_e2m1fn_x2
    return kernel_args.weight.transpose(1, 2) if kernel_args.transposed and not packed else kernel_args.weight


def _rows(data: Tensor, scale: Tensor | None, factor: Tensor | None, spec: QuantSpec | None, k: int) -> Any:
    """Return high-precision rows unchanged, or rebuild the operand from codes and scales."""
    if scale is None:
        return data
    assert spec is not None
    on_host = spec.per_tensor and data.is_cpu and scale.is_floating_point()
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale.item() if on_host else scale, spec, (data.shape[0], k), False, tensor_factor)


# ---- forward ----


def _forward(
    x: Tensor, x_scale: Tensor | None, x_factor: Tensor | None, high: Tensor | None, bias: Tensor | None, keeps: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernel_args = CustomOpArguments(*rest)
    call, weight = _call(kernel_args, x.shape[0], 0), _view(kernel_args)
    backend = cpu if ops.on_host(kernel_args.offsets) else device
    k = cpu.features(call, weight)[1]
    rows = _rows(x, x_scale, x_factor, call.recipe.fprop.a, k)
    active_context.compiled = True
    with ops.without_autocast(x.device.type), selective_checkpoint.inside():
        y, saved = backend.forward(call, rows, high, weight, bias, keeps)
    empty = y.new_empty(0, dtype=torch.uint8)
    parts = (empty, empty.clone(), y.new_empty(0, dtype=torch.float32), empty.clone())
    if saved is not None and saved.grouped_operand is not None:
        grouped_operand = saved.grouped_operand
        factor = parts[2] if grouped_operand.factor is None else grouped_operand.factor.contiguous()
        parts = grouped_operand.data, grouped_operand.scale.contiguous(), factor, parts[3]
    elif saved is not None and saved.rows is None:
        parts = _in_bytes(saved.parts, OperandBytes.of(call.recipe, x.shape[0], weight.shape[0], k))
    amax_values = torch.zeros((2, weight.shape[0]), dtype=torch.float32, device=y.device)
    for column, amaxes in call.amaxes.items():
        amax_values[column] = torch.as_tensor(amaxes, dtype=torch.float32, device=y.device)
    return y, *parts, amax_values


def _forward_fake(
    x: Tensor, x_scale: Tensor | None, x_factor: Tensor | None, high: Tensor | None, bias: Tensor | None, keeps: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernel_args = CustomOpArguments(*rest)
    n, k = _features(kernel_args)
    recipe, groups, rows = parsed(kernel_args.recipe), kernel_args.weight.shape[0], x.shape[0]
    y = x.new_empty((rows, n), dtype=kernel_args.dtype)
    shapes: tuple[Any, ...] = ((0,), (0,), (0,), (0,))
    dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.uint8, torch.float32, torch.uint8)
    if keeps and recipe.saved_input is not None:
        sizes = OperandBytes.of(recipe, rows, groups, k)
        if _on_host(x):
            shapes = ((sizes.data,), (sizes.scales,), (groups if sizes.spec.two_level else 0,), (groups,))
        else:
            shapes, dtypes = _operand_shapes(sizes, groups, rows, k)
    parts = [x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return y, *parts, x.new_empty((2, groups), dtype=torch.float32)


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and not gpu.forced_implementations


def _features(kernel_args: CustomOpArguments) -> tuple[Any, Any]:
    """Return N and K."""
    if kernel_args.weight_spec and kernel_args.weight.dtype is torch.float4_e2m1fn_x2:
        return kernel_args.weight.shape[1], kernel_args.columns
    n, k = kernel_args.weight.shape[1:]
    return (k, n) if kernel_args.transposed else (n, k)


class OperandBytes(NamedTuple):
    """Buffer sizes in bytes that suffice for the wgrad operands of all groups' inputs."""

    spec: QuantSpec
    #: True if the operands are rows [tokens, K] or their transposed views; False if they are quantized as [K, tokens].
    of_rows: bool
    #: True if the operands are rows exactly as fprop read them.
    consumed: bool
    data: Any
    scales: Any

    @staticmethod
    def of(recipe: Recipe, rows: Any, groups: Any, k: Any) -> "OperandBytes":
        spec, consumed = recipe.saved_input, recipe.wgrad.b is None
        assert spec is not None
        of_rows = recipe.reuse.input or consumed
        tokens = rows + (15 * groups if spec.hadamard else 0)
        # Scale blocks are counted as (tokens, K) for rows, and as (K, tokens) for transposes.
        along, across = spec.block[0 if of_rows else 1], spec.block[1 if of_rows else 0]
        blocks = (groups if along is None else tokens // along + groups) * (1 if across is None else -(-k // across))
        data = tokens * k
        if spec.format.packed:
            data = tokens * ((k + 1) // 2) if of_rows else (tokens + groups) // 2 * k
        return OperandBytes(spec, of_rows, consumed, data, blocks * dtype_of_scales(spec).itemsize)


def _operand_shapes(
    sizes: OperandBytes, groups: Any, rows: Any, k: Any
) -> tuple[tuple[Any, ...], tuple[torch.dtype, ...]]:
    """Shapes and dtypes of the tensors of a `GroupedOperand`."""
    spec = sizes.spec
    count = slots(rows, groups, multiple(spec))
    lines, deep = (rows, k) if sizes.consumed else (k, count)
    data = (lines, (deep + 1) // 2 if spec.format.packed else deep)
    height, width = spec.block if sizes.consumed else spec.block[::-1]
    segments = groups if height is None else rows if sizes.consumed and height == 1 else count // height
    blocks = segments, 1 if width is None else -(-k // width)
    narrow = torch.uint8 if spec.scale == "e8m0" or spec.two_level else torch.float32
    shapes = (data, blocks, (groups, 1) if spec.two_level else (0,), (0,))
    return shapes, (storage(spec.format), narrow, torch.float32, torch.uint8)


def _in_bytes(parts: Sequence[Quantized | None], sizes: OperandBytes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Concatenate the operands of all groups: codes, scales, factors of two-level scales, and flags for transposed
    storage.
    """
    data, buffer = (torch.empty(n, dtype=torch.uint8, device="cpu") for n in (sizes.data, sizes.scales))
    scales = buffer.view(dtype_of_scales(sizes.spec))
    factors = torch.ones(len(parts) if sizes.spec.two_level else 0, dtype=torch.float32, device="cpu")
    transposed = torch.zeros(len(parts), dtype=torch.uint8, device="cpu")
    at, after = 0, 0
    for group, q in enumerate(parts):
        if q is None:
            continue
        codes, scale = _bytes(q.data), _scale(q).reshape(-1)
        data[at : at + len(codes)] = codes
        scales[after : after + len(scale)] = scale
        at, after, transposed[group] = at + len(codes), after + len(scale), q.transposed
        if q.tensor_factor is not None:
            factors[group] = q.tensor_factor.reshape(())
    return data, buffer, factors, transposed


def _scale(q: Quantized) -> Tensor:
    return q.scale if isinstance(q.scale, Tensor) else torch.tensor([[q.scale]], dtype=torch.float32, device="cpu")


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).view(-1)


def _parts(
    saved: tuple[Tensor, Tensor, Tensor, Tensor], sizes: OperandBytes, offsets: GroupOffsets, k: int
) -> list[Quantized | None]:
    """Split the buffers that `_in_bytes` has written into operands."""
    data, scales, factors, transposed = saved
    spec, at, after = sizes.spec, 0, 0
    kind = dtype_of_scales(spec)
    scales = scales.view(kind)
    if kind is torch.float8_e8m0fnu:
        scales = scales.to(torch.float32)
    parts: list[Quantized | None] = []
    flags = transposed.tolist()
    for group, (start, end) in enumerate(offsets.bounds()):
        if start == end:
            parts.append(None)
            continue
        shape = (end - start, k) if sizes.consumed else (k, spec.padded(end - start))
        stored_shape = shape[::-1] if flags[group] else shape
        across = (stored_shape[1] + 1) // 2 if spec.format.packed else stored_shape[1]
        blocks = spec.blocks(*shape)
        blocks = blocks[::-1] if flags[group] else blocks
        size, count = stored_shape[0] * across, blocks[0] * blocks[1]
        codes = data[at : at + size].view(storage(spec.format)).view(stored_shape[0], across)
        scale: Any = scales[after : after + count].view(blocks)
        factor = factors[group].view(1, 1) if spec.two_level else None
        if spec.per_tensor and kind is torch.float32:
            scale = scale.item()
        parts.append(Quantized(codes, scale, spec, shape, bool(flags[group]), factor))
        at, after = at + size, after + count
    return parts


def _forward_flops(x: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    n, k = _features(CustomOpArguments(*rest[5:]))
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

# ---- backward ----


def _backward(
    g: Tensor, saved: Tensor, saved_scale: Tensor, saved_factor: Tensor, saved_transposed: Tensor, x: Tensor | None,
    x_scale: Tensor | None, x_factor: Tensor | None, needs: list[bool], bias_dtype: torch.dtype,
    number: Tensor | None, first: int, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernel_args = CustomOpArguments(*rest)
    call, weight = _call(kernel_args, g.shape[0], 1), _view(kernel_args)
    n, k = cpu.features(call, weight)
    offsets, recipe, groups = call.offsets, call.recipe, weight.shape[0]
    operands: WgradOperands | None = None
    if needs[1] and recipe.saved_input is None:
        assert x is not None
        operands = WgradOperands(rows=_rows(x, x_scale, x_factor, recipe.fprop.a, k))
    elif needs[1]:
        sizes = OperandBytes.of(recipe, g.shape[0], groups, k)
        parts = saved, saved_scale, saved_factor, saved_transposed
        if ops.on_host(kernel_args.offsets):
            operands = WgradOperands(_parts(parts, sizes, offsets, k))
        else:
            summed = not sizes.consumed
            places = offsets.slots(multiple(sizes.spec) if summed else 1)
            factor = saved_factor if sizes.spec.two_level else None
            deep = places.count if summed else k
            operands = WgradOperands(
                grouped_operand=GroupedOperand(saved, saved_scale, factor, sizes.spec, summed, places, deep)
            )
    like = GradientLike((groups, n, k), kernel_args.weight.dtype, kernel_args.transposed, (groups, n), bias_dtype)
    backend = cpu if ops.on_host(kernel_args.offsets) else device
    with ops.without_autocast(g.device.type), selective_checkpoint.inside():
        of_x, of_weight, of_bias = backend.backward(call, g, weight, operands, needs, like)
    if number is not None and amax.GRAD_OUTPUT in call.amaxes:
        amax_values = torch.as_tensor(call.amaxes[amax.GRAD_OUTPUT], dtype=torch.float32, device=g.device)
        amax.record_gradient(number, amax_values, first)
    empty = [g.new_empty(0, dtype=torch.float32) for _ in range(3)]
    results = zip((of_x, of_weight, of_bias), empty, strict=True)
    return tuple(none if t is None else t.contiguous() for t, none in results)


def _backward_fake(g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs, bias_dtype, kernel_args = rest[7], rest[8], CustomOpArguments(*rest[11:])
    n, k = _features(kernel_args)
    groups, dtype = kernel_args.weight.shape[0], kernel_args.weight.dtype
    dtype = torch.float32 if dtype in CODES else dtype
    shapes = (g.shape[0], k), (groups, *((k, n) if kernel_args.transposed else (n, k))), (groups, n)
    results = zip(needs, shapes, (kernel_args.dtype, dtype, bias_dtype), strict=True)
    return tuple(g.new_empty(s if need else (0,), dtype=d if need else torch.float32) for need, s, d in results)


def _backward_flops(g: Tensor, *rest: Any, out_val: Any, **_: Any) -> int:
    n, k = _features(CustomOpArguments(*rest[11:]))
    return int(2 * g.shape[0] * n * k * sum(rest[7][:2]))


BACKWARD: Operation[tuple[Tensor, ...]] = Operation(
    "grouped_backward(Tensor g, Tensor kept, Tensor kept_scale, Tensor kept_factor, Tensor kept_turned, Tensor? x,"
    " Tensor? x_scale, Tensor? x_factor, bool[] needs, ScalarType bias_dtype, Tensor? number, int first, "
    + _SCHEMA
    + ") -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    _backward,
    fake=_backward_fake,
    kernel=_backward,
    flops=_backward_flops,
)
