"""Mixture of experts as a replacement for an MLP: router, experts, and an optional shared expert for all tokens.

y = Σ over the k experts e that x is routed to of weight · expert[e](norm(x))  +  shared(norm(x))
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import takes
from quaver.recipes.spec import Recipe
from quaver.reference.moe import capacity_of, check_mixture_extras, check_permute
from quaver.torch.linear import stored_weight
from quaver.torch.linear.grouped.layer import NO_TRANSFORMS, GroupedLinear, Layout
from quaver.torch.linear.grouped.operands import RowInputOp
from quaver.torch.nn.activation import ActivationInputOp, get_activation, option_values
from quaver.torch.nn.mlp import MLP, ComposedBlock, PartOptions
from quaver.torch.nn.moe.permutation import ActivationRows, TokenRows, order, sum_choices
from quaver.torch.nn.moe.routing import Router, Routing, RoutingConfig
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.state.context import checkpoint

# ---- experts: MLPs stacked in two grouped linear layers ----
#
#     down[e](activation(up[e](x)))        or, gated,        down[e](f(gate[e](x)) · up[e](x))


@dataclass(frozen=True)
class ExpertsArguments:
    """Constructor arguments of `Experts`; see there."""

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
    """Expert MLPs: each token is processed by its chosen experts, whose outputs are summed with the token's weights.

    Args:
        experts: number of experts.
        dim: features of input and output.
        hidden: hidden features of each expert.
        activation, activation_options: as for `MLP`.
        bias: True for a bias in both linear layers.
        layout: layout of both weights, as for `GroupedLinear`.
        interleaved: gate and value rows alternate, as in gpt-oss, instead of gate first.
        pad: each expert's rows are padded with zeros to a multiple of it; see `permute`.
        codes_alone: if the recipe's blocks lie within a row, save tokens only as codes and compute the weight gradient
            from the dequantized codes; docs/blocks/experts.md describes the effect. False computes it from the tokens.
        eight_bit_activations: as for `MLP`.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `gate_up_proj`, the gate's rows first, or `up_proj`
            without a gate; and `down_proj`. Both are `GroupedLinear`.
    Exact: codes and scales equal those of each expert's tokens alone. The number of tokens per expert is not read on
    the host, so the GPU is not synchronized.
    """

    @takes(ExpertsArguments)
    def __init__(self, options: ExpertsArguments) -> None:
        super().__init__()
        check_permute((0, 1), True, options.experts, options.pad, None)
        gated = get_activation(options.activation).gated
        if options.interleaved and not gated:
            raise ValueError(
                f"activation {options.activation!r} has no gate, so it cannot be interleaved; leave interleaved out"
            )
        self.dim, self.hidden, self.activation = options.dim, options.hidden, options.activation
        self.pad, self.codes_alone = options.pad, options.codes_alone
        values = option_values(options.activation, options.activation_options or {})
        narrow = options.eight_bit_activations and gated
        self._activations = ActivationRows(ActivationInputOp(options.activation, values, narrow), options.interleaved)
        self._first_projections = "gate_up_proj" if gated else "up_proj"
        own: dict[str, Any] = {
            "recipe": options.recipe,
            "seed": options.seed,
            "layout": options.layout,
            "device": options.device,
            "dtype": options.dtype,
        }
        groups, dim, hidden = options.experts, options.dim, options.hidden
        self.register_module(
            self._first_projections, GroupedLinear(groups, dim, (2 if gated else 1) * hidden, options.bias, **own)
        )
        self.down_proj = GroupedLinear(groups, hidden, dim, options.bias, **own)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.down_proj.groups

    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        capacity: int | None = None,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Any:
        """Apply the experts to x [T, dim]; returns [T, dim].

        Args:
            x: tokens [T, dim].
            indices, weights: [T, k], from `route`.
            capacity: maximum number of choices per expert; see `permute`.
            meanwhile: function to run while rows are communicated, if experts are distributed over ranks. The method
                then returns (output, result of the function).
        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        x, k = self.checked(x, indices, capacity, self.experts), indices.shape[1]
        offsets, places, sources = order(indices, self.experts, self.pad, capacity)
        rows = self.on_rows(TokenRows(k, self.codes_alone), (x, sources, places), offsets)
        y = sum_choices(rows, sources, places, k, weights)
        return y if meanwhile is None else (y, meanwhile())

    def checked(self, x: Tensor, indices: Tensor, capacity: int | None, experts: int) -> Tensor:
        """Validate tokens and indices, and return the tokens in the dtype of the GEMMs.

        Args:
            x: tokens [T, dim].
            indices: [T, k].
            capacity: maximum number of choices per expert, or None.
            experts: number of experts that may be chosen.
        Raises:
            ValueError: shapes, dtypes or options that do not fit.
            NotImplementedError: a torch.func transform, or forward mode.
        """
        if not is_tracing():
            # Before the choices are sorted by a kernel, which would fail on a batched tensor.
            refuse_transforms(x, sentence=NO_TRANSFORMS)
        integers = indices.dtype in (torch.int64, torch.int32)
        check_permute(tuple(indices.shape), integers, experts, self.pad, capacity)
        if x.dim() != 2 or x.shape[1] != self.dim or x.shape[0] != indices.shape[0]:
            raise ValueError(
                f"experts of {self.dim} features got tokens of shape {tuple(x.shape)} and indices "
                f"{tuple(indices.shape)}; give [T, {self.dim}] and [T, k] of the same tokens"
            )
        device = ops.autocast_device(x)
        if torch.is_autocast_enabled(device) and x.dtype in ops.DTYPES:
            return x.to(torch.get_autocast_dtype(device))
        down: Any = self._modules["down_proj"]
        own = down.weight_dtype or down.weight.dtype
        if down.weight_spec is not None:
            stored_weight.check_stored(down, down.weight)
            if x.dtype is not own:
                raise ValueError(
                    f"experts have weights stored as codes of {own} and got {x.dtype} tokens; convert the tokens, "
                    f"enter torch.autocast, or call model.to({x.dtype}) before it is sharded: a "
                    "MixedPrecisionPolicy does not cast codes"
                )
        if x.dtype is not own:
            raise ValueError(
                f"experts have {own} weights and got {x.dtype} tokens; convert the tokens, or enter torch.autocast"
            )
        return x

    def on_rows(self, rows: RowInputOp, taken: Sequence[Tensor | None], offsets: Tensor) -> Tensor:
        """Apply the experts to rows that the first GEMM's input op creates; returns [rows, dim].

        Args:
            rows, taken: input op and its tensors, as for `GroupedLinear.project`.
            offsets: int32 [experts], end of each expert's rows.
        """
        first_projections: Any = self._modules[self._first_projections]
        return self._rest(first_projections.project(rows, taken, offsets), offsets)

    def _rest(self, h: Tensor, offsets: Tensor) -> Tensor:
        down: Any = self._modules["down_proj"]
        y: Tensor = down.project(self._activations, (h,), offsets)
        return y

    def extra_repr(self) -> str:
        shown = {"pad": self.pad} if self.pad != 1 else {}
        flags = {
            "codes_alone": self.codes_alone,
            "interleaved": self._activations.interleaved,
            "eight_bit_activations": self._activations.op.eight_bits,
        }
        shown |= {name: value for name, value in flags.items() if value}
        return f"activation={self.activation!r}" + "".join(f", {name}={value}" for name, value in shown.items())


