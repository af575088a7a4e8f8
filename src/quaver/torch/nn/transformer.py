"""`TransformerLayer`: attention, optional cross attention, and an MLP or mixture of experts on the residual stream."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.options import pick, takes
from quaver.recipes.text import check_name
from quaver.torch.nn.attention.inputs import Window
from quaver.torch.nn.attention.kv_cache import KVCache, PagedKVCache
from quaver.torch.nn.attention.latent import LatentAttention, LatentConfig, LatentOptions
from quaver.torch.nn.attention.multihead import AttentionOptions, MultiheadAttention
from quaver.torch.nn.attention.rope import RotaryEmbedding
from quaver.torch.nn.mlp import MLP, ComposedBlock, MLPOptions
from quaver.torch.nn.moe.layers import MixtureConfig, MoE
from quaver.torch.nn.moe.routing import Routing
from quaver.torch.nn.norm import check_normalization
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.autograd import Fork, Join
from quaver.torch.state.context import checkpoint

#: Placement of the norms. "pre": x + part(norm(x)). "post": norm(x + part(x)). "sandwich": x + norm(part(norm(x))).
#: "res_post": x + norm(part(x)), of Swin V2 (arXiv:2111.09883), OLMo 2 (arXiv:2501.00656) and EXAONE 4.
NORM_POSITIONS = ("pre", "post", "sandwich", "res_post")
#: Placements with a norm before each part.
BEFORE = ("pre", "sandwich")
#: Names of the options that latent attention supports.
LATENT = {field.name for field in fields(LatentOptions)}
#: Values of `recompute`: nothing, the MLP or the whole layer is recomputed in backward.
RECOMPUTE = (None, "mlp", "full")


@dataclass(frozen=True)
class TransformerArguments(AttentionOptions, MLPOptions):
    """Constructor arguments of `TransformerLayer`; see there."""

    dim: int
    heads: int
    hidden: int
    _: KW_ONLY
    activation: str = "gelu"
    normalization: str = "LayerNorm"
    norm_position: str = "pre"
    parallel: bool | str = False
    # Sizes of multi-head latent attention, which replaces multi-head attention; or None.
    latent: LatentConfig | None = None
    # Options of a mixture of experts, which replaces the MLP; or None.
    mixture: MixtureConfig | None = None
    cross_attention: bool = False
    memory_dim: int | None = None
    mask_type: str = "causal"
    cross_mask_type: str = "none"
    # Biases of attention and MLP; None uses `bias`.
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    # Dropout of each part's output, and of the attention probabilities.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    residual_scale: float = 1.0
    # The residual is the output of each part's norm instead of its input.
    residual_from_norm: bool = False
    # None, "mlp" or "full".
    recompute: str | None = None

    @property
    def one_norm(self) -> bool:
        """True if attention and MLP share one norm."""
        return bool(self.parallel) and not isinstance(self.parallel, str)

    @property
    def part_normalization(self) -> str | None:
        """Name of the norm inside each part, or None."""
        return self.normalization if self.norm_position in BEFORE and not self.one_norm else None

    @property
    def of_attention(self) -> dict[str, Any]:
        bias = self.bias if self.attention_bias is None else self.attention_bias
        own = {"normalization": self.part_normalization, "bias": bias, "dropout": self.attention_dropout}
        return pick(AttentionOptions, self) | own | {"return_normalized": self.residual_from_norm}

    @property
    def of_latent_attention(self) -> dict[str, Any]:
        return {name: value for name, value in self.of_attention.items() if name in LATENT}

    @property
    def of_cross_attention(self) -> dict[str, Any]:
        """Options of the cross attention: those of attention without positions, distances, head norms and sinks."""
        names = (
            *("window", "chunk", "alibi", "sinks", "rope", "temperature", "position_bias"),
            *("qk_norm", "qk_norm_eps", "qk_norm_after_rope", "qk_norm_scope"),
        )
        own = {name: getattr(AttentionOptions, name) for name in names} | {"mask_type": self.cross_mask_type}
        return self.of_attention | own | {"memory_dim": self.dim if self.memory_dim is None else self.memory_dim}

    @property
    def of_mlp(self) -> dict[str, Any]:
        bias = self.bias if self.mlp_bias is None else self.mlp_bias
        own = {"normalization": self.part_normalization, "bias": bias, "recompute": self.recompute == "mlp"}
        return pick(MLPOptions, self) | own | {"return_normalized": self.residual_from_norm}

    @property
    def of_mixture(self) -> dict[str, Any]:
        """Options of the mixture: those of the MLP except `fused`; gate and up are one matrix."""
        return {name: value for name, value in self.of_mlp.items() if name not in ("fused", "return_normalized")}


class TransformerLayer(ComposedBlock):
    """Transformer layer: encoder (mask_type "none" or "padding"), decoder ("causal"), or decoder with cross attention.

    Args:
        dim: features of the residual stream.
        heads, groups, head_dim, rope, temperature, position_bias: of the attention; see `MultiheadAttention`.
        qk_norm, qk_norm_eps, qk_norm_after_rope, qk_norm_scope: likewise.
        mask_type, window, chunk, scale, soft_cap, sinks, alibi, layout: likewise.
        hidden, activation, activation_options, eight_bit_activations: of the MLP; see `MLP`.
        mixture: a `MixtureConfig`; the MLP is then a `MoE` of experts with `hidden` features each.
        latent: a `LatentConfig`; attention is then a `LatentAttention`, which supports only some attention options.
        normalization: "LayerNorm" or "RMSNorm"; with eps, zero_centered and norm_bias.
        norm_position: one of `NORM_POSITIONS`.
        parallel: attention and MLP read the same x, and both outputs are added. True: they share one norm (GPT-J,
            Falcon, Cohere). "two_norms": each has its own (GPT-NeoX, Falcon 40B).
        cross_attention: True adds attention to a memory between attention and MLP.
        memory_dim: features of the memory; None is dim.
        cross_mask_type: mask type of the cross attention.
        bias: True for a bias in every linear layer.
        attention_bias, key_bias, out_bias, mlp_bias: override `bias` for attention, its keys, its output, and the MLP.
        fused: q, k and v are one matrix, and so are gate and up.
        dropout: of each part's output.
        attention_dropout: of the attention probabilities.
        drop_path: probability of dropping a part's output for a whole sample (arXiv:1603.09382).
        residual_scale: factor of each part's output before it is added.
        residual_from_norm: n + part(n) with n = norm(x) instead of x + part(norm(x)): Megatron-LM's and BLOOM's
            apply_residual_connection_post_layernorm. Requires norm_position "pre".
        recompute: "mlp" recomputes the MLP in backward instead of saving its activations, "full" the whole layer.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `attention`, `cross_attention`, `mlp`, each with its
            `norm` inside; `norm` if parallel is True;
        `attention_post_norm`, `cross_attention_post_norm` and `mlp_post_norm` for "post", "sandwich" and "res_post".
    Raises:
        ValueError: incompatible options or unknown names.
    """

    residual_from_norm = False

    #: Dropout function for the parts' outputs; context parallelism replaces it.
    drop: Callable[[Tensor, float], Tensor] = staticmethod(F.dropout)

    @takes(TransformerArguments)
    def __init__(self, options: TransformerArguments) -> None:
        super().__init__()
        _check(options)
        parallel = options.parallel
        self.parallel = parallel if isinstance(parallel, str) else bool(parallel)
        self.norm_position = options.norm_position
        self.recompute, self.layout = options.recompute, options.layout
        self.dropout, self.drop_path, self.residual_scale = options.dropout, options.drop_path, options.residual_scale
        if options.residual_from_norm:
            self.residual_from_norm = True
        dim, heads = options.dim, options.heads
        self.register_module("norm", options.norm(dim) if options.one_norm else None)
        self.attention: MultiheadAttention | LatentAttention
        if options.latent is None:
            self.attention = MultiheadAttention(dim, heads, **options.of_attention)
        else:
            self.attention = LatentAttention(dim, heads, options.latent, **options.of_latent_attention)
        cross = MultiheadAttention(dim, heads, **options.of_cross_attention) if options.cross_attention else None
        self.register_module("cross_attention", cross)
        self.mlp: MLP | MoE
        if options.mixture is None:
            self.mlp = MLP(dim, options.hidden, options.activation, **options.of_mlp)
        else:
            self.mlp = MoE(dim, options.hidden, options.mixture, options.activation, **options.of_mixture)
        for part in ("attention", "cross_attention", "mlp"):
            there = options.norm_position != "pre" and self._modules[part] is not None
            self.register_module(f"{part}_post_norm", options.norm(dim) if there else None)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Any = None,
        memory_mask: Any = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Any = None,
        cache: KVCache | PagedKVCache | None = None,
        layer: int = 0,
        mask_type: str | tuple[str | None, str | None] | None = None,
        window: Window | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> Any:
        """Run the layer on x [B, S, dim], or in the layer's layout; returns the same shape.

        Args:
            x: input.
            memory: what cross attention attends to, in x's layout.
            mask, bias, positions, cu_seqlens, cache, layer: of the self attention; see `MultiheadAttention`.
            memory_mask: mask of the cross attention.
            mask_type, window, rope: override the self attention's own for this call. A pair of mask types is (self
                attention, cross attention).
        Returns:
            The output; if the mixture has `return_routing`, (output, `Routing` of all tokens).
        Raises:
            ValueError: a memory is missing or not supported, or a part rejects its arguments.
        """
        parts: Any = self._modules
        cross = parts["cross_attention"]
        if (cross is None) is (memory is not None):
            raise ValueError(
                "this TransformerLayer has no cross attention: make it with cross_attention=True, or give no memory"
                if cross is None
                else "this TransformerLayer has cross attention and needs a memory"
            )
        of_attention = {"mask": mask, "bias": bias, "positions": positions, "cu_seqlens": cu_seqlens}
        mask_type, of_cross = mask_type if isinstance(mask_type, tuple) else (mask_type, None)
        if mask_type is not None or window is not None or rope is not None:
            others = {"mask_type": mask_type, "window": window, "rope": rope}
            others = {name: value for name, value in others.items() if value is not None}
            if isinstance(parts["attention"], LatentAttention):
                raise ValueError(
                    f"latent attention cannot override {', '.join(others)} for one call: give them to the constructor"
                )
            of_attention |= others
        of_memory = {"mask": memory_mask, "mask_type": of_cross}
        run: Any = self._forward
        if cache is not None:
            of_attention |= {"cache": cache, "layer": layer}
        elif self.recompute == "full" and torch.is_grad_enabled():
            run = partial(checkpoint, run)
        y, *routing = run(x, memory, of_memory, of_attention)
        return (y, Routing(*routing)) if routing else y

    def _forward(
        self, x: Tensor, memory: Tensor | None, of_memory: dict[str, Any], of_attention: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Return the output, followed by the routing tensors if the mixture returns them."""
        parts: Any = self._modules
        attention, mlp = parts["attention"], parts["mlp"]
        if self.parallel:
            if self.parallel == "two_norms":
                x, left, right = _branches(x, 3)
            else:
                x, h = _branches(x)
                left, right = _branches(parts["norm"](h))
            a = attention(left, **of_attention)
            y, *routing = _flat(mlp(right))
            return self._add(x, _sum(a, y), ""), *routing
        (x,) = self._after("attention", x, **of_attention)
        if memory is not None:
            (x,) = self._after("cross_attention", x, memory, **of_memory)
        return self._after("mlp", x)

    def _after(self, name: str, x: Tensor, *memory: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """Return the residual stream after a part, followed by its routing tensors if it returns them."""
        part: Any = self._modules[name]
        routing: Sequence[Tensor] = ()
        if self.residual_from_norm:
            y, x = part(x, *memory, **options)
        else:
            x, h = _branches(x)
            y, *routing = _flat(part(h, *memory, **options))
        return self._add(x, y, f"{name}_post_norm"), *routing

    def _add(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """Add a part's output to the residual stream, with its norm, dropout, drop path and scale."""
        after: Any = self._modules.get(norm)
        if after is not None and self.norm_position != "post":
            y = after(y)
        if self.training:
            if self.dropout:
                y = self.drop(y, self.dropout)
            if self.drop_path:
                y = drop_path(y, self.drop_path, 1 if self.layout == "sbhd" else 0)
        x = _sum(x, y if self.residual_scale == 1.0 else y * self.residual_scale)
        return after(x) if after is not None and self.norm_position == "post" else x

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("parallel", "dropout", "drop_path", "recompute")}
        return f"norm_position={self.norm_position!r}" + "".join(f", {n}={v!r}" for n, v in options.items() if v)


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    """Convert a part's output, or (output, `Routing`), to a flat tuple of tensors."""
    return (outputs[0], *outputs[1]) if isinstance(outputs, tuple) else (outputs,)


def _branches(x: Tensor, uses: int = 2) -> tuple[Tensor, ...]:
    """Return x for several uses; under a compiler with one sum for their gradients."""
    return Fork.apply(x, uses) if is_tracing() else (x,) * uses


def _sum(x: Tensor, y: Tensor) -> Tensor:
    return Join.apply(x, y) if is_tracing() else x + y


def drop_path(x: Tensor, rate: float, batch: int = 0) -> Tensor:
    """Drop a part's output for whole samples, and scale the rest by 1 / (1 - rate).

    Args:
        x: output of a part.
        rate: probability of dropping a sample.
        batch: axis of the samples.

    Statistical. Source: Huang et al. 2016, arXiv:1603.09382.
    """
    shape = [1] * x.dim()
    shape[batch] = x.shape[batch]
    return x * torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - rate).div_(1 - rate)


