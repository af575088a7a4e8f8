"""Experts whose weights are stacked [E, N, K], as transformers 5 holds them, by grouped GEMMs.

A class that transformers decorates with `use_experts_implementation` says in attributes how its weights lie and what
happens between its two products; `ALL_EXPERTS_FUNCTIONS` takes functions of such a module. `routed` is one, and stands
above the class of each converted module: a config, which holds the name of one function for all layers and all models
made of it, stays as it is, and each layer follows its own recipe.

Each matrix of a stack is a member: it has a history, counts and noise of its own, those of a layer that is named by the
module, the stack and the expert.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.linear.grouped.call import Product
from quaver.torch.linear.grouped.matmul import check, multiply
from quaver.torch.linear.layer import Quantizable, recipe_of, refuse_sharded
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.state import kept_weights
from quaver.torch.state.buffers import prepare

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
            kept_weights.look(module, getattr(module, name))
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
    products = Products(module, matrices(module), ends, recipe)
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


class Products:
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
        return self.by(name, x, getattr(module, name), bias, turned=module.is_transposed)

    def by(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, turned: bool = False) -> Tensor:
        """x [T, K] times the weight of this name, [E, N, K], or [E, K, N] if it is turned."""
        if not is_tracing():
            refuse_sharded(self.module, weight)
        check(x, weight.transpose(1, 2) if turned else weight, self.ends, bias, self.recipe)
        owner = Product(self.module, name, self.names.index(name) * self.ends.shape[0])
        return multiply(owner, x, weight, bias, self.ends, self.recipe, turned)


def members(names: Sequence[str], experts: int) -> tuple[str, ...]:
    """The names of the matrices of stacks, one stack after the other."""
    return tuple(f"{name}.{expert}" for name in names for expert in range(experts))


def is_stack(module: nn.Module) -> bool:
    """True for experts that the decorator of transformers describes."""
    if not all(hasattr(module, name) for name in DECORATED):
        return False
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in matrices(module))


def why_not(module: nn.Module) -> str:
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
