"""`explain`: the GEMMs of a compiled function, how their operands are quantized, and in which types they run."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, fields
from typing import Any

import jax

from quaver.recipes.spec import QuantSpec

# ---- names that layers give to their GEMMs ----


def gemm_scope(layer: str, gemm: str, a: QuantSpec | None, b: QuantSpec | None) -> AbstractContextManager[None]:
    """Return a context that names the operations of one GEMM in the compiled program."""
    operands = " x ".join("high precision" if spec is None else str(spec) for spec in (a, b))
    return jax.named_scope(f"quaver[{layer}|{gemm}|{operands}]")


_SCOPE = re.compile(r"quaver\[([^|\]]*)\|([^|\]]*)\|((?:[^\[\]]|\[[^\]]*\])*)\]")

# ---- explain ----


@dataclass(frozen=True)
class CompiledGemm:
    """One matrix multiplication of a compiled program."""

    #: Name of the layer, and "fprop", "dgrad" or "wgrad"; empty for GEMMs outside of quantized layers.
    layer: str
    gemm: str
    #: How the recipe quantizes the operands; empty outside of quantized layers.
    operands: str
    #: Types that the compiled instruction multiplies and writes, such as "f8e4m3fn x f8e4m3fn -> f32".
    types: str
    #: "fp8", "block-scaled", "emulated" (exact values of the codes in a wider type) or "high precision".
    runs: str


class CompiledGemms(tuple[CompiledGemm, ...]):
    """Result of `explain`, which prints as a table."""

    def __repr__(self) -> str:
        rows = [tuple(f.name for f in fields(CompiledGemm)), *(astuple(gemm) for gemm in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CompiledGemms:
    """Compile a function for these arguments and list its matrix multiplications, without running it.

        print(qj.explain(jax.grad(loss), params, x))

    Args:
        function: a function of arrays, jitted or not.
        args, kwargs: its arguments; `jax.ShapeDtypeStruct` will do for arrays. Of a function that is not jitted, all
            that are no arrays are static.
    Returns:
        One row for each multiplication in the optimized program, in its order: dots, and calls of cuBLASLt, cuDNN and
        oneDNN. A GEMM in a loop is one row.
    """
    if hasattr(function, "lower"):
        compiled = function.lower(*args, **kwargs).compile()
        # Equinox wraps what JAX compiled.
        return gemms_in(getattr(compiled, "compiled", compiled).as_text())
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if _is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(given) if _is_array(leaf) else leaf for leaf in leaves])
        return function(*args, **kwargs)

    return gemms_in(jax.jit(of_arrays).lower(*arrays).compile().as_text() or "")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


#: Targets of custom calls that multiply matrices.
_CALLS = re.compile(r'custom_call_target="(__cublas[^"]*|__cudnn\$blockScaledDot|__onednn\$matmul)"')
_DEFINITION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[[^=]*? ([\w\-]+)\((.*)$")
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def gemms_in(text: str) -> CompiledGemms:
    """Return the matrix multiplications of an optimized HLO program."""
    # Element type of each instruction; a computation defines the names that it uses.
    types: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        definition = _DEFINITION.match(line)
        if definition is None:
            continue
        name, dtype, operation, rest = definition.groups()
        types[name] = dtype
        target = _CALLS.search(line) if operation == "custom-call" else None
        if operation in ("dot", "ragged-dot", "scaled-dot") or target is not None:
            found.append(_gemm(line, dtype, rest, types, target.group(1) if target else operation))
    return CompiledGemms(found)


def _gemm(line: str, dtype: str, rest: str, types: dict[str, str], target: str) -> CompiledGemm:
    arguments = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
    left, right = (types.get(argument, "?") for argument in arguments[:2])
    name = _NAME.search(line)
    scopes = _SCOPE.findall(name.group(1)) if name else []
    layer, gemm, operands = scopes[-1] if scopes else ("", "", "")
    if "blockScaledDot" in target or target == "scaled-dot":
        runs = "block-scaled"
    elif left.startswith("f8") and right.startswith("f8"):
        runs = "fp8"
    else:
        runs = "emulated" if scopes and "high precision" not in operands else "high precision"
    return CompiledGemm(layer, gemm, operands, f"{left} x {right} -> {dtype}", runs)
