"""Plan of a linear layer: the functions that quantize its operands and run its three GEMMs.

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

A fast `LinearPlan` is made once per recipe, shape, dtype and device: its builder chooses kernels and layouts
beforehand, since in a small layer those choices take most of the time. The general plan (`quaver.torch.linear.general`)
is made once per recipe and runs any call on any device. All plans give the same bits, and all layers share them. A
`LinearCall` is the state of one call of a layer; `quaver.torch.linear.autograd` runs it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import NO_NOISE
from quaver.torch.operations import functional, ops
from quaver.torch.state import layer_state, observer, weight_cache
from quaver.torch.state.history import scaling_step

#: GEMM operand: a `Quantized` with its scale, codes with a separate scale, or an unquantized tensor.
Operand = Any
#: Scale of an operand: a float on a CPU, a tensor, a list [block scales, tensor factor], or None.
Scale = Any
#: Result of quantizing a matrix: operand, its scale, operand of the transpose (None if not written), its scale, extra.
#: `extra` of an input is its amax if a history needs it; `extra` of a grad_output is the bias gradient, or None if that
#: is still to be summed.
Operands = tuple[Operand, Scale, Operand, Scale, Any]


class WeightOperands:
    """Operands of a weight for fprop and dgrad, with their scales; those of dgrad are None until they are needed."""

    __slots__ = ("dgrad", "dgrad_scale", "factors", "fprop", "fprop_scale", "recipe")

    def __init__(
        self,
        fprop: Operand,
        fprop_scale: Scale = None,
        dgrad: Operand = None,
        dgrad_scale: Scale = None,
        recipe: Recipe | None = None,
        factors: object = None,
    ) -> None:
        self.fprop, self.fprop_scale, self.dgrad, self.dgrad_scale = fprop, fprop_scale, dgrad, dgrad_scale
        #: Recipe of the plans whose GEMMs read these operands.
        self.recipe = recipe
        #: Encode factors of the last call that recorded the weight's amax: a cached weight records it once per step.
        self.factors = factors


@dataclass(slots=True, eq=False)
class LinearPlan:
    """Functions of one linear layer; a matrix and its transpose are quantized by one function or by two."""

    recipe: Recipe
    #: (call, x [T, K], save) -> Operands: x for fprop, and x.T for wgrad if one read serves both and `save` says that
    #: backward will read it.
    quantize_input: Callable[..., Operands]
    #: (call, x, operands) -> the wgrad operand input.T [K, T] and its scale; x itself if wgrad is unquantized.
    transpose_input: Callable[..., tuple[Operand, Scale]]
    #: (call, weight [N, K]) -> WeightOperands. Fast plans, and the general one if dgrad reuses the codes, set
    #: `call.entry`.
    quantize_weight: Callable[..., WeightOperands]
    #: (call, weight) -> the dgrad operand weight.T [K, N] and its scale.
    transpose_weight: Callable[..., tuple[Operand, Scale]]
    #: (call, g [T, N], needs, bias dtype) -> Operands, for the needed gradients of input, weight and bias.
    quantize_grad: Callable[..., Operands]
    #: (call, g, operands) -> the wgrad operand grad_output.T [N, T] and its scale.
    transpose_grad: Callable[..., tuple[Operand, Scale]]
    #: (call, a [m, k], its scale, b, its scale, bias or None) -> a @ b.T + bias for b [n, k]. The functions of a fast
    #: plan return right-hand operands as [k, n], in which the GEMM that it calls takes them.
    fprop: Callable[..., Tensor]
    dgrad: Callable[..., Tensor]
    #: (call, a, its scale, b, its scale, dtype): dtype of the gradient, for plans whose GEMM can write any.
    wgrad: Callable[..., Tensor]
    #: (layer, x) -> encode factors of delayed scaling, or None if only the general plan can read them; None
    #: without delayed scaling.
    factors: Callable[..., Any] | None = None
    #: (call, column, amax): records an amax that another layer has measured, under delayed scaling.
    record_amax: Callable[..., None] | None = None
    #: (call, x, weight) -> operands of an input and an uncached weight, quantized in shared launches; None if there are
    #: none.
    quantize_together: Callable[..., tuple[Operands, WeightOperands]] | None = None
    #: Name of the weight's cache entry; plans with the same name read the same layout.
    cache_name: str = "fprop"
    #: True if the kernels need addresses that are multiples of 16 bytes, and may overwrite their buffers later.
    aligned: bool = False
    #: (grad_input, grad_weight) as the GEMMs gave them -> both in the dtype of the gradients, sums over ranks awaited;
    #: None if they are.
    finish: Callable[..., Sequence[Any]] | None = None
    #: True if the plan runs only steps that compute gradients of input and weight, and no CUDA-graph capture.
    training_only: bool = True
    #: Index in `Operation.implementations` of the one that a fused input operation uses with this plan, -1 for plain
    #: torch; None chooses by tensor.
    implementation: int | None = None
    #: (call, x [T, K]) -> what `transpose_input` returns, of an input that backward has recomputed; None in fast plans,
    #: which save it.
    recomputed_input: Callable[..., tuple[Operand, Scale]] | None = None
    #: Implementations of quantization and GEMM that the general plan calls; `both` quantizes a matrix and its transpose
    #: in one call, or is None. None in fast plans.
    operations: ops.ResolvedOperations | None = None
    #: Of sharded layers: (call, x, operands, save) -> operands, starts the all-gather of an input that a fused kernel
    #: has quantized.
    gather_input: Callable[..., Operands] | None = None
    #: Of sharded layers: (call, saved wgrad operand) -> operand and scale, starts its all-gather in backward.
    load_input: Callable[..., tuple[Operand, Scale]] | None = None

    def quantizes_like(self, other: "LinearPlan") -> bool:
        """Return True if the other plan quantizes an input to the same operands."""
        if (self.operations is None) is not (other.operations is None) or self.aligned is not other.aligned:
            return False
        if self.recipe is other.recipe:
            return True
        same_layout = self.cache_name == other.cache_name
        return same_layout and functional.same_input_quantization(self.recipe, other.recipe)


class LinearCall:
    """State of one call of one layer, carried from its forward to its backward."""

    #: Encode factors of input, weight and grad_output in the forward; None without delayed scaling.
    factors: Any = None
    #: Handle that keeps the delayed-scaling step open until the backward of this call has run.
    pending: scaling_step.PendingBackward | None = None
    #: Weak reference to the caller's input if torch.autocast has cast it, so that layers recognize a shared input.
    source: Any = None
    #: `quaver.torch.parallel.tensor.gemms.TensorParallelComm` for sharded operands, or None if the layer
    #: has whole operands.
    comm: Any = None
    #: Entry of the weight cache that fprop has read, or an entry of this call alone.
    entry: weight_cache.CachedWeight | None = None
    #: dgrad operand of the weight, if it was written together with fprop's and is not cached.
    transposed_weight: Quantized | None = None
    #: Version of the factors on the device that the forward read.
    version: int | None = None
    #: Shape of the input.
    shape: Sequence[int]
    #: Input [T, K] of an observed forward, for the report of wgrad.
    observed_input: Tensor | None = None
    #: True once the call's backward has begun; set only while an observer is active.
    began_backward: bool = False
    #: True in an operator of a compiled graph, which observers do not see.
    in_operator: bool = False

    def __init__(
        self, plan: LinearPlan, layer: nn.Module, training: bool, dtype: torch.dtype, traced: bool = False
    ) -> None:
        #: `training`: the forward runs with gradients; delayed scaling then records the amaxes of this call.
        self.plan, self.layer, self.training = plan, layer, training
        #: dtype of the activations.
        self.dtype = dtype
        #: True under torch.compile: operations are opaque and nothing is cached between calls.
        self.traced = traced
        self.recipe: Recipe = plan.recipe
        #: Implementations that the general plan calls; None in a call by a fast plan.
        self.operations: Any = plan.operations

    @property
    def is_observable(self) -> bool:
        """False in compiled graphs, and in a forward that checkpointing recomputes, if observers need only the first
        one.
        """
        if self.in_operator:
            return False
        repeats = layer_state.replaying() or layer_state.recomputing()
        return self.began_backward or not repeats or observer.active.sees_recomputation

    def quantize_unrecorded(
        self, x: Tensor, spec: QuantSpec, transposed: bool, factor: Any = None, noise: Any = NO_NOISE
    ) -> Quantized:
        """Quantize x without recording its amax or counting it.

        Args:
            transposed: used under torch.compile only: True if x is a transposed view of a row-major matrix.
            noise: used under torch.compile only, to distinguish this quantization from an earlier one of the same
                tensor.
        """
        if self.traced:
            q: Quantized = ops.QUANTIZE.traced(x, spec, None, factor, noise, transposed=transposed)
            return q
        assert self.operations is not None
        return self.operations.quantize(x, spec, None, factor)


def written_transpose(call: LinearCall, x: Tensor, operands: Operands) -> tuple[Operand, Scale]:
    """Return the transposed operand that was written together with the operand, and its scale."""
    return operands[2], operands[3]


def saved_operands(call: LinearCall) -> WeightOperands | None:
    """Return the weight's operands from the forward, or None if the cache was dropped since, as FSDP2 does."""
    assert call.entry is not None
    w: WeightOperands | None = call.entry.fast_operands
    return None if w is None or w.recipe is not call.recipe else w


def cached_operands(call: LinearCall, weight: Tensor, factor_key: Any) -> WeightOperands | None:
    """Return the operands of a cached weight if weight, factor and recipe are unchanged, else None.

    Args:
        factor_key: changes with the weight's encode factor; 0.0 without delayed scaling.
    """
    plan = call.plan
    spec: Any = plan.recipe.fprop.b
    entry = weight_cache.lookup(call.layer, plan.cache_name, weight, spec, factor_key, call.training)
    if entry is None:
        return None
    operands: WeightOperands | None = entry.fast_operands
    if operands is None or operands.recipe is not plan.recipe:
        return None
    call.entry = entry
    return operands
