"""Export a converted model to ONNX with float8 GEMM operands and the quantized weights as constants.

torch.export traces the model while each weight holds the codes that fprop consumes. Quaver's operators are traced as
plain torch operations, except quantize and matmul, which this module translates to ONNX.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_instance
from quaver.torch.conversion.export.check import evaluating, restored
from quaver.torch.conversion.export.operands import StoredOperand, store_operand
from quaver.torch.linear.linear import Linear, Quantizable
from quaver.torch.operations.operation import traced_plainly
from quaver.torch.state.context import in_force

# ---- translation of quantize and matmul to QuantizeLinear and DequantizeLinear ----
#
#     amax -> e, the largest power of two with amax × e <= max (docs/design/numerics.md) -> scale = 1 / e
#     codes = QuantizeLinear(x, scale)    y = MatMul(DequantizeLinear(a, scale), DequantizeLinear(b, scale))
#
# The exponent is found by binary search with eight comparisons. amax × 2**p is exact, so each comparison is exact; a
# logarithm would be inexact near powers of two. Only inputs are quantized in the graph: weights are already codes.

#: Smallest and largest exponent of an encode factor, and the step sizes of the binary search from the smallest.
LOWEST, HIGHEST = -126, 100
STEPS = (128, 64, 32, 16, 8, 4, 2, 1)
#: ONNX's type numbers, written out so that onnx need not be imported here.
FLOAT, UINT8, FLOAT8 = 1, 2, {"e4m3": 17, "e5m2": 19}


class Untranslatable(ValueError):
    """An operand or layer that ONNX has no operator for; the message says which and what to do."""


def table(op: Any) -> dict[Any, Callable[..., Any]]:
    """Return the translations of the operators quantize and matmul for torch.onnx's `custom_translation_table`.

    Args:
        op: the operators of an opset, from onnxscript.
    Returns:
        The translation functions by torch operator.
    """
    import torch

    ours = torch.ops.quaver
    return {ours.quantize.default: _Quantize(op), ours.matmul.default: _Matmul(op)}


def check(spec: QuantSpec) -> None:
    """Raise if ONNX's float8 operators cannot represent an operand with this spec.

    Raises:
        Untranslatable: the spec needs another format, scale or rotation; the message says which recipes work.
    """
    rows, k = spec.block
    supported = spec.format.name in FLOAT8 and not spec.hadamard and not spec.two_level
    if not supported or not (spec.per_tensor or (rows == 1 and spec.rounding == "nearest") or (rows == k)):
        raise Untranslatable(
            f"an operand in {spec} cannot be expressed with ONNX's float8 operators: export under a recipe with "
            "E4M3 or E5M2 and scales per tensor, row or block (tensorwise, delayed, rowwise, blockwise, mxfp8)"
        )


def _constant(op: Any, value: float) -> Any:
    return op.Constant(value_float=value)


def _scale(op: Any, amax: Any, spec: QuantSpec, factor: Any) -> Any:
    """Return the float32 decode scale of an amax; it is NaN where the amax is not finite.

    Args:
        op: the operators of an opset, from onnxscript.
        amax: amax per tensor, row or block.
        spec: spec of the operand.
        factor: encode factor to use instead of the computed one where it is not 0, or None.
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
    # x - x is 0 for a finite x and NaN for NaN and infinity.
    poison = op.Mul(op.Sub(amax, amax), _constant(op, 0.0))
    return op.Add(op.Div(one, e), poison)


