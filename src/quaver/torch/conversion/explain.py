"""`explain`: which implementation runs for each quantization and GEMM of a layer and for attention, and why not
another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, overload

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.recipes.text import html_lines, html_table
from quaver.reference.attention import MASKS
from quaver.torch.backends.gpu.device import architecture
from quaver.torch.conversion.matchers.linears import kind_of
from quaver.torch.linear.grouped.layer import GroupedLinear, check, grouped_matmul
from quaver.torch.linear.grouped.operands import GROUPED_MATMUL, GROUPED_WGRAD
from quaver.torch.linear.linear import Linear, Quantizable
from quaver.torch.nn.attention import AttentionExplanation, DotProductAttention, explain_attention
from quaver.torch.nn.attention.dot_product import reason_unsupported
from quaver.torch.numerics.grouped import GroupedOperand, GroupOffsets, by_rows, multiple
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import empty_parts, joined
from quaver.torch.state.context import recipe_in_force


@dataclass(frozen=True)
class ExplanationRow:
    """One quantization or GEMM of a layer."""

    what: str
    #: Spec of the quantized operand, or how the GEMM accumulates.
    how: str
    #: Name of the implementation that runs.
    runs: str
    #: (implementation, reason) for each implementation with higher priority that does not support the call.
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, repr=False)
class Explanation:
    """Result of `explain` for one layer; its repr is a table in an interpreter, in a notebook and in print."""

    recipe: Recipe | None
    rows: tuple[ExplanationRow, ...]

    def __repr__(self) -> str:
        if self.recipe is None:
            return NO_RECIPE
        lines = [f"recipe {self.recipe}"]
        for row in self.rows:
            lines.append(f"  {row.what:<20}{row.how:<58}{row.runs}")
            lines += [f"{'':<22}not {name}: {why}" for name, why in row.passed_over]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if self.recipe is None:
            return html_lines([NO_RECIPE])
        rows = [(row.what, row.how, row.runs, reason_unsupported(row.passed_over)) for row in self.rows]
        return html_table(("what", "how", "runs", "why not another"), rows, caption=f"recipe {self.recipe}")


class Explanations(dict[str, Explanation | AttentionExplanation]):
    """Result of `explain` for a module: one explanation per layer, by name."""

    def __repr__(self) -> str:
        return "\n".join(f"{name or '(root)'}\n{explanation}" for name, explanation in self.items())

    def _repr_html_(self) -> str:
        return "".join(html_lines([name or "(root)"]) + part._repr_html_() for name, part in self.items())


NO_RECIPE = "no recipe is in force: nn.Linear's own GEMMs, unquantized"
OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight.T"),
    "wgrad": ("grad_output.T", "input.T"),
}
UNQUANTIZED = "high precision"


@overload
def explain(layer: Linear | GroupedLinear, x: Tensor) -> Explanation: ...  # type: ignore[overload-overlap]
@overload
def explain(  # type: ignore[overload-overlap]
    layer: DotProductAttention, x: Tensor, *rest: Tensor, **options: Any
) -> AttentionExplanation: ...
@overload
def explain(layer: nn.Module, x: Tensor) -> Explanations: ...
@overload
def explain(layer: Callable[..., Tensor], x: Tensor, *rest: Tensor, recipe: str | Recipe | None) -> Explanation: ...
def explain(layer: Any, x: Tensor, *rest: Tensor, **options: Any) -> Any:
    """Show which implementations a forward and backward of this layer on x would run, without computing anything.

    An interpreter and a notebook show the result as a table; a script prints it: `print(explain(layer, x))`.

    Args:
        layer: a `quaver.torch.Linear`, a `GroupedLinear`, a `DotProductAttention`, the function `grouped_matmul`, or a
            module that contains such layers, such as a `TransformerLayer`. Of a module, each layer is explained under
            its name, as if its input had as many tokens as x.
        x: an input [..., in_features]; only its dtype, shape and device matter. For a whole model it may also be token
            ids, an integer tensor [batch, sequence]. For a DotProductAttention it is q.
        rest: k and v of a DotProductAttention; the other arguments of `grouped_matmul`.
        options: mask, bias, cu_seqlens and mask_type of a DotProductAttention's forward; keyword arguments of
            `grouped_matmul`.
    Returns:
        An `Explanation`; for a DotProductAttention an `AttentionExplanation`; for a module a dict of both by name.
    Raises:
        ValueError: the layer is none of these and contains none of them.
    """
    if isinstance(layer, DotProductAttention):
        return _attention(layer, x, *rest, **options)
    if layer is grouped_matmul:
        return _grouped(x, *rest, **options)
    if rest or options:
        raise ValueError(f"explain takes only a {type(layer).__name__} and its input x, no other arguments")
    if isinstance(layer, GroupedLinear):
        return _grouped_layer(layer, x)
    return _linear(layer, x) if isinstance(layer, Linear) else _module(layer, x)


def _linear(layer: Linear, x: Tensor) -> Explanation:
    recipe = recipe_in_force(layer.recipe)
    rows: list[ExplanationRow] = []
    if recipe is not None:
        dtype = _dtype(x)
        operands = _operands(layer, x, dtype)
        for name in OPERANDS:
            rows += _gemm(name, recipe, operands, _weight_dtype(layer) if name == "wgrad" else dtype, layer.weight_spec)
        if layer.weight_spec is None and _emulated_at_once(recipe, operands):
            rows = [_as_values(row) for row in rows]
    with torch.no_grad():
        weight: Any = layer._parameters.get("weight")
        shard: Any = weight.to_local() if hasattr(weight, "to_local") else None
    if hasattr(shard, "why_high_precision"):
        why = shard.why_high_precision
        runs, passed_over = ("high precision", (("codes", why),)) if why else ("codes", ())
        rows.append(ExplanationRow("weight of all ranks", "all-gather by fully_shard", runs, passed_over))
    return Explanation(recipe, tuple(rows))


def _emulated_at_once(recipe: Recipe, operands: dict[str, Tensor]) -> bool:
    """Return True if kernels write a layer's operands as bf16 values instead of codes.

    This is the fast emulation of GEMMs that the GPU does not have.
    """
    x, w = operands["input"], operands["weight"]
    if ops.no_kernels(x) or x.dtype is not w.dtype or not recipe.quantizes:
        return False
    from quaver.torch.linear import plan_emulated

    return not any(side % 16 for side in (*x.shape, *w.shape)) and not plan_emulated.reason_unsupported(
        recipe, x.device
    )


def _as_values(row: ExplanationRow) -> ExplanationRow:
    """Rewrite a row for a layer whose operands are emulated as bf16 values."""
    if row.what.endswith(" GEMM"):
        return replace(row, how="float32 accumulation of bf16 values")
    how = row.how.partition(", the codes of")
    text = f"{how[0]}, as bf16 values" + (f", those of{how[2]}" if how[1] else "")
    return replace(row, how=text, runs="triton", passed_over=())


def _grouped(
    x: Tensor, weight: Tensor, offsets: Tensor, *, bias: Any = None, recipe: Any = None, **_: Any
) -> Explanation:
    """Explain a `grouped_matmul` call: one row per operand of one group, and one per GEMM over all groups."""
    in_force = recipe_in_force(None if recipe is None else recipes.get(recipe))
    check(x, weight, offsets, bias, in_force)
    return _groups(x, (weight.shape[0], *weight.shape[1:]), weight.dtype, offsets, in_force)


def _grouped_layer(layer: GroupedLinear, x: Tensor) -> Explanation:
    """Explain a `GroupedLinear`, assuming an equal number of tokens per group."""
    recipe, rows = recipe_in_force(layer.recipe), x.new_empty(x.shape[:-1].numel(), layer.in_features)
    offsets = torch.zeros(layer.groups, dtype=torch.int32, device=x.device)
    dtype = torch.float32 if layer.weight_spec is not None else layer.weight.dtype
    shape = (layer.groups, layer.out_features, layer.in_features)
    return _groups(rows, shape, dtype, offsets, recipe, layer.weight_spec)


def _groups(
    x: Tensor,
    shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    offsets: Tensor,
    recipe: Recipe | None,
    stored_spec: QuantSpec | None = None,
) -> Explanation:
    rows: list[ExplanationRow] = []
    if recipe is not None:
        dtype, (groups, n, k) = _dtype(x), shape
        each = -(-x.shape[0] // max(groups, 1))
        # No values are read: one expanded element represents a large operand.
        one, weight = (torch.empty(1, dtype=d, device=x.device) for d in (x.dtype, weight_dtype))
        by_name = {
            "input": one.expand(each, k),
            "weight": weight.expand(n, k),
            "grad_output": one.expand(each, n),
        }
        operands = by_name | {f"{name}.T": t.t() for name, t in by_name.items()}
        for name in OPERANDS:
            out = weight_dtype if name == "wgrad" else dtype
            *operand_rows, gemm = _gemm(name, recipe, operands, out, stored_spec)
            places = GroupOffsets(offsets, x.shape[0])
            rows += [_row_of_all_groups(row, recipe, x) for row in operand_rows]
            rows.append(_gemm_of_all_groups(gemm, name, recipe, (n, k), places, out))
    return Explanation(recipe, tuple(rows))


def _row_of_all_groups(row: ExplanationRow, recipe: Recipe, x: Tensor) -> ExplanationRow:
    """Adapt the row of one group's operand to show how it is quantized for all groups."""
    if ops.on_host(x) or row.how == UNQUANTIZED or row.what.startswith("weight") or row.runs == "nothing":
        return row
    spec = recipe.fprop.a if row.what == "input" else recipe.dgrad.a if row.what == "grad_output" else None
    if spec is not None and by_rows(spec):
        return row
    return replace(row, runs="torch, all groups at once", passed_over=())


