"""A cache whose steps are begun from outside: how many new tokens each sequence has, by whatever names it.

As Megatron-LM's and Transformer Engine's `InferenceParams`, over pages of keys and values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.attention.cache.paged import PagedKVCache


class SteppedKVCache:
    """Keys and values of sequences that come and go; a step is begun by `pre_step`.

    Heads and dtypes are those of the first tokens that come.

    Args:
        pages: of each layer.
        page_size: tokens of a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self._caches: dict[int, PagedKVCache] = {}
        #: Tokens of each sequence before this step, and those that are new.
        self._held: dict[Any, int] = {}
        self._new: dict[Any, int] = {}
        self._numbers: dict[int, dict[Any, int]] = {}

    def pre_step(self, tokens: Mapping[Any, int]) -> None:
        """Begin a step: how many new tokens each sequence has, in the order of rows. Sequences left out are over."""
        self._held = {s: self._held.get(s, 0) + self._new.get(s, 0) for s in tokens}
        self._new = dict(tokens)
        for layer, numbers in self._numbers.items():
            for sequence in set(numbers) - set(tokens):
                self._caches[layer].free(numbers.pop(sequence))

    def lengths(self) -> Tensor:
        """Tokens of each row before this step, int32."""
        return torch.tensor(list(self._held.values()), dtype=torch.int32, device="cpu")

    def join(self, layer: int, k: Tensor, v: Tensor, mask_type: str) -> tuple[Tensor, Tensor, Any, str]:
        """Append a layer's keys and values [B, S, G, D], each row padded at its end; all of them, a mask and its type.

        Raises:
            ValueError: no step has begun for so many rows; and as `PagedKVCache`.
        """
        if len(self._new) != k.shape[0]:
            raise ValueError(
                f"{k.shape[0]} rows, and the step has {len(self._new)}: call pre_step({{sequence: tokens}})"
            )
        cache = self._caches.setdefault(layer, PagedKVCache(1, self.pages, self.page_size))
        numbers = self._numbers.setdefault(layer, {})
        numbers.update({s: cache.add() for s in self._new if s not in numbers})
        cache.use([numbers[s] for s in self._new])
        new = torch.tensor(list(self._new.values()), dtype=torch.int64, device="cpu")
        padded = torch.arange(k.shape[1], dtype=torch.int64, device="cpu")[None] >= new[:, None]
        k, v = cache.update(0, k, v)
        mask, mask_type = cache.mask(padded.to(k.device) if padded.any() else None, mask_type, padded.shape[1])
        cache.truncate([self._held[s] + n for s, n in self._new.items()])
        return k, v, mask, mask_type
