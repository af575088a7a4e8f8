"""Quantized grouped GEMMs for transformers' experts, whose weights are stacked [E, N, K].

transformers decorates experts classes with `use_experts_implementation`; attributes describe the weight layout and the
step between the two GEMMs. `convert` inserts `Experts` above the class of each module, and its forward calls `routed`.
The config, which names one experts function for all layers and models made of it, stays unchanged, so that each layer
follows its own recipe.

Each matrix of a stack is a member with its own history, counts and noise, named by module, stack and expert.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.linear import general
from quaver.torch.linear.autograd import IDENTITY_INPUT, LinearFunction, LinearSetup, eager_apply
from quaver.torch.linear.grouped.call import LayerGroups
from quaver.torch.linear.grouped.layer import check, multiply
from quaver.torch.linear.linear import Quantizable, check_not_sharded, recipe_of
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import create_state_buffers

# ---- experts that transformers decorates ----

#: Attributes and the method that the decorator sets on a class.
DECORATED = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class StackedExperts(Quantizable):
    """Mixin above an experts class described by transformers' decorator; runs its GEMMs quantized."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_in_force(self, matrices(self))
        if recipe is None:
            return super().forward(*args, **kwargs)
        if kwargs:
            # Model families use different argument names.
            args = inspect.signature(super().forward).bind(*args, **kwargs).args
        hidden_states, expert_ids, routing_weights = args
        return routed(self, hidden_states, expert_ids, routing_weights, recipe)


def recipe_in_force(module: Quantizable, names: Sequence[str]) -> Recipe | None:
    """Return the recipe in force for an experts module, or None if it does not quantize.

    Args:
        module: the experts module.
        names: parameter names of its stacks.
    """
    compiling = is_tracing()
    recipe = recipe_of(module, compiling)
    if recipe is not None and recipe.quantizes:
        return recipe
    if not compiling and torch.is_grad_enabled() and module._state.weights is not None:
        for name in names:
            weight_cache.expire(module, getattr(module, name))
    return None


def routed(module: Any, hidden_states: Tensor, expert_ids: Tensor, routing_weights: Tensor, recipe: Recipe) -> Tensor:
    """Return the weighted sum over each token's experts [T, H], with every GEMM quantized as the recipe says.

    Args:
        module: decorated experts.
        hidden_states: [T, H].
        expert_ids: [T, k]; an id of E or more belongs to another rank's expert and contributes nothing.
        routing_weights: [T, k].
        recipe: recipe in force.
    """
    experts, choices = module.down_proj.shape[0], expert_ids.shape[-1]
    ids, order = torch.sort(expert_ids.reshape(-1), stable=True)
    ends = ends_of(ids, experts)
    here = (ids < experts).unsqueeze(-1)
    products = ExpertGemms(module, matrices(module), ends, recipe)
    first, second = matrices(module)
    y = products(first, hidden_states[order // choices])
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = products(second, y)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    weights = routing_weights.reshape(-1)[order].unsqueeze(-1).where(here, 0.0)
    back = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    )
    y = (y * weights)[back].view(-1, choices, y.shape[-1]).sum(1)
    return y.to(hidden_states.dtype)


def ends_of(ids: Tensor, experts: int) -> Tensor:
    """Return the end of each expert's rows in sorted ids, int32 [E]; ids of E or more come after them."""
    numbers = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return torch.searchsorted(ids, numbers, right=True, out_int32=True)


class ExpertGemms:
    """Runs the grouped GEMMs of one forward of an experts module.

    Args:
        module: the module that has the parameters.
        names: parameter names of its stacks.
        ends: end of each expert's rows, int32 [E].
        recipe: recipe in force.
    """

    def __init__(self, module: Quantizable, names: Sequence[str], ends: Tensor, recipe: Recipe) -> None:
        self.module, self.names, self.ends, self.recipe = module, tuple(names), ends, recipe
        if torch.is_grad_enabled() and module._state.buffers_recipe is not recipe:
            create_state_buffers(module, recipe)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Multiply sorted x [T, K] by each expert's matrix of the named parameter, and add its bias if the module
        has one.
        """
        module: Any = self.module
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return self.by(name, x, getattr(module, name), bias, transposed=module.is_transposed)

    def by(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
        """Multiply x [T, K] by a weight [E, N, K], or [E, K, N] if transposed."""
        if not is_tracing():
            check_not_sharded(self.module, weight)
        check(x, weight.transpose(1, 2) if transposed else weight, self.ends, bias, self.recipe)
        owner = LayerGroups(self.module, name, self.names.index(name) * self.ends.shape[0])
        return multiply(owner, x, weight, bias, self.ends, self.recipe, transposed)


def members(names: Sequence[str], experts: int) -> tuple[str, ...]:
    """Return the names of the matrices of all stacks, stack by stack."""
    return tuple(f"{name}.{expert}" for name in names for expert in range(experts))


def is_stack(module: nn.Module) -> bool:
    """Return True if the module is an experts module described by transformers' decorator."""
    if not all(hasattr(module, name) for name in DECORATED):
        return False
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in matrices(module))


