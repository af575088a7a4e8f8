"""Experts whose weights are stacked [E, N, K], as transformers 5 holds them, by grouped GEMMs.

A class that transformers decorates with `use_experts_implementation` says in attributes how its weights lie and what
happens between its two products; `ALL_EXPERTS_FUNCTIONS` takes functions of such a module. `routed` is one, and stands
above the class of each converted module: a config, which holds the name of one function for all layers and all models
made of it, stays as it is, and each layer follows its own recipe.

Stateless recipes, in eager mode: a function keeps no history.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.torch.linear.grouped.matmul import grouped_matmul
from quaver.torch.linear.layer import Quantizable, recipe_of, refuse_sharded
from quaver.torch.model.reach.products import described
from quaver.torch.state import recomputation
from quaver.torch.state.buffers import prepare

#: What the decorator says of a class, and the function that it gives one.
DECORATED = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class Experts(Quantizable):
    """Stands above a class of experts that the decorator of transformers describes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = recipe_of(self, torch.compiler.is_compiling())
        if recipe is None or not recipe.quantizes:
            return super().forward(*args, **kwargs)
        if kwargs:
            # Families name them differently.
            args = inspect.signature(super().forward).bind(*args, **kwargs).args
        hidden_states, expert_ids, routing_weights = args
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{described(self)}: experts are not compiled yet, since how many tokens each has decides which "
                "operations run; without fullgraph=True they run in eager mode"
            )
        run = _left_alone() if "torch._dynamo" in sys.modules else routed
        return run(self, hidden_states, expert_ids, routing_weights, recipe)


@cache
def _left_alone() -> Callable[..., Tensor]:
    """`routed`, whose parts a compiler that broke its graph here would else compile one by one, by the token counts."""
    return torch.compiler.disable(routed)


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
    ids = ids.clamp(max=experts - 1)
    multiply = Multiply(module, ends, recipe)
    first, second = matrices(module)
    y = multiply(first, hidden_states[order // choices], ids)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = multiply(second, y, ids)
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


class Multiply:
    """The products of one forward of experts.

    Args:
        module: whose parameters multiply.
        ends: where each expert's rows end, int32 [E].
    """

    def __init__(self, module: Quantizable, ends: Tensor, recipe: Recipe) -> None:
        self.module, self.ends, self.recipe = module, ends, recipe
        if torch.is_grad_enabled() and module._state.prepared is not recipe:
            prepare(module, recipe)
        self.count = _count(module)

    def __call__(self, name: str, x: Tensor, ids: Tensor) -> Tensor:
        """x [T, K], sorted, times the matrix of each expert of a parameter, with its bias if the module has one."""
        module = self.module
        weight: Tensor = getattr(module, name)
        y = self.by(name, x, weight.transpose(1, 2) if module.is_transposed else weight)
        return y + getattr(module, f"{name}_bias")[ids].to(y.dtype) if module.has_bias else y

    def by(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] times weight [E, N, K], which is of this name to the noise."""
        refuse_sharded(self.module, weight)
        noise = {"seed": self.module.seed, "count": self.count, "name": f"{described(self.module)}.{name}"}
        return grouped_matmul(x, weight, self.ends, recipe=self.recipe, **noise)  # type: ignore[arg-type]


def _count(module: Quantizable) -> Tensor | int:
    """How many forwards have been differentiated, which tells the noise of one from that of the next."""
    count = module._buffers.get("count")
    if count is None:
        return 0
    number = recomputation.noted(module, "experts", count[0].clone())
    if torch.is_grad_enabled() and not recomputation.replaying():
        count[0] += 1
    return number


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