def _gemm_of_all_groups(
    row: ExplanationRow, name: str, recipe: Recipe, features: tuple[int, int], offsets: GroupOffsets, dtype: torch.dtype
) -> ExplanationRow:
    """Adapt the row of one group's GEMM to show how it runs for all groups."""
    spec, (n, k) = recipe.gemms[name], features
    if spec.a is None or spec.b is None:
        return replace(row, runs=f"{row.runs}, group by group" if ops.on_host(offsets.ends) else "torch, grouped")
    like = offsets.ends
    if name == "wgrad":
        sides = (_slot_operand(like, side, rows, offsets) for side, rows in ((spec.a, n), (spec.b, k)))
        reasons = GROUPED_WGRAD.explain(*sides, dtype, spec.fast_accum)
    else:
        columns, deep = (n, k) if name == "fprop" else (k, n)
        one = torch.empty(1, dtype=torch.float32, device=like.device)
        q = _empty_operand(one.expand(offsets.rows, deep), spec.a)
        left = GroupedOperand(q.data, like, None, spec.a, False, offsets.slots(1), deep)
        matrices = replace(spec.b, block=(1, spec.b.block[1]))
        right = _empty_operand(one.expand(offsets.groups * columns, deep), matrices)
        reasons = GROUPED_MATMUL.explain(left, right, offsets, columns, dtype, None, spec.fast_accum)
    passed = tuple((f"{other}, grouped", why) for other, why in takewhile(lambda reason: reason[1], reasons))
    runs = next(other for other, why in reasons if not why)
    if runs != "group by group":
        return replace(row, runs=f"{runs}, grouped", passed_over=passed)
    return replace(row, runs=f"{row.runs}, group by group", passed_over=(*passed, *row.passed_over))


