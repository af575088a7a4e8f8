"""Experts whose weights are stacked [E, N, K], as transformers 5 holds them, by grouped GEMMs.

A class that transformers decorates with `use_experts_implementation` says in attributes how its weights lie and what
happens between its two products; `ALL_EXPERTS_FUNCTIONS` takes functions of such a module. `routed` is one, and stands
above the class of each converted module: a config, which holds the name of one function for all layers and all models
made of it, stays as it is, and each layer follows its own recipe.

Each matrix of a stack is a member: it has a history, counts and noise of its own, those of a layer that is named by the
module, the stack and the expert.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.linear.function import LinearFunction, apply
from quaver.torch.linear.grouped.layer import check, multiply
from quaver.torch.linear.grouped.operands import GroupedProduct
from quaver.torch.linear.linear import Quantizable, recipe_of, refuse_sharded
from quaver.torch.linear.quantized_input import GIVEN, LinearSetup
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import prepare
from quaver.torch.state.context import active_context

# ---- experts ---------------------------------------------------------------------------------------------

#: What the decorator says of a class, and the function that it gives one.
DECORATED = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class Experts(Quantizable):
    """Stands above a class of experts that the decorator of transformers describes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_in_force(self, matrices(self))
        if recipe is None:
            return super().forward(*args, **kwargs)
        if kwargs:
            # Families name them differently.
            args = inspect.signature(super().forward).bind(*args, **kwargs).args
        hidden_states, expert_ids, routing_weights = args
        return routed(self, hidden_states, expert_ids, routing_weights, recipe)


def recipe_in_force(module: Quantizable, names: Sequence[str]) -> Recipe | None:
    """What a module of experts follows, if it quantizes.

    Args:
        names: of its stacks.
    """
    compiling = is_tracing()
    recipe = recipe_of(module, compiling)
    if recipe is not None and recipe.quantizes:
        return recipe
    if not compiling and torch.is_grad_enabled() and module._state.weights is not None:
        for name in names:
            weight_cache.look(module, getattr(module, name))
    return None


def routed(module: Any, hidden_states: Tensor, expert_ids: Tensor, routing_weights: Tensor, recipe: Recipe) -> Tensor:
    """The sum over each token's experts, every product quantized as the recipe says.

    Args:
        module: decorated experts.
        hidden_states: [T, H].
        expert_ids, routing_weights: [T, k]; an id of E or more is of another rank's expert, and adds nothing.
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
    """Where each expert's rows end, int32 [E], of sorted ids; those of no expert here come last."""
    numbers = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return torch.searchsorted(ids, numbers, right=True, out_int32=True)


class ExpertGemms:
    """The products of one forward of experts.

    Args:
        module: whose parameters multiply.
        names: of its stacks.
        ends: where each expert's rows end, int32 [E].
    """

    def __init__(self, module: Quantizable, names: Sequence[str], ends: Tensor, recipe: Recipe) -> None:
        self.module, self.names, self.ends, self.recipe = module, tuple(names), ends, recipe
        if torch.is_grad_enabled() and module._state.prepared is not recipe:
            prepare(module, recipe)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """x [T, K], sorted, times the matrix of each expert of a parameter, with its bias if the module has one."""
        module: Any = self.module
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return self.by(name, x, getattr(module, name), bias, transposed=module.is_transposed)

    def by(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
        """x [T, K] times the weight of this name, [E, N, K], or [E, K, N] if it is turned."""
        if not is_tracing():
            refuse_sharded(self.module, weight)
        check(x, weight.transpose(1, 2) if transposed else weight, self.ends, bias, self.recipe)
        owner = GroupedProduct(self.module, name, self.names.index(name) * self.ends.shape[0])
        return multiply(owner, x, weight, bias, self.ends, self.recipe, transposed)


def members(names: Sequence[str], experts: int) -> tuple[str, ...]:
    """The names of the matrices of stacks, one stack after the other."""
    return tuple(f"{name}.{expert}" for name in names for expert in range(experts))


def is_stack(module: nn.Module) -> bool:
    """True for experts that the decorator of transformers describes."""
    if not all(hasattr(module, name) for name in DECORATED):
        return False
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in matrices(module))


def reason_unsupported(module: nn.Module) -> str:
    """Why experts cannot be converted, or ""."""
    if not isinstance(module, Experts) and not hasattr(type(module).forward, "__wrapped__"):
        return f"{type(module).__name__} has a forward of its own"
    return ""


def matrices(module: Any) -> tuple[str, str]:
    """The names of the stacks."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def sizes(module: Any) -> tuple[int, int]:
    """Features of the input and of the output of an expert's first product."""
    n, k = getattr(module, matrices(module)[0]).shape[-2:]
    return (n, k) if module.is_transposed else (k, n)


def inner(module: Any) -> int:
    """Features of the input of an expert's second product."""
    return int(module.down_proj.shape[-2 if module.is_transposed else -1])


# ---- products --------------------------------------------------------------------------------------------
# The product of a module that is no nn.Linear and multiplies by a weight of its own, as a linear layer computes it.