class _Quantize:
    """Translation of torch.ops.quaver.quantize; returns data, scale, tensor factor and amax."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(
        self,
        x: Any,
        transposed: bool,
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
            block_amax = op.ReduceMax(op.Abs(x), keepdims=0)
            scale = _scale(op, block_amax, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), saturate=1)
            stored = op.Reshape(scale, op.Constant(value_ints=[1, 1]))
        elif k is None:
            block_amax = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[1]), keepdims=0)
            scale = _scale(op, block_amax, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), axis=0, saturate=1)
            stored = op.Unsqueeze(scale, op.Constant(value_ints=[1]))
        else:
            blocks = op.Reshape(x, op.Constant(value_ints=[0, -1, k]))
            block_amax = op.ReduceMax(op.Abs(blocks), op.Constant(value_ints=[2]), keepdims=0)
            scale = _scale(op, block_amax, parsed, factor)
            data = op.QuantizeLinear(x, scale, self._zeros(scale, number), axis=1, block_size=k, saturate=1)
            stored = _exponents(op, scale) if parsed.scale == "e8m0" else scale
        # Each output is a separate ONNX value, because the exporter attaches a shape to each. With a one-level scale,
        # matmul reads only the first two.
        nothing = op.Constant(value_float=0.0)
        return data, op.Identity(stored), op.Identity(nothing), op.Identity(nothing)

    def _zeros(self, scale: Any, number: int) -> Any:
        """Return one float8 zero point per scale. It is cast after Expand because onnxruntime cannot expand float8."""
        op = self.op
        return op.Cast(op.Expand(_constant(op, 0.0), op.Shape(scale)), to=number)


def _exponents(op: Any, scale: Any) -> Any:
    """Return the E8M0 byte of each power-of-two scale, found by the same binary search from 2**-127."""
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
    """Translation of torch.ops.quaver.matmul for operands [m, k] and [n, k]."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, *args: Any) -> Any:
        """Translate the operator's arguments: seven per operand, then dtype, bias and accumulation mode."""
        op, (dtype, *more) = self.op, args[14:]
        left, right = (self._values(one[0], one[1], QuantSpec.parse(one[3])) for one in (args[:7], args[7:14]))
        bias = more[0] if more else None
        y = op.MatMul(left, op.Transpose(right, perm=[1, 0]))
        y = y if bias is None else op.Add(y, op.Cast(bias, to=FLOAT))
        return op.Cast(y, to=dtype)

    def _values(self, data: Any, scale: Any, spec: QuantSpec) -> Any:
        """Return the dequantized float32 values of an operand."""
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
    """Return the table of 2**(code - 127) for each E8M0 code, with NaN for 255."""
    return op.Constant(value_floats=[*(2.0 ** (code - 127) for code in range(255)), float("nan")])


def _repeated(op: Any, scale: Any, rows: int) -> Any:
    """Repeat each row of scales `rows` times."""
    wide = op.Expand(op.Unsqueeze(scale, op.Constant(value_ints=[1])), op.Constant(value_ints=[1, rows, 1]))
    width = op.Shape(scale, start=1, end=2)
    return op.Reshape(wide, op.Concat(op.Constant(value_ints=[-1]), width, axis=0))


# ---- export ----

#: First opset in which QuantizeLinear supports float8 with block scales.
OPSET = 21
PACKAGES = ("onnx", "onnxscript")


