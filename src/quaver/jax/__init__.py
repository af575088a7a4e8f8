"""The JAX front end: the recipes of `quaver.recipes` for arrays, functions, Flax linen and NNX modules."""

from importlib.util import find_spec

if find_spec("jax") is None:
    sentence = "quaver.jax needs JAX, which is not installed: pip install 'quaver[jax]'"
    raise ModuleNotFoundError(sentence, name="jax")

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(
        f"quaver.jax needs jax 0.10.2 or newer and found {jax.__version__}; run: pip install -U 'jax>=0.10.2'"
    )

from quaver.jax import sharding, state
from quaver.jax.autocast import autocast
from quaver.jax.dot_general import dot_general
from quaver.jax.gather import Gather
from quaver.jax.grouped import grouped_dot
from quaver.jax.linear import linear
from quaver.jax.ops import dequantize, matmul, quantize
from quaver.jax.quantized import Quantized

__all__ = [
    "Gather",
    "Quantized",
    "autocast",
    "dequantize",
    "dot_general",
    "grouped_dot",
    "linear",
    "matmul",
    "quantize",
    "sharding",
    "state",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
