"""The MLP of a Transformer block, with the normalization before it.

    down(activation(up(norm(x))))        or, gated,        down(f(gate(norm(x))) · up(norm(x)))

Kept for backward of a quantized one: x and the norm's statistics, norm(x) in eight bits, and what goes into the
activation; its result is made again, and quantized again to the same bits, unless it is small.
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

# ---- norm linear -----------------------------------------------------------------------------------------
# A normalization and the linear layers that read its output: at the entrance of attention, of an MLP, of a head.


@dataclass(frozen=True, kw_only=True)
class PartOptions(NormOptions):
    """Of a normalization and the linear layers behind it."""

    bias: bool = True
    # q, k and v are one matrix, and so are gate and up.
    fused: bool = True
    recipe: str | Recipe | None = None
    # Of stochastic rounding.
    seed: int = 0

    def linear(self, in_features: int, out_features: int, bias: bool | None = None) -> Linear:
        """One of the linear layers; bias: None is as the others'."""
        bias = self.bias if bias is None else bias
        return Linear(in_features, out_features, bias, recipe=self.recipe, seed=self.seed, **self.like)


class ComposedBlock(nn.Module):
    """A block that is made of modules and has no parameter of its own."""

    def reset_parameters(self) -> None:
        """Each part as it begins by itself."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]


class LayerNormLinear(ComposedBlock):
    """Linear(norm(x)), of whose normalized input only what the GEMM consumed is kept for backward.

    Args:
        in_features, out_features, bias: of the linear layer.
        normalization, eps, zero_centered, norm_bias: of the `Norm`.
        return_normalized: give (output, norm(x)) instead of the output.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `norm` and `linear`; the same bits as calling one after the other.
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


# ---- mlp -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MLPOptions(PartOptions):
    """Of the MLP."""

    # Such as {"limit": 7.0}.
    activation_options: Mapping[str, float] | None = None
    # Keep what goes into a gated activation in eight bits.
    eight_bit_activations: bool = False


@dataclass(frozen=True)
class MLPArguments(MLPOptions):
    """The arguments of `MLP`, which says what they are."""

    dim: int
    hidden: int
    activation: str = "gelu"
    _: KW_ONLY
    # Keep only x for backward.
    recompute: bool = False
    # Give norm(x), too.
    return_normalized: bool = False


class MLP(ComposedBlock):
    """down(activation(up(x))), with a gate where the activation has one, and perhaps a normalization before.

    Args:
        dim: features of input and output.
        hidden: features between.
        activation: a row of `quaver.torch.nn.activation.ACTIVATIONS`.
        activation_options: of the activation, such as {"limit": 7.0}.
        bias: of both matrices.
        fused: gate and up are one matrix `gate_up_proj`, the gate's rows first; else `gate_proj` and `up_proj`.
        normalization: "LayerNorm", "RMSNorm" or None; with eps, zero_centered and norm_bias.
        eight_bit_activations: keep what goes into a gated activation in eight bits too. Outputs are the same;
            docs/blocks/mlp.md has the error of the gradients.
        recompute: keep only x for backward, and make everything else again.
        return_normalized: give (output, norm(x)) instead of the output.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `norm` if there is one; `up_proj`, with `gate_proj`, or `gate_up_proj`; `down_proj`.
    Exact: the codes and scales of the parts called one after the other.
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
        # What goes into a plain activation is as wide as what comes out, whose codes would be kept beside it.
        narrow = options.eight_bit_activations and gated
        self._prologue = ActivationInputOp(
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
        self._entrance = [name for name in ("gate_up_proj", "gate_proj", "up_proj") if name in self._modules]

    def forward(self, x: Tensor) -> Any:
        """x [..., dim] to [..., dim]; and norm(x) if return_normalized."""
        if not x.dim() or x.shape[-1] != self.dim:
            raise ValueError(
                f"MLP({self.dim}) got an input of shape {tuple(x.shape)}; its last axis must be {self.dim}"
            )
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Any:
        parts: Any = self._modules
        entrance = [parts[name] for name in self._entrance]
        then = self._prologue, (parts["down_proj"],)
        if self.return_normalized:
            normalized, *inner = normalized_projections(parts["norm"], x, entrance, True)
            return project(then[0], inner, then[1])[0], normalized
        return normalized_projections(parts["norm"], x, entrance, then=then)[0]

    def extra_repr(self) -> str:
        narrow = ", eight_bit_activations=True" * self._prologue.eight_bits
        return f"activation={self.activation!r}{narrow}" + ", recompute=True" * self.recompute


@dataclass(frozen=True, kw_only=True)
class LayerNormMLPArguments(MLPArguments):
    """The arguments of `LayerNormMLP`."""

    normalization: str | None = "LayerNorm"


class LayerNormMLP(MLP):
    """An `MLP` after a normalization; arguments as those of `MLP`."""

    @takes(LayerNormMLPArguments)
    def __init__(self, options: LayerNormMLPArguments) -> None:
        super().__init__(**vars(options))
