"""What is applied to a model from outside so that many ranks train it; no layer knows a mesh."""

from quaver.torch.parallel.fsdp.gathering import Gathers, gather_quantized
from quaver.torch.parallel.tensor.styles import Column, Heads, Row, Sequence

__all__ = ["Column", "Gathers", "Heads", "Row", "Sequence", "gather_quantized"]
