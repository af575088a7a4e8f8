"""A mixture of experts in the place of an MLP: a router, experts, and an MLP that every token goes through besides.

y = Σ over the k experts e that x chose of weight · expert[e](norm(x))  +  shared(norm(x))
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import takes
from quaver.recipes.spec import Recipe
from quaver.reference.moe import check_permute
from quaver.torch.linear import stored_weight
from quaver.torch.linear.grouped.layer import GroupedLinear, Layout
from quaver.torch.linear.grouped.operands import RowInputOp
from quaver.torch.nn.activation import ActivationInputOp, get_activation, option_values
from quaver.torch.nn.mlp import MLP, ComposedBlock, PartOptions
from quaver.torch.nn.moe.permutation import ActivationRows, TokenRows, order, unpermute
from quaver.torch.nn.moe.routing import Router, Routing, RoutingConfig
from quaver.torch.operations import ops
from quaver.torch.state.context import checkpoint

# ---- stack -----------------------------------------------------------------------------------------------
# Many MLPs of one kind in two stacks of matrices, each of which sees the tokens that chose it.
#
# down[e](activation(up[e](x)))        or, gated,        down[e](f(gate[e](x)) · up[e](x))


@dataclass(frozen=True)
class ExpertsArguments:
    """The arguments of `Experts`, which says what they are."""

    experts: int
    dim: int
    hidden: int
    activation: str = "swiglu"
    _: KW_ONLY
    activation_options: Mapping[str, float] | None = None
    bias: bool = False
    layout: Layout = "nk"
    interleaved: bool = False
    pad: int = 1
    codes_alone: bool = False
    eight_bit_activations: bool = False
    recipe: str | Recipe | None = None
    seed: int = 0
    device: Any = None
    dtype: torch.dtype | None = None


class Experts(ComposedBlock):
    """MLPs of which each token goes through those that it chose, summed with its weights.

    Args:
        experts: how many.
        dim: features of input and output.
        hidden: features between, of each expert.
        activation, activation_options: as `MLP`.
        bias: of both matrices.
        layout: of both weights, as `GroupedLinear` takes it.
        interleaved: a gated activation's gate and value lie by turns, as gpt-oss has them, and not one after the other.
        pad: rows of each expert are filled with zeros up to a multiple of it; see `permute`.
        codes_alone: where the recipe's blocks lie within a row, keep tokens as codes alone, of whose values the
            weight's gradient is made; docs/blocks/experts.md has what that changes. Else it is made of the tokens.
        eight_bit_activations: as `MLP`.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `gate_up_proj`, the gate's rows first, or `up_proj` if there is no gate; `down_proj`; `GroupedLinear`s.
    Exact: codes and scales, those of each expert's tokens alone; nothing waits for how many each has.
    """

    @takes(ExpertsArguments)
    def __init__(self, options: ExpertsArguments) -> None:
        super().__init__()
        check_permute((0, 1), True, options.experts, options.pad, None)
        gated = get_activation(options.activation).gated
        if options.interleaved and not gated:
            raise ValueError(f"activation {options.activation!r} has no gate to be interleaved; leave interleaved out")
        self.dim, self.hidden, self.activation = options.dim, options.hidden, options.activation
        self.pad, self.codes_alone = options.pad, options.codes_alone
        values = option_values(options.activation, options.activation_options or {})
        narrow = options.eight_bit_activations and gated
        self._activations = ActivationRows(ActivationInputOp(options.activation, values, narrow), options.interleaved)
        self._entrance = "gate_up_proj" if gated else "up_proj"
        own: dict[str, Any] = {
            "recipe": options.recipe,
            "seed": options.seed,
            "layout": options.layout,
            "device": options.device,
            "dtype": options.dtype,
        }
        groups, dim, hidden = options.experts, options.dim, options.hidden
        self.register_module(
            self._entrance, GroupedLinear(groups, dim, (2 if gated else 1) * hidden, options.bias, **own)
        )
        self.down_proj = GroupedLinear(groups, hidden, dim, options.bias, **own)

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.down_proj.groups

    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        capacity: int | None = None,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Any:
        """x [T, dim] to [T, dim].

        Args:
            indices, weights: [T, k], as `route` gives them.
            capacity: choices that an expert takes at most; see `permute`.
            meanwhile: what may be computed while rows travel, where experts lie on several ranks: the output is
                (this one's, what it gives) then.
        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        x, k = self.checked(x, indices, capacity, self.experts), indices.shape[1]
        offsets, places, sources = order(indices, self.experts, self.pad, capacity)
        rows = self.on_rows(TokenRows(k, self.codes_alone), (x, sources, places), offsets)
        y = unpermute(rows, places, k, weights)
        return y if meanwhile is None else (y, meanwhile())

    def checked(self, x: Tensor, indices: Tensor, capacity: int | None, experts: int) -> Tensor:
        """Tokens in the dtype that products have.

        Args:
            experts: how many may be chosen.
        Raises:
            ValueError: what does not fit, in a sentence.
        """
        integers = indices.dtype in (torch.int64, torch.int32)
        check_permute(tuple(indices.shape), integers, experts, self.pad, capacity)
        if x.dim() != 2 or x.shape[1] != self.dim or x.shape[0] != indices.shape[0]:
            raise ValueError(
                f"experts of {self.dim} features got tokens {tuple(x.shape)} and indices {tuple(indices.shape)}; give "
                f"[T, {self.dim}] and [T, k] of the same tokens"
            )
        device = ops.autocast_device(x)
        if torch.is_autocast_enabled(device) and x.dtype in ops.DTYPES:
            return x.to(torch.get_autocast_dtype(device))
        down: Any = self._modules["down_proj"]
        own = down.weight_dtype or down.weight.dtype
        if down.weight_spec is not None:
            stored_weight.check_uncast(down, down.weight)
            if x.dtype is not own:
                raise ValueError(
                    f"experts have weights in codes of {own} and got {x.dtype} tokens; convert the tokens, enter "
                    f"torch.autocast, or call model.to({x.dtype}) before it is sharded: a MixedPrecisionPolicy casts "
                    "no codes"
                )
        if x.dtype is not own:
            raise ValueError(
                f"experts have {own} weights and got {x.dtype} tokens; convert the tokens, or enter torch.autocast"
            )
        return x

    def on_rows(self, rows: RowInputOp, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """[rows, dim] of rows that are made of some tensors inside of the first product.

        Args:
            rows, taken: as `GroupedLinear.project` takes them.
            offsets: int32 [experts], where each expert's rows end.
        """
        entrance: Any = self._modules[self._entrance]
        return self._rest(entrance.project(rows, taken, offsets), offsets)

    def _rest(self, h: Tensor, offsets: Tensor) -> Tensor:
        down: Any = self._modules["down_proj"]
        y: Tensor = down.project(self._activations, (h,), offsets)
        return y

    def extra_repr(self) -> str:
        shown = {"pad": self.pad} if self.pad != 1 else {}
        flags = {
            "codes_alone": self.codes_alone,
            "interleaved": self._activations.interleaved,
            "eight_bit_activations": self._activations.prologue.eight_bits,
        }
        shown |= {name: value for name, value in flags.items() if value}
        return f"activation={self.activation!r}" + "".join(f", {name}={value}" for name, value in shown.items())


# ---- mixture ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(RoutingConfig):
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
    mixture: MixtureConfig
    activation: str = "swiglu"
    _: KW_ONLY
    activation_options: Mapping[str, float] | None = None
    eight_bit_activations: bool = False
    bias: bool = False
    recompute: bool = False


class MoE(ComposedBlock):
    """Experts that each token chooses from, and perhaps a shared one, after a normalization if there is one.

    Args:
        dim: features of input and output.
        hidden: features between, of each expert.
        mixture: a `MixtureConfig`: how many experts, how tokens choose, and all else that an MLP has not.
        activation, activation_options, eight_bit_activations: as `MLP`, of the shared one too.
        bias: of all matrices but the router's, which has `MixtureConfig.router_bias`.
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
            gate = SigmoidGate(dim, **options.like)
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


class SigmoidGate(nn.Module):
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
