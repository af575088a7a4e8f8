"""A converted model as a file of ONNX whose products are of float8 operands, with its weights' codes as constants.

torch.export traces the model with each weight held as the codes that fprop consumes; our own operators become plain
operations, but for quantize and matmul, which `quaver.torch.model.programs.translating` says in ONNX.
"""

import inspect
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.text.given import instance
from quaver.torch.linear.layer import Linear, Quantizable
from quaver.torch.model.programs import translating
from quaver.torch.model.weights.serving.checking import evaluating, restored
from quaver.torch.model.weights.serving.operands import Held, hold
from quaver.torch.operations.operation import traced_plainly
from quaver.torch.state.context import in_force

#: The first opset with QuantizeLinear of float8 in blocks.
OPSET = 21
PACKAGES = ("onnx", "onnxscript")


def onnx_export(
    model: nn.Module, inputs: Any, file: str | Path, *, dynamic_shapes: Any = None, opset: int = OPSET
) -> Any:
    """Write a converted model's forward as ONNX, with QuantizeLinear and DequantizeLinear in float8.

    Args:
        model: converted, or of `quaver.torch` layers inside the autocast that it runs under; float32 where onnxruntime
            is to run it on a CPU. Recipes with E4M3 or E5M2 in scales of tensors, rows or blocks.
        inputs: an example of what its forward takes: a tensor, a tuple of tensors, or a dict of arguments by name, in
            which what is no tensor is a constant. A model of transformers gives its logits alone, without a cache.
        file: to write; "model.onnx".
        dynamic_shapes: as torch.export takes it; None has every axis vary that can, but for the last of floats.
        opset: of ONNX, 21 or later.
    Returns:
        torch's ONNXProgram of it.
    Raises:
        ValueError: a recipe or a layer without counterpart in ONNX, an earlier opset, a folder that is not there.
        ModuleNotFoundError: onnx or onnxscript is not installed.
    Bounded: onnxruntime's outputs are within 1e-6, relative RMS, of this model's in float32, whose scales are powers of
    two; codes and scales are exact but where other kernels before them round otherwise.
    """
    instance("onnx_export", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        sentence = f"ONNX is written by {missing[0]}, which is not installed: pip install 'quaver[onnx]'"
        raise ModuleNotFoundError(sentence, name=missing[0])
    if opset < OPSET:
        raise ValueError(f"opset is {opset}; float8 in blocks is there from {OPSET} on")
    file = Path(file)
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is no folder; make it, or write the file elsewhere")
    layers = _layers(model)
    wrapped, given = _Forward(model, inputs), _tensors(inputs)
    # Of torch's exporter about itself, which a user can do nothing about.
    quiet = [warnings.catch_warnings(action="ignore", category=kind) for kind in (FutureWarning, DeprecationWarning)]
    with evaluating(model), _weights_as_codes(layers), quiet[0], quiet[1]:
        shapes = _dynamic(given) if dynamic_shapes is None else _by_place(dynamic_shapes)
        with traced_plainly(but=KEPT):
            program = torch.export.export(wrapped, given, dynamic_shapes=(shapes,), strict=False)
        for name in _unknown(program):
            raise ValueError(f"the model runs {name}, which has no counterpart in ONNX: export without what needs it")
        result = torch.onnx.export(
            program,
            given,
            custom_translation_table=translating.table(_operators(opset)),
            opset_version=opset,
            # The rules of onnxscript's optimizer are tried on every node, four fifths of the time of a whole model.
            optimize=False,
            verbose=False,
        )
    assert result is not None
    result.save(file)
    return result


class _Forward(nn.Module):
    """A model as a function of tensors by place, with one output where it gives logits."""

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


def _by_place(shapes: Any) -> tuple[Any, ...]:
    return tuple(shapes.values()) if isinstance(shapes, Mapping) else tuple(shapes)


def _dynamic(given: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Every axis that can vary, but for features."""
    auto = torch.export.Dim.AUTO
    return tuple(dict.fromkeys(range(x.dim() - x.is_floating_point()), auto) for x in given)


def _layers(model: nn.Module) -> list[Held]:
    """The layers whose products are quantized.

    Raises:
        ValueError: one without counterpart in ONNX.
    """
    held = []
    for name, module in model.named_modules():
        recipe = in_force(module.recipe) if isinstance(module, Quantizable) else None
        if not isinstance(module, Quantizable) or recipe is None or recipe.fprop.b is None:
            continue
        if not isinstance(module, Linear) or "weight" not in module._parameters:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has products that ONNX is not given here: leave it "
                f"in high precision, convert(model, {{{name!r}: None, '*': ...}})"
            )
        for spec in (recipe.fprop.a, recipe.fprop.b):
            assert spec is not None
            translating.check(spec)
            width = spec.block[1] or 1
            if module.in_features % width:
                raise ValueError(
                    f"{name} has rows of {module.in_features}, which end within a block of {width}: leave it out"
                )
        held.append(Held(f"{name}.weight".lstrip("."), module, recipe))
    if not held:
        raise ValueError("no layer of this model is quantized; torch.onnx.export writes it as it is")
    return held


@contextmanager
def _weights_as_codes(layers: list[Held]) -> Any:
    """Inside, each layer's weight is the codes that its fprop consumes."""
    operands = [one.operand() for one in layers]
    with restored([one.layer for one in layers]):
        for one, q in zip(layers, operands, strict=True):
            hold(one.layer, q)
        yield


#: Operators that ONNX is told in operators of its own.
KEPT = ("quantize", "quantize_both", "matmul")


def _unknown(program: Any) -> list[str]:
    """Operators of ours in a program that ONNX is not told of."""
    names = [str(node.target) for node in program.graph.nodes]
    return [name for name in names if name.startswith("quaver.") and name.split(".")[1] not in ("quantize", "matmul")]


def _operators(opset: int) -> Any:
    """The operators of an opset."""
    from onnxscript import values

    return values.Opset("", opset)
