"""The MLP of a Transformer: a matrix, an activation, a matrix; with a norm before it, if wanted.

A gated activation's gate and value come out of one GEMM, interleaved: wi is [d, hidden, 2], so that a mesh axis can
split `hidden` without parting a pair.
"""

from collections.abc import Mapping
from typing import Any

from jax import Array

from quaver.core.spec import Recipe
from quaver.jax.blocks.activation import activate, get_activation
from quaver.jax.blocks.norm import normalize
from quaver.jax.linears.general import Matrix, dense

State = Mapping[str, Mapping[str, Array]]


def mlp(
    x: Array,
    wi: Array,
    wo: Array,
    bi: Array | None = None,
    bo: Array | None = None,
    *,
    activation: str = "gelu",
    recipe: str | Recipe | None = None,
    state: State | None = None,
    name: str = "mlp",
    **options: Any,
) -> Array:
    """wo · activation(wi · x + bi) + bo.

    Args:
        x: [..., d].
        wi: [d, hidden], or [d, hidden, 2] with gate and value for a gated activation.
        wo: [hidden, out].
        bi: [hidden] or [hidden, 2].
        bo: [out].
        activation: a row of `ACTIVATIONS`; `options` are its own.
        recipe: of both GEMMs, as `linear` takes it.
        state: {"wi": state, "wo": state} of the two, where the recipe has one.
        name: of the whole; the layers are name.wi and name.wo.
    Returns:
        [..., out].
    Raises:
        ValueError: what does not fit.
    Exact, bounded: as `linear` and `activate`.
    """
    state = state or {}
    name = f"{name}." if name else ""
    h = dense(x, wi, bi, recipe=recipe, state=state.get("wi"), name=f"{name}wi")
    h = activate_fused(activation, h, wi.ndim - 1, **options)
    return dense(h, wo, bo, recipe=recipe, state=state.get("wo"), name=f"{name}wo")


def layer_norm_mlp(
    x: Array,
    scale: Array | None,
    shift: Array | None,
    wi: Array,
    wo: Array,
    bi: Array | None = None,
    bo: Array | None = None,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-6,
    zero_centered: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """`mlp` of the normalized x; scale, shift and options as `layer_norm` and `mlp` take them.

    Returns:
        The output, and the normalized x.
    """
    normalized = normalize(x, scale, shift, normalization=normalization, eps=eps, zero_centered=zero_centered)
    return mlp(normalized, wi, wo, bi, bo, **options), normalized


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
