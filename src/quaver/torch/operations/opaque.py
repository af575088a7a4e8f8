"""The operations as opaque library operators: `torch.compile` sees these and does not look inside.

Decoding happens inside them, so that a compiled graph keeps eight bits for backward and not their decoded copies, and
so that the bits are those of eager mode (Inductor may skip the rounding to bf16 between two fused operations). Scales
travel as tensors; what a spec does not use is an empty tensor.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.philox import QUIET, Noise
from quaver.torch.numerics.quantized import Quantized, pack, storage
from quaver.torch.operations import ops
from quaver.torch.operations.operators import define
from quaver.torch.state.context import ambient
from quaver.torch.state.history import amax as amax_state


def quantize(
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
    amax, factor = _float(amax), _float(factor)
    tensor_id, count = (
        torch.tensor(v, dtype=torch.int64, device="cpu") if isinstance(v, int) else v for v in noise[1:]
    )
    data, scale, tensor_factor, top = torch.ops.quaver.quantize(
        x.t() if turned else x, turned, spec.text, amax, factor, noise[0], tensor_id, count, number
    )
    shape = (x.shape[0], spec.padded(x.shape[1]))
    lies_turned = turned and not spec.format.packed
    return Quantized(data, scale, spec, shape, lies_turned, tensor_factor if spec.two_level else None, top)


def _float(v: Tensor | float | None) -> Tensor | None:
    return torch.tensor(v, dtype=torch.float32, device="cpu") if isinstance(v, int | float) else v


def quantize_both(
    x: Tensor,
    spec: QuantSpec,
    other: QuantSpec,
    amax: Tensor | None = None,
    factor: Tensor | float | None = None,
    noise: Noise = QUIET,
    other_noise: Noise = QUIET,
    number: Tensor | None = None,
) -> tuple[Quantized, Quantized]:
    """`QUANTIZE_BOTH` as an opaque operator, of roundings to nearest; the number as `quantize` takes it."""
    # Not whether they are QUIET: to a compiler a default and the global that it names are two tuples.
    assert spec.rounding == other.rounding == "nearest"
    factor = _float(factor)
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
    pair = ops.QUANTIZE_BOTH(x, QuantSpec.parse(text), QuantSpec.parse(other), amax, factor)
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
        data = pack(q.codes()) if q.spec.format.packed else q.data.t().clone(memory_format=torch.contiguous_format)
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
    q: Quantized = ops.QUANTIZE(x.t() if turned else x, spec, amax, factor, noise)
    data, scale = q.data, q.plain_scale() if isinstance(q.scale, Tensor) else q.scale
    if (turned and not spec.format.packed and not q.turned) or (q.turned and not turned):
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
    if spec.format.packed:
        shape = (rows, (k + 1) // 2)
    elif turned:
        shape, blocks = (k, rows), blocks[::-1]
    else:
        shape = (rows, k)
    narrow = spec.scale == "e8m0" or spec.two_level
    return (
        x.new_empty(shape, dtype=storage(spec.format)),
        x.new_empty(blocks, dtype=torch.uint8 if narrow else torch.float32),
        x.new_empty((1, 1) if spec.two_level else (0,), dtype=torch.float32),
        x.new_empty((1, 1) if spec.per_tensor else (0,), dtype=torch.float32),
    )


def matmul(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """`ops.MATMUL` as an opaque operator."""
    y: Tensor = torch.ops.quaver.matmul(*flat(a), *flat(b), dtype, bias, fast_accum)
    return y


def flat(q: Quantized) -> tuple[Tensor, Tensor, Tensor, str, bool, int, bool]:
    assert isinstance(q.scale, Tensor)
    factor = q.scale.new_empty(0) if q.tensor_factor is None else q.tensor_factor
    return q.data, q.scale, factor, q.spec.text, q.turned, q.lying_shape[1], q.swizzled


def _restore(
    data: Tensor, scale: Tensor, factor: Tensor, text: str, turned: bool, columns: int, swizzled: bool
) -> Quantized:
    spec = QuantSpec.parse(text)
    data = data.view(storage(spec.format))
    layout = (data.shape[0], columns)
    shape = layout[::-1] if turned else layout
    host = spec.per_tensor and data.is_cpu and scale.is_floating_point()
    tensor_factor = factor if spec.two_level else None
    return Quantized(data, scale.item() if host else scale, spec, shape, turned, tensor_factor, swizzled=swizzled)


def _matmul_impl(*args: Any) -> Tensor:
    a, b, rest = args[:7], args[7:14], args[14:]
    ambient.compiled = True
    with ops.without_autocast(args[0].device.type):
        y: Tensor = ops.MATMUL(_restore(*a), _restore(*b), *rest)
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
