"""One linear layer without bias in JAX, forward and backward in one compiled call: plain, flax's, qwix's and ours."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix
from flax.linen import fp8_ops
from jax import Array

from benchmarks.measuring.timing import Step
from quaver.jax import state as states
from quaver.jax.linears.function import linear
from quaver.recipes.spec import Recipe

#: flax's ops by the name shown: delayed scaling, with a pair of casts before the product or 8-bit operands in it.
FLAX = {"flax Fp8DotGeneralOp": fp8_ops.Fp8DotGeneralOp, "flax Fp8DirectDotGeneralOp": fp8_ops.Fp8DirectDotGeneralOp}
#: qwix's rules by the name shown: a scale for each channel, and for each block of 32.
QWIX = {"qwix float8": {}, "qwix float8, blocks of 32": {"tile_size": 32, "bwd_weight_grad_tile_size": 32}}

Arrays = tuple[Array, Array, Array]


def arrays(features: int) -> Arrays:
    """x and w, Gaussian, and the output's gradient g, all bf16 [features, features]."""
    x, w, g = (jax.random.normal(key, (features, features)) for key in jax.random.split(jax.random.key(0), 3))
    return x.astype(jnp.bfloat16), (0.02 * w).astype(jnp.bfloat16), g.astype(jnp.bfloat16)


def plain(at: Arrays) -> Step:
    """Return the step of a linear layer in bf16."""
    x, w, g = at
    return _step(lambda x, w: x @ w, g, x, w)


def flax(at: Arrays, op: Any) -> Step:
    """nn.Dense with one of flax's ops in its slot; its state is differentiated too, as flax documents it."""
    x, w, g = at
    with quiet():
        dense = nn.Dense(w.shape[1], use_bias=False, dtype=x.dtype, param_dtype=w.dtype, dot_general_cls=op)
        variables = {**dense.init(jax.random.key(0), x), "params": {"kernel": w}}
        return _step(lambda x, variables: dense.apply(variables, x), g, x, variables)


def with_qwix(at: Arrays, options: dict[str, Any]) -> Step:
    """nn.Dense under qwix's rule for quantized training: E4M3 with E5M2 gradients."""
    x, w, g = at
    types = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
    with quiet():
        dense = nn.Dense(w.shape[1], use_bias=False, dtype=x.dtype, param_dtype=w.dtype)
        model = qwix.quantize_model(dense, qwix.QtProvider([qwix.QtRule(**types, **options)]))
        variables = {**model.init(jax.random.key(0), x[None]), "params": {"kernel": w}}
        # qwix recognizes a weight by its shape, so the input must not be square.
        return _step(lambda x, variables: model.apply(variables, x[None])[0], g, x, variables)


@contextmanager
def quiet() -> Iterator[None]:
    """Context that silences the deprecation warnings of flax and qwix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ours(at: Arrays, recipe: Recipe) -> Step:
    """Return the step of `quaver.jax.linear`, which also differentiates the recipe's state."""
    x, w, g = at

    def layer(x: Array, w: Array, state: Any) -> Array:
        return linear(x, w, recipe=recipe, state=state)

    return _step(layer, g, x, w, states.init(recipe))


def _step(layer: Callable[..., Array], g: Array, *inputs: Any) -> Step:
    """Output and gradients of all inputs, compiled; a step waits for them."""

    @jax.jit
    def forward_and_backward(g: Array, *inputs: Any) -> Any:
        y, backward = jax.vjp(layer, *inputs)
        return y, backward(g)

    def step() -> None:
        jax.block_until_ready(forward_and_backward(g, *inputs))

    step()
    return step
