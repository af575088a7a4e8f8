"""A mixture of experts in the place of an MLP: a router, experts, and an MLP that every token goes through besides.

y = Σ over the k experts e that x chose of weight · expert[e](norm(x))  +  shared(norm(x))
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.options import takes
from quaver.torch.blocks.experts.router import Choice, Router
from quaver.torch.blocks.experts.routing import Routing
from quaver.torch.blocks.experts.stack import Experts
from quaver.torch.blocks.mlp import MLP
from quaver.torch.blocks.norm_linear import PartOptions, Parts
from quaver.torch.linear.grouped.layer import Layout
from quaver.torch.operations import ops
from quaver.torch.state.checkpointing import checkpoint


@dataclass(frozen=True, kw_only=True)
class Mixture(Choice):
    """The options of a mixture of experts beyond those of an MLP: how tokens choose, and what is made of it."""

    # Hidden features of the shared MLP, 0 for none; DeepSeek's n shared experts are one of n times an expert's.
    shared: int = 0
    # The shared MLP's output is multiplied by the sigmoid of a product of each token, as Qwen2-MoE's.
    shared_gate: bool = False
    # Of the shared MLP: gate and up are one matrix.
    shared_fused: bool = True
    # Choices that an expert takes are this times an even share, rounded up; None takes all.
    capacity: float | None = None
    # Give (output, `Routing`) instead of the output, for losses and counts.
    return_routing: bool = False
    # Of `Experts`.
    layout: Layout = "nk"
    interleaved: bool = False
    pad: int = 1
    codes_alone: bool = False

    def check(self) -> None:
        super().check()
        if self.shared < 0 or (self.shared_gate and not self.shared):
            raise ValueError(
                f"shared is {self.shared}, the hidden features of an MLP that every token goes through: give some, or "
                "0 and no shared_gate"
            )
        if self.capacity is not None and not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ValueError(
                f"capacity is {self.capacity}, which drops every token: an expert takes that many times an even share; "
                "give more than 0, such as 1.25, or None"
            )

    def capacity_of(self, tokens: int) -> int | None:
        """Choices that an expert takes of so many tokens: one at least."""
        if self.capacity is None:
            return None
        # Of whole numbers alone, which compilers follow for any number of tokens.
        parts, of = Fraction(self.capacity).limit_denominator(1 << 16).as_integer_ratio()
        return max(1, -(-parts * tokens * self.k // (of * self.experts)))


@dataclass(frozen=True)
class MoEArguments(PartOptions):
    """The arguments of `MoE`, which says what they are."""

    dim: int
    hidden: int
    mixture: Mixture
    activation: str = "swiglu"
    _: KW_ONLY
    activation_options: Mapping[str, float] | None = None
    eight_bit_activations: bool = False
    bias: bool = False
    recompute: bool = False


class MoE(Parts):
    """Experts that each token chooses from, and perhaps a shared one, after a normalization if there is one.

    Args:
        dim: features of input and output.
        hidden: features between, of each expert.
        mixture: a `Mixture`: how many experts, how tokens choose, and all else that an MLP has not.
        activation, activation_options, eight_bit_activations: as `MLP`, of the shared one too.
        bias: of all matrices but the router's, which has `Mixture.router_bias`.
        normalization: "LayerNorm", "RMSNorm" or None; with eps, zero_centered and norm_bias.
        recompute: keep only x for backward, and make everything else again.
        recipe, seed: as `quaver.torch.Linear`. The router and the shared gate are in high precision.
    Attribute: `return_routing`, whether a call gives (output, `Routing`); it may be set at any time.
    Submodules: `norm` if there is one; `router`; `experts`; `shared`, an `MLP`; `shared_gate`, a `Gate`.
    Exact: the codes and scales of the parts called one after the other.
    """

    @takes(MoEArguments)
    def __init__(self, options: MoEArguments) -> None:
        super().__init__()
        mixture, dim, hidden = options.mixture, options.dim, options.hidden
        mixture.check()
        self.dim, self.mixture, self.recompute = dim, mixture, options.recompute
        self.return_routing = mixture.return_routing
        own: dict[str, Any] = {
            "activation_options": options.activation_options,
            "eight_bit_activations": options.eight_bit_activations,
            "bias": options.bias,
            "recipe": options.recipe,
            "seed": options.seed,
        }
        self.register_module("norm", options.norm(dim))
        self.router = Router(dim, mixture, **options.like)
        self.experts = Experts(
            mixture.experts,
            dim,
            hidden,
            options.activation,
            layout=mixture.layout,
            interleaved=mixture.interleaved,
            pad=mixture.pad,
            codes_alone=mixture.codes_alone,
            **own,
            **options.like,
        )
        shared = gate = None
        if mixture.shared:
            own |= {"fused": mixture.shared_fused}
            shared = MLP(dim, mixture.shared, options.activation, **own, **options.like)
        if mixture.shared_gate:
            gate = Gate(dim, **options.like)
        self.register_module("shared", shared)
        self.register_module("shared_gate", gate)

    def forward(self, x: Tensor) -> Any:
        """x [..., dim] to [..., dim]; and the `Routing` of all tokens while `return_routing` is set."""
        if not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(
                f"MoE({self.dim}) got an input of shape {tuple(x.shape)}; its last axis must be {self.dim}"
            )
        if self.recompute and torch.is_grad_enabled():
            y, *routing = checkpoint(self._forward, x)
        else:
            y, *routing = self._forward(x)
        return (y, Routing(*routing)) if self.return_routing else y

    def _forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: Any = self._modules
        x = x if parts["norm"] is None else parts["norm"](x)
        tokens = x.reshape(-1, self.dim)
        routing: Routing = parts["router"](tokens)
        asked = tokens, routing.indices, routing.weights, self.mixture.capacity_of(tokens.shape[0])
        if parts["shared"] is None:
            y = parts["experts"](*asked)
        else:
            y, z = parts["experts"](*asked, partial(self._shared, tokens))
            y = y + z
        return y.view(x.shape), *routing

    def _shared(self, tokens: Tensor) -> Tensor:
        """What every token goes through."""
        parts: Any = self._modules
        z: Tensor = parts["shared"](tokens)
        gate = parts["shared_gate"]
        return z if gate is None else z * gate(tokens).to(z.dtype)

    def extra_repr(self) -> str:
        shown = {"capacity": self.mixture.capacity, "recompute": self.recompute or None}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class Gate(nn.Module):
    """The sigmoid of a product of each token, [T, dim] to [T, 1], in high precision under every recipe.

    Parameter: `weight` [1, dim], which begins as nn.Linear's.
    """

    weight: nn.Parameter

    def __init__(self, dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((1, dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight as nn.Linear does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(ops.autocast_device(tokens), enabled=False):
            return torch.sigmoid(tokens.to(wide) @ self.weight.to(wide).t())
