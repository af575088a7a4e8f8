"""A whole layer: attention, perhaps attention to a memory, and an MLP, around the residual stream."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.core.spec import Recipe
from quaver.core.text.spelling import suggest
from quaver.torch.blocks.attention.cache.contiguous import KVCache
from quaver.torch.blocks.attention.cache.paged import PagedKVCache
from quaver.torch.blocks.attention.multihead import MultiheadAttention
from quaver.torch.blocks.attention.rope.embedding import RotaryEmbedding
from quaver.torch.blocks.mlp import MLP
from quaver.torch.blocks.norm import Norm, named
from quaver.torch.operations.sums import fork, join
from quaver.torch.state.checkpointing import checkpoint

#: Where the norms stand. "pre": x + part(norm(x)). "post": norm(x + part(x)). "sandwich": x + norm(part(norm(x))).
NORM_POSITIONS = ("pre", "post", "sandwich")
#: What is made again in backward.
RECOMPUTE = (None, "mlp", "full")


class TransformerLayer(nn.Module):
    """Encoder (mask_type "none" or "padding"), decoder ("causal"), or decoder with cross attention.

    Args:
        dim: features of the residual stream.
        heads, groups, head_dim, rope, qk_norm, qk_norm_eps, qk_norm_after_rope, mask_type, window, scale, soft_cap,
            sinks, alibi, layout: of the attention; see `MultiheadAttention`.
        hidden, activation, activation_options, eight_bit_activations: of the MLP; see `MLP`.
        normalization: "LayerNorm" or "RMSNorm"; with eps, zero_centered and norm_bias.
        norm_position: one of `NORM_POSITIONS`.
        parallel: attention and MLP read the same x and are added at once: True, after one norm that they share
            (GPT-J, Falcon, Cohere); "two_norms", each after its own (GPT-NeoX, Falcon 40B).
        cross_attention: attend to a memory, between attention and MLP; memory_dim: its features, None as dim.
        cross_mask_type: of that attention.
        bias: of every matrix; attention_bias, out_bias, mlp_bias: of those of attention, of its output, of the MLP,
            where they differ from it.
        fused: q, k and v are one matrix, and so are gate and up.
        dropout: of each part's output; attention_dropout: of the probabilities.
        drop_path: probability of leaving a part out of a whole sample (arXiv:1603.09382).
        residual_scale: each part's output is multiplied by it before it is added.
        recompute: make again in backward what is "mlp"'s, or everything ("full"), instead of keeping it.
        recipe, seed: as `quaver.torch.Linear`.
    Submodules: `attention`, `cross_attention`, `mlp`, each with its `norm` inside; `norm` if parallel is True;
        `attention_post_norm`, `cross_attention_post_norm` and `mlp_post_norm` of "post" and "sandwich".
    Raises:
        ValueError: options that exclude one another, unknown names.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int,
        *,
        groups: int | None = None,
        head_dim: int | tuple[int, int] | None = None,
        activation: str = "gelu",
        activation_options: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered: bool = False,
        norm_bias: bool = True,
        norm_position: str = "pre",
        parallel: bool | str = False,
        cross_attention: bool = False,
        memory_dim: int | None = None,
        mask_type: str = "causal",
        cross_mask_type: str = "none",
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: str | None = None,
        alibi: bool = False,
        fused: bool = True,
        rope: RotaryEmbedding | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float | None = None,
        qk_norm_after_rope: bool = False,
        bias: bool = True,
        attention_bias: bool | None = None,
        out_bias: bool | None = None,
        mlp_bias: bool | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        residual_scale: float = 1.0,
        eight_bit_activations: bool = False,
        recompute: str | None = None,
        layout: str = "bshd",
        recipe: str | Recipe | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parallel = parallel if isinstance(parallel, str) else bool(parallel)
        _check(norm_position, parallel, cross_attention, recompute, layout, dropout, drop_path)
        self.parallel, self.norm_position, self.recompute, self.layout = parallel, norm_position, recompute, layout
        self.dropout, self.drop_path, self.residual_scale = dropout, drop_path, residual_scale
        attention_bias = bias if attention_bias is None else attention_bias
        like = {"device": device, "dtype": dtype}
        of_norm: dict[str, Any] = {"eps": eps, "zero_centered": zero_centered, "norm_bias": norm_bias}
        entrance = None if norm_position == "post" or parallel is True else normalization
        of_part: dict[str, Any] = {
            "normalization": entrance,
            "fused": fused,
            "recipe": recipe,
            "seed": seed,
            **of_norm,
            **like,
        }
        of_attention: dict[str, Any] = {
            "groups": groups,
            "head_dim": head_dim,
            "bias": attention_bias,
            "out_bias": out_bias,
            "scale": scale,
            "soft_cap": soft_cap,
            "dropout": attention_dropout,
            "layout": layout,
            **of_part,
        }

        def norm_if(wanted: bool) -> Norm | None:
            if not wanted:
                return None
            return named(normalization, dim, eps, zero_centered=zero_centered, bias=norm_bias, **like)

        self.register_module("norm", norm_if(parallel is True))
        self.attention = MultiheadAttention(
            dim,
            heads,
            rope=rope,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            qk_norm_after_rope=qk_norm_after_rope,
            mask_type=mask_type,
            window=window,
            sinks=sinks,
            alibi=alibi,
            **of_attention,
        )
        cross = None
        if cross_attention:
            source = dim if memory_dim is None else memory_dim
            cross = MultiheadAttention(dim, heads, memory_dim=source, mask_type=cross_mask_type, **of_attention)
        self.register_module("cross_attention", cross)
        self.mlp = MLP(
            dim,
            hidden,
            activation,
            activation_options=activation_options,
            bias=bias if mlp_bias is None else mlp_bias,
            eight_bit_activations=eight_bit_activations,
            recompute=recompute == "mlp",
            **of_part,
        )
        for part in ("attention", "cross_attention", "mlp"):
            there = norm_position != "pre" and self._modules[part] is not None
            self.register_module(f"{part}_post_norm", norm_if(there))

    def reset_parameters(self) -> None:
        """Each part as it begins by itself."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

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
    ) -> Tensor:
        """x [B, S, dim], or as the layout, to the same.

        Args:
            memory: what cross attention attends to, laid out as x.
            mask, bias, positions, cu_seqlens, cache, layer: of the self attention; memory_mask of the cross attention.
                See `MultiheadAttention`.
        Raises:
            ValueError: a memory is missing or not wanted; and as the parts.
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
        if cache is not None:
            return self._forward(x, memory, memory_mask, {**of_attention, "cache": cache, "layer": layer})
        if self.recompute == "full" and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._forward, x, memory, memory_mask, of_attention)
            return y
        return self._forward(x, memory, memory_mask, of_attention)

    def _forward(self, x: Tensor, memory: Tensor | None, memory_mask: Any, of_attention: dict[str, Any]) -> Tensor:
        parts: Any = self._modules
        attention, mlp = parts["attention"], parts["mlp"]
        if self.parallel:
            if self.parallel == "two_norms":
                x, left, right = fork(x, 3)
            else:
                x, h = fork(x)
                left, right = fork(parts["norm"](h))
            return self._add(x, join(attention(left, **of_attention), mlp(right)), "")
        x, h = fork(x)
        x = self._add(x, attention(h, **of_attention), "attention_post_norm")
        if memory is not None:
            x, h = fork(x)
            x = self._add(x, parts["cross_attention"](h, memory, mask=memory_mask), "cross_attention_post_norm")
        x, h = fork(x)
        return self._add(x, mlp(h), "mlp_post_norm")

    def _add(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """A part's output joins the residual stream."""
        after: Any = self._modules.get(norm)
        if after is not None and self.norm_position == "sandwich":
            y = after(y)
        if self.training:
            if self.dropout:
                y = F.dropout(y, self.dropout)
            if self.drop_path:
                y = drop_path(y, self.drop_path, 1 if self.layout == "sbhd" else 0)
        x = join(x, y, self.residual_scale)
        return after(x) if after is not None and self.norm_position == "post" else x

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("parallel", "dropout", "drop_path", "recompute")}
        return f"norm_position={self.norm_position!r}" + "".join(f", {n}={v!r}" for n, v in options.items() if v)


