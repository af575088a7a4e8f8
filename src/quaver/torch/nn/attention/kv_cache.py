"""Key/value caches for decoding: contiguous, paged, and paged with explicit steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# ---- contiguous ----


class LayerCache:
    """Base of caches of two buffers [B, ...] per layer, for sequences of one length.

    Args:
        layers: number of layers that share the cache.
    """

    def __init__(self, layers: int) -> None:
        self._counts = [0] * layers
        self._buffers: tuple[list[Tensor | None], list[Tensor | None]] = [None] * layers, [None] * layers

    @property
    def layers(self) -> int:
        """Number of layers that share the cache."""
        return len(self._counts)

    @property
    def batch(self) -> int | None:
        """Batch size B; None before the first update."""
        first = next((buffer for buffer in self._buffers[0] if buffer is not None), None)
        return None if first is None else first.shape[0]

    @property
    def length(self) -> int:
        """Number of tokens that every layer has cached; during a forward, those before it."""
        return min(self._counts)

    def length_of(self, layer: int) -> int:
        """Return the number of tokens that one layer has cached."""
        return self._counts[layer]

    def reset(self) -> None:
        """Drop all tokens; the next update may have another batch size or dtype."""
        self._counts = [0] * self.layers

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence indices[i], for beam search.

        Args:
            indices: int [B'], each below B; B' may differ from B, to expand a batch into beams.
        Raises:
            ValueError: the cache is empty, or indices (on the CPU) are out of range.
        """
        if not any(self._counts):
            raise ValueError("the cache is empty; reorder it after the first update")
        if indices.is_cpu:  # Reading indices on a GPU would synchronize.
            check_indices(indices.tolist(), self.batch or 0)
        for layer, count in enumerate(self._counts):
            for buffers in self._buffers:
                old = buffers[layer]
                if old is None:
                    continue
                taken = self._used(old, count)[indices.to(old.device)]
                if taken.shape[0] != old.shape[0]:
                    # Inference tensors cannot be written outside inference mode.
                    with torch.inference_mode(False):
                        old = buffers[layer] = old.new_empty(taken.shape[0], *old.shape[1:])
                self._used(old, count).copy_(taken)

    def _used(self, buffer: Tensor, count: int) -> Tensor:
        """Return the view of a buffer that a number of tokens have filled."""
        return buffer


