"""Compare Transformer Engine's own JAX modules with ours, in one process on a CPU: `python -m` this runs all cases.

Its compiled extension needs a GPU's libraries, and only provides numbers of types where no custom call is enabled:
`extension` replaces it, and all products, quantizations and histories are computed by its own Python.
The package is a wheel of Python files: pip install --no-deps --target FOLDER transformer-engine.
"""

import enum
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp

#: Where `make test-integrations` installs it: outside the environment's packages, where other libraries would find it.
FOLDER = Path(sys.prefix, "peers")
VERSION = "2.20.2"


class _Numbers(type):
    """Class of the extension with a distinct number for every name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = [v for v in vars(cls).values() if isinstance(v, enum.Enum)]
        value = enum.Enum(cls.__name__, {name: len(known)}, type=int)[name]
        setattr(cls, name, value)
        return value


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Numbers(name, (), {}))
        return getattr(self, name)


def extension() -> types.ModuleType:
    """What stands in for `transformer_engine_jax`: a card of Hopper's, and no attention and no call of its own."""

    def missing(*_: Any) -> Any:
        raise RuntimeError("cublas is not there")

    module: Any = _Extension("transformer_engine_jax")
    module.get_cublasLt_version = lambda: 130000
    module.get_cuda_version = lambda: 13000
    module.get_device_compute_capability = lambda *_: 90
    module.get_grouped_gemm_setup_workspace_size = missing
    module.get_num_compute_streams = lambda: 1
    module.nvte_built_with_cublasmp = lambda: False
    module.get_fused_attn_backend = lambda *_: (module.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "not there")
    module.registrations = dict
    return module  # type: ignore[no-any-return]


def theirs() -> tuple[Any, Any]:
    """Transformer Engine's `jax` and `common.recipe`."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_JAX_CUSTOM_CALLS": "false"}
    sys.modules["transformer_engine_jax"] = extension()
    sys.path.insert(0, str(FOLDER))
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda _: None
    return importlib.import_module("transformer_engine.jax"), importlib.import_module(
        "transformer_engine.common.recipe"
    )


def ours() -> tuple[Any, Any]:
    return (
        importlib.import_module("quaver.compat.transformer_engine.jax"),
        importlib.import_module("quaver.compat.transformer_engine.common.recipe"),
    )


#: The module of each case, and how it is called.
MODULES: dict[str, Any] = {
    "DenseGeneral": lambda te: (te.DenseGeneral(features=96), {}),
    "LayerNormDenseGeneral": lambda te: (te.LayerNormDenseGeneral(96, layernorm_type="rmsnorm"), {}),
    "LayerNormMLP": lambda te: (te.LayerNormMLP(128, activations=("silu", "linear")), {"deterministic": True}),
    "TransformerLayer": lambda te: (
        te.TransformerLayer(hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, dtype=jnp.float32),
        {"deterministic": True},
    ),
}
#: Recipes whose GEMMs it has for a CPU; of blocks JAX's `scaled_matmul` is for GPUs alone.
RECIPES: dict[str, Any] = {
    "none": lambda recipe: None,
    "DelayedScaling": lambda recipe: recipe.DelayedScaling(amax_history_len=4),
    "DelayedScaling, e4m3": lambda recipe: recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3, margin=1, amax_compute_algo="most_recent"
    ),
    "Float8CurrentScaling": lambda recipe: recipe.Float8CurrentScaling(),
}


Run = Callable[..., tuple[Any, Any]]


def steps(library: tuple[Any, Any], module: str, recipe: str, x: Any) -> tuple[Any, Run]:
    """First values of variables, and a step: variables and an input to (loss, gradients), and variables afterwards."""
    te, recipes = library
    given = RECIPES[recipe](recipes)
    layer, call = MODULES[module](te.flax)

    def loss(params: Any, state: Any, x: Any) -> Any:
        y = layer.apply({"params": params, **state}, x, **call)
        return jnp.mean((y[0] if isinstance(y, tuple) else y) ** 2)

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def run(variables: Any, x: Any) -> tuple[Any, Any]:
        state, params = flax.core.pop(variables, "params")
        with te.autocast(enabled=given is not None, recipe=given):
            value, (gradients, state) = both(params, state, x)
        after = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return (value, gradients), {"params": after, **state}

    with te.autocast(enabled=given is not None, recipe=given):
        return layer.init(jax.random.key(1), x, **call), run


def difference(a: Any, b: Any) -> float:
    """The largest ‖a - b‖ / ‖b‖ of two trees' leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def compared(module: str, recipe: str, both: tuple[Any, Any]) -> tuple[float, float]:
    """Difference of loss and gradients from Transformer Engine after three of its steps."""
    own, peer = both
    x = jax.random.normal(jax.random.key(0), (32, 32, 64))
    variables, peer_step = steps(peer, module, recipe, x)
    _, own_step = steps(own, module, recipe, x)
    for i in range(3):
        _, variables = peer_step(variables, x * (1 + i))
    expected, _ = peer_step(variables, x)
    got, _ = own_step(own[0].quantize.own_collections(variables), x)
    return difference(got[0], expected[0]), difference(got[1], expected[1])


#: Modules by recipe: of losses and gradients in float32, whose sums are in another order, ‖a - b‖ / ‖b‖.
CASES = [
    *(("DenseGeneral", recipe) for recipe in RECIPES),
    *((module, "DelayedScaling") for module in ("LayerNormDenseGeneral", "LayerNormMLP", "TransformerLayer")),
]
LOSS, GRADIENTS = 1e-6, 1e-5

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    libraries = ours(), theirs()
    for case in CASES if len(sys.argv) < 2 else [case for case in CASES if case[0] in sys.argv]:
        figures = compared(*case, libraries)
        print(*case, *(f"{figure:.1e}" for figure in figures), sep=" | ", flush=True)
        assert figures[0] <= LOSS and figures[1] <= GRADIENTS, case
