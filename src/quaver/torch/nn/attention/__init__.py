"""Attention: the function `attention`, the module `DotProductAttention`, and `explain_attention`."""

from quaver.torch.nn.attention.dot_product import AttentionExplanation, DotProductAttention, explain_attention
from quaver.torch.nn.attention.op import attention

__all__ = ["AttentionExplanation", "DotProductAttention", "attention", "explain_attention"]
