"""Transformer Engine's token permutations as plain torch operations: dispatch rows to experts and combine them.

A row map, `row_id_map`, is int64 [3, rows]: for each copy its token, its expert (or its index among the token's
choices), and its row. `quaver.torch.permute` also supports static shapes and codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quaver.recipes.text import check_name

__all__ = ["moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs", "moe_sort_chunks_by_index"]
__all__ += ["moe_sort_chunks_by_index_with_probs", "moe_unpermute"]

MAPS = ("mask", "index")


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens sorted by expert, and the row map for `moe_unpermute`.

    Args:
        inp: [T, H].
        routing_map: "mask": bool or int [T, experts]; "index": the experts of each token, int [T, k].
        num_out_tokens: keep only this many rows; -1 keeps all.
    """
    check_name("map_type", map_type, MAPS)
    if map_type == "mask":
        place, token = routing_map.t().nonzero(as_tuple=True)
    else:
        order = routing_map.flatten().argsort(stable=True)
        token, place = order // routing_map.shape[1], order % routing_map.shape[1]
    if num_out_tokens > 0:
        token, place = token[:num_out_tokens], place[:num_out_tokens]
    return inp.index_select(0, token), torch.stack((token, place, torch.arange(token.shape[0], device=token.device)))


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` for a mask, with row probabilities from probs [T, experts]; returns (rows, probabilities, map)."""
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs[row_id_map[0], row_id_map[1]], row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`moe_permute_with_probs` with each expert's rows padded with zeros to a multiple of `align_size`.

    Returns:
        Rows, probabilities, the row map, the offset that padding adds to each expert's rows, and the padded sizes.
    """
    rows, row_probs, row_id_map = moe_permute_with_probs(inp, probs, routing_map)
    target = -(-tokens_per_expert // align_size) * align_size
    moved = (target - tokens_per_expert).cumsum(0) - (target - tokens_per_expert)
    at = row_id_map[2] + moved.to(row_id_map.device)[row_id_map[1]]
    total = int(target.sum())
    padded = rows.new_zeros(total, rows.shape[1]).index_copy(0, at, rows)
    wide = row_probs.new_zeros(total).index_copy(0, at, row_probs)
    return padded, wide, torch.stack((row_id_map[0], row_id_map[1], at)), moved, target


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: Sequence[int] | None = None,
    map_type: str = "mask", probs: Tensor | None = None, pad_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum each token's rows, weighted by merging_probs [T, experts or k], in float32; `probs` is its older name.

    Raises:
        ValueError: neither merging_probs nor restore_shape gives the number of tokens.
    """
    check_name("map_type", map_type, MAPS)
    merging_probs = probs if merging_probs is None else merging_probs
    token, place, row = row_id_map
    rows = inp.index_select(0, row).float()
    if merging_probs is not None:
        rows = rows * merging_probs[token, place].float()[:, None]
    if restore_shape is None and merging_probs is None:
        if map_type == "mask":
            raise ValueError("moe_unpermute needs restore_shape, the shape of the tokens before permutation")
        tokens = int(token.max()) + 1 if token.numel() else 0
    else:
        tokens = restore_shape[0] if restore_shape is not None else merging_probs.shape[0]  # type: ignore[union-attr]
    return rows.new_zeros(tokens, inp.shape[1]).index_add(0, token, rows).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Reorder chunks of rows with the given sizes."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `moe_sort_chunks_by_index` to rows and to their probabilities."""
    return tuple(moe_sort_chunks_by_index(x, split_sizes, sorted_index) for x in (inp, probs))  # type: ignore[return-value]
