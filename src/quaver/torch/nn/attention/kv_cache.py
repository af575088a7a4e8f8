"""Keys and values of the tokens so far, so that decoding computes each token once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# ---- contiguous ------------------------------------------------------------------------------------------


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


# ---- paged -----------------------------------------------------------------------------------------------
# A key-value cache in pages, for sequences of different lengths that come and go.
#
# Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180. Attention reads contiguous keys here: an update gathers
# them, so that memory is saved between steps and not during one.


class PagedKVCache:
    """Pages of tokens, shared by all sequences; a sequence has a list of them, and gives them back when it is freed.

    Args:
        layers: how many attention layers share it.
        pages: how many there are, for all sequences together.
        page_size: tokens of a page.
    Raises:
        ValueError: numbers that are not positive.
    The rows of a batch are the sequences of `use`, by default all in the order they were added; an update of an empty
    cache adds one for each row. Gradients do not pass.
    Exact.
    """

    def __init__(self, layers: int, pages: int, page_size: int = 16) -> None:
        if min(layers, pages, page_size) < 1:
            raise ValueError(
                f"a cache for {layers} layers with {pages} pages of {page_size} tokens holds nothing; "
                "give numbers above 0"
            )
        self.layers, self.pages, self.page_size = layers, pages, page_size
        self._serial = 0
        self.reset()

    def reset(self) -> None:
        """Free every sequence, and the memory; the next update may bring another dtype."""
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
        """Tokens that fit in all pages."""
        return self.pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        """The sequences that the rows of a batch are, in order."""
        return list(self._table) if self._rows is None else list(self._rows)

    @property
    def batch(self) -> int:
        """How many these are."""
        return len(self.sequences)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each of them that every layer holds, int64 [B], where the keys are."""
        return self._tensor(tuple(min(self._counts[s]) for s in self.sequences))

    @property
    def length(self) -> int:
        """The largest of `lengths`."""
        return max((min(self._counts[s]) for s in self.sequences), default=0)

    @property
    def offset(self) -> int | Tensor:
        """Where the next tokens stand, for rope: `lengths`, or one number where they are equal."""
        counts = {min(self._counts[s]) for s in self.sequences} or {0}
        return counts.pop() if len(counts) == 1 else self.lengths

    def held(self, layer: int) -> Tensor:
        """Tokens of each of them that one layer holds, int64 [B]."""
        return self._tensor(tuple(self._counts[s][layer] for s in self.sequences))

    def padding(self) -> Tensor:
        """bool [B, longest], True where what `update` last returned is padding."""
        held = self._newest()
        at = torch.arange(max(held, default=0), dtype=torch.int64, device=self._device())
        return at >= self._tensor(held)[:, None]

    def mask(self, mask: Any, mask_type: str, queries: int) -> tuple[Any, str]:
        """(mask, mask_type) for attention of the newest tokens to what `update` returned.

        Args:
            mask: None, or bool [B, queries], True where new tokens at the end of a row are padding; `truncate` forgets
                those afterwards.
            mask_type: the layer's; a causal one puts each row's last query at its last key.
            queries: how many tokens are new.
        Raises:
            ValueError: as `check_mask`.
        """
        self.check_mask(mask, mask_type, (self.batch, queries))
        causal = "causal" in mask_type
        held = self._newest()
        if mask is None and len(set(held)) < 2:
            return None, "causal_bottom_right" if causal else "none"
        of_queries = torch.zeros(self.batch, queries, dtype=torch.bool, device=self._device()) if mask is None else mask
        real = self._tensor(held)[:, None] - of_queries.sum(1, keepdim=True)
        of_keys = torch.arange(max(held), dtype=torch.int64, device=real.device) >= real
        return (of_queries, of_keys), "padding_causal_bottom_right" if causal else "padding"

    def check_mask(self, mask: Any, mask_type: str, tokens: tuple[int, int]) -> None:
        """Raise a ValueError for a mask of another shape than the new tokens [B, queries], or an arbitrary one."""
        if mask_type == "arbitrary" or (mask is not None and mask.shape != tokens):
            raise ValueError(
                f"with a PagedKVCache a mask says which of the new tokens {list(tokens)} are padding; "
                f"this one has mask_type {mask_type!r} and shape {None if mask is None else tuple(mask.shape)}"
            )

    def add(self) -> int:
        """A new, empty sequence; its number."""
        sequence, self._serial = self._serial, self._serial + 1
        self._table[sequence] = []
        self._counts[sequence] = [0] * self.layers
        return sequence

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back.

        Raises:
            ValueError: there is no such sequence.
        """
        self._check_known([sequence])
        self._last = None
        self._free += self._table.pop(sequence)[::-1]
        del self._counts[sequence]
        if self._rows is not None:
            self._rows = [s for s in self._rows if s != sequence]

    def use(self, sequences: list[int] | None) -> None:
        """Say which sequences the rows of the next batches are, in order; None: all.

        Raises:
            ValueError: one that there is not, or one twice.
        """
        if sequences is not None:
            self._check_known(sequences)
            if len(set(sequences)) != len(sequences):
                raise ValueError(f"sequences {sequences} name one twice; each row needs its own")
        self._rows = None if sequences is None else list(sequences)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values to the sequences in use.

        Args:
            layer: from 0.
            k: [B, S, G, D]; v: [B, S, G, Dv].
        Returns:
            (keys, values) of all tokens so far, [B, longest, G, D] and [B, longest, G, Dv], copied; rows that are
            shorter are filled up with their own first token, which `padding` masks out.
        Raises:
            ValueError: no pages left, another number of rows, shapes or dtypes other than before, tensors that
                require gradients, or a layer ahead of the others; nothing has been written then.
        """
        check_new(k, v, layer, self.layers)
        for held, new, what in ((self._keys[layer], k, "keys"), (self._values[layer], v, "values")):
            if held is not None:
                check_same(held[None], new, what, (2, 3))
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
        """Cut the sequences in use to these lengths: what padded prompts brought in, or what was rejected.

        Raises:
            ValueError: another number of lengths, or a sequence that is shorter.
        """
        rows = self.sequences
        held = [min(self._counts[s]) for s in rows]
        if len(lengths) != len(rows) or any(not 0 <= n <= h for n, h in zip(lengths, held, strict=False)):
            raise ValueError(f"the sequences hold {held} tokens; they cannot be cut to {list(lengths)}")
        self._last = None
        for sequence, length in zip(rows, lengths, strict=True):
            self._counts[sequence] = [length] * self.layers
            kept = self._pages_for(length)
            self._free += self._table[sequence][kept:][::-1]
            self._table[sequence] = self._table[sequence][:kept]

    def reorder(self, indices: Tensor) -> None:
        """Row i becomes what row indices[i] was, as beam search needs it; pages are copied.

        Raises:
            ValueError: another number of indices than rows, one of no row, or no room for longer rows.
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
            kept = len(old[j])
            self._free += self._table[sequence][kept:][::-1]
            self._table[sequence] = self._table[sequence][:kept]
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
        """Tokens of each row in the layer that was updated last."""
        return tuple(max(self._counts[s]) for s in self.sequences)

    def _tensor(self, values: tuple[int, ...]) -> Tensor:
        """int64; the same object for the same numbers, so that a step's layers share what rope makes of it."""
        if self._indices is None or self._indices[0] != values:
            self._indices = values, torch.tensor(values, dtype=torch.int64, device=self._device())
        return self._indices[1]

    def _check_known(self, sequences: list[int]) -> None:
        for sequence in sequences:
            if sequence not in self._table:
                raise ValueError(f"there is no sequence {sequence}; those held are {list(self._table)}")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _require(self, pages: int) -> None:
        if pages > self.free_pages:
            raise ValueError(
                f"{pages} more pages of {self.page_size} tokens are needed, and {self.free_pages} of {self.pages} are "
                "free; free() a sequence, or make the cache with more pages"
            )

    def _reserve(self, ends: dict[int, int]) -> None:
        """Pages for these lengths, all or none."""
        wanted = {s: max(0, self._pages_for(end) - len(self._table[s])) for s, end in ends.items()}
        self._require(sum(wanted.values()))
        for sequence, count in wanted.items():
            self._table[sequence] += [self._free.pop() for _ in range(count)]

    def _pool(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's memory, [capacity, G, D]."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            # An inference tensor could not be written outside inference mode.
            with torch.inference_mode(False):
                keys, values = (t.new_empty(self.capacity, *t.shape[2:]) for t in (k, v))
            self._keys[layer], self._values[layer] = keys, values
        return keys, values

    def _slots(self, rows: list[int], ends: list[int], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the new tokens go, [B S], and where all of them are, [B, longest]; the layers of a step share them."""
        key = (tuple(rows), tuple(ends), tokens, device)
        if self._last is None or self._last[0] != key:
            longest = max(ends, default=0)
            every = torch.zeros(len(rows), longest, dtype=torch.int64, device="cpu")
            for i, (sequence, end) in enumerate(zip(rows, ends, strict=True)):
                at = torch.arange(end, dtype=torch.int64, device="cpu")
                pages = torch.tensor(self._table[sequence], dtype=torch.int64, device="cpu")
                every[i, :end] = pages[at // self.page_size] * self.page_size + at % self.page_size
                # A token of its own: another sequence's NaN would pass a mask that multiplies by 0.
                every[i, end:] = every[i, 0] if longest else 0
            new = [row[end - tokens : end] for row, end in zip(every, ends, strict=True)]
            self._last = key, torch.cat(new).to(device) if new else every.flatten().to(device), every.to(device)
        return self._last[1], self._last[2]


# ---- stepped ---------------------------------------------------------------------------------------------
# A cache whose steps are begun from outside: how many new tokens each sequence has, by whatever names it.
#
# As Megatron-LM's and Transformer Engine's `InferenceParams`, over pages of keys and values.


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
