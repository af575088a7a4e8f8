"""Multi-head attention with norm, projections, rotary embedding and output projection."""

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

#: Axes of x by layout.
SHAPES = {"bshd": "[batch, tokens, features]", "sbhd": "[tokens, batch, features]", "thd": "[tokens, features]"}
DIMS = {layout: shape.count(",") + 1 for layout, shape in SHAPES.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(CoreOptions, PartOptions):
    """Options of attention and its projections."""

    # Features of a head, or (of queries and keys, of values); None divides the input's features by the heads.
    head_dim: int | tuple[int, int] | None = None
    # Bias of the key projection, and of the output projection; None uses `bias`.
    key_bias: bool | None = None
    out_bias: bool | None = None
    rope: RotaryEmbedding | None = None
    # (gain, length): queries are scaled by their position.
    temperature: tuple[float, int] | None = None
    position_bias: RelativePositionBias | None = None
    # Norm of queries and keys, its eps, True to apply it after rope, and a name in `QK_NORM_SCOPES`.
    qk_norm: str | None = None
    qk_norm_eps: float | None = None
    qk_norm_after_rope: bool = False
    qk_norm_scope: str = "head"


@dataclass(frozen=True)
class AttentionArguments(AttentionOptions):
    """Constructor arguments of `MultiheadAttention`; see there."""

    dim: int
    heads: int
    _: KW_ONLY
    # Features of the output; None uses dim.
    out: int | None = None
    # Features of the memory for keys and values; None for self-attention.
    memory_dim: int | None = None
    # Also return norm(x).
    return_normalized: bool = False


class MultiheadAttention(ComposedBlock):
    """Multi-head attention: out(attention(q, k, v)), with q, k and v projected from x, or k and v from a memory.

    Args:
        dim: features of x.
        heads: number of query heads.
        groups: number of key/value heads, each shared by heads / groups query heads; None for one per query head.
        head_dim: features of a head, or (of queries and keys, of values); None divides dim by the heads.
        out: features of the output; None uses dim.
        memory_dim: features of the memory for keys and values (cross attention).
        fused: True for one matrix `qkv_proj` with the rows of all query heads, then keys, then values (with a memory:
            `q_proj` and `kv_proj`); False for `q_proj`, `k_proj` and `v_proj`.
        bias: True for a bias in the projections.
        key_bias: bias of `k_proj`, for fused=False; None uses `bias`.
        out_bias: bias of `o_proj`; None uses `bias`.
        rope: rotary embedding of queries and keys, or None. Layers may share one.
        temperature: (gain, length): the query at position p is multiplied by 1 + gain log(1 + floor((p + 1) / length)).
        position_bias: a `RelativePositionBias`, which is added to the scores. Layers may share one.
        qk_norm: "RMSNorm", "LayerNorm" or "L2" norm of queries and keys.
        qk_norm_eps: eps of those norms; None uses `eps`.
        qk_norm_after_rope: True applies these norms after rope.
        qk_norm_scope: a name in `QK_NORM_SCOPES`: which features are normalized together, and with which gamma.
        mask_type, window, chunk, scale, soft_cap, dropout, sinks, alibi, layout: as for `DotProductAttention`.
        normalization: norm of x before the projections; with eps, zero_centered and norm_bias.
        return_normalized: return (output, norm(x)) instead of the output.
        recipe, seed: as for `quaver.torch.Linear`; a recipe's `attention` also quantizes the GEMMs of attention.
            Submodules: `norm` if there is one, the projections, `q_norm` and `k_norm` if there are, `core`, `o_proj`.
    Raises:
        ValueError: heads that do not divide, unknown names, or incompatible options.
    Source: Vaswani et al. 2017, arXiv:1706.03762; GQA: arXiv:2305.13245; norms of queries and keys: arXiv:2302.05442.
        "L2" after rope is Llama 4's (transformers' Llama4TextL2Norm), and so is the temperature, in layers without rope
        (arXiv:2501.19399).
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
        norm_options = replace(options, normalization=options.qk_norm, eps=eps)
        for name, count in (("q_norm", heads), ("k_norm", groups)):
            self.register_module(name, norm_of_heads(norm_options, options.qk_norm_scope, count, wide))
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
            memory: in x's layout, with memory_dim features; only for cross attention.
            mask, bias, cu_seqlens: as for `DotProductAttention`.
            positions: positions for `rope`; None counts from 0, or from the number of cached tokens.
            cache: keys and values of earlier tokens, to which the new ones are appended; a causal mask aligns the last
                query with the last key. Layout "bshd" only.
            layer: index of this layer in the cache.
            mask_type, window, rope: override the module's for this call; a window (-1, -1) is none.
        Returns:
            x's shape with `out` features; with return_normalized (output, norm(x)).
        Raises:
            ValueError: a memory is missing or unexpected; a cache with a memory or another layout.
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
                raise ValueError("a cache cannot be used with a memory")
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
        q, k, v = self._apply_rope(projected, positions, cu_seqlens, offset, rope)
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
        """Return norm(x) (x itself unless return_normalized), and q, k and v, each [..., heads, features of a head].

        If rope can rotate and split the fused projection itself, a single tensor of all heads replaces q, k and v.
        """
        parts: Any = self._modules
        names, sizes = list(self._parts), parts["core"].sizes
        first = [parts[name] for name in (names if memory is None else names[:1])]
        outputs = normalized_projections(parts["norm"], x, first, self.return_normalized)
        if self.return_normalized:
            x, outputs = outputs[0], outputs[1:]
        if memory is not None:
            outputs += normalized_projections(None, memory, [parts[name] for name in names[1:]])
        rotates = len(names) < 3 and rope is not None and parts["q_norm"] is None
        if rotates and len(names) == 1 and sizes[0][1] == sizes[2][1] and not isinstance(cu_seqlens, tuple):
            return x, outputs[0].unflatten(-1, (-1, sizes[0][1]))
        if len(names) < 3:
            widths = (self._parts[name] for name in names)
            split = (y.split(of, -1) if len(of) > 1 else (y,) for y, of in zip(outputs, widths, strict=True))
            outputs = tuple(itertools.chain.from_iterable(split))
        # Same as `unflatten`, in three quarters of its time.
        q, k, v = (y.view(*y.shape[:-1], *size) for y, size in zip(outputs, sizes, strict=True))
        if rotates and torch.is_grad_enabled():
            # Backward will need only v of the fused projection: a copy lets the rest be freed.
            v = v.contiguous()
        return x, q, k, v

    def _apply_rope(
        self, projected: Sequence[Tensor], positions: Tensor | None, cu_seqlens: Any, offset: int | Tensor, rope: Any
    ) -> tuple[Tensor, ...]:
        normalize = self._modules["q_norm"] is not None
        cu_seqlens_q, cu_seqlens_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        where = {"positions": positions, "offset": offset, "layout": self.layout}
        if len(projected) == 1:
            cos, sin = rope.tables(projected[0], cu_seqlens=cu_seqlens, **where)
            return apply_rotary_to_parts(projected[0], self.core.heads, cos, sin, rope.interleaved)
        q, k, v = projected
        if normalize and not self.qk_norm_after_rope:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        if rope is not None:
            cos, sin = rope.tables(q, cu_seqlens=cu_seqlens_q, **where)
            if cu_seqlens_k is cu_seqlens_q and k.shape[:-2] == q.shape[:-2]:
                q, k = apply_rotary_to_both(q, k, cos, sin, rope.interleaved)
            else:
                q = apply_rotary(q, cos, sin, rope.interleaved)
                cos, sin = rope.tables(k, cu_seqlens=cu_seqlens_k, **where)
                k = apply_rotary(k, cos, sin, rope.interleaved)
        if normalize and self.qk_norm_after_rope:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        return q, k, v

    def _normalized(self, x: Tensor, name: str) -> Tensor:
        """Apply the norm of queries or keys to x [..., heads, D]."""
        norm: Any = self._modules[name]
        if self.qk_norm_scope == "all_heads":
            y: Tensor = norm(x.flatten(-2)).unflatten(-1, x.shape[-2:])
            return y
        return norm(x)


def _check(options: AttentionArguments, heads: int, wide: int) -> None:
    """Raise ValueError for options that do not fit each other."""
    rope, bias, temperature = options.rope, options.position_bias, options.temperature
    if rope is not None and rope.head_dim != wide:
        raise ValueError(f"rope rotates heads of {rope.head_dim} features, but these have {wide}")
    if options.fused and options.key_bias not in (None, options.bias):
        raise ValueError(
            f"key_bias={options.key_bias} with bias={options.bias} requires separate matrices: fused=False"
        )
    check_name("qk_norm_scope", options.qk_norm_scope, QK_NORM_SCOPES)
    if options.qk_norm_scope != "head" and options.qk_norm is None:
        raise ValueError(f"qk_norm_scope={options.qk_norm_scope!r} without a norm: give qk_norm, such as 'RMSNorm'")
    if options.qk_norm_scope == "each_head" and options.qk_norm == "L2":
        raise ValueError("qk_norm 'L2' has no gamma, so it cannot have one per head; give qk_norm_scope='head'")
    pair = isinstance(temperature, tuple) and len(temperature) == 2
    if temperature is not None and (not pair or not temperature[1] > 0):
        raise ValueError(f"temperature is {temperature}; give (gain, length), a length in tokens above 0")
    if bias is not None and (bias.heads != heads or options.layout == "thd" or options.memory_dim is not None):
        raise ValueError(
            f"position_bias is of {bias.heads} heads, this attention has {heads} in layout {options.layout!r}: give "
            "one of as many heads, layout 'bshd' or 'sbhd', and no memory"
        )


def check_input(module: Any, x: Tensor) -> None:
    """Raise ValueError unless x has the module's layout and features."""
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
    """Raise ValueError for options that a cache does not support, before the cache is modified."""
    if layout != "bshd":
        raise ValueError("a cache requires layout 'bshd'")
    mask_type, window = mask_type or core.mask_type, core.window if window is None else window
    if "causal" not in mask_type and (window is not None or core.chunk is not None or core.alibi):
        raise ValueError(
            "with a cache, queries are aligned with the last keys, but a window, chunks or ALiBi with mask_type "
            f"{mask_type!r} count from the first key; make the layer with mask_type='causal'"
        )
    cache.check_mask(mask, mask_type, (x.shape[0], x.shape[1]))


def head_sizes(dim: int, heads: int, head_dim: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return the features of a head of queries and keys, and of values."""
    if isinstance(head_dim, tuple):
        if len(head_dim) != 2:
            raise ValueError(f"head_dim is {head_dim}; give a number, or (of queries and keys, of values)")
        return head_dim
    if head_dim is None:
        if heads < 1 or dim % heads:
            raise ValueError(
                f"{dim} features do not divide by {heads} heads; give head_dim, or a dim that is a multiple"
            )
        head_dim = dim // heads
    return head_dim, head_dim


def _projections(fused: bool, cross: bool) -> dict[str, tuple[str, ...]]:
    """Return the outputs of each projection, by its name."""
    if not fused:
        return {name: (name,) for name in ("q_proj", "k_proj", "v_proj")}
    if cross:
        return {"q_proj": ("q_proj",), "kv_proj": ("k_proj", "v_proj")}
    return {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
