"""A whole layer: a Mamba-2 block, and perhaps an MLP, around the residual stream."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.core.options import pick, takes
from quaver.torch.blocks.mlp import MLP, MLPOptions
from quaver.torch.blocks.norm_linear import Parts
from quaver.torch.blocks.state_space.cache import StateCache
from quaver.torch.blocks.state_space.mamba2 import Mamba2, Mamba2Options
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations.sums import Fork, Join
from quaver.torch.state.checkpointing import checkpoint


@dataclass(frozen=True)
class Mamba2LayerArguments(Mamba2Options, MLPOptions):
    """The arguments of `Mamba2Layer`, which says what they are."""

    dim: int
    _: KW_ONLY
    # Features between the matrices of an MLP; None has no MLP.
    hidden: int | None = None
    activation: str = "swiglu"
    mlp_bias: bool | None = None
    normalization: str = "RMSNorm"
    residual_scale: float = 1.0
    residual_in_fp32: bool = False
    # None or "full".
    recompute: str | None = None


class Mamba2Layer(Parts):
    """x + mixer(norm(x)), a `Mamba2`, and, with `hidden`, an `MLP` after it in the same way.

    Args:
        dim: features of the residual stream.
        inner, head_dim, state, groups, taps, conv_bias, conv_activation, gate, gate_groups, gate_eps: of the block; see
            `Mamba2`. dt_limit, dt_range, A_range, chunk_size: likewise.
        hidden, activation, activation_options, fused, eight_bit_activations: of the MLP; see `MLP`. hidden None: none.
        normalization: "RMSNorm" or "LayerNorm", at the entrance of both; with eps, zero_centered and norm_bias.
        bias: of all matrices; out_bias: of the block's last one; mlp_bias: of the MLP, where they differ from it.
        residual_scale: each part's output is multiplied by it before it is added.
        residual_in_fp32: the stream is float32, whatever the parts compute in.
        recompute: "full" makes everything again in backward.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `mixer`, `mlp` or None, each with its `norm` inside.
    Raises:
        ValueError: options that do not fit.
    """

    @takes(Mamba2LayerArguments)
    def __init__(self, options: Mamba2LayerArguments) -> None:
        super().__init__()
        if options.recompute not in (None, "full"):
            raise ValueError(f"recompute is {options.recompute!r}; give None or 'full'")
        self.recompute, self.residual_scale = options.recompute, options.residual_scale
        self.residual_in_fp32 = options.residual_in_fp32
        self.mixer = Mamba2(options.dim, **pick(Mamba2Options, options))
        mlp: MLP | None = None
        if options.hidden is not None:
            bias = options.bias if options.mlp_bias is None else options.mlp_bias
            mlp = MLP(options.dim, options.hidden, options.activation, **pick(MLPOptions, options) | {"bias": bias})
        self.register_module("mlp", mlp)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: StateCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """x [B, S, dim], or with cu_seqlens [T, dim], to the same; arguments as of `Mamba2`."""
        if cache is None and self.recompute == "full" and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._forward, x, mask=mask, cu_seqlens=cu_seqlens)
            return y
        return self._forward(x, mask=mask, cu_seqlens=cu_seqlens, cache=cache, layer=layer)

    def _forward(self, x: Tensor, **of_mixer: Any) -> Tensor:
        parts: Any = self._modules
        x, h = self._branch(x)
        x = self._add(x, parts["mixer"](h, **of_mixer))
        if parts["mlp"] is None:
            return x
        x, h = self._branch(x)
        return self._add(x, parts["mlp"](h))

    def _branch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream, and what a part reads of it."""
        x, h = Fork.apply(x, 2) if is_tracing() else (x, x)
        if not self.residual_in_fp32:
            return x, h
        weight = self.mixer.in_proj.weight.dtype
        narrow = weight if weight.is_floating_point and weight.itemsize > 1 else h.dtype
        return x.to(torch.promote_types(x.dtype, torch.float32)), h.to(narrow)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        y = y if self.residual_scale == 1.0 else y * self.residual_scale
        return Join.apply(x, y) if is_tracing() else x + y

    def extra_repr(self) -> str:
        options = {"residual_scale": self.residual_scale, "residual_in_fp32": self.residual_in_fp32}
        usual = {"residual_scale": 1.0, "residual_in_fp32": False, "recompute": None}
        every = options | {"recompute": self.recompute}
        return ", ".join(f"{name}={value!r}" for name, value in every.items() if value != usual[name])