def product(module: Quantizable, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias, quantized as a recipe says, with the state of a module.

    Args:
        weight: the module's parameter, or a view of it.
    Raises:
        ValueError: another dtype than the weight's outside of torch.autocast, or a weight that is sharded.
    """
    if not is_tracing():
        refuse_sharded(module, weight)
    training = torch.is_grad_enabled()
    if training and module._state.prepared is not recipe:
        prepare(module, recipe)
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
    layers: Any = (module,)
    setup = LinearSetup(GIVEN, layers, recipe, x.dtype, training)
    y: Tensor
    if is_tracing():
        (y,) = LinearFunction.apply(setup, x, weight, bias)
        return y
    refuse_transforms(x, weight, bias)
    with ops.without_autocast(device):
        run: Any = apply if active_context.split is None else active_context.split(LinearFunction, apply)
        (y,) = run(setup, x, weight, bias)
    return y


def described(module: Quantizable) -> str:
    """A module's name, or its class."""
    return module.__dict__.get("qualified_name") or type(module).__name__


# ---- stacks ----------------------------------------------------------------------------------------------
# Experts that transformers does not decorate, class by class: Llama 4's, JetMoE's and DBRX's.
#
# Each is written after the forward of the class that it stands above, and a test compares their outputs and gradients.

#: The stacks of each class.
ALIKE, SPLIT, FLAT = ("gate_up_proj", "down_proj"), ("weight",), ("mlp.w1", "mlp.v1", "mlp.w2")


class Llama4Stack(Quantizable):
    """Llama 4's: x [E·T, H], as many rows for each expert; weights [E, H, 2I] and [E, I, H]."""

    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_in_force(self, ALIKE)
        if recipe is None:
            return super().forward(*args, **kwargs)
        (hidden_states,) = (*args, *kwargs.values())
        gate_up, down = self.gate_up_proj, self.down_proj
        x = hidden_states.view(-1, gate_up.shape[1])
        rows = x.shape[0] // gate_up.shape[0]
        ends = torch.arange(1, gate_up.shape[0] + 1, dtype=torch.int32, device=x.device) * rows
        products = ExpertGemms(self, ALIKE, ends, recipe)
        gate, up = products.by("gate_up_proj", x, gate_up, transposed=True).chunk(2, dim=-1)
        return products.by("down_proj", up * self.act_fn(gate), down, transposed=True)


class Split(Quantizable):
    """JetMoE's: x [T, K] sorted, the number of rows of each expert, and one weight [E, N, K]."""

    weight: Tensor

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Any:
        recipe = recipe_in_force(self, SPLIT)
        if recipe is None:
            return super().forward(inputs, expert_size)
        sizes = torch.as_tensor(expert_size, dtype=torch.int32, device=inputs.device)
        return ExpertGemms(self, SPLIT, sizes.cumsum(0, dtype=torch.int32), recipe).by("weight", inputs, self.weight)


class Flat(Quantizable):
    """DBRX's: w1, v1 and w2 [E·I, H] of the module `mlp` in it; ids and weights [T, k]."""

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
        products = ExpertGemms(self, FLAT, ends_of(ids, w1.shape[0]), recipe)
        rows = x[order // choices]
        y = glu.activation_fn(products.by(FLAT[0], rows, w1)) * products.by(FLAT[1], rows, v1)
        y = products.by(FLAT[2], y, w2, transposed=True) * weights.reshape(-1)[order].unsqueeze(-1)
        total = torch.zeros_like(x).index_add_(0, order // choices, y.to(x.dtype))
        return total.view(hidden_states.shape[0], -1, glu.hidden_size)


class Stack(NamedTuple):
    """A class of experts: functions of a module of it."""

    #: What stands above the class.
    over: type[Quantizable]
    #: Its matrices.
    weights: tuple[str, ...]
    #: Features of the input and of the output of the first product.
    sizes: Callable[[Any], tuple[int, int]]
    #: Features of each input.
    inputs: Callable[[Any], tuple[int, ...]]
    experts: Callable[[Any], int]


#: By the name of the class, which is of a module of transformers.
CLASSES = {
    "Llama4TextExperts": Stack(
        Llama4Stack,
        ALIKE,
        sizes=lambda m: tuple(m.gate_up_proj.shape[1:]),
        inputs=lambda m: (m.gate_up_proj.shape[1], m.down_proj.shape[1]),
        experts=lambda m: int(m.gate_up_proj.shape[0]),
    ),
    "JetMoeParallelExperts": Stack(
        Split,
        SPLIT,
        sizes=lambda m: tuple(m.weight.shape[:0:-1]),
        inputs=lambda m: (m.weight.shape[2],),
        experts=lambda m: int(m.weight.shape[0]),
    ),
    "DbrxExperts": Stack(
        Flat,
        FLAT,
        sizes=lambda m: (m.mlp.hidden_size, m.mlp.ffn_hidden_size),
        inputs=lambda m: (m.mlp.hidden_size, m.mlp.ffn_hidden_size),
        experts=lambda m: int(m.mlp.w1.shape[0] // m.mlp.ffn_hidden_size),
    ),
}
