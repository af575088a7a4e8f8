"""What a decoder remembers of earlier tokens: keys and values of layers with attention, states of state spaces."""

from typing import Any

from quaver.torch.blocks.attention.cache.contiguous import KVCache
from quaver.torch.blocks.attention.cache.paged import PagedKVCache
from quaver.torch.blocks.state_space.cache import StateCache
from quaver.train.configuration.sizes import ModelConfig

#: Tokens of a page.
PAGE = 16


class Caches:
    """One of each kind that a model has layers for.

    Args:
        config: of the model.
        kind: "plain" or "paged".
        capacity: tokens in all.
    """

    def __init__(self, config: ModelConfig, kind: str, capacity: int) -> None:
        attention, states = config.numbers("attention", "experts"), config.numbers("state", "state-mlp")
        self._places: dict[int, dict[str, Any]] = {}
        if attention:
            layers = len(attention)
            paged = kind == "paged"
            keys = PagedKVCache(layers, -(-capacity // PAGE), PAGE) if paged else KVCache(layers, capacity)
            self._places |= {number: {"cache": keys, "layer": place} for place, number in enumerate(attention)}
        if states:
            state = StateCache(len(states))
            self._places |= {number: {"cache": state, "layer": place} for place, number in enumerate(states)}

    def of(self, number: int) -> dict[str, Any]:
        """What the decoder's layer of this number is called with."""
        return self._places[number]
