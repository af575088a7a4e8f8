"""A key-value cache in pages, for sequences of different lengths that come and go.

Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180. Attention reads contiguous keys here: an update gathers
them, so that memory is saved between steps and not during one.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.attention.cache.contiguous import check_even, check_indices, check_new, check_same


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