def _check(options: TransformerArguments) -> None:
    norm_position, parallel, recompute = options.norm_position, options.parallel, options.recompute
    check_name("norm_position", norm_position, NORM_POSITIONS)
    if parallel not in (False, True, "two_norms"):
        raise ValueError(f"parallel is {parallel!r}; give False, True (one norm) or 'two_norms'")
    if parallel and (norm_position != "pre" or options.cross_attention):
        raise ValueError("a parallel TransformerLayer requires norm_position 'pre' and no cross attention")
    if norm_position != "pre" or options.one_norm:
        check_normalization(options.normalization)
    if options.residual_from_norm and (norm_position != "pre" or parallel or options.latent is not None):
        raise ValueError(
            "residual_from_norm uses the norm before each part as the residual: leave norm_position, parallel and "
            "latent out"
        )
    if options.residual_from_norm and options.mixture is not None:
        raise ValueError(
            "residual_from_norm needs the MLP's norm, which a mixture of experts does not return: leave one of them out"
        )
    if options.latent is not None:
        others = {f.name for f in fields(AttentionOptions)} - LATENT - {"fused"}
        plain = AttentionOptions()
        unsupported = sorted(name for name in others if getattr(options, name) != getattr(plain, name))
        if unsupported or options.cross_attention:
            names = ", ".join(unsupported) or "cross_attention"
            raise ValueError(f"latent attention has no {names}: leave it out, or leave out latent")
    if options.cross_attention and options.layout == "thd":
        raise ValueError("cross attention requires sequences of equal length: layout 'bshd' or 'sbhd', not 'thd'")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}; give None, 'mlp' or 'full'")
    for name, value in (("dropout", options.dropout), ("drop_path", options.drop_path)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; give a probability in [0, 1)")
    if options.drop_path and options.layout == "thd":
        raise ValueError("drop_path drops whole samples, but layout 'thd' has no batch axis; use dropout")