class KVCache(LayerCache):
    """Key/value cache with one buffer [B, capacity, G, D] per layer, allocated at the first update.

    Args:
        layers: number of attention layers that share it.
        capacity: maximum number of tokens per sequence.
    Raises:
        ValueError: numbers that are not positive.

    All sequences of a batch have the same length; use `PagedKVCache` for different lengths. No gradients. Exact.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        if layers < 1 or capacity < 1:
            raise ValueError(f"a cache needs positive numbers of layers and tokens, not {layers} and {capacity}")
        self.capacity = capacity
        super().__init__(layers)
        self._keys, self._values = self._buffers

    @property
    def offset(self) -> int:
        """Position of the next token, for rope; equals `length`."""
        return self.length

    @property
    def lengths(self) -> Tensor:
        """`length` for each sequence, int64 [B], on the device of the keys."""
        first = next((k for k in self._keys if k is not None), None)
        if first is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return torch.full((first.shape[0],), self.length, dtype=torch.int64, device=first.device)

    def mask(self, mask: Any, mask_type: str, queries: int) -> tuple[Any, str]:
        """Return (mask, mask_type) for attention of the new tokens on the result of `update`.

        Args:
            mask: for mask type "arbitrary", broadcastable to [B, H, queries, total].
            mask_type: mask type of the layer; a causal one aligns the last query with the last key.
            queries: number of new tokens.
        Raises:
            ValueError: as `check_mask`.
        """
        self.check_mask(mask, mask_type)
        if mask_type == "arbitrary":
            return mask, mask_type
        return mask, "causal_bottom_right" if "causal" in mask_type else "none"

    def check_mask(self, mask: Any, mask_type: str, tokens: tuple[int, int] | None = None) -> None:
        """Raise ValueError for a padding mask, which sequences of equal length do not have, or a mask of an
        unsupported type.
        """
        if mask_type.startswith("padding") and mask is not None:
            raise ValueError(
                "the sequences of a KVCache have the same length, without padding; use a PagedKVCache for prompts "
                "of different lengths, or one KVCache for each"
            )
        if mask is not None and mask_type != "arbitrary":
            raise ValueError(f"mask_type {mask_type!r} takes no mask; make the layer with 'arbitrary'")

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values.

        Args:
            layer: index of the layer, from 0.
            k: [B, S, G, D].
            v: [B, S, G, Dv].
        Returns:
            (keys, values) of all tokens so far, [B, total, G, D] and [B, total, G, Dv]: views of the cache, valid until
            the next reset, reorder or truncate.
        Raises:
            ValueError: the capacity is exceeded, shapes or dtypes differ from earlier ones, tensors require gradients,
                or the layer is ahead of the others. Nothing is written in that case.
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
        """Return the buffers of an empty layer, reused if the new tokens fit, else newly allocated."""
        memory = self._keys[layer], self._values[layer]
        enlarged: list[Tensor] = []
        # Inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False):
            for old, new in zip(memory, (k, v), strict=True):
                if old is None or not same(old, new):
                    old = new.new_empty(new.shape[0], self.capacity, *new.shape[2:])
                enlarged.append(old)
        keys, values = self._keys[layer], self._values[layer] = enlarged
        return keys, values

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on.

        Raises:
            ValueError: there are fewer tokens.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens; it cannot be truncated to {length}")
        self._counts = [length] * self.layers

    def _used(self, buffer: Tensor, count: int) -> Tensor:
        return buffer[:, :count]


def check_new(k: Tensor, v: Tensor, layer: int, layers: int) -> None:
    """Raise ValueError unless k and v are keys and values of one layer."""
    check_layer(layer, layers, k, v)
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"keys have shape {tuple(k.shape)} and values {tuple(v.shape)}; both are [B, S, G, D or Dv]")


def check_layer(layer: int, layers: int, *new: Tensor) -> None:
    """Raise ValueError for a layer that does not exist, or new tokens that require gradients."""
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} of a cache for {layers}; make it for more layers, or count from 0")
    if torch.is_grad_enabled() and any(tokens.requires_grad for tokens in new):
        raise ValueError("a cache does not support gradients of earlier tokens; decode under torch.no_grad()")


def check_even(counts: list[int], layer: int) -> None:
    """Raise ValueError if a layer already has the tokens of this forward, which would be appended twice."""
    if counts[layer] > min(counts):
        raise ValueError(
            f"layer {layer} holds {counts[layer]} tokens and layer {counts.index(min(counts))} of the cache "
            f"{min(counts)}: a forward failed between them, or the cache was made for more layers than the model "
            f"has; truncate() it to {min(counts)}, or make another"
        )


def check_indices(indices: list[int], batch: int) -> None:
    """Raise ValueError unless all indices are rows of the batch."""
    if any(not 0 <= i < batch for i in indices):
        raise ValueError(
            f"the indices {indices} are not all rows of the {batch} cached sequences; give 0 to {batch - 1}"
        )


def same(old: Tensor, new: Tensor, axes: tuple[int, ...] = (0, 2, 3)) -> bool:
    """Return True if new tokens match the cache in dtype, device and the sizes of these axes."""
    sizes = all(old.shape[a] == new.shape[a] for a in axes)
    return sizes and old.dtype == new.dtype and old.device == new.device


def check_same(old: Tensor, new: Tensor, what: str, axes: tuple[int, ...] = (0, 2, 3)) -> None:
    """Raise ValueError unless new tokens match the cache as in `same`."""
    if not same(old, new, axes):
        raise ValueError(
            f"the cache holds {what} {tuple(old.shape)} in {old.dtype} on {old.device}, but got "
            f"{tuple(new.shape)} in {new.dtype} on {new.device}; reset() it, or use another"
        )


# ---- paged, for sequences of different lengths that are added and freed ----
#
# Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180. Attention here reads contiguous keys, so an update
# gathers them: memory is saved between steps but not within one.


class PagedKVCache:
    """Key/value cache in pages of tokens that all sequences share; freeing a sequence returns its pages.

    Args:
        layers: number of attention layers that share it.
        pages: number of pages for all sequences together.
        page_size: tokens per page.
    Raises:
        ValueError: numbers that are not positive.

    The rows of a batch are the sequences set by `use`, by default all in the order in which they were added. An update
    of an empty cache adds a sequence per row. No gradients. Exact.
    """

    def __init__(self, layers: int, pages: int, page_size: int = 16) -> None:
        if min(layers, pages, page_size) < 1:
            raise ValueError(
                f"a cache needs positive numbers of layers, pages and tokens per page, not {layers}, {pages} and "
                f"{page_size}"
            )
        self.layers, self.pages, self.page_size = layers, pages, page_size
        self._serial = 0
        self.reset()

    def reset(self) -> None:
        """Free all sequences and the memory; the next update may have another dtype."""
        self._keys: list[Tensor | None] = [None] * self.layers
        self._values: list[Tensor | None] = [None] * self.layers
        self._free = list(range(self.pages))[::-1]
        self._table: dict[int, list[int]] = {}
        self._counts: dict[int, list[int]] = {}
        self._rows: list[int] | None = None
        self._indices: tuple[tuple[int, ...], Tensor] | None = None
        self._last: tuple[object, Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all pages."""
        return self.pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Number of unused pages."""
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        """Sequences that are the rows of a batch, in order."""
        return list(self._table) if self._rows is None else list(self._rows)

    @property
    def batch(self) -> int:
        """Number of sequences in use."""
        return len(self.sequences)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens per sequence in use that every layer has cached, int64 [B], on the device of the keys."""
        return self._tensor(tuple(min(self._counts[s]) for s in self.sequences))

    @property
    def length(self) -> int:
        """Largest of `lengths`."""
        return max((min(self._counts[s]) for s in self.sequences), default=0)

    @property
    def offset(self) -> int | Tensor:
        """Position of the next token, for rope: `lengths`, or an int if all are equal."""
        counts = {min(self._counts[s]) for s in self.sequences} or {0}
        return counts.pop() if len(counts) == 1 else self.lengths

    def length_of(self, layer: int) -> Tensor:
        """Return the number of tokens per sequence that one layer has cached, int64 [B]."""
        return self._tensor(tuple(self._counts[s][layer] for s in self.sequences))

    def padding(self) -> Tensor:
        """Return bool [B, longest], True where the last result of `update` is padding."""
        counts = self._newest()
        at = torch.arange(max(counts, default=0), dtype=torch.int64, device=self._device())
        return at >= self._tensor(counts)[:, None]

    def mask(self, mask: Any, mask_type: str, queries: int) -> tuple[Any, str]:
        """Return (mask, mask_type) for attention of the new tokens on the result of `update`.

        Args:
            mask: None, or bool [B, queries], True where new tokens at the end of a row are padding; drop those
                afterwards with `truncate`.
            mask_type: mask type of the layer; a causal one aligns each row's last query with its last key.
            queries: number of new tokens.
        Raises:
            ValueError: as `check_mask`.
        """
        self.check_mask(mask, mask_type, (self.batch, queries))
        causal = "causal" in mask_type
        counts = self._newest()
        if mask is None and len(set(counts)) < 2:
            return None, "causal_bottom_right" if causal else "none"
        query_mask = torch.zeros(self.batch, queries, dtype=torch.bool, device=self._device()) if mask is None else mask
        real = self._tensor(counts)[:, None] - query_mask.sum(1, keepdim=True)
        key_mask = torch.arange(max(counts), dtype=torch.int64, device=real.device) >= real
        return (query_mask, key_mask), "padding_causal_bottom_right" if causal else "padding"

    def check_mask(self, mask: Any, mask_type: str, tokens: tuple[int, int]) -> None:
        """Raise ValueError for an arbitrary mask, or one whose shape is not that of the new tokens [B, queries]."""
        if mask_type == "arbitrary" or (mask is not None and mask.shape != tokens):
            raise ValueError(
                f"with a PagedKVCache a mask says which of the new tokens {list(tokens)} are padding; "
                f"this one has mask_type {mask_type!r} and shape {None if mask is None else tuple(mask.shape)}"
            )

    def add(self) -> int:
        """Add an empty sequence and return its number."""
        sequence, self._serial = self._serial, self._serial + 1
        self._table[sequence] = []
        self._counts[sequence] = [0] * self.layers
        return sequence

    def free(self, sequence: int) -> None:
        """Free a sequence's pages.

        Raises:
            ValueError: unknown sequence.
        """
        self._check_known([sequence])
        self._last = None
        self._free += self._table.pop(sequence)[::-1]
        del self._counts[sequence]
        if self._rows is not None:
            self._rows = [s for s in self._rows if s != sequence]

    def use(self, sequences: list[int] | None) -> None:
        """Set which sequences are the rows of the following batches, in order; None for all.

        Raises:
            ValueError: an unknown sequence, or one that occurs twice.
        """
        if sequences is not None:
            self._check_known(sequences)
            if len(set(sequences)) != len(sequences):
                raise ValueError(f"sequences {sequences} name one twice; each row needs its own")
        self._rows = None if sequences is None else list(sequences)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values to the sequences in use.

        Args:
            layer: index of the layer, from 0.
            k: [B, S, G, D].
            v: [B, S, G, Dv].
        Returns:
            (keys, values) of all tokens so far, [B, longest, G, D] and [B, longest, G, Dv], as copies. Shorter rows are
            filled with their own first token, which `padding` masks out.
        Raises:
            ValueError: no free pages, a wrong number of rows, shapes or dtypes that differ from earlier ones, tensors
                that require gradients, or a layer ahead of the others. Nothing is written in that case.
        """
        check_new(k, v, layer, self.layers)
        for old, new, what in ((self._keys[layer], k, "keys"), (self._values[layer], v, "values")):
            if old is not None:
                check_same(old[None], new, what, (2, 3))
        batch, tokens = k.shape[:2]
        if not self._table:
            self._require(batch * self._pages_for(tokens))
            for _ in range(batch):
                self.add()
        rows = self.sequences
        if len(rows) != batch:
            raise ValueError(f"the batch has {batch} rows and {len(rows)} sequences are in use; add() or use() some")
        for sequence in rows:
            check_even(self._counts[sequence], layer)
        ends = [self._counts[s][layer] + tokens for s in rows]
        self._reserve(dict(zip(rows, ends, strict=True)))
        keys, values = self._pool(layer, k, v)
        new, every = self._slots(rows, ends, tokens, k.device)
        keys[new] = k.flatten(0, 1)
        values[new] = v.flatten(0, 1)
        for sequence, end in zip(rows, ends, strict=True):
            self._counts[sequence][layer] = end
        return keys[every], values[every]

    def truncate(self, lengths: list[int]) -> None:
        """Truncate the sequences in use to these lengths, to drop padding of prompts or rejected tokens.

        Raises:
            ValueError: a wrong number of lengths, or a sequence that is shorter.
        """
        rows = self.sequences
        counts = [min(self._counts[s]) for s in rows]
        if len(lengths) != len(rows) or any(not 0 <= n <= h for n, h in zip(lengths, counts, strict=False)):
            raise ValueError(f"the sequences hold {counts} tokens; they cannot be truncated to {list(lengths)}")
        self._last = None
        for sequence, length in zip(rows, lengths, strict=True):
            self._counts[sequence] = [length] * self.layers
            pages = self._pages_for(length)
            self._free += self._table[sequence][pages:][::-1]
            self._table[sequence] = self._table[sequence][:pages]

    def reorder(self, indices: Tensor) -> None:
        """Replace row i by row indices[i], for beam search; pages are copied.

        Raises:
            ValueError: a wrong number of indices, an index out of range, or no free pages for longer rows.
        """
        rows, source = self.sequences, [int(i) for i in indices]
        if len(source) != len(rows):
            raise ValueError(f"{len(source)} indices for {len(rows)} rows; add() or free() sequences first")
        check_indices(source, len(rows))
        self._last = None
        old = [list(self._table[s]) for s in rows]
        counts = [self._counts[s] for s in rows]
        self._reserve({s: len(old[j]) * self.page_size for s, j in zip(rows, source, strict=True)})
        for sequence, j in zip(rows, source, strict=True):
            pages = len(old[j])
            self._free += self._table[sequence][pages:][::-1]
            self._table[sequence] = self._table[sequence][:pages]
            self._counts[sequence] = list(counts[j])
        moves = [(a, b) for s, j in zip(rows, source, strict=True) for a, b in zip(old[j], self._table[s], strict=True)]
        for pool in (*self._keys, *self._values):
            if pool is not None and moves:
                paged = pool.view(self.pages, self.page_size, *pool.shape[1:])
                sides = zip(*moves, strict=True)
                here, there = (torch.tensor(side, dtype=torch.int64, device=pool.device) for side in sides)
                paged[there] = paged[here]

    def _device(self) -> torch.device | None:
        first = next((k for k in self._keys if k is not None), None)
        return None if first is None else first.device

    def _newest(self) -> tuple[int, ...]:
        """Return the tokens per row in the layer that was updated last."""
        return tuple(max(self._counts[s]) for s in self.sequences)

    def _tensor(self, values: tuple[int, ...]) -> Tensor:
        """Return values as an int64 tensor; the same object for the same values, so that layers share rope's tables."""
        if self._indices is None or self._indices[0] != values:
            self._indices = values, torch.tensor(values, dtype=torch.int64, device=self._device())
        return self._indices[1]

    def _check_known(self, sequences: list[int]) -> None:
        for sequence in sequences:
            if sequence not in self._table:
                raise ValueError(f"there is no sequence {sequence}; the cache has {list(self._table)}")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _require(self, pages: int) -> None:
        if pages > self.free_pages:
            raise ValueError(
                f"{pages} more pages of {self.page_size} tokens are needed, and {self.free_pages} of {self.pages} are "
                "free; free() a sequence, or make the cache with more pages"
            )

    def _reserve(self, ends: dict[int, int]) -> None:
        """Allocate pages for these lengths, all or none."""
        wanted = {s: max(0, self._pages_for(end) - len(self._table[s])) for s, end in ends.items()}
        self._require(sum(wanted.values()))
        for sequence, count in wanted.items():
            self._table[sequence] += [self._free.pop() for _ in range(count)]

    def _pool(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's buffers [capacity, G, D]."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            # Inference tensors cannot be written outside inference mode.
            with torch.inference_mode(False):
                keys, values = (t.new_empty(self.capacity, *t.shape[2:]) for t in (k, v))
            self._keys[layer], self._values[layer] = keys, values
        return keys, values

    def _slots(self, rows: list[int], ends: list[int], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots of the new tokens [B * S] and of all tokens [B, longest]; cached for the layers of a
        step.
        """
        key = (tuple(rows), tuple(ends), tokens, device)
        if self._last is None or self._last[0] != key:
            longest = max(ends, default=0)
            every = torch.zeros(len(rows), longest, dtype=torch.int64, device="cpu")
            for i, (sequence, end) in enumerate(zip(rows, ends, strict=True)):
                at = torch.arange(end, dtype=torch.int64, device="cpu")
                pages = torch.tensor(self._table[sequence], dtype=torch.int64, device="cpu")
                every[i, :end] = pages[at // self.page_size] * self.page_size + at % self.page_size
                # Use the row's own first token: another sequence's NaN would survive a mask that multiplies by 0.
                every[i, end:] = every[i, 0] if longest else 0
            new = [row[end - tokens : end] for row, end in zip(every, ends, strict=True)]
            self._last = key, torch.cat(new).to(device) if new else every.flatten().to(device), every.to(device)
        return self._last[1], self._last[2]


# ---- paged with explicit steps, like Megatron-LM's and Transformer Engine's `InferenceParams` ----


class SteppedKVCache:
    """Key/value cache for named sequences that are added and freed; `pre_step` begins a step.

    The first tokens determine heads and dtypes.

    Args:
        pages: pages per layer.
        page_size: tokens per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.reset()

    def reset(self) -> None:
        """Drop all sequences."""
        self._caches: dict[int, PagedKVCache] = {}
        #: Tokens of each sequence before this step, and new ones.
        self._lengths_before: dict[Any, int] = {}
        self._new: dict[Any, int] = {}
        self._numbers: dict[int, dict[Any, int]] = {}

    def pre_step(self, tokens: Mapping[Any, int]) -> None:
        """Begin a step with the number of new tokens per sequence, in row order. Sequences not listed are freed."""
        self._lengths_before = {s: self._lengths_before.get(s, 0) + self._new.get(s, 0) for s in tokens}
        self._new = dict(tokens)
        for layer, numbers in self._numbers.items():
            for sequence in set(numbers) - set(tokens):
                self._caches[layer].free(numbers.pop(sequence))

    def lengths(self) -> Tensor:
        """Return the tokens of each row before this step, int32."""
        return torch.tensor(list(self._lengths_before.values()), dtype=torch.int32, device="cpu")

    def join(self, layer: int, k: Tensor, v: Tensor, mask_type: str) -> tuple[Tensor, Tensor, Any, str]:
        """Append a layer's keys and values [B, S, G, D], with rows padded at the end.

        Returns:
            Keys and values of all tokens, a mask, and its mask type.
        Raises:
            ValueError: `pre_step` was called for another number of rows; or as `PagedKVCache`.
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
        cache.truncate([self._lengths_before[s] + n for s, n in self._new.items()])
        return k, v, mask, mask_type
