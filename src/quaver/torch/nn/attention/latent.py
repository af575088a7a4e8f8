"""Multi-head latent attention: keys and values of all heads are computed from one small latent per token, which is
cached.

Source: DeepSeek-AI 2024, arXiv:2405.04434 §2.1; the rope key shared by all heads is §2.1.3.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quaver.options import pick, takes
from quaver.torch.nn.attention.dot_product import CoreOptions, DotProductAttention
from quaver.torch.nn.attention.kv_cache import KVCache, PagedKVCache
from quaver.torch.nn.attention.multihead import check_cached, check_input
from quaver.torch.nn.attention.rope import RotaryEmbedding, apply_rotary
from quaver.torch.nn.mlp import ComposedBlock, PartOptions
from quaver.torch.nn.norm import normalized_projections


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of the latents and heads of multi-head latent attention."""

    # Features of the key/value latent; the cache stores kv_rank + rope_dim features per token.
    kv_rank: int
    # Features of a head's queries and keys without rope, and with rope; the rope key is shared by all heads.
    plain_dim: int
    rope_dim: int
    # Features of a head's values.
    value_dim: int
    # Features of the query latent; None projects queries from x directly.
    q_rank: int | None = None

    def __post_init__(self) -> None:
        sizes = {name: size for name, size in vars(self).items() if size is not None}
        wrong = {name: size for name, size in sizes.items() if not isinstance(size, int) or size < 1}
        if wrong:
            raise ValueError(f"LatentConfig takes positive numbers of features, but got {wrong}")


@dataclass(frozen=True, kw_only=True)
class LatentOptions(CoreOptions, PartOptions):
    """Options of latent attention and its projections."""

    # Bias of the output projection; None uses `bias`.
    out_bias: bool | None = None
    rope: RotaryEmbedding | None = None
    # eps of the latents' norms; None uses `eps`.
    qk_norm_eps: float | None = None


@dataclass(frozen=True)
class LatentArguments(LatentOptions):
    """Constructor arguments of `LatentAttention`; see there."""

    dim: int
    heads: int
    latent: LatentConfig
    _: KW_ONLY


