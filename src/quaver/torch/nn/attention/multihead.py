"""Multi-head attention with everything around it: norm, projections, rotary positions, and the projection out."""

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quaver.options import pick, takes
from quaver.recipes.text import check_name
from quaver.torch.nn.attention.dot_product import CoreOptions, DotProductAttention
from quaver.torch.nn.attention.inputs import Window
from quaver.torch.nn.attention.kv_cache import KVCache, PagedKVCache
from quaver.torch.nn.attention.relative_bias import RelativePositionBias
from quaver.torch.nn.attention.rope import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_to_both,
    apply_rotary_to_parts,
    positions_of,
    tempered,
)
from quaver.torch.nn.mlp import ComposedBlock, PartOptions
from quaver.torch.nn.norm import QK_NORM_SCOPES, norm_of_heads, normalized_projections
from quaver.torch.state.layer_state import state_of

#: What x is in each layout.
SHAPES = {"bshd": "[batch, tokens, features]", "sbhd": "[tokens, batch, features]", "thd": "[tokens, features]"}
DIMS = {layout: shape.count(",") + 1 for layout, shape in SHAPES.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(CoreOptions, PartOptions):
    """Of attention with its projections."""

    # Features of a head, or (of queries and keys, of values); None divides the input's among the heads.
    head_dim: int | tuple[int, int] | None = None
    # Of the projection of keys, and of the projection out; None is as bias.
    key_bias: bool | None = None
    out_bias: bool | None = None
    rope: RotaryEmbedding | None = None
    # (gain, length): queries grow with their position.
    temperature: tuple[float, int] | None = None
    position_bias: RelativePositionBias | None = None
    # A normalization of queries and keys, its eps, whether to turn first, and a row of `QK_NORM_SCOPES`.
    qk_norm: str | None = None
    qk_norm_eps: float | None = None
    qk_norm_after_rope: bool = False
    qk_norm_scope: str = "head"


@dataclass(frozen=True)
class AttentionArguments(AttentionOptions):
    """The arguments of `MultiheadAttention`, which says what they are."""

    dim: int
    heads: int
    _: KW_ONLY
    # Features of the output; None keeps dim.
    out: int | None = None
    # Features of the memory that keys and values are made of; None has no memory.
    memory_dim: int | None = None
    # Give norm(x), too.
    return_normalized: bool = False


class MultiheadAttention(ComposedBlock):
    """out(attention(q, k, v)), q, k and v being projections of x, or k and v of a memory.

    Args:
        dim: features of x.
        heads: of the queries.
        groups: heads of keys and values, each shared by heads / groups query heads; None gives each its own.
        head_dim: features of a head, or (of queries and keys, of values); None divides dim among the heads.
        out: features of the output; None keeps dim.
        memory_dim: features of the memory that keys and values are made of: cross attention.
        fused: one matrix `qkv_proj`, whose rows are all heads of the queries, then of the keys, then of the values
            (with a memory: `q_proj` and `kv_proj`); else `q_proj`, `k_proj` and `v_proj`.
        bias: of the projections; key_bias: of `k_proj`, for fused=False; out_bias: of `o_proj`; None as bias.
        rope: rotary positions of queries and keys; None has none. Layers may share one.
        temperature: (gain, length); the query at position p is multiplied by 1 + gain log(1 + floor((p + 1) / length)).
        position_bias: a `RelativePositionBias`, whose numbers are added to the scores. Layers may share one.
        qk_norm: "RMSNorm", "LayerNorm" or "L2" (`Norm`) of queries and keys.
        qk_norm_eps: of those norms; None takes eps.
        qk_norm_after_rope: turn first.
        qk_norm_scope: a row of `QK_NORM_SCOPES`: whose features are normalized, and by which gamma.
        mask_type, window, chunk, scale, soft_cap, dropout, sinks, alibi, layout: as `DotProductAttention`.
        normalization: of x, before the projections; with eps, zero_centered and norm_bias.
        return_normalized: give (output, norm(x)) instead of the output.
        recipe, seed: as `quaver.torch.Linear`; a recipe's `attention` quantizes the products of attention too.
    Submodules: `norm` if there is one, the projections, `q_norm` and `k_norm` if there are, `core`, `o_proj`.
    Raises:
        ValueError: heads that do not divide, names that do not exist, or options that exclude one another.
    Source: Vaswani et al. 2017, arXiv:1706.03762; GQA: arXiv:2305.13245; norms of queries and keys: arXiv:2302.05442.
        "L2" after the rotation is Llama 4's (transformers' Llama4TextL2Norm), and so is the temperature, of layers
        without rope (arXiv:2501.19399).
    """

    return_normalized = False

    @takes(AttentionArguments)
    def __init__(self, options: AttentionArguments) -> None:
        super().__init__()
        dim, memory_dim = options.dim, options.memory_dim
        wide, narrow = head_sizes(dim, options.heads, options.head_dim)
        self.core = DotProductAttention(options.heads, (wide, narrow), **pick(CoreOptions, options))
        heads, groups = self.core.heads, self.core.groups
        _check(options, heads=self.core.heads, wide=wide)
        self.register_module("rope", options.rope)
        self.register_module("position_bias", options.position_bias)
        self.layout, self.qk_norm_after_rope = options.layout, options.qk_norm_after_rope
        self.temperature, self.qk_norm_scope = options.temperature, options.qk_norm_scope
        if options.return_normalized:
            self.return_normalized = True
        self.dim, self.memory_dim, self.cross = dim, memory_dim, memory_dim is not None
        self.register_module("norm", options.norm(dim))
        widths = {"q_proj": heads * wide, "k_proj": groups * wide, "v_proj": groups * narrow}
        self._parts = {}
        for name, parts in _projections(options.fused, self.cross).items():
            features = dim if name.startswith("q") or memory_dim is None else memory_dim
            self._parts[name] = [widths[part] for part in parts]
            bias = options.key_bias if name == "k_proj" else None
            layer = options.linear(features, sum(self._parts[name]), bias)
            if len(parts) > 1:
                state_of(layer).pieces = {part: widths[part] for part in parts}
            setattr(self, name, layer)
        eps = options.eps if options.qk_norm_eps is None else options.qk_norm_eps
        of_heads = replace(options, normalization=options.qk_norm, eps=eps)
        for name, count in (("q_norm", heads), ("k_norm", groups)):
            self.register_module(name, norm_of_heads(of_heads, options.qk_norm_scope, count, wide))
        self.o_proj = options.linear(heads * narrow, dim if options.out is None else options.out, options.out_bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Any = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Any = None,
        cache: KVCache | PagedKVCache | None = None,
        layer: int = 0,
        mask_type: str | None = None,
        window: Window | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> Any:
        """Attend from x to itself, or to a memory.

        Args:
            x: [B, S, dim] in layout "bshd", [S, B, dim] in "sbhd", [T, dim] in "thd".
            memory: as x, of memory_dim features; only with cross attention.
            mask, bias, cu_seqlens: as `DotProductAttention`.
            positions: of `rope`; None counts from 0, or from the number of tokens in the cache.
            cache: earlier tokens' keys and values, which the new ones join; a causal mask aligns the last query with
                the last key. Layout "bshd".
            layer: this layer's place in the cache.
            mask_type, window, rope: others than the module's, for this call; a window (-1, -1) is none.
        Returns:
            x's shape, with `out` features; and norm(x) if return_normalized.
        Raises:
            ValueError: a memory is missing or not wanted; a cache with a memory or another layout.
        """
        check_input(self, x)
        if self.cross is (memory is None):
            raise ValueError(
                "this MultiheadAttention has memory_dim and needs a memory"
                if self.cross
                else "this MultiheadAttention attends to x itself: make it with memory_dim=, or give no memory"
            )
        if memory is not None and memory.shape[-1] != self.memory_dim:
            raise ValueError(f"the memory has shape {tuple(memory.shape)}; its last axis must be {self.memory_dim}")
        if cache is not None:
            if self.cross:
                raise ValueError("a cache holds keys and values of x itself, and this attention has a memory")
            check_cached(self.core, self.layout, x, mask, cache, mask_type, window)
        elif not (mask is None and bias is None and cu_seqlens is None and mask_type is None and window is None):
            where = 1 if self.layout == "bshd" else 0
            batch = 1 if self.layout == "thd" else x.shape[1 - where]
            keys = (x if memory is None else memory).shape[where]
            self.core.check(batch, x.shape[where], keys, mask, bias, cu_seqlens, mask_type, window)
        parts: Any = self._modules
        rope = parts["rope"] if rope is None else rope
        before = 0 if cache is None else cache.offset
        offset = before if positions is None else 0
        normalized, *projected = self._project(x, memory, cu_seqlens, rope)
        q, k, v = self._turned(projected, positions, cu_seqlens, offset, rope)
        if self.temperature is not None:
            ends = cu_seqlens[0] if isinstance(cu_seqlens, tuple) else cu_seqlens
            q = tempered(q, positions_of(q, self.layout, positions, offset, ends), *self.temperature)
        if cache is not None:
            k, v = cache.update(layer, k, v)
            mask, mask_type = cache.mask(mask, mask_type or self.core.mask_type, q.shape[1])
        if parts["position_bias"] is not None:
            bias = self._with_position_bias(q, k, bias, before)
        y = parts["core"](q, k, v, mask=mask, bias=bias, cu_seqlens=cu_seqlens, mask_type=mask_type, window=window)
        output: Tensor = parts["o_proj"](y.flatten(-2))
        return (output, normalized) if self.return_normalized else output

    def _with_position_bias(self, q: Tensor, k: Tensor, bias: Tensor | None, before: int | Tensor) -> Tensor:
        parts: Any = self._modules
        tokens = 0 if self.layout == "sbhd" else 1
        own: Tensor = parts["position_bias"](q.shape[tokens], k.shape[tokens], before)
        return own if bias is None else own + bias

    def _project(
        self, x: Tensor, memory: Tensor | None, cu_seqlens: Any, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, ...]:
        """norm(x), or x where nothing asks for that; q, k and v, each [..., its heads, its features of a head], or one
        tensor of all heads, which `rope` parts."""
        parts: Any = self._modules
        names, sizes = list(self._parts), parts["core"].sizes
        first = [parts[name] for name in (names if memory is None else names[:1])]
        outputs = normalized_projections(parts["norm"], x, first, self.return_normalized)
        if self.return_normalized:
            x, outputs = outputs[0], outputs[1:]
        if memory is not None:
            outputs += normalized_projections(None, memory, [parts[name] for name in names[1:]])
        transposed = len(names) < 3 and rope is not None and parts["q_norm"] is None
        if transposed and len(names) == 1 and sizes[0][1] == sizes[2][1] and not isinstance(cu_seqlens, tuple):
            return x, outputs[0].unflatten(-1, (-1, sizes[0][1]))
        if len(names) < 3:
            widths = (self._parts[name] for name in names)
            split = (y.split(of, -1) if len(of) > 1 else (y,) for y, of in zip(outputs, widths, strict=True))
            outputs = tuple(itertools.chain.from_iterable(split))
        # As `unflatten`, in three quarters of its time.
        q, k, v = (y.view(*y.shape[:-1], *size) for y, size in zip(outputs, sizes, strict=True))
        if transposed and torch.is_grad_enabled():
            # Of a fused projection backward will need v alone: a copy lets the rest go.
            v = v.contiguous()
        return x, q, k, v

    def _turned(
        self, projected: Sequence[Tensor], positions: Tensor | None, cu_seqlens: Any, offset: int | Tensor, rope: Any
    ) -> tuple[Tensor, ...]:
        normalize = self._modules["q_norm"] is not None
        of_queries, of_keys = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        where = {"positions": positions, "offset": offset, "layout": self.layout}
        if len(projected) == 1:
            cos, sin = rope.tables(projected[0], cu_seqlens=cu_seqlens, **where)
            return apply_rotary_to_parts(projected[0], self.core.heads, cos, sin, rope.interleaved)
        q, k, v = projected
        if normalize and not self.qk_norm_after_rope:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        if rope is not None:
            cos, sin = rope.tables(q, cu_seqlens=of_queries, **where)
            if of_keys is of_queries and k.shape[:-2] == q.shape[:-2]:
                q, k = apply_rotary_to_both(q, k, cos, sin, rope.interleaved)
            else:
                q = apply_rotary(q, cos, sin, rope.interleaved)
                cos, sin = rope.tables(k, cu_seqlens=of_keys, **where)
                k = apply_rotary(k, cos, sin, rope.interleaved)
        if normalize and self.qk_norm_after_rope:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        return q, k, v

    def _normalized(self, x: Tensor, name: str) -> Tensor:
        """Queries or keys [..., heads, D] after their norm."""
        norm: Any = self._modules[name]
        if self.qk_norm_scope == "all_heads":
            y: Tensor = norm(x.flatten(-2)).unflatten(-1, x.shape[-2:])
            return y
        return norm(x)


def _check(options: AttentionArguments, heads: int, wide: int) -> None:
    """Raise the ValueError for what does not go together."""
    rope, bias, temperature = options.rope, options.position_bias, options.temperature
    if rope is not None and rope.head_dim != wide:
        raise ValueError(f"rope turns heads of {rope.head_dim} features, and these have {wide}")
    if options.fused and options.key_bias not in (None, options.bias):
        raise ValueError(f"key_bias={options.key_bias} beside bias={options.bias} wants matrices apart: fused=False")
    check_name("qk_norm_scope", options.qk_norm_scope, QK_NORM_SCOPES)
    if options.qk_norm_scope != "head" and options.qk_norm is None:
        raise ValueError(f"qk_norm_scope={options.qk_norm_scope!r} without a norm: give qk_norm, such as 'RMSNorm'")
    if options.qk_norm_scope == "each_head" and options.qk_norm == "L2":
        raise ValueError("qk_norm 'L2' has no gamma that each head could have; give qk_norm_scope='head'")
    pair = isinstance(temperature, tuple) and len(temperature) == 2
    if temperature is not None and (not pair or not temperature[1] > 0):
        raise ValueError(f"temperature is {temperature}; give (gain, length), a length in tokens above 0")
    if bias is not None and (bias.heads != heads or options.layout == "thd" or options.memory_dim is not None):
        raise ValueError(
            f"position_bias is of {bias.heads} heads, this attention has {heads} in layout {options.layout!r}: give "
            "one of as many heads, layout 'bshd' or 'sbhd', and no memory"
        )


def check_input(module: Any, x: Tensor) -> None:
    """Raise a ValueError unless x is of a module's layout and features."""
    if x.dim() != DIMS[module.layout] or x.shape[-1] != module.dim:
        raise ValueError(
            f"{type(module).__name__}({module.dim}) got an input of shape {tuple(x.shape)}; "
            f"layout {module.layout!r} is {SHAPES[module.layout]} with {module.dim} features"
        )


def check_cached(
    core: DotProductAttention,
    layout: str,
    x: Tensor,
    mask: Any,
    cache: KVCache | PagedKVCache,
    mask_type: str | None = None,
    window: Window | None = None,
) -> None:
    """Refuse, before the cache has taken anything, what does not go with one."""
    if layout != "bshd":
        raise ValueError("a cache holds keys and values of x itself in layout 'bshd'")
    mask_type, window = mask_type or core.mask_type, core.window if window is None else window
    if "causal" not in mask_type and (window is not None or core.chunk is not None or core.alibi):
        raise ValueError(
            "with a cache queries stand at the last keys, and a window, chunks or ALiBi with mask_type "
            f"{mask_type!r} count from the first; make the layer with mask_type='causal'"
        )
    cache.check_mask(mask, mask_type, (x.shape[0], x.shape[1]))


def head_sizes(dim: int, heads: int, head_dim: int | tuple[int, int] | None) -> tuple[int, int]:
    """Features of a head of queries and keys, and of values."""
    if isinstance(head_dim, tuple):
        if len(head_dim) != 2:
            raise ValueError(f"head_dim is {head_dim}; give a number, or (of queries and keys, of values)")
        return head_dim
    if head_dim is None:
        if heads < 1 or dim % heads:
            raise ValueError(
                f"{dim} features do not divide among {heads} heads; give head_dim, or a dim that is a multiple"
            )
        head_dim = dim // heads
    return head_dim, head_dim


def _projections(fused: bool, cross: bool) -> dict[str, tuple[str, ...]]:
    """What each projection makes."""
    if not fused:
        return {name: (name,) for name in ("q_proj", "k_proj", "v_proj")}
    if cross:
        return {"q_proj": ("q_proj",), "kv_proj": ("k_proj", "v_proj")}
    return {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