def _slot_operand(like: Tensor, spec: QuantSpec, rows: int, offsets: GroupOffsets) -> GroupedOperand:
    """Return an uninitialized wgrad operand [rows, slots] that has the right shapes but no values."""
    slots = offsets.slots(multiple(spec))
    one = torch.empty(1, dtype=torch.float32, device=like.device)
    q = _empty_operand(one.expand(rows, slots.count), spec)
    return GroupedOperand(q.data, like, None, spec, True, slots, slots.count)


def _attention(core: DotProductAttention, *qkv: Tensor, mask_type: str | None = None, **keywords: Any) -> Any:
    if len(qkv) != 3:
        raise ValueError(
            f"a DotProductAttention takes q, k and v, but got {len(qkv)} tensors; only their shapes matter"
        )
    q, k, v = qkv
    return explain_attention(q, k, v, **keywords, **core.options(q, k, v, mask_type))


def _module(module: nn.Module, x: Tensor) -> Explanations:
    parts = {n: part for n, part in module.named_modules() if isinstance(part, Quantizable | DotProductAttention)}
    if not parts:
        kind = type(module).__name__
        raise ValueError(
            "explain takes a quaver.torch.Linear, a DotProductAttention or a module that contains some, not "
            f"{kind}; convert the model first"
        )
    if not x.is_floating_point():
        # Token ids of a whole model: its layers receive as many rows, in the dtype of the weights.
        dtypes = [p.dtype for p in module.parameters() if p.dtype in ops.DTYPES]
        x = x.new_empty((*x.shape, 1), dtype=dtypes[0] if dtypes else torch.float32)
    explanations = Explanations()
    for name, part in parts.items():
        shape = x.shape[:-1]
        if isinstance(part, DotProductAttention):
            explanations[name] = _explain_core(part, x)
        elif isinstance(part, GroupedLinear):
            explanations[name] = _grouped_layer(part, x)
        elif isinstance(part, Linear):
            explanations[name] = _linear(part, x.new_empty(*shape, part.in_features))
        else:
            explanations.update(_explain_gemms(part, name, x))
    return explanations


