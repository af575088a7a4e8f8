"""Experts that transformers does not decorate, class by class: Llama 4's, JetMoE's and DBRX's.

Each is written after the forward of the class that it stands above, and a test compares their outputs and gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import Recipe
from quaver.torch.linear.layer import Quantizable
from quaver.torch.model.reach.experts import Products, ends_of, recipe_in_force

#: The stacks of each class.
ALIKE, SPLIT, FLAT = ("gate_up_proj", "down_proj"), ("weight",), ("mlp.w1", "mlp.v1", "mlp.w2")


class Alike(Quantizable):
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
        products = Products(self, ALIKE, ends, recipe)
        gate, up = products.by("gate_up_proj", x, gate_up, turned=True).chunk(2, dim=-1)
        return products.by("down_proj", up * self.act_fn(gate), down, turned=True)


class Split(Quantizable):
    """JetMoE's: x [T, K] sorted, the number of rows of each expert, and one weight [E, N, K]."""

    weight: Tensor

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Any:
        recipe = recipe_in_force(self, SPLIT)
        if recipe is None:
            return super().forward(inputs, expert_size)
        sizes = torch.as_tensor(expert_size, dtype=torch.int32, device=inputs.device)
        return Products(self, SPLIT, sizes.cumsum(0, dtype=torch.int32), recipe).by("weight", inputs, self.weight)


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
        products = Products(self, FLAT, ends_of(ids, w1.shape[0]), recipe)
        rows = x[order // choices]
        y = glu.activation_fn(products.by(FLAT[0], rows, w1)) * products.by(FLAT[1], rows, v1)
        y = products.by(FLAT[2], y, w2, turned=True) * weights.reshape(-1)[order].unsqueeze(-1)
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
        Alike,
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
