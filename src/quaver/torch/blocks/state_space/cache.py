"""What state-space layers remember of the tokens so far: a state of one size, however many tokens there were."""

import torch
from torch import Tensor

from quaver.torch.blocks.attention.cache.contiguous import check_even, check_indices, check_same, same


class StateCache:
    """The last tokens of each layer's convolution and the state of its scan, made when the first tokens come.

    Args:
        layers: how many state-space layers share it; the attention layers of a hybrid have a `KVCache` beside it.
    Raises:
        ValueError: a number that is not positive.
    All sequences of a batch have the same length. Gradients do not pass. A state is a sum over tokens and cannot be
    cut: keep a `copy.deepcopy` to come back to. Exact: what was written.
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"a cache for {layers} layers holds nothing; give a number above 0")
        self._counts = [0] * layers
        #: [B, taps - 1, channels] in the dtype of the tokens, and [B, H, P, N] in float32 or float64.
        self._tokens: list[Tensor | None] = [None] * layers
        self._states: list[Tensor | None] = [None] * layers

    @property
    def layers(self) -> int:
        """How many layers share the cache."""
        return len(self._counts)

    @property
    def batch(self) -> int | None:
        """B; None before the first update."""
        first = next((state for state in self._states if state is not None), None)
        return None if first is None else first.shape[0]

    @property
    def length(self) -> int:
        """Tokens that every layer has seen: during a forward pass, those before it."""
        return min(self._counts)

    def held(self, layer: int) -> int:
        """Tokens that one layer has seen."""
        return self._counts[layer]

    def read(self, layer: int, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """One layer's last tokens and state, which hold until its next update; (None, None) before the first.

        Args:
            layer: from 0.
            x: what comes next, [B, S, ...].
        Raises:
            ValueError: a layer that is not there or is ahead of the others, another batch, or gradients that would have
                to pass.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} of a cache for {self.layers}; make it for more layers, or count from 0")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("a cache passes no gradients on to earlier tokens; decode under torch.no_grad()")
        check_even(self._counts, layer)
        if not self._counts[layer]:
            return None, None
        tokens, state = self._tokens[layer], self._states[layer]
        assert tokens is not None and state is not None
        if tokens.shape[0] != x.shape[0]:
            raise ValueError(
                f"the cache holds {tokens.shape[0]} sequences and was given {x.shape[0]}; reset() it, or use another"
            )
        return tokens, state

    def update(self, layer: int, tokens: Tensor, state: Tensor, count: int) -> None:
        """Write one layer's last tokens and state, in place of those that were there.

        Args:
            tokens: [B, taps - 1, channels]. state: [B, H, P, N].
            count: how many tokens are new.
        Raises:
            ValueError: other shapes or dtypes than before; nothing has been written then.
        """
        new = tokens.detach(), state.detach()
        stores = self._tokens, self._states
        if self._counts[layer]:
            for store, value, what in zip(stores, new, ("last tokens", "states"), strict=True):
                held = store[layer]
                assert held is not None
                check_same(held, value, what, tuple(range(value.dim())))
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            for store, value in zip(stores, new, strict=True):
                held = store[layer]
                if held is None or not same(held, value, tuple(range(value.dim()))):
                    held = store[layer] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                held.copy_(value)
        self._counts[layer] += count

    def reset(self) -> None:
        """Forget every token; the next update may bring another batch or dtype."""
        self._counts = [0] * self.layers

    def truncate(self, length: int) -> None:
        """Forget all tokens, or none.

        Raises:
            ValueError: some would have to be left.
        """
        if length == 0:
            self.reset()
        elif length != self.length or len(set(self._counts)) > 1:
            raise ValueError(
                f"the cache has seen {self.length} tokens and a state cannot be cut to {length}: keep a copy.deepcopy "
                "of the cache to come back to, or reset() it"
            )

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
        for store in (self._tokens, self._states):
            for layer, held in enumerate(store):
                if held is not None and self._counts[layer]:
                    with torch.inference_mode(False):
                        store[layer] = held[indices.to(held.device)]
