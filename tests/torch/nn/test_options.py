"""The constructors of blocks: what they show, and what they say of an option that is none."""

import inspect
from typing import Any

import pytest

import quaver.torch as qt

LAYERS: dict[str, tuple[Any, ...]] = {
    "MLP": (8, 16),
    "LayerNormMLP": (8, 16),
    "DotProductAttention": (2, 4),
    "MultiheadAttention": (8, 2),
    "TransformerLayer": (8, 2, 16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_misspelt_option_suggests_the_nearest(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} has no option 'recip'; did you mean 'recipe'"):
        getattr(qt, name)(*LAYERS[name], recip="mxfp8")


@pytest.mark.parametrize(("name", "sizes"), [("LayerNorm", (8,)), ("RMSNorm", (8,)), ("LayerNormLinear", (8, 8))])
def test_norms_suggest_the_nearest_option_and_print_explicit_options(name: str, sizes: tuple[int, ...]) -> None:
    layer = getattr(qt, name)
    with pytest.raises(TypeError, match=f"^{name} has no option 'zero_centred'; did you mean 'zero_centered'"):
        layer(*sizes, zero_centred=True)
    assert layer(*sizes, zero_centered=True) and inspect.signature(layer).parameters["eps"].default == 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_a_constructor_shows_its_options_and_their_defaults(name: str) -> None:
    shown = inspect.signature(getattr(qt, name)).parameters
    positional = [p for p in shown.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    assert len(positional) == len(LAYERS[name])
    options = {p.name: p.default for p in shown.values() if p.default is not p.empty}
    assert {"recipe": None, "device": None, "dtype": None}.items() <= options.items()
    given = getattr(qt, name)(*LAYERS[name], **options)
    assert str(given) == str(getattr(qt, name)(*LAYERS[name]))


def test_cross_attention_has_no_positions_windows_sinks_or_norms_of_heads() -> None:
    own = {"rope": qt.RotaryEmbedding(4), "window": (1, 0), "sinks": "learnable", "alibi": True, "qk_norm": "L2"}
    layer: Any = qt.TransformerLayer(8, 2, 16, cross_attention=True, **own)
    cross = layer.cross_attention
    assert layer.attention.rope is own["rope"] and layer.attention.q_norm is not None
    assert cross.rope is None and cross.q_norm is None and cross.memory_dim == 8
    assert (cross.core.window, cross.core.sinks, cross.core.alibi, cross.core.mask_type) == (None, None, False, "none")


@pytest.mark.parametrize("options", [{"norm_position": "post"}, {"norm_position": "sandwich"}, {"parallel": True}])
def test_a_norm_of_the_stream_needs_a_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no normalization None"):
        qt.TransformerLayer(8, 2, 16, normalization=None, **options)  # type: ignore[arg-type]
