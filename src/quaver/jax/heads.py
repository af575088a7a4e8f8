"""What happens to queries, keys and values between their projections and attention."""

from dataclasses import dataclass

from jax import Array

from quaver.jax.rope import rope


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The options of `rope` that a layer keeps."""

    # Base of the frequencies.
    theta: float = 10_000.0
    # Of each head's features that turn, the first ones.
    fraction: float = 1.0
    # Pairs are neighbours; else feature i goes with i + half.
    interleaved: bool = False


def turn(x: Array, options: Rope | None, positions: Array | None, offset: int | Array) -> Array:
    """`rope` with a layer's options; x itself where there are none."""
    if options is None:
        return x
    return rope(
        x,
        positions,
        offset=offset,
        theta=options.theta,
        fraction=options.fraction,
        interleaved=options.interleaved,
    )


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


def count_heads(features: int, heads: int, groups: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """heads, groups and head_dim with their defaults: groups = heads, head_dim = features / heads.

    Raises:
        ValueError: what does not divide.
    """
    groups = heads if groups is None else groups
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"{heads} query heads cannot share {groups} heads of keys and values evenly; make `heads` a multiple of "
            "`groups`"
        )
    if head_dim is None and features % heads:
        raise ValueError(f"{features} features do not divide among {heads} heads; give head_dim, or other heads")
    return heads, groups, features // heads if head_dim is None else head_dim
