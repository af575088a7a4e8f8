"""Attention: the function, the module, and what says which implementation runs; no residual stream."""

from quaver.torch.blocks.attention.dot_product import DotProductAttention
from quaver.torch.blocks.attention.explanation import AttentionExplanation, explain_attention
from quaver.torch.blocks.attention.op import attention

__all__ = ["AttentionExplanation", "DotProductAttention", "attention", "explain_attention"]
