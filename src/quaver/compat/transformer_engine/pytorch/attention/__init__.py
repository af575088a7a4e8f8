"""Transformer Engine's attention modules: its arguments, mask types and layouts for Quaver's attention."""

from quaver.compat.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from quaver.compat.transformer_engine.pytorch.attention.inference import InferenceParams
from quaver.compat.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from quaver.compat.transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding"]
__all__ += ["apply_rotary_pos_emb"]
