"""Transformer Engine's API for JAX, with each name in the same file as there; without custom calls and tensor
classes.
"""

from importlib.util import find_spec

if find_spec("flax") is None:
    sentence = "quaver.compat.transformer_engine.jax needs Flax, which is not installed: pip install 'quaver[flax]'"
    raise ModuleNotFoundError(sentence, name="flax")

from quaver.compat.stand_in import JAX, unknown
from quaver.compat.transformer_engine.jax import flax, quantize, sharding
from quaver.compat.transformer_engine.jax.quantize import (
    NVTE_FP8_COLLECTION_NAME,
    autocast,
    fp8_autocast,
    update_collections,
    update_fp8_metas,
)
from quaver.compat.transformer_engine.jax.sharding import MeshResource

__all__ = ["NVTE_FP8_COLLECTION_NAME", "MeshResource", "autocast", "flax", "fp8_autocast", "quantize", "sharding"]
__all__ += ["update_collections", "update_fp8_metas"]

__getattr__ = unknown(__name__, __all__, JAX)