class LatentAttention(ComposedBlock):
    """Multi-head latent attention: out(attention(q, k, v)) with k and v computed from a small latent of x.

        q = q_up(q_norm(q_down(x)))                      heads of plain_dim, then rope_dim features
        c, r = kv_down(x)                                kv_rank features, and the rope_dim of one key for all heads
        k, v = kv_up(kv_norm(c))                         heads of plain_dim features of keys, then value_dim of values
        q = (q plain, rope(q rotary)), k = (k, rope(r))

    Args:
        dim: features of x and of the output.
        heads: number of heads.
        latent: a `LatentConfig` with the sizes; with q_rank=None, `q_proj` replaces `q_down_proj` and `q_up_proj`.
        rope: rotary embedding of latent.rope_dim features; None for no rotation.
        bias: True for a bias in `q_down_proj` and `kv_down_proj`.
        out_bias: bias of `o_proj`; None uses `bias`.
        qk_norm_eps: eps of the latents' RMSNorms; None uses `eps`.
        mask_type, window, chunk, scale, soft_cap, dropout, sinks, alibi, layout: as for `DotProductAttention`.
        normalization: norm of x before the projections; with eps, zero_centered and norm_bias.
        recipe, seed: as for `quaver.torch.Linear`. Submodules: `norm` if there is one, `q_down_proj`, `q_norm`,
            `q_up_proj`, `kv_down_proj`, `kv_norm`, `kv_up_proj`,
        `core`, `o_proj`.
    Raises:
        ValueError: sizes that do not fit.
    Exact: projections have the bits of norms and layers called one after the other. Attention is bounded.
    """

    @takes(LatentArguments)
    def __init__(self, options: LatentArguments) -> None:
        super().__init__()
        dim, heads, latent = options.dim, options.heads, options.latent
        wide = latent.plain_dim + latent.rope_dim
        if options.groups not in (None, heads):
            raise ValueError(
                f"groups is {options.groups}, but each head of latent attention has its own keys: leave it out"
            )
        if options.rope is not None and options.rope.head_dim != latent.rope_dim:
            raise ValueError(f"rope rotates {options.rope.head_dim} features, but latent.rope_dim is {latent.rope_dim}")
        self.core = DotProductAttention(heads, (wide, latent.value_dim), **pick(CoreOptions, options))
        self.dim, self.latent, self.layout = dim, latent, options.layout
        self.register_module("rope", options.rope)
        self.register_module("norm", options.norm(dim))
        eps = options.eps if options.qk_norm_eps is None else options.qk_norm_eps
        norm_options = replace(options, normalization="RMSNorm", eps=eps)
        if latent.q_rank is None:
            self.q_proj = options.linear(dim, heads * wide, False)
        else:
            self.q_down_proj = options.linear(dim, latent.q_rank)
            self.register_module("q_norm", norm_options.norm(latent.q_rank))
            self.q_up_proj = options.linear(latent.q_rank, heads * wide, False)
        self.kv_down_proj = options.linear(dim, latent.kv_rank + latent.rope_dim)
        self.register_module("kv_norm", norm_options.norm(latent.kv_rank))
        self.kv_up_proj = options.linear(latent.kv_rank, heads * (latent.plain_dim + latent.value_dim), False)
        self.o_proj = options.linear(heads * latent.value_dim, dim, options.out_bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Any = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Any = None,
        cache: KVCache | PagedKVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Self-attention on x; arguments as for `MultiheadAttention`.

        Args:
            x: input in the module's layout.
            mask, bias, positions, cu_seqlens, layer: as for `MultiheadAttention`.
            cache: stores kv_rank + rope_dim features per token and layer; each call recomputes keys and values of all
                tokens.
        """
        check_input(self, x)
        core: Any = self._modules["core"]
        if cache is not None:
            check_cached(core, self.layout, x, mask, cache)
        elif mask is not None or bias is not None or cu_seqlens is not None:
            where = 1 if self.layout == "bshd" else 0
            batch = 1 if self.layout == "thd" else x.shape[1 - where]
            core.check(batch, x.shape[where], x.shape[where], mask, bias, cu_seqlens)
        offset = 0 if cache is None or positions is not None else cache.offset
        q, c, r = self._down(x)
        q, r = self._apply_rope(q, r, {"positions": positions, "offset": offset, "cu_seqlens": cu_seqlens})
        mask_type = None
        if cache is None:
            k, v = self._up(c, r, normalized=False)
        else:
            parts: Any = self._modules
            c, r = cache.update(layer, parts["kv_norm"](c).unsqueeze(-2), r)
            k, v = self._up(c.squeeze(-2), r, normalized=True)
            mask, mask_type = cache.mask(mask, core.mask_type, q.shape[1])
        y = core(q, k, v, mask=mask, bias=bias, cu_seqlens=cu_seqlens, mask_type=mask_type)
        projected: Tensor = self.o_proj(y.flatten(-2))
        return projected

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [..., heads, features], the latent [..., kv_rank] and the rope key [..., 1, rope_dim]."""
        parts: Any = self._modules
        first = "q_proj" if self.latent.q_rank is None else "q_down_proj"
        q, narrow = normalized_projections(parts["norm"], x, [parts[first], parts["kv_down_proj"]])
        if self.latent.q_rank is not None:
            (q,) = normalized_projections(parts["q_norm"], q, [parts["q_up_proj"]])
        c, r = narrow.split((self.latent.kv_rank, self.latent.rope_dim), -1)
        return q.unflatten(-1, (self.core.heads, -1)), c.contiguous(), r.unsqueeze(-2)

    def _apply_rope(self, q: Tensor, r: Tensor, where: dict[str, Any]) -> tuple[Tensor, Tensor]:
        rope: Any = self._modules["rope"]
        if rope is None:
            return q, r
        cos, sin = rope.tables(r, layout=self.layout, **where)
        plain, rotary = q.split((self.latent.plain_dim, self.latent.rope_dim), -1)
        rotated = apply_rotary(rotary, cos, sin, rope.interleaved)
        return torch.cat((plain, rotated), -1), apply_rotary(r, cos, sin, rope.interleaved)

    def _up(self, c: Tensor, r: Tensor, normalized: bool) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads, from latents and rotated rope keys."""
        parts: Any = self._modules
        (kv,) = normalized_projections(None if normalized else parts["kv_norm"], c, [parts["kv_up_proj"]])
        kv = kv.unflatten(-1, (self.core.heads, -1))
        k, v = kv.split((self.latent.plain_dim, self.latent.value_dim), -1)
        return torch.cat((k, r.expand(*k.shape[:-1], -1)), -1), v
