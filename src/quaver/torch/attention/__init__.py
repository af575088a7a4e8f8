"""Attention: the function, the module, and `explain_attention`, which says which implementation runs."""

from quaver.torch.attention.dot_product import DotProductAttention
from quaver.torch.attention.explain import AttentionExplanation, explain_attention
from quaver.torch.attention.op import attention

__all__ = ["AttentionExplanation", "DotProductAttention", "attention", "explain_attention"]