def onnx_export(
    model: nn.Module, inputs: Any, file: str | Path, *, dynamic_shapes: Any = None, opset: int = OPSET
) -> Any:
    """Write a converted model's forward as ONNX, with QuantizeLinear and DequantizeLinear in float8.

    Args:
        model: a converted model, or one of `quaver.torch` layers inside the autocast that it runs under. Use float32 if
            onnxruntime is to run it on a CPU. Recipes must use E4M3 or E5M2 with scales per tensor, row or block.
        inputs: example inputs of the forward: a tensor, a tuple of tensors, or a dict of arguments by name. Values of
            the dict that are not tensors become constants. A transformers model exports only its logits, without a
            cache.
        file: path of the file to write, such as "model.onnx".
        dynamic_shapes: as for torch.export. None makes every axis dynamic except the last axis of floating-point
            inputs.
        opset: ONNX opset, 21 or later.
    Returns:
        torch's ONNXProgram.
    Raises:
        ValueError: a recipe or layer cannot be expressed in ONNX, the opset is too old, or the folder does not exist.
        ModuleNotFoundError: onnx or onnxscript is not installed.
    Bounded: with power-of-two scales, onnxruntime's outputs differ from this model's float32 outputs by at most 1e-6
    (relative RMS). Codes and scales are exact unless a preceding kernel rounds differently.
    """
    check_instance("onnx_export", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        sentence = f"ONNX is written by {missing[0]}, which is not installed: pip install 'quaver[onnx]'"
        raise ModuleNotFoundError(sentence, name=missing[0])
    if opset < OPSET:
        raise ValueError(f"opset is {opset}; float8 with block scales requires {OPSET} or later")
    file = Path(file)
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; create it, or write the file elsewhere")
    layers = _layers(model)
    wrapped, example_inputs = _OnnxForward(model, inputs), _tensors(inputs)
    # torch's exporter warns about its own internals; users cannot act on these warnings.
    quiet = [warnings.catch_warnings(action="ignore", category=kind) for kind in (FutureWarning, DeprecationWarning)]
    with evaluating(model), _weights_as_codes(layers), quiet[0], quiet[1]:
        shapes = _dynamic(example_inputs) if dynamic_shapes is None else _positional_shapes(dynamic_shapes)
        with traced_plainly(but=TRACED_OPERATORS):
            program = torch.export.export(wrapped, example_inputs, dynamic_shapes=(shapes,), strict=False)
        for name in _unknown(program):
            raise ValueError(f"the model runs {name}, which ONNX cannot express: remove the option that needs it")
        result = torch.onnx.export(
            program,
            example_inputs,
            custom_translation_table=table(_operators(opset)),
            opset_version=opset,
            # onnxscript's optimizer tries its rules on every node, which takes four fifths of a whole model's export
            # time.
            optimize=False,
            verbose=False,
        )
    assert result is not None
    result.save(file)
    return result


class _OnnxForward(nn.Module):
    """Wraps a model as a function of positional tensors that returns the logits if the output has any."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        self.names = (
            [name for name, value in inputs.items() if isinstance(value, Tensor)] if isinstance(inputs, Mapping) else []
        )
        self.constants = (
            {n: v for n, v in inputs.items() if not isinstance(v, Tensor)} if isinstance(inputs, Mapping) else {}
        )
        if "use_cache" in inspect.signature(model.forward).parameters:
            self.constants = {"use_cache": False} | self.constants

    def forward(self, *x: Tensor) -> Any:
        by_name = dict(zip(self.names, x, strict=False))
        result = self.model(*(() if by_name else x), **by_name, **self.constants)
        return getattr(result, "logits", result)


def _tensors(inputs: Any) -> tuple[Tensor, ...]:
    each = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(value for value in each if isinstance(value, Tensor))


def _positional_shapes(shapes: Any) -> tuple[Any, ...]:
    return tuple(shapes.values()) if isinstance(shapes, Mapping) else tuple(shapes)


def _dynamic(example_inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Mark every axis as dynamic, except the last (feature) axis of floating-point inputs."""
    auto = torch.export.Dim.AUTO
    return tuple(dict.fromkeys(range(x.dim() - x.is_floating_point()), auto) for x in example_inputs)


def _layers(model: nn.Module) -> list[StoredOperand]:
    """Return the quantized linear layers of a model as `StoredOperand`s.

    Raises:
        ValueError: a layer cannot be expressed in ONNX, or no layer is quantized.
    """
    supported = []
    for name, module in model.named_modules():
        recipe = in_force(module.recipe) if isinstance(module, Quantizable) else None
        if not isinstance(module, Quantizable) or recipe is None or recipe.fprop.b is None:
            continue
        if not isinstance(module, Linear) or "weight" not in module._parameters:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has GEMMs that this export does not support: "
                f"leave it in high precision, convert(model, {{{name!r}: None, '*': ...}})"
            )
        for spec in (recipe.fprop.a, recipe.fprop.b):
            assert spec is not None
            check(spec)
            width = spec.block[1] or 1
            if module.in_features % width:
                raise ValueError(
                    f"{name} has rows of {module.in_features} values, which end within a block of {width}: leave "
                    "it in high precision"
                )
        supported.append(StoredOperand(f"{name}.weight".lstrip("."), module, recipe))
    if not supported:
        raise ValueError("no layer of this model is quantized; torch.onnx.export writes it as it is")
    return supported


@contextmanager
def _weights_as_codes(layers: list[StoredOperand]) -> Any:
    """Replace each layer's weight by the codes that its fprop consumes, until the context exits."""
    operands = [one.operand() for one in layers]
    with restored([one.layer for one in layers]):
        for one, q in zip(layers, operands, strict=True):
            store_operand(one.layer, q)
        yield


#: Operators that the trace records as Quaver operators; the others are traced as plain torch operations.
TRACED_OPERATORS = ("quantize", "quantize_both", "matmul")


def _unknown(program: Any) -> list[str]:
    """Return the names of Quaver operators in a program that have no ONNX translation."""
    names = [str(node.target) for node in program.graph.nodes]
    return [name for name in names if name.startswith("quaver.") and name.split(".")[1] not in ("quantize", "matmul")]


def _operators(opset: int) -> Any:
    """Return onnxscript's operators of an opset."""
    from onnxscript import values

    return values.Opset("", opset)
