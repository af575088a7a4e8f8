"""quantize and matmul of eight bits in ONNX: QuantizeLinear, DequantizeLinear, and scales by comparisons.

    amax -> e, the largest power of two with amax × e <= max, as `docs/design/numerics.md` has it -> scale = 1 / e
    codes = QuantizeLinear(x, scale)    y = MatMul(DequantizeLinear(a, scale), DequantizeLinear(b, scale))

The exponent comes from eight comparisons, by halves: amax × 2**p is exact, and so is each of them. A logarithm is not
near powers of two. Weights are codes already; what is quantized here are inputs.
"""

from collections.abc import Callable
from typing import Any

from quaver.core.spec import QuantSpec

#: Exponents of encode factors, and the largest power of two first that a search by halves adds to the smallest.
LOWEST, HIGHEST = -126, 100
STEPS = (128, 64, 32, 16, 8, 4, 2, 1)
#: ONNX's numbers of types, which onnx itself is not asked for before it is needed.
FLOAT, UINT8, FLOAT8 = 1, 2, {"e4m3": 17, "e5m2": 19}


class Untranslatable(ValueError):
    """What ONNX has no operator for, in a sentence."""


def table(op: Any) -> dict[Any, Callable[..., Any]]:
    """What exports our operators, for the translation table of torch.onnx.

    Args:
        op: the operators of an opset, as onnxscript has them.
    """
    import torch

    ours = torch.ops.quaver
    return {ours.quantize.default: _Quantize(op), ours.matmul.default: _Matmul(op)}


def check(spec: QuantSpec) -> None:
    """Refuse an operand that float8 operators of ONNX cannot hold.

    Raises:
        Untranslatable: with what can be done.
    """
    rows, k = spec.block
    held = spec.format.name in FLOAT8 and not spec.hadamard and not spec.two_level
    if not held or not (spec.per_tensor or (rows == 1 and spec.rounding == "nearest") or (rows == k)):
        raise Untranslatable(
            f"an operand in {spec} has no counterpart in ONNX's float8 operators: export under a recipe with E4M3 or "
            "E5M2 in scales of tensors, rows or blocks (tensorwise, delayed, rowwise, blockwise, mxfp8)"
        )


def _constant(op: Any, value: float) -> Any:
    return op.Constant(value_float=value)


def _scale(op: Any, amax: Any, spec: QuantSpec, factor: Any) -> Any:
    """The decode scale of an amax: of float32, NaN where that is not finite.

    Args:
        factor: an encode factor to take where it is not 0, or None.
    """
    one, largest = _constant(op, 1.0), _constant(op, spec.format.max)
    usable = op.And(op.GreaterOrEqual(amax, _constant(op, 2.0**LOWEST)), op.Less(amax, _constant(op, float("inf"))))
    if spec.power_of_two:
        e = op.Expand(_constant(op, 2.0**LOWEST), op.Shape(amax))
        for step in STEPS:
            more = op.Mul(e, _constant(op, 2.0 ** min(step, 127)))
            more = op.Mul(more, _constant(op, 2.0)) if step == 128 else more
            e = op.Where(op.LessOrEqual(op.Mul(amax, more), largest), more, e)
        e = op.Min(e, _constant(op, 2.0**HIGHEST))
    else:
        e = op.Min(op.Div(largest, amax), _constant(op, 3.4028234663852886e38))
    e = op.Where(usable, e, one)
    if factor is not None:
        e = op.Where(op.Equal(factor, _constant(op, 0.0)), e, factor)
    # NaN differs from itself: infinity less infinity is one.
    poison = op.Mul(op.Sub(amax, amax), _constant(op, 0.0))
    return op.Add(op.Div(one, e), poison)


