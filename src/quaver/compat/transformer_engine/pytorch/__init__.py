"""Transformer Engine's API for PyTorch, with each name in the same file as there; without tensor subclasses
and kernels.
"""

from quaver.compat.stand_in import PYTORCH, unknown
from quaver.compat.transformer_engine.pytorch import cpu_offload, module, optimizers, permutation, quantization
from quaver.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from quaver.compat.transformer_engine.pytorch.cpu_offload import *  # noqa: F403
from quaver.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from quaver.compat.transformer_engine.pytorch.distributed import checkpoint
from quaver.compat.transformer_engine.pytorch.module import *  # noqa: F403
from quaver.compat.transformer_engine.pytorch.permutation import *  # noqa: F403
from quaver.compat.transformer_engine.pytorch.quantization import *  # noqa: F403
from quaver.compat.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = ["DotProductAttention", "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding"]
__all__ += ["TransformerLayer", "checkpoint", "optimizers", "parallel_cross_entropy", "quantization"]
__all__ += cpu_offload.__all__
__all__ += module.__all__
__all__ += permutation.__all__
__all__ += quantization.__all__

__getattr__ = unknown(__name__, __all__, PYTORCH)
