"""The MLP of a Transformer block, with an optional norm in front.

    down(activation(up(norm(x))))        or, gated,        down(f(gate(norm(x))) · up(norm(x)))

When quantized, backward saves x and the norm's statistics, norm(x) in eight bits, and the input of the activation. The
activation's output is recomputed and quantized again to the same bits, unless it is small.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.options import checks, takes
from quaver.recipes.spec import Recipe
from quaver.torch.linear.fused_projections import project
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.activation import ActivationInputOp, get_activation, option_values
from quaver.torch.nn.norm import NormOptions, named, normalized_projections
from quaver.torch.state.context import checkpoint
from quaver.torch.state.layer_state import state_of

# ---- norm and the linear layers that read its output ----


@dataclass(frozen=True, kw_only=True)
class PartOptions(NormOptions):
    """Options of a norm and the linear layers after it."""

    bias: bool = True
    # q, k and v are one matrix, and so are gate and up.
    fused: bool = True
    recipe: str | Recipe | None = None
    # Seed of stochastic rounding.
    seed: int = 0

    def linear(self, in_features: int, out_features: int, bias: bool | None = None) -> Linear:
        """Return a linear layer with these options; bias=None uses the option `bias`."""
        bias = self.bias if bias is None else bias
        return Linear(in_features, out_features, bias, recipe=self.recipe, seed=self.seed, **self.like)


class ComposedBlock(nn.Module):
    """Base class of blocks that consist of submodules and have no parameters of their own."""

    def reset_parameters(self) -> None:
        """Reset the parameters of each submodule."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]


class LayerNormLinear(ComposedBlock):
    """Linear(norm(x)), which saves for backward only the operand of the GEMM, not norm(x) in high precision.

    Args:
        in_features, out_features, bias: of the linear layer.
        normalization, eps, zero_centered, norm_bias: of the norm.
        return_normalized: return (output, norm(x)) instead of the output.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `norm` and `linear`.
    Exact: the same bits as calling one after the other.
    """

    @checks
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        norm_bias: bool = True,
        return_normalized: bool = False,
        recipe: str | Recipe | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.norm = named(normalization, in_features, eps, zero_centered=zero_centered, bias=norm_bias, **like)
        self.linear = Linear(in_features, out_features, bias, recipe=recipe, seed=seed, **like)
        self.return_normalized = return_normalized

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        parts: Any = self._modules
        outputs = normalized_projections(parts["norm"], x, (parts["linear"],), self.return_normalized)
        return (outputs[1], outputs[0]) if self.return_normalized else outputs[0]


# ---- MLP ----


@dataclass(frozen=True, kw_only=True)
class MLPOptions(PartOptions):
    """Options of an MLP."""

    # Options of the activation, such as {"limit": 7.0}.
    activation_options: Mapping[str, float] | None = None
    # Save the input of a gated activation in eight bits.
    eight_bit_activations: bool = False


@dataclass(frozen=True)
class MLPArguments(MLPOptions):
    """Constructor arguments of `MLP`; see there."""

    dim: int
    hidden: int
    activation: str = "gelu"
    _: KW_ONLY
    # Save only x for backward and recompute everything else.
    recompute: bool = False
    # Also return norm(x).
    return_normalized: bool = False


class MLP(ComposedBlock):
    """MLP with an optional gate and an optional norm in front: down(activation(up(x))).

    Args:
        dim: features of input and output.
        hidden: hidden features.
        activation: a name in `quaver.torch.nn.activation.ACTIVATIONS`.
        activation_options: options of the activation, such as {"limit": 7.0}.
        bias: True for a bias in both linear layers.
        fused: gate and up are one matrix `gate_up_proj`, the gate's rows first; else `gate_proj` and `up_proj`.
        normalization: "LayerNorm", "RMSNorm" or None; with eps, zero_centered and norm_bias.
        eight_bit_activations: also save the input of a gated activation in eight bits. Outputs are unchanged;
            docs/blocks/mlp.md gives the error of the gradients.
        recompute: save only x for backward and recompute everything else.
        return_normalized: return (output, norm(x)) instead of the output.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `norm` if there is one; `up_proj`, with `gate_proj`, or
            `gate_up_proj`; `down_proj`.
    Exact: the codes and scales equal those of calling the parts one after the other.
    """

    return_normalized = False

    @takes(MLPArguments)
    def __init__(self, options: MLPArguments) -> None:
        super().__init__()
        dim, hidden, activation = options.dim, options.hidden, options.activation
        gated = get_activation(activation).gated
        self.dim, self.activation = dim, activation
        self.recompute = options.recompute
        if options.return_normalized:
            self.return_normalized = True
        # The input of an ungated activation is as wide as its output, whose codes would be saved as well: no gain.
        narrow = options.eight_bit_activations and gated
        self._input_op = ActivationInputOp(
            activation, option_values(activation, options.activation_options or {}), narrow
        )
        self.register_module("norm", options.norm(dim))
        if gated and options.fused:
            self.gate_up_proj = options.linear(dim, 2 * hidden)
            state_of(self.gate_up_proj).pieces = {"gate_proj": hidden, "up_proj": hidden}
        else:
            if gated:
                self.gate_proj = options.linear(dim, hidden)
            self.up_proj = options.linear(dim, hidden)
        self.down_proj = options.linear(hidden, dim)
        self._first_projections = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if name in self._modules]

    def forward(self, x: Tensor) -> Any:
        """Return the MLP of x [..., dim], of the same shape; with return_normalized (output, norm(x))."""
        if not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(
                f"MLP({self.dim}) got an input of shape {tuple(x.shape)}; its last axis must be {self.dim}"
            )
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Any:
        parts: Any = self._modules
        first_projections = [parts[name] for name in self._first_projections]
        outputs = normalized_projections(parts["norm"], x, first_projections, self.return_normalized)
        inner = outputs[1:] if self.return_normalized else outputs
        (y,) = project(self._input_op, inner, (parts["down_proj"],))
        return (y, outputs[0]) if self.return_normalized else y

    def extra_repr(self) -> str:
        narrow = ", eight_bit_activations=True" * self._input_op.eight_bits
        return f"activation={self.activation!r}{narrow}" + ", recompute=True" * self.recompute


@dataclass(frozen=True, kw_only=True)
class LayerNormMLPArguments(MLPArguments):
    """Constructor arguments of `LayerNormMLP`; see there."""

    normalization: str | None = "LayerNorm"


class LayerNormMLP(MLP):
    """An `MLP` with LayerNorm in front by default. Arguments as for `MLP`."""

    @takes(LayerNormMLPArguments)
    def __init__(self, options: LayerNormMLPArguments) -> None:
        super().__init__(**vars(options))
