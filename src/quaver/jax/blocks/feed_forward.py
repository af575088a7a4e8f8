"""The MLP of a Transformer: a matrix, an activation, a matrix; with a norm before it, if wanted.

A gated activation's gate and value come out of one GEMM, interleaved: wi is [d, hidden, 2], so that a mesh axis can
split `hidden` without parting a pair.
"""

from typing import Any

from jax import Array

from quaver.jax.blocks.activation import activate, get_activation
from quaver.jax.linears.general import Matrix


def hidden_features(activation: str, hidden: int) -> tuple[int, ...]:
    """The features of wi: (hidden,), or (hidden, 2) for a gated activation."""
    return (hidden, 2) if get_activation(activation).gated else (hidden,)


def matrices(activation: str, hidden: int, out: int) -> dict[str, Matrix]:
    """The two of a layer, by the name of theirs."""
    features = hidden_features(activation, hidden)
    inner: tuple[str | None, ...] = ("mlp", None)[: len(features)]
    return {"wi": Matrix(features, ("embed", *inner)), "wo": Matrix((out,), ("mlp", "embed"))}


def activate_fused(activation: str, h: Array, features: int = 1, **options: Any) -> Array:
    """Apply an activation to what wi gave: [..., hidden], or [..., hidden, 2] for a gated one (features 2)."""
    gated = get_activation(activation).gated
    if features != 1 + gated:
        wanted = "[d, hidden, 2], gate and value," if gated else "[d, hidden]"
        raise ValueError(f"activation {activation!r} needs a first matrix {wanted} and got one of {features + 1} axes")
    return activate(activation, h[..., 0], h[..., 1], **options) if gated else activate(activation, h, **options)