def _explain_gemms(part: Quantizable, name: str, x: Tensor) -> dict[str, Explanation]:
    """Explain a converted module that is not a Linear: its GEMM, or the first and second GEMM of experts."""
    kind = kind_of(part)
    assert kind is not None
    ((k, n), *others), experts = kind.features(part), kind.experts(part)
    dtype = next(part.parameters()).dtype
    if not experts:
        equivalent = Linear(k, n, bias=False, device="meta", dtype=dtype, recipe=part.recipe)
        return {name: _linear(equivalent, x.new_empty(*x.shape[:-1], k))}
    offsets = torch.zeros(experts, dtype=torch.int32, device=x.device)
    # No values are read: one expanded element represents a large weight.
    one = torch.empty(1, dtype=x.dtype, device=x.device)
    tokens = x.shape[:-1].numel()
    sizes = [("first", k, n), *(("second", inner, out) for inner, out in others)]
    return {
        f"{name}, {which} product": _grouped(
            one.expand(tokens, k), one.expand(experts, n, k), offsets, recipe=part.recipe
        )
        for which, k, n in sizes
    }


def _explain_core(core: DotProductAttention, x: Tensor) -> AttentionExplanation:
    """Explain self-attention of x's tokens, with an all-False mask if the mask type needs one."""
    thd = core.layout == "thd"
    tokens = (x.shape[:-1].numel(),) if thd else (1, 1, *x.shape[:-1])[-2:]
    dtype = _dtype(x)
    qkv = [x.new_empty(*tokens, *size, dtype=dtype) for size in core.sizes]
    keywords: dict[str, Any] = (
        {"cu_seqlens": torch.tensor([0, tokens[0]], dtype=torch.int64, device="cpu")} if thd else {}
    )
    if MASKS[core.mask_type][0]:
        batch, length = (1, tokens[0]) if thd else tokens[::-1] if core.layout == "sbhd" else tokens
        rows = length if core.mask_type == "arbitrary" else batch
        keywords["mask"] = torch.zeros((rows, length), dtype=torch.bool, device=x.device)
    explanation: AttentionExplanation = _attention(core, *qkv, **keywords)
    return explanation


