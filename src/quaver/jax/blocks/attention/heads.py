"""What attention with heads is made of, in either flavour of Flax: projections, and what comes between and after."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from quaver.core.options import pick
from quaver.core.reference.masks import check_heads
from quaver.jax.blocks.attention.dot_product import Mask, attention
from quaver.jax.blocks.attention.rotary import rope
from quaver.jax.blocks.options import CoreOptions, Rope
from quaver.jax.linears.general import Matrix


def prepare(
    x: Array,
    norm: Callable[[Array], Array] | None,
    options: Rope | None,
    positions: Array | None,
    offset: int | Array,
    norm_after_rope: bool,
) -> Array:
    """Queries or keys, normalized and turned, where a layer does either."""
    if norm is not None and not norm_after_rope:
        x = norm(x)
    if options is not None:
        x = rope(x, positions, offset=offset, **vars(options))
    return norm(x) if norm is not None and norm_after_rope else x


def split_fused(fused: Array, *parts: int) -> tuple[Array, ...]:
    """[B, S, G, sum of parts, D] to one [B, S, G * part, D] for each: a group's heads stand together.

    A mesh axis can split the groups without parting a group's queries from its keys and values.
    """
    out, start = [], 0
    for part in parts:
        x = fused[..., start : start + part, :]
        out.append(x.reshape(*x.shape[:2], -1, x.shape[-1]))
        start += part
    return tuple(out)


def projections(heads: int, groups: int, dim: int, fused: bool, cross: bool) -> dict[str, Matrix]:
    """The matrices before attention, by the name of their layer; those of keys and values read a memory (cross)."""
    query = Matrix((heads, dim), ("embed", "heads", "head_dim"))
    if not fused:
        return {"query": query} | dict.fromkeys(("key", "value"), Matrix((groups, dim), query.axes))
    of_groups = ("embed", "heads", None, "head_dim")
    if cross:
        return {"query": query, "kv": Matrix((groups, 2, dim), of_groups)}
    return {"qkv": Matrix((groups, heads // groups + 2, dim), of_groups)}


def project(
    x: Array, memory: Array | None, layers: Mapping[str, Callable[[Array], Array]], shared: int
) -> tuple[Array, ...]:
    """Queries, keys and values [B, S, H or G, D] by the layers of `projections`; `shared` query heads have one key."""
    memory = x if memory is None else memory
    if "qkv" in layers:
        return split_fused(layers["qkv"](x), shared, 1, 1)
    q = layers["query"](x)
    if "kv" in layers:
        return q, *split_fused(layers["kv"](memory), 1, 1)
    return q, layers["key"](memory), layers["value"](memory)


def attend(
    layer: Any, q: Array, k: Array, v: Array, mask: Mask | None, bias: Array | None, dropout_key: Array | None
) -> Array:
    """`attention` with a layer's options; it drops nothing without a key."""
    options = pick(CoreOptions, layer)
    if dropout_key is None:
        options["dropout"] = 0.0
    return attention(q, k, v, mask=mask, bias=bias, dropout_key=dropout_key, **options)


def count_heads(features: int, heads: int, groups: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """heads, groups and head_dim with their defaults: groups = heads, head_dim = features / heads.

    Raises:
        ValueError: what does not divide.
    """
    groups = heads if groups is None else groups
    check_heads(heads, groups)
    if head_dim is None and features % heads:
        raise ValueError(f"{features} features do not divide among {heads} heads; give head_dim, or other heads")
    return heads, groups, features // heads if head_dim is None else head_dim