class _Quantize:
    """torch.ops.quaver.quantize: data, scale, factor of the tensor, amax."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(
        self,
        x: Any,
        turned: bool,
        spec: str,
        amax: Any = None,
        factor: Any = None,
        seed: int = 0,
        tensor_id: Any = None,
        count: Any = None,
        number_of_layer: Any = None,
    ) -> Any:
        op, parsed = self.op, QuantSpec.parse(spec)
        check(parsed)
        x = op.Cast(x, to=FLOAT)
        number = FLOAT8[parsed.format.name]
        k = parsed.block[1]
        if parsed.per_tensor:
            top = op.ReduceMax(op.Abs(x), keepdims=0)
            scale = _scale(op, top, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), saturate=1)
            stored = op.Reshape(scale, op.Constant(value_ints=[1, 1]))
        elif k is None:
            top = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[1]), keepdims=0)
            scale = _scale(op, top, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), axis=0, saturate=1)
            stored = op.Unsqueeze(scale, op.Constant(value_ints=[1]))
        else:
            blocks = op.Reshape(x, op.Constant(value_ints=[0, -1, k]))
            top = op.ReduceMax(op.Abs(blocks), op.Constant(value_ints=[2]), keepdims=0)
            scale = _scale(op, top, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), axis=1, block_size=k, saturate=1)
            stored = _exponents(op, scale) if parsed.scale == "e8m0" else scale
        # Each is a value of its own, on which the exporter notes a shape; products of one level read but two.
        nothing = op.Constant(value_float=0.0)
        return data, op.Identity(stored), op.Identity(nothing), op.Identity(nothing)

    def _zeros(self, scale: Any, number: int) -> Any:
        """Zero points of a type, one for each scale: onnxruntime expands no float8."""
        op = self.op
        return op.Cast(op.Expand(_constant(op, 0.0), op.Shape(scale)), to=number)


def _exponents(op: Any, scale: Any) -> Any:
    """E8M0 bytes of powers of two: how many powers from 2**-127 on are smaller, by the same comparisons."""
    code, rest = _constant(op, 0.0), scale
    base = 2.0**-127
    value = op.Expand(_constant(op, base), op.Shape(scale))
    code = op.Mul(op.Sub(scale, scale), _constant(op, 0.0))
    for step in STEPS:
        more = op.Mul(value, _constant(op, 2.0 ** min(step, 127)))
        more = op.Mul(more, _constant(op, 2.0)) if step == 128 else more
        taken = op.LessOrEqual(more, rest)
        value = op.Where(taken, more, value)
        code = op.Where(taken, op.Add(code, _constant(op, float(step))), code)
    code = op.Where(op.IsNaN(scale), _constant(op, 255.0), code)
    return op.Cast(code, to=UINT8)


class _Matmul:
    """torch.ops.quaver.matmul of two operands [m, k] and [n, k]."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, *args: Any) -> Any:
        """The operator's arguments: seven of each operand, then the dtype, the bias and how to accumulate."""
        op, (dtype, *more) = self.op, args[14:]
        left, right = (self._values(one[0], one[1], QuantSpec.parse(one[3])) for one in (args[:7], args[7:14]))
        bias = more[0] if more else None
        y = op.MatMul(left, op.Transpose(right, perm=[1, 0]))
        y = y if bias is None else op.Add(y, op.Cast(bias, to=FLOAT))
        return op.Cast(y, to=dtype)

    def _values(self, data: Any, scale: Any, spec: QuantSpec) -> Any:
        """float32 values of an operand."""
        op = self.op
        check(spec)
        rows, k = spec.block
        if spec.per_tensor:
            return op.DequantizeLinear(data, op.Squeeze(scale))
        if k is None:
            return op.DequantizeLinear(data, op.Squeeze(scale, op.Constant(value_ints=[1])), axis=0)
        if spec.scale == "e8m0":
            scale = op.Gather(_powers(op), op.Cast(scale, to=7))
        if rows is not None and rows > 1:
            scale = op.Slice(_repeated(op, scale, rows), op.Constant(value_ints=[0]), op.Shape(data, start=0, end=1))
        return op.DequantizeLinear(data, scale, axis=1, block_size=k)


def _powers(op: Any) -> Any:
    """2**(code - 127) by code, and NaN."""
    return op.Constant(value_floats=[*(2.0 ** (code - 127) for code in range(255)), float("nan")])


def _repeated(op: Any, scale: Any, rows: int) -> Any:
    """Each row of scales so many times."""
    wide = op.Expand(op.Unsqueeze(scale, op.Constant(value_ints=[1])), op.Constant(value_ints=[1, rows, 1]))
    width = op.Shape(scale, start=1, end=2)
    return op.Reshape(wide, op.Concat(op.Constant(value_ints=[-1]), width, axis=0))