def drop_path(x: Tensor, rate: float, batch: int = 0) -> Tensor:
    """Leave a part's output out for whole samples, and scale what stays by 1 / (1 - rate).

    Args:
        x: its axis `batch` counts the samples.
        rate: probability of leaving a sample out.
    Statistical. Source: Huang et al. 2016, arXiv:1603.09382.
    """
    shape = [1] * x.dim()
    shape[batch] = x.shape[batch]
    return x * torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - rate).div_(1 - rate)


def _check(
    norm_position: str,
    parallel: bool | str,
    cross_attention: bool,
    recompute: str | None,
    layout: str,
    dropout: float,
    rate: float,
) -> None:
    if norm_position not in NORM_POSITIONS:
        raise ValueError(f"norm_position is {norm_position!r}; {suggest(str(norm_position), NORM_POSITIONS)}")
    if parallel not in (False, True, "two_norms"):
        raise ValueError(f"parallel is {parallel!r}; give False, True (one norm) or 'two_norms'")
    if parallel and (norm_position != "pre" or cross_attention):
        raise ValueError("a parallel TransformerLayer normalizes before its parts and has no cross attention")
    if cross_attention and layout == "thd":
        raise ValueError("cross attention takes sequences of one length: layout 'bshd' or 'sbhd', not 'thd'")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}; give None, 'mlp' or 'full'")
    for name, value in (("dropout", dropout), ("drop_path", rate)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; give a probability in [0, 1)")
    if rate and layout == "thd":
        raise ValueError("drop_path leaves out whole samples, and layout 'thd' has no axis of samples; use dropout")
