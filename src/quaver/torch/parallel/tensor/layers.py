"""Column-parallel and row-parallel linear layers, whose weight is a sharded DTensor."""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.linear.autograd import LinearSetup, apply, may_fuse
from quaver.torch.linear.fused_projections import is_bare
from quaver.torch.linear.general import begin, is_prequantized
from quaver.torch.linear.linear import Quantizable, dtype_sentence, recipe_of
from quaver.torch.linear.plan import LinearCall
from quaver.torch.nn.norm import NormKind
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.parallel.tensor import joined, plan
from quaver.torch.parallel.tensor.gemms import ShardLayout, TensorParallelComm
from quaver.torch.parallel.tensor.partial import why_partial
from quaver.torch.parallel.tensor.sequence import TokenShardedModule, local_parameters
from quaver.torch.parallel.tensor.sharded_module import ShardedModule, own_class
from quaver.torch.parallel.tensor.vocab import loss_over_ranks
from quaver.torch.state.buffers import create_state_buffers
from quaver.torch.state.context import active_context
from quaver.torch.state.history.sync import check_agreement, describe_tensor


def layout_of(layer: nn.Module) -> ShardLayout | None:
    """Return the tensor-parallel layout of a layer, or None without a style."""
    return layer.layout_on_ranks if isinstance(layer, TensorParallelLinear) else None