def matrices(module: Any) -> tuple[str, str]:
    """Return the parameter names of the two stacks."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def features(module: Any) -> tuple[tuple[int, int], ...]:
    """Return the input and output features of an expert's first and second GEMM."""
    shapes = [getattr(module, name).shape[1:] for name in matrices(module)]
    return tuple((k, n) if module.is_transposed else (n, k) for k, n in shapes)


# ---- the quantized GEMM of a module other than nn.Linear ----


def product(module: Quantizable, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """Compute x [..., K] @ weight [N, K].T + bias, quantized as the recipe says, with the module's state.

    Args:
        module: module that owns the weight and the state.
        x: input [..., K].
        weight: parameter of the module, or a view of it.
        bias: bias [N] or None.
        recipe: recipe in force.
    Raises:
        ValueError: x and the weight differ in dtype outside of torch.autocast, or the weight is sharded.
    """
    if not is_tracing():
        check_not_sharded(module, weight)
    training = torch.is_grad_enabled()
    if training and module._state.buffers_recipe is not recipe:
        create_state_buffers(module, recipe)
    device = ops.autocast_device(x)
    casting = torch.is_autocast_enabled(device) and x.dtype in ops.DTYPES and weight.dtype in ops.DTYPES
    if casting:
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype is not weight.dtype:
        raise ValueError(
            f"{described(module)} has {weight.dtype} weights and got a {x.dtype} input; convert the input, or enter "
            "torch.autocast"
        )
    if x.dtype not in ops.DTYPES:
        return F.linear(x, weight, bias)
    y: Tensor
    if is_tracing():
        layers: Any = (module,)
        setup = LinearSetup(IDENTITY_INPUT, layers, recipe, x.dtype, training)
        (y,) = LinearFunction.apply(setup, x, weight, bias)
        return y
    refuse_transforms(x, weight, bias)
    with ops.without_autocast(device):
        y = eager_apply()(general.begin(module, recipe, x, x.dtype, training), x, weight, bias)
    return y


def described(module: Quantizable) -> str:
    """Return the module's qualified name, or its class name."""
    return module.__dict__.get("qualified_name") or type(module).__name__


# ---- experts that transformers does not decorate: Llama 4's, JetMoE's and DBRX's ----
#
# Each mixin follows the forward of the class that it is put above; a test compares outputs and gradients.

#: Parameter names of the stacks in Llama 4's, JetMoE's and DBRX's class.
LLAMA4, JETMOE, DBRX = ("gate_up_proj", "down_proj"), ("weight",), ("mlp.w1", "mlp.v1", "mlp.w2")


class QuantizedLlama4Experts(Quantizable):
    """Mixin for Llama 4's experts: x [E * T, H] with T rows per expert; weights [E, H, 2I] and [E, I, H]."""

    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_in_force(self, LLAMA4)
        if recipe is None:
            return super().forward(*args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        gate_up, down = self.gate_up_proj, self.down_proj
        x = hidden_states.view(-1, gate_up.shape[1])
        rows = x.shape[0] // gate_up.shape[0]
        ends = torch.arange(1, gate_up.shape[0] + 1, dtype=torch.int32, device=x.device) * rows
        products = ExpertGemms(self, LLAMA4, ends, recipe)
        gate, up = products.by("gate_up_proj", x, gate_up, transposed=True).chunk(2, dim=-1)
        return products.by("down_proj", up * self.act_fn(gate), down, transposed=True)


class QuantizedJetMoeExperts(Quantizable):
    """Mixin for JetMoE's experts: x [T, K] sorted by expert, the number of rows per expert, and one weight [E, N,
    K].
    """

    weight: Tensor

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Any:
        recipe = recipe_in_force(self, JETMOE)
        if recipe is None:
            return super().forward(inputs, expert_size)
        sizes = torch.as_tensor(expert_size, dtype=torch.int32, device=inputs.device)
        return ExpertGemms(self, JETMOE, sizes.cumsum(0, dtype=torch.int32), recipe).by("weight", inputs, self.weight)


class QuantizedDbrxExperts(Quantizable):
    """Mixin for DBRX's experts: parameters w1, v1 and w2 [E * I, H] of the child `mlp`; ids and weights [T, k]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        recipe = recipe_in_force(self, ())
        if recipe is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return self._routed(hidden_states, top_k_index, top_k_weights, recipe)

    def _routed(self, hidden_states: Tensor, ids: Tensor, weights: Tensor, recipe: Recipe) -> Tensor:
        glu: Any = self.mlp
        x = hidden_states.reshape(-1, glu.hidden_size)
        choices = ids.shape[-1]
        ids, order = torch.sort(ids.reshape(-1), stable=True)
        w1, v1, w2 = (w.view(-1, glu.ffn_hidden_size, glu.hidden_size) for w in (glu.w1, glu.v1, glu.w2))
        products = ExpertGemms(self, DBRX, ends_of(ids, w1.shape[0]), recipe)
        rows = x[order // choices]
        y = glu.activation_fn(products.by(DBRX[0], rows, w1)) * products.by(DBRX[1], rows, v1)
        y = products.by(DBRX[2], y, w2, transposed=True) * weights.reshape(-1)[order].unsqueeze(-1)
        total = torch.zeros_like(x).index_add_(0, order // choices, y.to(x.dtype))
        return total.view(hidden_states.shape[0], -1, glu.hidden_size)
