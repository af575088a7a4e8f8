"""Keys and values of the tokens so far, so that decoding computes each token once."""

from typing import Any

import torch
from torch import Tensor


class KVCache:
    """One stretch of memory a layer, [B, capacity, G, D], made when the first keys and values come.

    Args:
        layers: how many attention layers share it.
        capacity: tokens that each of a batch's sequences may have.
    Raises:
        ValueError: numbers that are not positive.
    All sequences of a batch have the same length; `PagedKVCache` holds different ones. Gradients do not pass.
    Exact.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        if layers < 1 or capacity < 1:
            raise ValueError(f"a cache for {layers} layers of {capacity} tokens holds nothing; give numbers above 0")
        self.capacity = capacity
        self._counts = [0] * layers
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    @property
    def layers(self) -> int:
        """How many layers share the cache."""
        return len(self._counts)

    @property
    def batch(self) -> int | None:
        """B; None before the first update."""
        first = next((k for k in self._keys if k is not None), None)
        return None if first is None else first.shape[0]

    @property
    def length(self) -> int:
        """Tokens that every layer holds: during a forward pass, those before it."""
        return min(self._counts)

    @property
    def offset(self) -> int:
        """Where the next tokens stand, for rope: `length`."""
        return self.length

    @property
    def lengths(self) -> Tensor:
        """`length` of each sequence, int64 [B], where the keys are."""
        first = next((k for k in self._keys if k is not None), None)
        if first is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return torch.full((first.shape[0],), self.length, dtype=torch.int64, device=first.device)

    def held(self, layer: int) -> int:
        """Tokens that one layer holds."""
        return self._counts[layer]

    def mask(self, mask: Any, mask_type: str, queries: int) -> tuple[Any, str]:
        """(mask, mask_type) for attention of the newest tokens to what `update` returned.

        Args:
            mask: for mask type "arbitrary", broadcastable to [B, H, queries, total].
            mask_type: the layer's; a causal one puts the last query at the last key.
            queries: how many tokens are new.
        Raises:
            ValueError: as `check_mask`.
        """
        self.check_mask(mask, mask_type)
        if mask_type == "arbitrary":
            return mask, mask_type
        return mask, "causal_bottom_right" if "causal" in mask_type else "none"

    def check_mask(self, mask: Any, mask_type: str, tokens: tuple[int, int] | None = None) -> None:
        """Raise a ValueError for padding, which sequences of one length do not have, or a mask of another type."""
        if mask_type.startswith("padding") and mask is not None:
            raise ValueError(
                "a KVCache holds sequences of one length, without padding; give prompts of different lengths to a "
                "PagedKVCache, or each its own KVCache"
            )
        if mask is not None and mask_type != "arbitrary":
            raise ValueError(f"mask_type {mask_type!r} takes no mask; make the layer with 'arbitrary'")

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values.

        Args:
            layer: from 0.
            k: [B, S, G, D]; v: [B, S, G, Dv].
        Returns:
            (keys, values) of all tokens so far, [B, total, G, D] and [B, total, G, Dv]: views of the cache, which hold
            until the next reset, reorder or truncate.
        Raises:
            ValueError: no room, shapes or dtypes other than before, tensors that require gradients, or a layer ahead
                of the others; nothing has been written then.
        """
        check_new(k, v, layer, self.layers)
        start = self._counts[layer]
        end = start + k.shape[1]
        if end > self.capacity:
            raise ValueError(
                f"the cache holds {start} of {self.capacity} tokens, and {k.shape[1]} more do not fit; "
                f"make it with a capacity of {end} or more, or reset() it"
            )
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None or start == 0:
            keys, values = self._memory(layer, k, v)
        check_same(keys, k, "keys")
        check_same(values, v, "values")
        check_even(self._counts, layer)
        keys[:, start:end] = k
        values[:, start:end] = v
        self._counts[layer] = end
        return keys[:, :end], values[:, :end]

    def _memory(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of an empty layer: what it has if the new tokens fit in, else new."""
        held = self._keys[layer], self._values[layer]
        enlarged: list[Tensor] = []
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            for old, new in zip(held, (k, v), strict=True):
                if old is None or not same(old, new):
                    old = new.new_empty(new.shape[0], self.capacity, *new.shape[2:])
                enlarged.append(old)
        keys, values = self._keys[layer], self._values[layer] = enlarged
        return keys, values

    def reset(self) -> None:
        """Forget every token; the next update may bring another batch or dtype."""
        self._counts = [0] * self.layers

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens; it cannot be cut to {length}")
        self._counts = [length] * self.layers

    def reorder(self, indices: Tensor) -> None:
        """Sequence i becomes what sequence indices[i] was, as beam search needs it.

        Args:
            indices: int [B'], each below B; B' may differ from B, to widen a batch into beams.
        Raises:
            ValueError: nothing is held yet, or indices (on the CPU) of no row.
        """
        if not any(self._counts):
            raise ValueError("the cache is empty; reorder it after the first update")
        if indices.is_cpu:  # reading them on a GPU would wait for it
            check_indices(indices.tolist(), self.batch or 0)
        for layer, count in enumerate(self._counts):
            for store in (self._keys, self._values):
                old = store[layer]
                if old is None:
                    continue
                taken = old[indices.to(old.device), :count]
                if taken.shape[0] != old.shape[0]:
                    with torch.inference_mode(False):
                        old = store[layer] = old.new_empty(taken.shape[0], *old.shape[1:])
                old[:, :count] = taken


def check_new(k: Tensor, v: Tensor, layer: int, layers: int) -> None:
    """Raise a ValueError where these are not one layer's keys and values."""
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} of a cache for {layers}; make it for more layers, or count from 0")
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"keys have shape {tuple(k.shape)} and values {tuple(v.shape)}; both are [B, S, G, D or Dv]")
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError("a cache passes no gradients on to earlier tokens; decode under torch.no_grad()")


def check_even(counts: list[int], layer: int) -> None:
    """Raise a ValueError where a layer already holds what the next forward brings: its tokens would stand twice."""
    if counts[layer] > min(counts):
        raise ValueError(
            f"layer {layer} holds {counts[layer]} tokens and layer {counts.index(min(counts))} of the cache "
            f"{min(counts)}: a forward broke off between them, or the cache was made for more layers than the model "
            f"has; truncate() it to {min(counts)}, or make another"
        )


def check_indices(indices: list[int], batch: int) -> None:
    """Raise a ValueError unless these are rows of a batch."""
    if any(not 0 <= i < batch for i in indices):
        raise ValueError(f"the indices {indices} are not all rows of the {batch} held; give 0 to {batch - 1}")


def same(held: Tensor, new: Tensor, axes: tuple[int, ...] = (0, 2, 3)) -> bool:
    """Whether new tokens fit those held in dtype, device and along these axes."""
    sizes = all(held.shape[a] == new.shape[a] for a in axes)
    return sizes and held.dtype == new.dtype and held.device == new.device


def check_same(held: Tensor, new: Tensor, what: str, axes: tuple[int, ...] = (0, 2, 3)) -> None:
    """Raise a ValueError where they do not."""
    if not same(held, new, axes):
        raise ValueError(
            f"the cache holds {what} {tuple(held.shape)} in {held.dtype} on {held.device}, and was given "
            f"{tuple(new.shape)} in {new.dtype} on {new.device}; reset() it, or use another"
        )