class TensorParallelLinear(ShardedModule):
    """A linear layer of this rank's output or input features; see `quaver.torch.parallel.tensor.gemms`."""

    layout_on_ranks: ShardLayout

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        call, x, weight, bias = _prepare_call(self, input)
        with ops.without_autocast(ops.autocast_device(input)):
            y: Tensor = apply(call, x, weight, bias)
        return y

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # An unsharded weight is accepted too, whole or as separate matrices.
        joined.share(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def loss_over_ranks(self, *args: Any) -> Tensor:
        """Compute `linear_cross_entropy` with this layer as the head."""
        return loss_over_ranks(self, *args)

    @staticmethod
    @torch.compiler.disable
    def normed_over_ranks(norm: nn.Module, x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """Run column-parallel layers on a norm's output in one autograd function, or return None where that is not
        supported.

        Each rank has some tokens of x. On a GPU one kernel normalizes and quantizes them in one pass.
        """
        if not isinstance(norm, TokenShardedModule) or own_class(norm).forward is not NormKind.forward:
            return None
        tokens, layout = norm.layout_on_ranks, layout_of(layers[0])
        if tokens.replicated_input or tokens.gather_output:
            return None
        if layout is None or not (layout.column and layout.sequence):
            return None
        recipe = recipe_of(layers[0], False) if isinstance(layers[0], Quantizable) else None
        if recipe is None or any(recipe_of(layer, False) is not recipe for layer in layers) or not _rounds(recipe):
            return None
        same_layout = all(
            layout_of(each) == layout and joined.of(each, "weight")[0].device_mesh == tokens.mesh for each in layers
        )
        casting = torch.is_autocast_enabled(ops.autocast_device(x))
        if not same_layout or casting or not is_bare(norm, *layers) or not may_fuse(x.dtype, x):
            return None
        own: Any = norm
        own.check_input(x)
        local, calls = local_parameters(norm), [_prepare_call(layer, x) for layer in layers]
        inputs = x, local.get("weight"), local.get("bias")
        each = [one.call for one in calls]
        setup = LinearSetup(
            own.formula, tuple(layers), recipe, x.dtype, torch.is_grad_enabled(), len(inputs), calls=each
        )
        outputs: tuple[Tensor, ...] = apply(
            setup, *inputs, *(one.weight for one in calls), *(one.bias for one in calls)
        )
        return outputs


class ShardedLayerCall(NamedTuple):
    """Prepared inputs of one call of a tensor-parallel layer."""

    call: LinearCall
    #: Input cast to the dtype of the GEMMs.
    x: Tensor
    #: Local tensors that receive the gradients of weight and bias.
    weight: Tensor
    bias: Tensor | None


def _rounds(recipe: Recipe) -> bool:
    """True if a recipe quantizes inputs and weights, and all layers with the same input get the same codes."""
    a, b, c = recipe.fprop.a, recipe.fprop.b, recipe.wgrad.b
    return a is not None and b is not None and all(spec is None or spec.rounding == "nearest" for spec in (a, c))


def _prepare_call(layer: Any, input: Tensor) -> ShardedLayerCall:
    """Validate an input on all ranks and prepare a call.

    Raises:
        ValueError: the layer or the input does not fit.
    """
    layout: Any = layout_of(layer)
    if active_context.captures_wgrad and torch.is_grad_enabled():
        raise ValueError(
            f"{name_of(layer)} is sharded by {layout.name}, whose weight gradients go through autograd: "
            "weight_gradients does not support it; leave it out around this layer"
        )
    weights, biases = joined.of(layer, "weight"), joined.of(layer, "bias")
    if not weights or any(getattr(each, "device_mesh", None) is None for each in weights):
        raise ValueError(
            f"{name_of(layer)} is sharded by {layout.name}, and its weight is no DTensor, so something has "
            "replaced it; load weights by torch.distributed.checkpoint, and leave a parametrized layer out "
            "of the plan"
        )
    if getattr(input, "device_mesh", None) is not None:
        raise ValueError(
            f"{name_of(layer)} is sharded by {layout.name} and takes local tensors, and its input is a "
            "DTensor: pass input.to_local(), or use use_local_output=True in the preceding style"
        )
    weight = weights[0]
    recipe = recipe_of(layer, False) if isinstance(layer, Quantizable) else None
    local_weight: Any = joined.local_weight(layer)
    device = ops.autocast_device(input)
    casts = torch.is_autocast_enabled(device) and input.dtype in ops.DTYPES
    x = input.to(torch.get_autocast_dtype(device)) if casts else input
    error: str | Exception = ""
    try:
        if is_prequantized(local_weight):
            # fully_shard has gathered the weight as codes.
            local_weight.check_recipe(layer, recipe)
        if not casts and x.dtype is not local_weight.dtype:
            raise ValueError(dtype_sentence(layer, x.dtype))
        refuse_transforms(x)
        _check(layer, local_weight, x)
        why = "" if layout.column else why_partial(layer, name_of(layer), input)
        if why:
            raise ValueError(why)
    except Exception as raised:
        # Catch any exception: the other ranks wait.
        error = raised
    if recipe is None or input.dtype not in ops.DTYPES:
        recipe = recipes.get("bf16")
    if isinstance(layer, Quantizable):
        joined.watch(layer, weights)
    training, name = torch.is_grad_enabled(), name_of(layer)
    what = {
        "style": layout.name,
        "chunks of overlap": layout.overlap,
        "input": describe_tensor(input),
        "input in GEMMs": x.dtype,
        "weights": [describe_tensor(each) for each in weights],
        "biases": [describe_tensor(each) for each in biases],
        "gradients": training,
        "recipe": recipe.text,
    }
    check_agreement(name, what, weight.device_mesh.get_group(), error=error, forward=True)
    if training and isinstance(layer, Quantizable) and layer._state.buffers_recipe is not recipe:
        create_state_buffers(layer, recipe)
    call = begin(layer, recipe, x, x.dtype, training)
    call.plan = plan.plan_for(recipe, x)
    call.operations = call.plan.operations
    if x is not input:
        call.source = weakref.ref(input)
    rows, batches = joined.rows(layer, weight.device_mesh.size()), max(1, math.prod(x.shape[:-2]))
    call.comm = ranks = TensorParallelComm(layout, call, weight, local_weight, batches, rows)
    if training:
        ranks.check_gradient(local_weight, x.shape)
    with ops.without_autocast(device):
        local_weights = joined.routed([each.to_local() for each in weights])
        local_biases = [each.to_local() for each in biases]
        bias = None if not local_biases else local_biases[0] if len(local_biases) == 1 else torch.cat(local_biases)
    return ShardedLayerCall(call, x, local_weights, bias)


def _check(layer: Any, local_weight: Tensor, x: Tensor) -> None:
    """Raise a ValueError if the shape of an input does not fit the layer."""
    layout: Any = layout_of(layer)
    number = joined.of(layer, "weight")[0].device_mesh.size()
    error = f"{name_of(layer)} under {layout.name} got an input of shape {tuple(x.shape)}"
    if x.dim() == 0 or x.shape[-1] != local_weight.shape[1]:
        has = "all of them" if layout.column else "a part of them"
        raise ValueError(
            f"{error}; its last axis must be {local_weight.shape[1]}: of the layer's {layer.in_features} features each "
            f"of {number} ranks has {has}"
        )
    if layout.sequence and x.dim() < 2:
        raise ValueError(f"{error}, which has no axis of tokens to shard over {number} ranks: add one")
    if layout.sequence and not layout.column and x.shape[-2] % number:
        raise ValueError(
            f"{error}: {number} ranks cannot share {x.shape[-2]} tokens; pad them to a multiple of {number}"
        )


def name_of(layer: nn.Module) -> str:
    """Return the name of a layer for error messages."""
    return layer.__dict__.get("qualified_name") or type(layer).__name__
