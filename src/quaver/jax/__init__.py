"""JAX front end: quantized functions of arrays, Flax linen and NNX modules under the recipes of `quaver.recipes`; no
torch.
"""

from importlib.util import find_spec

if find_spec("jax") is None:
    sentence = "quaver.jax needs JAX, which is not installed: pip install 'quaver[jax]'"
    raise ModuleNotFoundError(sentence, name="jax")

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(
        f"quaver.jax needs jax 0.10.2 or newer and found {jax.__version__}; run: pip install -U 'jax>=0.10.2'"
    )

from quaver.jax import state
from quaver.jax.blocks.experts import balance_loss, token_counts, update_bias, z_loss
from quaver.jax.blocks.moe import Routing, permute, route, unpermute
from quaver.jax.compare import compare, perturb
from quaver.jax.conversion.convert import convert, plain_state
from quaver.jax.inspection.explain import explain
from quaver.jax.inspection.inspector import Inspector, count, inspect
from quaver.jax.linears.dot_general import dot_general
from quaver.jax.linears.function import linear
from quaver.jax.linears.grouped import grouped_dot
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations import sharding
from quaver.jax.operations.ops import dequantize, matmul, quantize
from quaver.jax.operations.sharding import ShardedOperand
from quaver.jax.state.context import autocast

__all__ = [
    "Inspector",
    "Quantized",
    "Routing",
    "ShardedOperand",
    "autocast",
    "balance_loss",
    "compare",
    "convert",
    "count",
    "dequantize",
    "dot_general",
    "explain",
    "grouped_dot",
    "inspect",
    "linear",
    "matmul",
    "permute",
    "perturb",
    "plain_state",
    "quantize",
    "route",
    "sharding",
    "state",
    "token_counts",
    "unpermute",
    "update_bias",
    "z_loss",
]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