def _dtype(x: Tensor) -> torch.dtype:
    """Return the compute dtype for x: that of torch.autocast if enabled, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _operands(layer: Linear, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return uninitialized tensors [rows, k] with the shapes of the six operands; only their shapes are used."""
    flat = torch.empty((x.numel() // max(x.shape[-1], 1), layer.in_features), dtype=dtype, device=x.device)
    g = flat.new_empty((flat.shape[0], layer.out_features))
    w = flat.new_empty((layer.out_features, layer.in_features), dtype=_weight_dtype(layer))
    by_name = {"input": flat, "weight": w, "grad_output": g}
    return by_name | {f"{name}.T": t.t() for name, t in by_name.items()}


def _weight_dtype(layer: Linear) -> torch.dtype:
    """Return the dtype that the weight is quantized from and its gradient has; a stored weight dequantizes to
    float32.
    """
    return layer.weight.dtype if layer.weight_spec is None else torch.float32


def _gemm(
    name: str, recipe: Recipe, operands: dict[str, Tensor], dtype: torch.dtype, stored_spec: QuantSpec | None
) -> list[ExplanationRow]:
    """Return a row for each operand of a GEMM, and one for the GEMM.

    Args:
        name: "fprop", "dgrad" or "wgrad".
        recipe: recipe in force.
        operands: tensors [rows, k] by operand name, used for their shapes and dtypes.
        dtype: dtype of the GEMM's output.
        stored_spec: spec of a weight that is stored quantized, or None.
    """
    spec = recipe.gemms[name]
    a, b = (operands[operand] for operand in OPERANDS[name])
    if spec.a is None or spec.b is None or a.dtype not in ops.DTYPES:
        return [ExplanationRow(what, UNQUANTIZED, "torch") for what in (*OPERANDS[name], f"{name} GEMM")]
    rows = []
    for operand, x, quant in zip(OPERANDS[name], (a, b), (spec.a, spec.b), strict=True):
        shared = operand.removesuffix(".T") if _reused(operand, recipe) else ""
        if stored_spec == quant and (operand == "weight" or shared == "weight"):
            rows.append(ExplanationRow(operand, f"{quant}, the codes of the parameter", "nothing"))
            continue
        how = f"{quant}, the codes of {shared}" if shared else str(quant)
        rows.append(_row(operand, how, ops.QUANTIZE.explain(x, quant)))
    empty_operands = _empty_operand(a, spec.a), _empty_operand(b, spec.b)
    reasons = ops.MATMUL.explain(*empty_operands, dtype, None, spec.fast_accum)
    return [*rows, _row(f"{name} GEMM", _accumulation(spec.fast_accum, reasons, a.device), reasons)]


def fprop_runs(recipe: Recipe, k: int, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of the implementation that runs the fprop GEMM of a layer with these sizes."""
    gemm = recipe.fprop
    if gemm.a is None or gemm.b is None or dtype not in ops.DTYPES:
        return "torch"
    # No values are read: one expanded element represents a large weight.
    x, w = (torch.empty(1, dtype=dtype, device=device).expand(rows, k) for rows in (16, n))
    reasons = ops.MATMUL.explain(_empty_operand(x, gemm.a), _empty_operand(w, gemm.b), dtype, None, gemm.fast_accum)
    return next((name for name, why in reasons if not why), "nothing")


def _accumulation(fast: bool, reasons: list[tuple[str, str]], device: torch.device) -> str:
    """Describe how the implementation that runs accumulates."""
    runs = next((name for name, why in reasons if not why), "")
    if runs != "native" or not fast:
        return "float32 accumulation" + (", fast where the hardware offers it" if fast else "")
    return "fast accumulation, 13 bits of a sum" if architecture(device) < 100 else "float32 accumulation"


def _reused(operand: str, recipe: Recipe) -> bool:
    """Return True if the GEMM reuses the transposed codes of an operand that an earlier GEMM quantized."""
    reuse = recipe.reuse
    return {"weight.T": reuse.weight, "grad_output.T": reuse.grad_output, "input.T": reuse.input}.get(operand, False)


def _empty_operand(x: Tensor, spec: QuantSpec) -> Quantized:
    """Return an uninitialized quantized operand with x's shape, for asking implementations if they support it."""
    q = joined(x, spec, False, *empty_parts(x, spec))
    if spec.per_tensor and x.is_cpu and spec.scale != "e8m0":
        q.scale = 1.0
    return q


def _row(what: str, how: str, reasons: list[tuple[str, str]]) -> ExplanationRow:
    """Return the row for the first implementation that supports the call, with the reasons against those before it."""
    passed_over = tuple(takewhile(lambda reason: reason[1], reasons))
    runs = reasons[len(passed_over)][0] if len(passed_over) < len(reasons) else "nothing"
    return ExplanationRow(what, how, runs, passed_over)