# ---- mixture of experts ----


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(RoutingConfig):
    """Options of a mixture of experts beyond those of an MLP: routing, shared expert and layout."""

    # Hidden features of the shared MLP, 0 for none. DeepSeek's n shared experts equal one MLP of n times the features.
    shared: int = 0
    # Multiply the shared MLP's output by a sigmoid gate per token, as in Qwen2-MoE.
    shared_gate: bool = False
    # Gate and up of the shared MLP are one matrix.
    shared_fused: bool = True
    # Capacity of an expert as a multiple of an even share of the choices, rounded up; None for no limit.
    capacity: float | None = None
    # Return (output, `Routing`) instead of the output, for losses and counts.
    return_routing: bool = False
    # Options of `Experts`.
    layout: Layout = "nk"
    interleaved: bool = False
    pad: int = 1
    codes_alone: bool = False

    def check(self) -> None:
        super().check()
        check_mixture_extras(self.shared, self.shared_gate, self.capacity)

    def capacity_of(self, tokens: int) -> int | None:
        """Return the maximum number of choices per expert for this many tokens, at least 1, or None."""
        return capacity_of(self.capacity, tokens, self.k, self.experts)


@dataclass(frozen=True)
class MoEArguments(PartOptions):
    """Constructor arguments of `MoE`; see there."""

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
    """Mixture of experts with an optional shared expert and an optional norm in front.

    Args:
        dim: features of input and output.
        hidden: hidden features of each expert.
        mixture: a `MixtureConfig` with the number of experts, the routing, and all other options that an MLP lacks.
        activation, activation_options, eight_bit_activations: as for `MLP`; also for the shared expert.
        bias: True for a bias in all linear layers but the router, which has `MixtureConfig.router_bias`.
        normalization: "LayerNorm", "RMSNorm" or None; with eps, zero_centered and norm_bias.
        recompute: save only x for backward and recompute everything else.
        recipe, seed: as for `quaver.torch.Linear`. The router and the shared gate stay in high precision. Attribute:
            `return_routing`, True if a call returns (output, `Routing`); it may be set at any time. Submodules: `norm`
            if there is one; `router`; `experts`; `shared`, an `MLP`; `shared_gate`, a `SigmoidGate`.
    Exact: the codes and scales equal those of calling the parts one after the other.
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
        """Apply the mixture to x [..., dim]; returns the same shape, with `return_routing` (output, `Routing` of all
        tokens).
        """
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
        arguments = tokens, routing.indices, routing.weights, self.mixture.capacity_of(tokens.shape[0])
        if parts["shared"] is None:
            y = parts["experts"](*arguments)
        else:
            y, z = parts["experts"](*arguments, partial(self._shared, tokens))
            y = y + z
        return y.view(x.shape), *routing

    def _shared(self, tokens: Tensor) -> Tensor:
        """Apply the shared expert and its gate to all tokens."""
        parts: Any = self._modules
        z: Tensor = parts["shared"](tokens)
        gate = parts["shared_gate"]
        return z if gate is None else z * gate(tokens).to(z.dtype)

    def extra_repr(self) -> str:
        shown = {"capacity": self.mixture.capacity, "recompute": self.recompute or None}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class SigmoidGate(nn.Module):
    """Sigmoid of a linear function of each token, [T, dim] to [T, 1], in high precision under every recipe.

    Parameter: `weight` [1, dim], initialized as nn.Linear's.
    """

    weight: nn.Parameter

    def __init__(self, dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((1, dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight as nn.Linear does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(ops.autocast_device(tokens), enabled=False):
            return torch.sigmoid(tokens.to(wide) @ self.weight.to(wide).t())
