"""Statistics of quantized attention: of its operands, and of its results against attention in high precision."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quaver.inspection.statistics import ErrorStatistics, OperandStatistics
from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.torch.inspection.statistics import operand_statistics, result_statistics
from quaver.torch.nn.attention.backends import quantize_heads
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.nn.attention.inputs import all_heads_first, heads_first
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.state.layer_state import recomputing, replaying

#: Function that takes the name of a tensor and its statistics.
Report = Callable[[str, ErrorStatistics], None]


def measure_attention(
    core: DotProductAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
    y: Tensor,
    report: Report,
) -> None:
    """Report the statistics of one call of quantized attention, now those of forward, and in backward the others.

    Args:
        core: the module, whose `attend` without a recipe computes the exact results in float32.
        qkv: q, k and v as `attend` took them; nothing else reads these tensors.
        options: keyword arguments of `attend`.
        y: its output.
        report: receives "q", "k", "v", "output" in forward, and "grad_output", "grad_q", "grad_k", "grad_v" in
            backward. With dropout, operands only.
    """
    kind, layout, spec = ops.autocast_device(y), options["layout"], options["recipe"].attention
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else qkv[0].dtype
    inputs = [x.detach().to(dtype) for x in qkv]
    exact_options = {**options, "recipe": None}

    def attend(*inputs: Tensor) -> Tensor:
        with torch.autocast(kind, enabled=False):
            return core.attend(*inputs, **exact_options)

    wide = [x.float() for x in inputs]
    # Observers have seen the first run of a forward that checkpointing recomputes.
    if not (replaying() or recomputing()):
        with torch.no_grad():
            _report_inputs(all_heads_first(layout, *inputs), spec, report)
            if not options["dropout"]:
                report("output", _compare(attend(*wide), y))
    if not y.requires_grad:
        return
    needs = [x.requires_grad for x in qkv]
    exact: dict[int, Tensor] = {}

    def observe_grad_output(g: Tensor) -> None:
        with torch.no_grad():
            report("grad_output", _heads_statistics(heads_first(g, layout), spec.grad_output))
        if options["dropout"]:
            return
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(wide, needs, strict=True)]
            needed = {place: leaf for place, leaf in enumerate(leaves) if leaf.requires_grad}
            gradients = torch.autograd.grad(attend(*leaves), list(needed.values()), g.detach().float())
        exact.update(zip(needed, gradients, strict=True))

    def observe_gradient(place: int, g: Tensor) -> None:
        if place in exact:
            report("grad_" + "qkv"[place], _compare(exact.pop(place), g))

    y.register_hook(observe_grad_output)
    for place, x in enumerate(qkv):
        if needs[place]:
            x.register_hook(partial(observe_gradient, place))


def _report_inputs(qkv: tuple[Tensor, Tensor, Tensor], spec: AttentionSpec, report: Report) -> None:
    """Report q and k as the scores' GEMM reads them, and v as the GEMM with the probabilities does."""
    q, k, v = qkv
    report("q", _heads_statistics(q, spec.input))
    report("k", _heads_statistics(k, spec.input))
    if spec.input.transposable:
        report("v", _heads_statistics(v, spec.input))
        return
    statistics = _heads_statistics(v.mT, spec.input)
    statistics.transpose()
    report("v", statistics)


def _heads_statistics(x: Tensor, spec: QuantSpec) -> OperandStatistics:
    """Return the pooled statistics of x [B, H, rows, k], every (batch, head) quantized on its own."""
    q, pooled = quantize_heads(x, spec), OperandStatistics(spec=spec)
    batches, heads, rows, k = x.shape
    for batch in range(batches):
        for head in range(heads):
            codes = Quantized(q.data[batch, head], q.scale[batch, head], spec, (rows, k))
            pooled.add(operand_statistics(x[batch, head], codes))
    return pooled


def _compare(exact: Tensor, actual: Tensor) -> ErrorStatistics:
    """Compare [..., heads, features] as matrices [tokens, heads * features]."""
    features = exact.shape[-2:].numel()
    return result_statistics(*(x.detach().float().reshape(-1, features) for x in (exact, actual)))
