"""How a layer of transformers is called by itself: its rope, its mask and its positions, as its model makes them."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Surroundings:
    """What a layer is told from outside, as far as it says so itself."""

    #: The model's.
    config: Any
    #: Its place in the model.
    index: int
    causal: bool
    #: A row of transformers' layer_types, such as "sliding_attention".
    kind: str

    @property
    def window(self) -> tuple[int, int] | None:
        """As `TransformerLayer` takes it."""
        return (self.config.sliding_window - 1, -1) if self.kind == "sliding_attention" else None

    @property
    def chunk(self) -> int | None:
        """The same."""
        return self.config.attention_chunk_size if self.kind == "chunked_attention" else None


def surroundings(layer: nn.Module, config: Any, causal: bool | None) -> Surroundings:
    """Read them.

    Args:
        config, causal: None reads them from the layer.
    Raises:
        ValueError: nothing in the layer knows its model's configuration, whether it is causal, or how it attends.
    """
    config = attribute(layer, "config") if config is None else config
    if config is None or not hasattr(config, "num_attention_heads"):
        raise ValueError(
            f"{type(layer).__name__} holds no configuration of transformers; give a decoder or encoder layer of one of "
            "its models, such as model.model.layers[0], and config=model.config"
        )
    index = attribute(layer, "layer_idx") or 0
    causal = attribute(layer, "is_causal") if causal is None else causal
    if causal is None:
        raise ValueError(f"{type(layer).__name__} does not say whether it is causal: give mask_type='causal' or 'none'")
    types = getattr(config, "layer_types", None)
    if types:
        kind = types[index]
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    else:
        kind = "full_attention"
    if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
        raise ValueError(f"layer {index} is of kind {kind!r}, which is no attention that a TransformerLayer has")
    if kind != "full_attention" and not causal:
        raise ValueError(
            f"layer {index} is of kind {kind!r} and not causal; make a TransformerLayer with a window by hand"
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{type(layer).__name__} is handed ALiBi's bias, scaled by its own rule; a TransformerLayer has none"
        )
    clip = attribute(layer, "clip_qkv", getattr(config, "clip_qkv", None))
    if clip is not None:
        # Random input may never reach the bound, and a real one does.
        raise ValueError(
            f"{type(layer).__name__} clamps queries, keys and values to ±{clip:g} (clip_qkv), which a TransformerLayer "
            "does not"
        )
    return Surroundings(config, index, bool(causal), kind)


def attribute(layer: nn.Module, name: str, default: Any = None) -> Any:
    """What the layer, or the first of its modules that has one, calls so."""
    return next(
        (getattr(module, name) for module in layer.modules() if getattr(module, name, None) is not None), default
    )


def arguments(layer: nn.Module, around: Surroundings, x: Tensor) -> dict[str, Any]:
    """What the layer's forward takes beside x [B, S, dim].

    Raises:
        ValueError: it asks for something that is not known.
    """
    given: dict[str, Any] = {}
    positions = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)[None]
    for name, parameter in list(inspect.signature(layer.forward).parameters.items())[1:]:
        if name == "position_embeddings":
            given[name] = _rotated(layer, around, x, positions)
        elif name == "position_ids":
            given[name] = positions.expand(x.shape[0], -1)
        elif name == "attention_mask":
            given.setdefault(name, _mask(around, x))
        elif name == "alibi":
            given[name] = None
        elif name == "position_bias" and asks_for_alibi(layer):
            build: Any = _of_its_file(layer, "build_mpt_alibi_tensor")
            given[name] = build(around.config.num_attention_heads, x.shape[1], device=x.device)
            given["attention_mask"] = _mask(around, x, boolean=True)
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            raise ValueError(f"{type(layer).__name__}.forward asks for {name!r}, which is not known here")
    return given


def asks_for_alibi(layer: nn.Module) -> bool:
    """Whether its forward cannot do without a bias of positions: MPT's, which is ALiBi's."""
    parameter = inspect.signature(layer.forward).parameters.get("position_bias")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _rotated(layer: nn.Module, around: Surroundings, x: Tensor, positions: Tensor) -> Any:
    """What the layer's model makes once for all layers."""
    config = around.config
    if getattr(config, "rope_parameters", None) is None:
        return None
    for rotary in _rotaries(layer):
        more = {"layer_type": around.kind} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
        return rotary(config).to(x.device)(x, positions, **more)
    raise ValueError(f"the file of {type(layer).__name__} has no class that makes its rotary positions")


def _rotaries(layer: nn.Module) -> Iterator[Any]:
    members = vars(sys.modules[type(layer).__module__])
    classes = [c for name, c in members.items() if name.endswith("RotaryEmbedding") and isinstance(c, type)]
    # A file of several models has one each; the text model's says so.
    yield from sorted(classes, key=lambda c: ("Vision" in c.__name__, "Text" not in c.__name__))


def _of_its_file(layer: nn.Module, name: str) -> Any:
    function = getattr(sys.modules[type(layer).__module__], name, None)
    if function is None:
        raise ValueError(
            f"{type(layer).__name__}.forward asks for a bias of positions, and its file has no {name}; "
            "make a TransformerLayer with alibi=True by hand"
        )
    return function


def _mask(around: Surroundings, x: Tensor, boolean: bool = False) -> Tensor | None:
    """By the function that its model calls."""
    from transformers import masking_utils

    if not around.causal:
        return None
    makers = {"sliding_attention": "sliding_window_causal", "chunked_attention": "chunked_causal"}
    make = getattr(masking_utils, f"create_{makers.get(around.kind, 'causal')}_mask")
    mask = make(config=around.config, inputs_embeds=x, attention_mask=None, past_key_values=None)
    if boolean and (mask is None or mask.dtype is torch.bool):
        every = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return every[None, None]
    return mask.bool() if boolean else mask
