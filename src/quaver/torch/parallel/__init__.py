"""What is applied to a model from outside so that many ranks train it; no layer knows a mesh."""

from quaver.torch.parallel.tensor.styles import Column, Row

__all__ = ["Column", "Row"]
