"""`InferenceParams`: Transformer Engine's cache of keys and values, implemented by `SteppedKVCache`."""

import torch

from quaver.options import checks
from quaver.torch.nn.attention.kv_cache import SteppedKVCache


class InferenceParams(SteppedKVCache):
    """`SteppedKVCache` with Transformer Engine's arguments; unless is_paged, each sequence has one page of
    max_sequence_length tokens.
    """

    @checks
    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int = 16, head_dim_k: int = 64,
        dtype: torch.dtype | None = None, head_dim_v: int | None = None, is_paged: bool = False,
        total_num_pages: int | None = None, page_size: int | None = None, max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
    ) -> None:  # fmt: skip
        pages, tokens = max_batch_size, max_sequence_length
        if is_paged:
            if page_size is None or total_num_pages is None:
                raise ValueError("is_paged=True needs total_num_pages and page_size")
            pages, tokens = total_num_pages, page_size
        super().__init__(pages, tokens)

    def allocate_memory(self, layer_number: int) -> None:
        """Do nothing: a layer's memory is allocated with its first tokens."""

    get_seqlens_pre_step = SteppedKVCache.lengths
